"""Exported heads read by the rules of their engines: plain PyTorch, from what the engines' sources say of each format.

Nothing here comes from heads/: config.json, the tensors and the target's hidden states are all that is used. Every row
is computed again at each step, without a cache. `hs` are the target's `output_hidden_states`: hs[0] is the embedding,
hs[L] the output of its layer L - 1, and the last one has been normed.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

IDS = "eagle_aux_hidden_state_layer_ids"


class Served(NamedTuple):
    """What an engine has of the target."""

    hs: list[Tensor]
    embedding: Tensor
    lm_head: Tensor


class Reading:
    """A folder as an engine reads it."""

    def __init__(self, folder: Path, served: Served) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tensors, self.served = load_file(folder / "model.safetensors"), served

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return scaled * self.tensors[f"{name}.weight"]

    def rotated(self, x: Tensor, position: Tensor) -> Tensor:
        known = ("head_dim", "hidden_size", "num_attention_heads", "rope_theta", "rope_scaling")
        config = LlamaConfig(**{key: self.config[key] for key in known}, max_position_embeddings=160)
        cos, sin = LlamaRotaryEmbedding(config)(x, position[None])
        first, second = x.chunk(2, -1)
        return x * cos[0] + torch.cat([-second, first], -1) * sin[0]

    def embedding(self) -> Tensor:
        """Return the head's own embedding, or the target's."""
        return self.tensors.get("embed_tokens.weight", self.served.embedding)

    def heads(self, name: str, x: Tensor, norm: str = "") -> Tensor:
        split = self.linear(name, x).view(len(x), -1, self.config["head_dim"]).transpose(0, 1)
        return self.norm(norm, split) if norm else split

    def attention(self, layer: str, x: Tensor, mask: Tensor, position: Tensor) -> Tensor:
        """Return a Llama's self-attention."""
        name = f"{layer}self_attn."
        query, key = (self.rotated(self.heads(f"{name}{kind}_proj", x), position) for kind in "qk")
        return self.mixed(name, query, key, self.heads(f"{name}v_proj", x), mask)

    def mixed(self, name: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        group = len(query) // len(key)
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        score = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        return self.linear(f"{name}o_proj", (score.softmax(-1) @ value).transpose(0, 1).flatten(1))

    def mlp(self, layer: str, x: Tensor) -> Tensor:
        return self.mlp_of_normed(layer, self.norm(f"{layer}post_attention_layernorm", x))

    def mlp_of_normed(self, layer: str, x: Tensor) -> Tensor:
        gate = functional.silu(self.linear(f"{layer}mlp.gate_proj", x))
        return self.linear(f"{layer}mlp.down_proj", gate * self.linear(f"{layer}mlp.up_proj", x))

    def spread(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary: token i of the draft's is i + d2t[i] of the target's."""
        offset = self.tensors.get("d2t")
        if offset is None:
            return logits
        full = logits.new_full((self.config["vocab_size"],), float("-inf"))
        full[torch.arange(len(offset)) + offset] = logits
        return full


def rows(count: int) -> tuple[Tensor, Tensor]:
    """Return a causal mask and the positions."""
    return torch.ones(count, count, dtype=torch.bool).tril(), torch.arange(count)


def wide_layers(read: Reading, state: Tensor, token: list[int], first: str, norm: str) -> Tensor:
    """Return the last layer's output for all rows of EAGLE-3; `norm` names the norm before later attentions."""
    config, (mask, position) = read.config, rows(len(state))
    normed = read.norm(f"{first}hidden_norm", state)
    x = torch.cat([read.norm(f"{first}input_layernorm", read.embedding()[token]), normed], -1)
    x = read.attention(first, x, mask, position) + (normed if config.get("norm_before_residual") else state)
    x = x + read.mlp(first, x)
    for i in range(1, config["num_hidden_layers"]):
        name = "input_layernorm" if norm == "input" else "hidden_norm"
        x = x + read.attention(f"layers.{i}.", read.norm(f"layers.{i}.{name}", x), mask, position)
        x = x + read.mlp(f"layers.{i}.", x)
    return x


def peagle(folder: Path, served: Served, token: list[int], steps: int) -> list[Tensor]:
    """Return a chain's logits by vLLM's parallel drafting: one pass over the rows and a mask slot a further step."""
    read = Reading(folder, served)
    config = read.config
    hidden = torch.cat([served.hs[i] for i in config[IDS]], -1)
    hidden = torch.cat([hidden, read.tensors["mask_hidden"].view(1, -1).expand(steps - 1, -1)])
    if config.get("fc_norm"):
        parts = hidden.chunk(len(config[IDS]), -1)
        hidden = torch.cat([read.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
    if config.get("norm_before_fc"):
        hidden = read.norm("input_norm", hidden)
    tokens = [*token, *[config["mask_token_id"]] * (steps - 1)]
    x = wide_layers(read, read.linear("fc", hidden), tokens, "layers.0.", "input")
    return [read.spread(read.linear("lm_head", read.norm("norm", row))) for row in x[-steps:]]


def eagle3(
    folder: Path, served: Served, token: list[int], steps: int, engine: str = "vllm", capture: list[int] | None = None
) -> list[Tensor]:
    """Return a chain's logits, greedy: `token` are those behind every row, the last one being the root.

    vLLM takes the layers from the top level of config.json and SGLang from within, where an id is one less. vLLM has
    `input_layernorm` in the layers after the first, SGLang and TensorRT-LLM `hidden_norm`. TensorRT-LLM is told the
    layers when it is started, `capture`, or takes its own three. The authors' layers are fixed, and their first one is
    called midlayer.
    """
    read = Reading(folder, served)
    config, count = read.config, len(served.hs) - 1
    ids = {
        "vllm": lambda: config[IDS],
        "sglang": lambda: [i + 1 for i in config["eagle_config"][IDS]],
        "trtllm": lambda: [i + 1 for i in capture or [1, count // 2 - 1, count - 4]],
        "authors": lambda: [2, count // 2, count - 3],
    }[engine]()
    first = "midlayer." if engine == "authors" else "layers.0."
    hidden = [served.hs[i] for i in ids]
    if config.get("fc_norm"):
        hidden = [read.norm(f"fc_norm.{i}", each) for i, each in enumerate(hidden)]
    joined = torch.cat(hidden, -1)
    if config.get("norm_before_fc"):
        joined = read.norm("input_norm", joined)
    states, token, found = list(read.linear("fc", joined)), list(token), []
    for _ in range(steps):
        x = wide_layers(read, torch.stack(states), token, first, "input" if engine == "vllm" else "hidden")
        out = read.norm("norm", x[-1])
        found.append(read.spread(read.linear("lm_head", out)))
        states.append(out if config.get("norm_output") else x[-1])
        token.append(int(found[-1].argmax()))
    return found


def eagle(folder: Path, served: Served, token: list[int], steps: int, bias: bool) -> list[Tensor]:
    """Return a chain's logits, as `eagle3`. vLLM's fc has no bias, SGLang's has one."""
    read = Reading(folder, served)
    states, token, found = list(served.hs[-1]), list(token), []
    if not bias:
        read.tensors.pop("fc.bias", None)
    for _ in range(steps):
        mask, position = rows(len(states))
        x = read.linear("fc", torch.cat([served.embedding[token], torch.stack(states)], -1))
        for i in range(read.config["num_hidden_layers"]):
            normed = read.norm(f"layers.{i}.input_layernorm", x) if i else x
            x = x + read.attention(f"layers.{i}.", normed, mask, position)
            x = x + read.mlp(f"layers.{i}.", x)
        found.append(served.lm_head @ x[-1])
        states.append(x[-1])
        token.append(int(found[-1].argmax()))
    return found


def mimo(folder: Path, served: Served, token: list[int], steps: int) -> list[Tensor]:
    """Return a chain's logits, as `eagle3`, but for the first row's embedding, which engines leave out."""
    read, layer = Reading(folder, served), "model.mtp_layers.0."
    states, token, found = list(served.hs[-1]), list(token), []
    for _ in range(steps):
        mask, position = rows(len(states))
        state = read.norm(f"{layer}hidden_layernorm", torch.stack(states))
        embedded = read.norm(f"{layer}token_layernorm", served.embedding[token])
        x = read.linear(f"{layer}input_proj", torch.cat([state, embedded], -1))
        x = x + read.attention(layer, read.norm(f"{layer}input_layernorm", x), mask, position)
        out = read.norm(f"{layer}final_layernorm", (x + read.mlp(layer, x))[-1])
        found.append(served.lm_head @ out)
        states.append(out)
        token.append(int(found[-1].argmax()))
    return found


def medusa(folder: Path, served: Served, token: list[int], steps: int) -> list[Tensor]:
    """Return each head's logits as vLLM up to 0.32 makes them."""
    read = Reading(folder, served)
    assert steps == read.config["num_heads"]
    assert read.config["medusa_fc_bias"]
    found = []
    for i in range(steps):
        x = served.hs[-1][-1]
        for j in range(read.config["num_hidden_layers"]):
            x = x + functional.silu(read.linear(f"blocks.{i}.layers.{j}", x))
        found.append(read.linear(f"lm_heads.{0 if read.config['original_lm_head'] else i}", x))
    return found


def medusa_authors(folder: Path, served: Served, token: list[int], steps: int) -> list[Tensor]:
    """Return each head's logits as the authors' Sequential makes them, whose lm_head starts as the target's."""
    read = Reading(folder, served)
    layers, found = read.config["medusa_num_layers"], []
    for i in range(steps):
        x = served.hs[-1][-1]
        for _ in range(layers):  # one module, whose tensors the last place wins
            x = x + functional.silu(read.linear(f"{i}.{layers - 1}.linear", x))
        found.append(read.tensors.get(f"{i}.{layers}.weight", served.lm_head) @ x)
    return found


def hydra(folder: Path, served: Served, token: list[int], steps: int) -> list[Tensor]:
    """Return each head's logits, greedy, as the authors' modules make them; dropouts stand at every other place."""
    read = Reading(folder, served)
    prefix, layers = read.config["hydra_head_arch"] == "prefix-mlp", read.config["hydra_num_layers"]
    x, (mask, position), found = served.hs[-1], rows(len(served.hs[-1])), []
    if prefix:
        layer = "prefix_embeding_layer.layers.0."
        x = x + read.attention(layer, read.norm(f"{layer}input_layernorm", x), mask, position)
        x = read.norm("prefix_embeding_layer.norm", x + read.mlp(layer, x))
    joined, last = x[-1], token[-1]
    for i in range(steps):
        joined = torch.cat([joined, served.embedding[last]])
        place = [f"hydra_mlp.{i}.{2 * j + 1 if prefix else j}." for j in range(layers)]
        z = read.linear(f"{place[0]}res_connection", joined) + functional.silu(read.linear(f"{place[0]}linear", joined))
        for _ in place[1:]:  # one module, whose tensors the last place wins
            z = z + functional.silu(read.linear(f"{place[-1]}linear", z))
        found.append(read.linear(f"hydra_lm_head.{i}.1" if prefix else f"hydra_lm_head.{i}", z))
        last = int(found[-1].argmax())
    return found


def convolved(x: Tensor, base: Tensor, added: Tensor) -> Tensor:
    """Return a block's slots under DFlash2's kernels: `base` by tap and channel, `added` by slot, tap and group."""
    out, size = torch.zeros_like(x), x.shape[1] // added.shape[-1]
    for slot in range(len(x)):
        for tap in range(min(len(base), slot + 1)):
            kernel = base[tap] + added[slot, tap].repeat_interleave(size)
            out[slot] += kernel * x[slot - tap]
    return out


def between(read: Reading, name: str, x: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a sublayer's output, between the two convolutions of that name where there are some."""
    base = read.tensors.get(f"{name}.base_kernel")
    if base is None:
        return inner(x)
    added = read.linear(f"{name}.kernel_projection", x).view(len(x), 2, base.shape[1], -1)
    return convolved(inner(convolved(x, base[0], added[:, 0])), base[1], added[:, 1])


def selected(read: Reading, logits: Tensor, slot: Tensor, last: int) -> Tensor:
    """Return the scores of DFlash2's candidates behind the token before them."""
    before, behind = (read.tensors[f"candidate_selector.{kind}_codebook"] for kind in ("predecessor", "successor"))
    context = before[last] * read.linear("candidate_selector.hidden_projection", slot)
    scores = torch.full_like(logits, float("-inf"))
    for candidate in logits.topk(read.config["dflash_config"]["selector_top_k"]).indices.tolist():
        scores[candidate] = logits[candidate] + context @ behind[candidate]
    return scores


def recurrent(read: Reading, served: Served, slot: Tensor, tokens: list[int]) -> Tensor:
    """Return Domino's correction of a slot by torch's own GRU over the block's tokens so far."""
    weights = {name: read.tensors[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")}
    width, inner = weights["weight_ih_l0"].shape[1], weights["weight_hh_l0"].shape[1]
    gru = torch.nn.GRU(width, inner, bias=False, batch_first=True)
    gru.load_state_dict(weights)
    state = gru(served.embedding[tokens][None])[1][0, 0].detach()
    return read.linear("embed_proj.2", functional.silu(read.linear("embed_proj.0", torch.cat([slot, state]))))


def dflash(folder: Path, served: Served, token: list[int], steps: int) -> list[Tensor]:
    """Return each slot's logits, greedy: the context's keys and values are made of the fused features."""
    read = Reading(folder, served)
    told = read.config["dflash_config"]
    hidden = torch.cat([served.hs[i + 1] for i in told["target_layer_ids"]], -1)
    context = read.norm("hidden_norm", read.linear("fc", hidden))
    size, before = read.config["block_size"], len(context)
    x = served.embedding[[token[-1], *[told["mask_token_id"]] * (size - 1)]]
    place = torch.arange(before + size)
    own = torch.ones(size, size, dtype=torch.bool)
    mask = torch.cat([torch.ones(size, before, dtype=torch.bool), own.tril() if read.config["is_causal"] else own], 1)
    for i in range(read.config["num_hidden_layers"]):
        name = f"layers.{i}.self_attn."

        def attended(y: Tensor, name: str = name) -> Tensor:
            seen = torch.cat([context, y])
            query = read.rotated(read.heads(f"{name}q_proj", y, f"{name}q_norm"), place[before:])
            key = read.rotated(read.heads(f"{name}k_proj", seen, f"{name}k_norm"), place)
            return read.mixed(name, query, key, read.heads(f"{name}v_proj", seen), mask)

        x = x + between(read, f"layers.{i}.attention_conv", read.norm(f"layers.{i}.input_layernorm", x), attended)
        normed = read.norm(f"layers.{i}.post_attention_layernorm", x)
        x = x + between(read, f"layers.{i}.mlp_conv", normed, partial(read.mlp_of_normed, f"layers.{i}."))
    slots, last, found = read.norm("norm", x)[0 if told["sample_from_anchor"] else 1 :], token[-1], []
    assert len(slots) == steps
    chain = [last]
    for slot in slots:
        logits = read.tensors.get("lm_head.weight", served.lm_head) @ slot
        if "markov_rank" in read.config:
            logits = logits + read.linear("markov_head.markov_w2", read.tensors["markov_head.markov_w1.weight"][last])
        if told.get("projector_type") == "domino" and len(chain) > told["pure_draft_prefix_len"]:
            logits = logits + recurrent(read, served, slot, chain)
        if "selector_rank" in told:
            logits = selected(read, logits, slot, last)
        found.append(read.spread(logits))
        last = int(found[-1].argmax())
        chain.append(last)
    return found
