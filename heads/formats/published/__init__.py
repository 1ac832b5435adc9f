"""Draft heads in the formats of other projects and engines; one module reads and writes each format.

A format is recognised by the names of its tensors.

A loaded head is one of `heads.HEADS`: it can be measured, trained further and saved in our format. Every tensor is
mapped or refused by name; counts come from names and shapes, since config files are often wrong.

files.py      a published head's files and tensors
plan.py       assembly of a head, every tensor mapped; the dimensions of a decoder layer
export.py     export of a head to a format
exporting.py  the head to export, and code shared by the formats
eagle.py      EAGLE-1/2 and HASS: vLLM, SGLang, the authors
eagle3.py     EAGLE-3 and 3.1: vLLM, SGLang, TensorRT-LLM and speculators in one folder; the authors
eagle4.py     EAGLE-4: the engine plug-ins
peagle.py     P-EAGLE: vLLM and speculators
medusa.py     Medusa: vLLM up to 0.32, the authors
hydra.py      Hydra and Hydra++: the authors
mlp.py        the MLP speculator, only read
mimo.py       MTP in MiMo's layout: vLLM and SGLang, for other targets too
openvino.py   EAGLE-3 and DFlash for OpenVINO GenAI, by its own converter
gguf.py       EAGLE-3, DFlash and DSpark in one file for llama.cpp
dflash.py     DFlash, DSpark and DFlash2: vLLM, SGLang; Domino: SGLang
"""

import re
from pathlib import Path

from torch import nn

from heads.base import Embeddings
from heads.common.errors import one_line
from heads.formats.published import dflash, eagle, eagle3, eagle4, hydra, medusa, mimo, mlp, peagle
from heads.formats.published.files import config_of, is_published, names_of, stored_tensors, without_prefix
from heads.formats.published.plan import PublishedHead, assemble

__all__ = ["FORMATS", "KINDS", "format_of", "is_published", "load_published"]


# The module of each format, with the names of tensors that identify it (SIGNATURE) and its `read`.
FORMATS = {
    "dflash": dflash, "peagle": peagle, "eagle4": eagle4, "eagle3": eagle3, "eagle": eagle, "medusa": medusa,
    "hydra": hydra, "mlp": mlp, "mimo": mimo,
}  # fmt: skip
KINDS = {"dflash": "block", "mimo": "mtp"}  # kinds of head that are not named like their format


def load_published(folder: Path, embeddings: Embeddings) -> nn.Module:
    """Load a published head for a target, on the CPU and in the file's dtype, ready for `save_head`.

    Only the target's hidden size and vocabulary can be checked: published heads do not identify its weights. Refuse, in
    one line, an unknown format, a damaged file, other tensors than the head's, and options that heads here do not have.
    """
    module = FORMATS[format_of(folder)]  # the tensor names are checked before tensors are read
    source = PublishedHead(folder, config_of(folder), without_prefix(stored_tensors(folder)))
    try:
        plan = module.read(source, embeddings)
    except (TypeError, AttributeError, KeyError, IndexError) as error:  # a value or a tensor of an unexpected type
        raise ValueError(
            f"{folder}: config.json or a tensor is not as its format has it ({one_line(error)})"
        ) from error
    return assemble(source, plan, embeddings)


def format_of(folder: Path) -> str:
    """Return the name of a published head's format, by its tensor names; refuse an unknown format."""
    names = names_of(folder)
    for name, module in FORMATS.items():
        if all(any(re.fullmatch(pattern, one) for one in names) for pattern in module.SIGNATURE):
            return name
    some = ", ".join(sorted(names)[:3])
    raise ValueError(f"{folder}: tensors such as {some} are of no published head known here: {', '.join(FORMATS)}")
