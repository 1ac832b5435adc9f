"""Export of heads to the formats of engines and other projects."""

import logging
from collections.abc import Callable
from pathlib import Path

from torch import nn

from heads import HEADS
from heads.formats.published import dflash, eagle, eagle3, eagle4, gguf, hydra, medusa, mimo, peagle
from heads.formats.published.exporting import Export, ExportedHead, TargetFacts
from heads.formats.store import assert_finite, write_files

__all__ = ["FORMATS", "READERS", "TargetFacts", "check", "export", "refusals"]

log = logging.getLogger(__name__)

# The writer of each kind of head by format. Four engines read the same EAGLE-3 folder; which one is asked for decides
# over options that not all of them run.
Writers = dict[str, Callable[[Export], ExportedHead]]
ENGINES: Writers = {"eagle": eagle.engines, "hass": eagle.engines, "eagle3": eagle3.engines, "block": dflash.engines,
                    "eagle4": eagle4.without_candidates, "mtp": mimo.engines}  # fmt: skip
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
}
READERS = ("vllm", "sglang", "trtllm", "speculators")  # formats named for the readers of their common folder


def check(head: nn.Module, engine: str, served: TargetFacts) -> None:
    """Refuse a head, trained or not, that one of `heads.ENGINES` cannot load."""
    format_name = {"llamacpp": "gguf"}.get(engine, engine)
    try:
        _writer(head, format_name)(Export(format_name, head, served))
    except ValueError as error:
        raise ValueError(f"engine={engine}: {str(error).removeprefix(f'format={format_name}: ')}") from None


def export(head: nn.Module, format_name: str, served: TargetFacts, folder: Path) -> None:
    """Export a head to one of FORMATS: a folder of config.json and model.safetensors, written atomically.

    The embedding and lm_head of its target must be plain tables.

    Raises:
        ValueError: the format is unknown or not for this head, the head has an option that it cannot express, or
            a weight is not finite in the exported dtype: one line, and nothing is left behind.
        OSError: the disk is full or the folder cannot be written.
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


def refusals(head: nn.Module, served: TargetFacts) -> dict[str, str]:
    """Return, by format among READERS, the reason why it refuses this head; formats of other kinds are left out."""
    reasons = {}
    for format_name in READERS:
        if (writer := FORMATS[format_name].get(_name_of(head))) is not None:
            try:
                writer(Export(format_name, head, served))
            except ValueError as error:
                reasons[format_name] = (
                    str(error).removeprefix(f"format={format_name}: ").partition("; ")[0]
                )  # without the remedy
    return reasons


def _writer(head: nn.Module, format_name: str) -> Callable[[Export], ExportedHead]:
    """Return the function that exports this kind of head to a format; refuse a format of other kinds."""
    if (name := _name_of(head)) in FORMATS[format_name]:
        return FORMATS[format_name][name]
    others = ", ".join(other for other, heads in FORMATS.items() if name in heads)
    if not others:
        raise ValueError(
            f"format={format_name}: no engine loads a head of kind {name}; train head=eagle3, which most load; our "
            "own engine decodes with this one"
        )
    raise ValueError(f"format={format_name}: not one of a head of kind {name}, which can take the form of {others}")


def _name_of(head: nn.Module) -> str:
    return next(name for name, kind in HEADS.items() if type(head) is kind)


def assert_known(format_name: str) -> None:
    """Refuse a name that is not in FORMATS."""
    if format_name not in FORMATS:
        raise ValueError(f"format is {format_name!r}: choose one of {', '.join(FORMATS)}, or null for headstart's own")
