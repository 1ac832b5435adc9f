"""Speculative decoding with this repository's draft head, by transformers, torch and safetensors only.

    model.generate(**inputs, custom_generate=REPOSITORY, trust_remote_code=True)

This call returns what `generate` returns without these two arguments, in fewer passes: the same tokens without
sampling, the same distribution of tokens with it. The head drafts a chain and the model scores it in one pass. A token
drafted with probability q, to which the model gives p, is accepted with probability min(1, p / q); otherwise a sample
of max(0, p - q) replaces it (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).
"""

import inspect
import json
import math
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils.hub import cached_file
from transformers.utils.versions import require_version

HUB = ("revision", "token", "cache_dir", "force_download", "proxies", "local_files_only")
CACHE = ("past_key_values", "cache")  # the cache's argument: before transformers 5.24, and since
UNREAD = ("assistant_model", "inputs_embeds", "synced_gpus", *CACHE)
READ = {"attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep", *CACHE}
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # layers whose cache can be cropped
# Settings that also process draft logits, to bring them near the model's; the output does not depend on this.
SHARED = (
    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor,
)  # fmt: skip

Json = dict[str, Any]
Weights = dict[str, Tensor]
Draft = tuple[Tensor, Tensor]  # a token (1,) and the distribution (V,) that it was drafted from
Embed = Callable[[Tensor], Tensor]  # token ids (1,) to embeddings (1, D)
States = Generator[Tensor, Tensor, None]  # yields the state (1, D) that lm_head d reads; receives the token of depth d


def medusa(config: Json, weights: Weights, _embed: Embed, last: Tensor, _token: Tensor) -> States:
    """Medusa: residual blocks on the last state (1, D), one stack per depth (Cai et al., arXiv 2401.10774)."""
    for depth in range(config["heads"]):
        state = last
        for i in range(config["layers"]):
            state = state + functional.silu(linear(weights, f"blocks.{depth}.{i}.linear", state))
        yield state


def hydra(config: Json, weights: Weights, embed: Embed, last: Tensor, token: Tensor) -> States:
    """Hydra: residual blocks on the last state and the drafted tokens' embeddings (Ankner et al., arXiv 2402.05109)."""
    for depth in range(config["heads"]):
        last = torch.cat([last, embed(token)], -1)
        name = f"branches.{depth}"
        state = linear(weights, f"{name}.entry.res_connection", last)
        state = state + functional.silu(linear(weights, f"{name}.entry.linear", last))
        for i in range(config["layers"] - 1):
            block = 0 if config["tied"] else i
            state = state + functional.silu(linear(weights, f"{name}.blocks.{block}.linear", state))
        token = yield state


def mlp(config: Json, weights: Weights, _embed: Embed, last: Tensor, token: Tensor) -> States:
    """The MLP speculator: a state that each drafted token is mixed into (Wertheimer et al., arXiv 2404.19124)."""
    state, share = last, 0.5 ** (0.5 / config["heads"])
    if config["scale_input"]:
        state = functional.rms_norm(last, last.shape[-1:], eps=1e-6) / math.sqrt(2)
    for depth in range(config["heads"]):
        i = 0 if config["tied"] else depth
        table = weights[f"emb.{i}.weight"]
        mix = math.sqrt((1 - share**2) * table.shape[1] / 2) / share
        state = linear(weights, f"proj.{min(depth, 1) if config['tied'] else depth}", state) + mix * table[token]
        state = functional.rms_norm(state, state.shape[-1:], weights[f"ln.{i}.weight"], 1e-6)
        state = functional.gelu(state + weights[f"ln.{i}.bias"])
        token = yield state


