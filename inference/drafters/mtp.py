"""The multi-token-prediction module of the target's own checkpoint, which transformers leaves out, as a drafter.

heads/formats/mtp_layouts.py names the layouts that are read; recurrent targets verify only chains. The module's
decoder layer is of the target's own kind: one with rotary attention, over all that comes before, and no recurrent
state. What it is made of else does not matter. Of several modules only the first is used, for every depth.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heads.common.errors import one_line
from heads.formats.mtp_layouts import BLOCK, COUNTS, LAYOUTS, PROJECTION, layout_of
from heads.mtp import TARGET, Mtp
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig, verifiable
from inference.target.checkpoint import all_tensor_files
from inference.target.target import Target


class MtpDrafter(HeadDrafter):
    """A draft head that needs no training and no file of its own."""

    @dataclass(frozen=True)
    class Config:
        """Where the module lies (None: where the target was loaded from), and the tree it grows."""

        checkpoint: str | None
        tree: TreeConfig

    def __init__(self, config: Config, target: Target, name: str) -> None:
        super().__init__(load_mtp(target, config.checkpoint or target.name), verifiable(target, config.tree), name)


def load_mtp(target: Target, checkpoint: str) -> Mtp:
    """Return the module in a target's checkpoint, a folder or Hub name, on the target's device and in its dtype.

    It uses the target's embedding and lm_head. Refuse a checkpoint without one, or with one unlike the target's layer.
    """
    try:
        files = all_tensor_files(checkpoint)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(
            f"drafter.mtp.checkpoint: {checkpoint} holds no readable model.safetensors ({one_line(error)}); give the "
            "folder or Hub name of the target's own checkpoint"
        ) from error
    layers = target.spec.num_layers
    layout = layout_of(files, layers)
    if layout is None:
        signs = ", no ".join(one.theirs(PROJECTION, layers) for one in LAYOUTS.values())
        remedy = "choose another drafter"
        if promise := next((key for key in COUNTS if getattr(target.config, key, None)), None):
            remedy = (
                f"its {promise} promises one, which transformers leaves out when it saves: take it from the model that "
                "was fine-tuned, by drafter.mtp.checkpoint=BASE, in a training by init=checkpoint base=BASE"
            )
        raise ValueError(
            f"drafter.mtp: {checkpoint} carries no module for multi-token prediction (no {signs}); {remedy}"
        )
    names = layout.ours(files, layers)
    try:
        opened: dict[Path, Any] = {file: safe_open(file, "pt") for file in {files[theirs] for theirs in names}}
        tensors = layout.read({ours: opened[files[theirs]].get_tensor(theirs) for theirs, ours in names.items()})
    except (OSError, SafetensorError, RuntimeError, IndexError) as error:  # of experts too, which do not stack
        raise ValueError(
            f"drafter.mtp: the module in {checkpoint} is damaged ({one_line(error)}); download it again"
        ) from error
    try:
        if target.recurrence is not None and layers - 1 in target.recurrence.mixers:
            raise ValueError("the target's last layer cannot run by itself (it keeps a recurrent state)")
        # The layer's numbers are the target's.
        sizes = None, None, None, None, None, 10000.0, None, 0.0
        config = Mtp.Config("mtp", *sizes, "shared", None, TARGET, layout.raw_state, False, None)
        with torch.device("meta"):
            head = Mtp(config, target.embeddings)
        _fill(head, tensors, target, checkpoint)
        head.check()
    except ValueError as error:
        raise ValueError(f"drafter.mtp: {error}; choose another drafter") from error
    return head.eval().requires_grad_(False)


def _fill(head: Mtp, tensors: dict[str, Tensor], target: Target, checkpoint: str) -> None:
    """Give a module its tensors, in the dtypes of the target's last layer; refuse others than it has."""
    state: dict[str, Tensor] = head.state_dict(keep_vars=True)
    wrong = sorted(state.keys() ^ tensors.keys())
    wrong += [name for name in state.keys() & tensors.keys() if state[name].shape != tensors[name].shape]
    if wrong:
        raise ValueError(
            f"the module in {checkpoint} is not built like the target's last layer, or is quantised ({wrong[0]}"
            f"{f' and {len(wrong) - 1} more' if wrong[1:] else ''})"
        )
    last = target.decoder_layers[-1].state_dict().items()
    wide = {BLOCK + name for name, tensor in last if tensor.dtype == torch.float32}  # a router's, whatever the others'
    dtypes = {name: torch.float32 if name in wide else target.dtype for name in tensors}
    head.load_state_dict(
        {name: tensor.to(target.device, dtypes[name]) for name, tensor in tensors.items()}, assign=True
    )
