"""Speculative decoding with the draft head of this repository, by transformers alone.

model.generate(**inputs, custom_generate=REPOSITORY, trust_remote_code=True) writes what it writes without these two
arguments, sooner: the same tokens without sampling, tokens of the same distribution with it. The repository or folder
that the code was loaded from is the one whose config.json and model.safetensors are read.
"""

import sys
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils.versions import require_version

from heads.formats.custom_generate.decoding import Sequence, Settings, Written, decode
from heads.formats.custom_generate.reading import Head, load
from heads.formats.custom_generate.target import Target, decoder_layers

HUB = ("revision", "token", "cache_dir", "force_download", "proxies", "local_files_only", "repo_type")
CACHE = ("past_key_values", "cache")  # before transformers 5.24, and since
TAKEN = {"attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep", *CACHE}
OF_A_BATCH = (  # of guidance_scale, of watermarking_config, of the two options of an encoder
    UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor, EncoderNoRepeatNGramLogitsProcessor,
)  # fmt: skip
ELSE = "does not go with this custom_generate, which continues text by a draft head: leave one of them out"


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """The output of `return_dict_in_generate=True`: sequences, passes that verified drafts, and their tokens.

    A pass gives the drafted tokens that stood and one more. The first token, which the prompt's own pass gives, is not
    counted.
    """

    sequences: Any = None
    scores: Any = None  # (1, V) a token, of which the class above is annotated to hold one alone
    logits: Any = None
    passes: int | None = None
    tokens_per_pass: float | None = None


def generate(
    model: PreTrainedModel,
    head: str | None = None,
    draft_tokens: int | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    **kwargs: Any,
) -> Any:
    """Generate as `model.generate` does, and return what it returns.

    Args:
        model: the model that the head was made for.
        head: the folder or repository of the head; None for the one that custom_generate names.
        draft_tokens: how many tokens are drafted a pass; None for what the head's config.json says.
        streamer: as in generate.
        tokenizer: as in generate: what stop_strings are read by.
        kwargs: the other arguments of generate.

    Raises:
        ValueError: the head is not one of this model, or an argument asks for what is not decoded speculatively.
        ImportError: transformers is too old.
    """
    require_version("transformers>=5.17")
    where = head or _named()
    hub = {name: kwargs.pop(name) for name in HUB if name in kwargs}
    if draft_tokens is not None and draft_tokens < 1:
        raise ValueError(f"draft_tokens is {draft_tokens}: give 1 or more, or leave it out")
    _check(kwargs)
    decoder_layers(model)
    loaded = load(where, model, hub)
    if tokenizer is not None:
        _stop_here(kwargs, tokenizer)

    def decoding(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        _check_mode(generation_config, model_kwargs, len(input_ids))
        if len(input_ids) > 1:
            _check_rows(kwargs, logits_processor)
        settings = Settings(
            logits_processor,
            stopping_criteria,
            streamer,
            generation_config,
            draft_tokens or loaded.draft_tokens,
        )
        rows = _rows(model, loaded, input_ids, model_kwargs.get("attention_mask"), settings)
        if streamer is not None:
            streamer.end()
        return _answer(rows, generation_config)

    kind: Any = type(model)  # whose generate it is: a model that was loaded from such a repository has another generate
    return kind.generate(model, streamer=streamer, custom_generate=decoding, **kwargs)


def _named() -> str:
    """Return the name in the call of generate: transformers hands the name to nobody, and copies the code elsewhere."""
    named = sys._getframe(2).f_locals.get("custom_generate")
    if not isinstance(named, str):
        raise ValueError("which head is meant is not known here: give generate the argument head=FOLDER_OR_REPOSITORY")
    return named


def _stop_here(kwargs: dict[str, Any], tokenizer: Any) -> None:
    """Make stop strings a criterion of their own: generate hands no tokenizer on to us, and wants one for them."""
    config: GenerationConfig | None = kwargs.get("generation_config")
    strings = kwargs.pop("stop_strings", None) or (None if config is None else config.stop_strings)
    if strings is None:
        return
    if config is not None:
        kwargs["generation_config"] = copy(config)
        kwargs["generation_config"].stop_strings = None
    stop = StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
    kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), stop])