HEADS = {"medusa": medusa, "hydra": hydra, "mlp": mlp}


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Apply a linear layer (…, D) -> (…, W) by its name."""
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


class Head:
    """A head's folder or repository, read for a model, in its dtype, on its device; refuse another model's."""

    def __init__(self, where: str, model: Any, hub: Json) -> None:
        content = json.loads(Path(str(cached_file(where, "config.json", **hub))).read_text())
        self.config, sizes = content.get("head", {}), model.config.get_text_config()
        if self.config.get("name") not in HEADS:
            raise ValueError(f"{where}: its config.json has no head of {', '.join(HEADS)}")
        self.embed, self.lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        vocab, width = self.lm_head.weight.shape
        for name, size in (("hidden_size", width), ("num_layers", sizes.num_hidden_layers), ("vocab_size", vocab)):
            if (theirs := content["target"][name]) != size:
                raise ValueError(
                    f"{where}: made for another model, {content['target']['name']}: its {name} is {theirs}, this "
                    f"model's {size}"
                )
        read = load_file(str(cached_file(where, "model.safetensors", **hub)))
        self.weights = {
            name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)
            for name, tensor in read.items()
        }
        self.depth = content["tree"].get("depth") or self.config["heads"]

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """Return the logits (1, V) of a state (1, D), minus infinity for tokens outside the draft vocabulary."""
        name = (
            f"head.{0 if self.config.get('tied') else depth}" if self.config["name"] == "mlp" else f"lm_heads.{depth}"
        )
        ids = self.weights.get("vocab.ids")
        if f"{name}.weight" not in self.weights:  # the model's own lm_head
            logits = self.lm_head(state)
            logits = logits if ids is None else logits[:, ids]
        else:
            if f"{name}.down.weight" in self.weights:
                state = linear(self.weights, f"{name}.down", state)
            logits = linear(self.weights, name, state)
        if ids is None:
            return logits
        return logits.new_full((1, self.lm_head.weight.shape[0]), -math.inf).index_copy(1, ids, logits)

    def draft(self, last: Tensor, ids: Tensor, count: int, processors: Any, sample: bool) -> list[Draft]:
        """Return up to `count` drafted tokens (1,) after ids (1, T), and their distributions (V,).

        `last` (1, D) is the model's state at the position before the last token.
        """
        drafts: list[Draft] = []
        states = HEADS[self.config["name"]](self.config, self.weights, self.embed, last, ids[0, -1:])
        state = next(states)
        while len(drafts) < count:
            q = processors(ids, self.logits(state, len(drafts)).float())[0].softmax(-1)
            token = torch.multinomial(q, 1) if sample else q.argmax(keepdim=True)
            drafts.append((token, q))
            ids = torch.cat([ids, token[None]], 1)
            if len(drafts) < count:
                state = states.send(token)
        return drafts


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """The output of `return_dict_in_generate=True`: sequences (1, T), and the number of passes that scored a draft."""

    sequences: Any = None
    passes: Any = None


def choose(scores: Tensor, draft: Draft | None, sample: bool) -> tuple[Tensor, bool]:
    """Return the next token (1,) from the model's processed logits (V,), and whether the draft was accepted."""
    if not sample:
        token = scores.argmax(keepdim=True)
        return token, draft is not None and bool(token == draft[0])
    p = scores.softmax(-1)
    if draft is not None:
        token, q = draft
        if torch.rand((), device=p.device) * q[token] < p[token]:
            return token, True
        rest = (p - q).clamp_min(0)
        p = rest if rest.sum() > 0 else p  # p and q are equal but for rounding
    return torch.multinomial(p, 1), False


