"""The layouts of MTP modules in targets' checkpoints, and the mapping of tensor names both ways.

behind  `model.layers.N.*` behind the last of N layers: DeepSeek-V3, GLM-4.5
apart   `mtp.*`: Qwen3-Next, Qwen3.5
mimo    `model.mtp_layers.0.*`: MiMo, whose projection reads the state first, as it is before the target's final norm
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK, PROJECTION = "block.layer.", "eh_proj.weight"  # among the tensors of heads/mtp.py
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # the target's own, written a second time


class Layout(NamedTuple):
    """The names of a module's tensors in a checkpoint, and its differences.

    `outer` and `inner` precede those of the module and of its decoder layer; {} stands for the target's layers.
    """

    outer: str
    inner: str
    renamed: dict[str, str]  # their name of each tensor beside the layer's, by ours
    state_first: bool = False  # in the projection's input
    raw_state: bool = False

    def theirs(self, name: str, layers: int) -> str:
        """Return the name in a checkpoint of one of our tensors."""
        if name.startswith(BLOCK):
            return self.inner.format(layers) + name.removeprefix(BLOCK)
        return self.outer.format(layers) + self.renamed[name]

    def ours(self, names: Iterable[str], layers: int) -> dict[str, str]:
        """Return our name of each of the module's tensors among those of a checkpoint."""
        beside = {self.theirs(name, layers): name for name in self.renamed}
        inner, shared = self.inner.format(layers), {self.outer.format(layers) + name for name in SHARED}
        return {
            name: beside.get(name) or BLOCK + name.removeprefix(inner)
            for name in names
            if name in beside or (name.startswith(inner) and name not in shared)
        }

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a checkpoint's tensors, by our names, as our module has them."""
        return self._turned(fused(tensors))

    def write(self, tensors: Mapping[str, Tensor], layers: int, *, split: bool) -> dict[str, Tensor]:
        """Return our tensors as a checkpoint has them, its experts one by one if `split`."""
        turned = self._turned(dict(tensors))
        return {self.theirs(name, layers): tensor for name, tensor in (apart(turned) if split else turned).items()}

    def _turned(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.state_first or PROJECTION not in tensors:
            return tensors
        return tensors | {PROJECTION: swapped(tensors[PROJECTION])}


def _names(enorm: str, hnorm: str, norm: str, projection: str) -> dict[str, str]:
    return {
        f"{ours}.weight": f"{theirs}.weight"
        for ours, theirs in (("enorm", enorm), ("hnorm", hnorm), ("norm", norm), ("eh_proj", projection))
    }


LAYOUTS = {
    "behind": Layout(
        "model.layers.{}.", "model.layers.{}.", _names("enorm", "hnorm", "shared_head.norm", "eh_proj")
    ),
    "apart": Layout(
        "mtp.", "mtp.layers.0.", _names("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
    ),
    "mimo": Layout(
        "model.mtp_layers.0.", "model.mtp_layers.0.",
        _names("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj"),
        state_first=True, raw_state=True,
    ),
}  # fmt: skip


COUNT = "num_nextn_predict_layers"  # the key of config.json that counts a model's modules
COUNTS = (COUNT, "mtp_num_hidden_layers")  # the second is Qwen3.5's
FAMILIES = {  # where the models of an architecture have theirs
    "DeepseekV3ForCausalLM": LAYOUTS["behind"],
    "Glm4MoeForCausalLM": LAYOUTS["behind"],
    "MiMoForCausalLM": LAYOUTS["mimo"],
    "Qwen3NextForCausalLM": LAYOUTS["apart"],
}


def swapped(projection: Tensor) -> Tensor:
    """Return a projection of two states joined for the same states joined in the other order."""
    return torch.cat(projection.chunk(2, -1)[::-1], -1)


def layout_of(names: Iterable[str], layers: int) -> Layout | None:
    """Return the layout of the module that a checkpoint of these tensors holds, None if it holds none."""
    available = set(names)
    return next((one for one in LAYOUTS.values() if one.theirs(PROJECTION, layers) in available), None)


def fused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack what checkpoints hold expert by expert as transformers holds it: gate above up, and down."""
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
    return stacked


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same with experts one by one, the inverse of `fused`."""
    split = {}
    for name, tensor in tensors.items():
        stem, _, matrix = name.rpartition(".")
        if not stem.endswith(".experts"):
            split[name] = tensor
            continue
        for i, expert in enumerate(tensor):
            halves = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            named = halves if matrix == "gate_up_proj" else {matrix: expert}
            split |= {f"{stem}.{i}.{one}.weight": weight for one, weight in named.items()}
    return split