def _check(kwargs: dict[str, Any]) -> None:
    """Refuse arguments that are not read here."""
    for name in ("assistant_model", *CACHE, "inputs_embeds", "negative_prompt_ids", "synced_gpus"):
        value = kwargs.get(name)
        if value is not None and value is not False:
            raise ValueError(f"{name} {ELSE}")


def _check_mode(config: GenerationConfig, model_kwargs: dict[str, Any], rows: int) -> None:
    """Refuse ways to generate that are not speculative decoding of one sequence."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"{mode.value} {ELSE}")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise ValueError(f"{name} {ELSE}")
    # Models that read images have a mapping of what they saw, empty without any.
    given = {name for name, value in model_kwargs.items() if value is not None and value != {}}
    more = sorted(given - TAKEN)
    if more:
        raise ValueError(f"{more[0]} {ELSE}")
    if rows > 1 and (config.output_scores or config.output_logits):
        raise ValueError("output_scores and output_logits are given of one sequence: generate them one by one")


def _check_rows(kwargs: dict[str, Any], processors: LogitsProcessorList) -> None:
    """Refuse what is made for a batch as a whole: its rows are decoded one after the other."""
    if kwargs.get("prefix_allowed_tokens_fn") is not None:
        raise ValueError("prefix_allowed_tokens_fn asks by rows of a batch: generate them one by one")
    for processor in processors:
        if isinstance(processor, OF_A_BATCH):
            raise ValueError(f"{type(processor).__name__} keeps a state of all rows: generate them one by one")


def _rows(
    model: PreTrainedModel, head: Head, input_ids: Tensor, mask: Tensor | None, settings: Settings
) -> list[Written]:
    """Decode one row of a batch after the other, each without its padding."""
    written = []
    for i in range(len(input_ids)):
        prompt = input_ids[i] if mask is None else input_ids[i][mask[i].bool()]
        target = Target(model, head.drafts.feature_layers)
        head.drafts.restart()
        with target.noting():
            processors = LogitsProcessorList(_of_row(step, i) for step in settings.processors)
            sequence = Sequence(input_ids[i : i + 1], settings._replace(processors=processors))
            written.append(decode(target, head.drafts, head.embeddings, prompt.to(head.embeddings.device), sequence))
    return written


def _of_row(processor: Any, row: int) -> Any:
    """Return a processor for one row of a batch: a repetition penalty holds each row's padding, from 5.24 on."""
    padding = getattr(processor, "prompt_ignore_length", None)
    if isinstance(padding, Tensor):
        processor = copy(processor)
        processor.prompt_ignore_length = padding[row : row + 1]
    return processor


def _answer(rows: list[Written], config: GenerationConfig) -> Any:
    """Return the sequences, those that ended early padded, as a tensor or with what else was asked for."""
    longest = max(row.ids.shape[1] for row in rows)
    pad: Any = config._pad_token_tensor
    if pad is None and any(row.ids.shape[1] < longest for row in rows):
        raise ValueError("the sequences ended at different lengths: give generate a pad_token_id")
    fill = 0 if pad is None else int(pad)
    sequences = torch.cat([functional.pad(row.ids, (0, longest - row.ids.shape[1]), value=fill) for row in rows])
    if not config.return_dict_in_generate:
        return sequences
    passes, tokens = sum(row.passes for row in rows), sum(row.verified for row in rows)
    return SpeculativeOutput(
        sequences=sequences,
        scores=tuple(rows[0].scores) if config.output_scores else None,
        logits=tuple(rows[0].logits) if config.output_logits else None,
        passes=passes,
        tokens_per_pass=tokens / passes if passes else None,
    )
