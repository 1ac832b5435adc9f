"""The layouts of MTP modules in targets' checkpoints, and the mapping of tensor names both ways.

appended  `model.layers.N.*` after the last of N layers: DeepSeek-V3, GLM-4.5
separate  `mtp.*`: Qwen3-Next, Qwen3.5
mimo      `model.mtp_layers.0.*`: MiMo, whose projection reads the state first, before the target's final norm
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from heads.base import NamedTensors
from heads.common.typed import Json

BLOCK, PROJECTION = "block.layer.", "eh_proj.weight"  # parts of tensor names in heads/mtp.py
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the target's own tensors

# What to do about a promised module that the files do not hold.
REMEDY = (
    "transformers leaves it out when it saves: take it from the model that was fine-tuned, by experiment="
    "mtp_after_finetune base=BASE, or untrained by drafter=mtp drafter.mtp.checkpoint=BASE"
)


class Layout(NamedTuple):
    """The names of a module's tensors in a checkpoint, and its differences from our module.

    `outer` is the name prefix of the module, `inner` that of its decoder layer; {} is the target's layer count.
    """

    outer: str
    inner: str
    renamed: dict[str, str]  # our names of the tensors outside the layer -> the checkpoint's names
    state_first: bool = False  # whether the projection's input begins with the state
    raw_state: bool = False
    count_key: str = "num_nextn_predict_layers"  # the key of config.json with the number of modules

    def theirs(self, name: str, layers: int) -> str:
        """Return the checkpoint's name for one of our tensors."""
        if name.startswith(BLOCK):
            return self.inner.format(layers) + name.removeprefix(BLOCK)
        return self.outer.format(layers) + self.renamed[name]

    def ours(self, names: Iterable[str], layers: int) -> dict[str, str]:
        """Return the checkpoint's names of the module's tensors, each with our name."""
        renamed = {self.theirs(name, layers): name for name in self.renamed}
        inner, shared = self.inner.format(layers), {self.outer.format(layers) + name for name in SHARED}
        return {
            name: renamed.get(name) or BLOCK + name.removeprefix(inner)
            for name in names
            if name in renamed or (name.startswith(inner) and name not in shared)
        }

    def read(self, tensors: NamedTensors) -> NamedTensors:
        """Convert a checkpoint's tensors to our names and layout; stack separate experts as transformers does."""
        experts: dict[str, dict[str, dict[int, Tensor]]] = {}
        stacked = {}
        for name, tensor in tensors.items():
            if match := EXPERT.fullmatch(name):
                experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
            else:
                stacked[name] = tensor
        for name, matrices in experts.items():
            gate, up, down = (
                torch.stack([tensor for _, tensor in sorted(matrices.get(matrix, {}).items())] or [torch.empty(0)])
                for matrix in ("gate_proj", "up_proj", "down_proj")
            )
            stacked[f"{name}.gate_up_proj"] = torch.cat([gate, up], 1)
            stacked[f"{name}.down_proj"] = down
        return self._turned(stacked)

    def write(self, tensors: NamedTensors, layers: int, *, split: bool) -> NamedTensors:
        """Convert our tensors to a checkpoint's names and layout; `split` undoes the stacking of experts in `read`."""
        written = {}
        for name, tensor in self._turned(dict(tensors)).items():
            stem, _, matrix = name.rpartition(".")
            if not split or not stem.endswith(".experts"):
                written[self.theirs(name, layers)] = tensor
                continue
            for i, expert in enumerate(tensor):
                halves = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
                for one, weight in halves if matrix == "gate_up_proj" else [(matrix, expert)]:
                    written[self.theirs(f"{stem}.{i}.{one}.weight", layers)] = weight
        return written

    def _turned(self, tensors: NamedTensors) -> NamedTensors:
        if not self.state_first or PROJECTION not in tensors:
            return tensors
        return tensors | {PROJECTION: swapped(tensors[PROJECTION])}


def _names(enorm: str, hnorm: str, norm: str, projection: str) -> dict[str, str]:
    return {
        f"{ours}.weight": f"{theirs}.weight"
        for ours, theirs in (("enorm", enorm), ("hnorm", hnorm), ("norm", norm), ("eh_proj", projection))
    }


LAYOUTS = {
    "appended": Layout("model.layers.{}.", "model.layers.{}.", _names("enorm", "hnorm", "shared_head.norm", "eh_proj")),
    "separate": Layout("mtp.", "mtp.layers.0.", _names("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")),
    "mimo": Layout(
        "model.mtp_layers.0.", "model.mtp_layers.0.",
        _names("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj"),
        state_first=True, raw_state=True,
    ),
}  # fmt: skip


COUNT = LAYOUTS["appended"].count_key
QWEN35 = LAYOUTS["separate"]._replace(count_key="mtp_num_hidden_layers")
FAMILIES = {  # the layout of each architecture
    "DeepseekV3ForCausalLM": LAYOUTS["appended"],
    "Glm4MoeForCausalLM": LAYOUTS["appended"],
    "MiMoForCausalLM": LAYOUTS["mimo"],
    "Qwen3NextForCausalLM": LAYOUTS["separate"],
    "Qwen3_5ForCausalLM": QWEN35,
    "Qwen3_5ForConditionalGeneration": QWEN35,
    "Qwen3_5MoeForCausalLM": QWEN35,
    "Qwen3_5MoeForConditionalGeneration": QWEN35,
}


def text_section(values: Json) -> Json:
    """Return the part of a config.json that describes the text model: all of it, or a multimodal one's section."""
    section = values.get("text_config")
    return section if isinstance(section, dict) else values


def promise(values: Json) -> str | None:
    """Return the key by which a config.json says that the model has an MTP module, None without one."""
    section = text_section(values)
    return next((one.count_key for one in (LAYOUTS["appended"], QWEN35) if section.get(one.count_key)), None)


def swapped(projection: Tensor) -> Tensor:
    """Return the projection's weight with its two concatenated inputs swapped."""
    return torch.cat(projection.chunk(2, -1)[::-1], -1)


def layout_of(names: Iterable[str], layers: int) -> Layout | None:
    """Return the layout of the MTP module in a checkpoint with these tensors, None without an MTP module."""
    available = set(names)
    return next((one for one in LAYOUTS.values() if one.theirs(PROJECTION, layers) in available), None)


def prefixes(layers: int) -> tuple[str, ...]:
    """Return what the names of an MTP module's tensors begin with, by the target's number of layers."""
    return tuple(one.outer.format(layers) for one in LAYOUTS.values())
