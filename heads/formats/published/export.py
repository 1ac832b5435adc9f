"""Export of heads to the formats of engines and other projects."""

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch import nn

from heads.formats import custom_generate
from heads.formats.published import dflash, eagle, eagle3, eagle4, gguf, hydra, medusa, mimo, peagle
from heads.formats.published.exporting import Export, ExportedHead, TargetFacts
from heads.formats.store import assert_finite, write_files

__all__ = ["FORMATS", "READERS", "TargetFacts", "check", "engine_mismatch", "export", "refusals"]

log = logging.getLogger(__name__)

# The writer of each kind of head, by format. Four engines read the same EAGLE-3 folder; the requested engine decides
# over options that only some of them run.
Writers = dict[str, Callable[[Export], ExportedHead]]
ENGINES: Writers = {"eagle": eagle.engines, "hass": eagle.engines, "eagle3": eagle3.engines, "block": dflash.engines,
                    "eagle4": eagle3.engines, "mtp": mimo.engines}  # fmt: skip
FORMATS: dict[str, Writers] = {
    "vllm": {**ENGINES, "medusa": medusa.engines, "peagle": peagle.engines},
    "sglang": ENGINES,
    "gguf": {"eagle3": gguf.of_eagle3, "block": gguf.of_block},
    "trtllm": {"eagle3": eagle3.engines},
    "speculators": {"eagle3": eagle3.engines, "peagle": peagle.engines},
    "eagle": {"eagle": eagle.authors, "hass": eagle.authors, "eagle3": eagle3.authors},
    "medusa": {"medusa": medusa.authors},
    "hydra": {"hydra": hydra.authors},
    "dflash": {"block": dflash.engines},
    "eagle4": {"eagle4": eagle4.engines},
    "openvino": {"eagle3": eagle3.authors, "block": dflash.openvino},
}
# The targets, by model_type, whose class in vLLM 0.33, SGLang 0.5.23 or llama.cpp (of llama-cpp-python 0.3.36) hands
# out no layers to a head: the server ends at its start.
CLOSED = {
    "vllm": "gemma2 gemma3_text mixtral glm4 glm4_moe gpt2 cohere cohere2 falcon_h1 granitemoehybrid lfm2 kimi_linear "
    "bamba",
    "sglang": "gemma2 mixtral olmo2 olmo3 glm4 gpt2 gpt_neox cohere cohere2 falcon_h1 granite granitemoehybrid "
    "kimi_linear bamba smollm3",
    "sglang eagle3": "lfm2 nemotron_h",
    "sglang dflash": "qwen2 qwen2_moe glm4_moe",
    "llamacpp": "qwen2 gemma2 gemma3_text ministral3 phi3 olmo2 olmo3 glm4 glm4_moe gpt2 gpt_neox cohere cohere2 "
    "falcon_h1 granite granitemoehybrid deepseek_v3 llama4 kimi_linear bamba smollm3",
}
READERS = ("vllm", "sglang", "trtllm", "speculators")  # formats named after the engines that read one common folder


def check(head: Any, engine: str, served: TargetFacts, beyond: Collection[str]) -> None:
    """Refuse a head, maybe on meta, that an engine cannot load; `beyond` is its target's `extra_ops`."""
    format_name = {"llamacpp": "gguf"}.get(engine, engine)
    try:
        if engine == "transformers":  # transformers runs the target's own embedding and lm_head
            if not custom_generate.files(vars(head.config)):
                raise ValueError(f"no code of ours decodes there with {head.config.name}; train head=mlp")
            return
        kind = served.config.get("model_type")
        taken = f"{engine} {'dflash' if hasattr(head.config, 'mask_token') else 'eagle3'}"  # SGLang's algorithms differ
        if head.feature_layers and kind in f"{CLOSED.get(engine, '')} {CLOSED.get(taken, '')}".split():
            raise ValueError(f"a target of model_type {kind} hands out no layers there, which head={head.config.name} "
                             "reads; choose another engine, or train for a newer version with engine=null")  # fmt: skip
        if why := engine_mismatch(head.config, beyond):
            raise ValueError(why)
        _writer(head, format_name)(Export(format_name, head, served))
    except ValueError as error:
        raise ValueError(f"engine={engine}: {str(error).removeprefix(f'format={format_name}: ')}") from None


def engine_mismatch(config: Any, beyond: Collection[str]) -> str | None:
    """Return why engines would draft differently from the head's training; None if they would not.

    Engines read the plain tables of the target's embedding and lm_head. EAGLE-3, P-EAGLE and MTP norm the embedding
    first, which removes its scale, and EAGLE-1's fc absorbs it. A factor or cap of the target's logits does not change
    their argmax, and an lm_head of the head's own has learnt them.
    """
    terms = any(getattr(config, key, None) for key in ("markov_rank", "domino", "selector_rank"))
    for what, matters in (
        ("a scaled embedding", config.name in ("block", "hydra")),
        ("a bias of its logits", getattr(config, "lm_head", "shared") == "shared"),
        ("a scale or cap of its logits", terms and config.lm_head == "shared"),
    ):
        if what in beyond and matters:
            return f"the target has {what}, which engines do not know when they draft with head={config.name}"
    return None


def export(head: nn.Module, format_name: str, served: TargetFacts, folder: Path) -> None:
    """Export a head to one of FORMATS: a folder of config.json and model.safetensors, written atomically.

    The embedding and lm_head of its target must be plain tables. Refuse, without leaving a file, a format that is
    unknown, is not for this head or cannot express its options, and a weight that is not finite in the exported dtype.
    """
    assert_known(format_name)
    source = Export(format_name, head, served)
    foreign = _writer(head, format_name)(source)
    length, context = getattr(source.config, "length", None), foreign.config.get("max_position_embeddings")
    if length is not None and "rope_theta" in foreign.config and (context is None or length < context):
        log.warning(
            "format=%s: the head was trained to look back %d tokens, which we keep to and engines do not: in longer "
            "texts it may draft worse there than here", format_name, length,
        )  # fmt: skip
    tensors = {name: t.to(served.dtype) if t.is_floating_point() else t for name, t in foreign.tensors.items()}
    assert_finite(tensors, folder, f"no export in {served.dtype} holds it: give dtype=float32, or train again")
    write_files(folder, foreign.config, tensors)


def refusals(head: Any, served: TargetFacts) -> dict[str, str]:
    """Return the reason why each format of READERS refuses this head; formats of other kinds are left out."""
    reasons = {}
    for format_name in READERS:
        if (writer := FORMATS[format_name].get(head.config.name)) is not None:
            try:
                writer(Export(format_name, head, served))
            except ValueError as error:
                # The refusal without its remedy.
                reasons[format_name] = str(error).removeprefix(f"format={format_name}: ").partition("; ")[0]
    return reasons


def _writer(head: Any, format_name: str) -> Callable[[Export], ExportedHead]:
    """Return the function that exports this kind of head to a format; refuse a format for other kinds."""
    if (name := head.config.name) in FORMATS[format_name]:
        return FORMATS[format_name][name]
    others = ", ".join(other for other, heads in FORMATS.items() if name in heads)
    if not others:
        raise ValueError(
            f"format={format_name}: no engine loads a head of kind {name}; train head=eagle3, which most load; our "
            "own engine decodes with this one"
        )
    raise ValueError(f"format={format_name} is no form of {name} heads: they are written as {others}")


def assert_known(format_name: str) -> None:
    """Refuse a name that is not in FORMATS."""
    if format_name not in FORMATS:
        raise ValueError(f"format is {format_name!r}: choose one of {', '.join(FORMATS)}, or null for headstart's own")