def decode(
    model: Any, head: Head, ids: Tensor, count: int, processors: Any, criteria: Any, sample: bool, streamer: Any
) -> tuple[Tensor, int]:
    """Decode after ids (1, T) to the end; return all tokens and the number of passes that scored a draft."""
    shared = LogitsProcessorList(step for step in processors if isinstance(step, SHARED))
    limit = min(
        criteria.max_length or sys.maxsize,
        getattr(model.config.get_text_config(), "max_position_embeddings", sys.maxsize),
    )
    cache, arguments = DynamicCache(), inspect.signature(model.forward).parameters
    argument = next(name for name in reversed(CACHE) if name in arguments)
    states: list[Tensor] = []
    hook = head.lm_head.register_forward_pre_hook(lambda _module, inputs: states.append(inputs[0]))
    pending, drafts, passes, done = ids, list[Draft](), 0, False
    try:
        while not done:
            tokens = torch.cat([pending, *(token[None] for token, _ in drafts)], 1)
            more = {argument: cache} | ({"logits_to_keep": len(drafts) + 1} if model._supports_logits_to_keep() else {})
            states.clear()
            logits = model(input_ids=tokens, use_cache=True, return_dict=True, **more).logits[:, -len(drafts) - 1 :]
            hidden = states[-1][0, -len(drafts) - 1 :]  # before `processors`, which may run the model again
            passes, accepted, going = passes + bool(drafts), 0, True
            while going and not done:
                scores = processors(ids, logits[:, accepted].to(copy=True, dtype=torch.float32))[0]
                token, going = choose(scores, drafts[accepted] if accepted < len(drafts) else None, sample)
                accepted += going
                ids = torch.cat([ids, token[None]], 1)
                if streamer is not None:
                    streamer.put(token.cpu())
                done = bool(criteria(ids, None).all())
            if accepted < len(drafts):
                cache.crop(accepted - len(drafts))
            pending, left = ids[:, -1:], limit - ids.shape[1] - 1
            drafts = [] if done else head.draft(hidden[accepted, None], ids, min(count, left), shared, sample)
    finally:
        hook.remove()
    return ids, passes


def generate(model: Any, head: str | None = None, draft_tokens: int | None = None, **kwargs: Any) -> Any:
    """Generate with a draft head; transformers calls this function.

    Args:
        model: the model that the head was trained for.
        head: the folder or repository of the head, by default this file's.
        draft_tokens: tokens to draft per pass, at most the head's number of depths.
        kwargs: the arguments of `model.generate`.

    Raises:
        ValueError: there is no head for this model, or an argument is not supported here.
    """
    require_version("transformers>=5.17")
    # transformers passes the repository's name to no argument and copies this file: the name is in the caller's frame.
    where = head or sys._getframe(1).f_locals.get("custom_generate")
    if not isinstance(where, str):
        raise ValueError("the head is not named: give generate the argument head=FOLDER_OR_REPOSITORY")
    given = [name for name in UNREAD if kwargs.get(name) is not None and kwargs[name] is not False]
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ATTENTION)
    if given or model.config.is_encoder_decoder or not kinds <= ATTENTION:
        raise ValueError(
            f"{', '.join(given) or type(model).__name__}: not with custom_generate, which decodes by attention only"
        )
    loaded = Head(where, model, {name: kwargs.pop(name) for name in HUB if name in kwargs})
    tokenizer, strings = kwargs.pop("tokenizer", None), kwargs.pop("stop_strings", None)
    if strings is not None:  # transformers passes no tokenizer to a custom function, and stop strings need one
        stop = StopStringCriteria(tokenizer, strings)
        kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), stop])
    count = min(draft_tokens or loaded.depth, loaded.config["heads"])

    def decoding(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        mode, mask = generation_config.get_generation_mode(), model_kwargs.get("attention_mask")
        unread = [name for name in OUTPUTS if getattr(generation_config, name)]
        # For models that read images, a mapping of the images seen; empty without images.
        unread += sorted({name for name, value in model_kwargs.items() if value is not None and value != {}} - READ)
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            unread.append(mode.value)
        if unread:
            raise ValueError(f"{unread[0]}: not with custom_generate, which continues the tokens of one text")
        if len(input_ids) > 1 or (mask is not None and not mask.all()):
            raise ValueError("custom_generate decodes one sequence without padding: generate the rows one by one")
        sample, streamer = generation_config.do_sample, kwargs.get("streamer")
        ids, passes = decode(model, loaded, input_ids, count, logits_processor, stopping_criteria, sample, streamer)
        if streamer is not None:
            streamer.end()
        return SpeculativeOutput(sequences=ids, passes=passes) if generation_config.return_dict_in_generate else ids

    return type(model).generate(model, custom_generate=decoding, **kwargs)
