"""What a run would do, from configurations alone: nothing is loaded, nothing is written."""

from typing import Any

import torch
from jaxtyping import Float, Int
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from heads import HEADS
from heads.base import LayerShape, frozen_count, parameter_count
from inference.ends import layer_shape
from inference.target import DTYPES, default_device, fast_dtype
from train.adapt import adapt
from train.config import RunConfig
from train.start import AUTO

ADAMW_BYTES = 16  # fp32 weight, gradient and two moments


class ShapesOnly:
    """The ends of a target that is not there: shapes for building a head, on the meta device."""

    def __init__(self, hidden_size: int, vocab_size: int, num_layers: int, layer: LayerShape) -> None:
        self.hidden_size, self.vocab_size, self.num_layers, self.layer = hidden_size, vocab_size, num_layers, layer

    def embed(self, token: Int[Tensor, "*n"]) -> Float[Tensor, "*n D"]:
        """Return shapes without values."""
        return torch.empty(*token.shape, self.hidden_size, device="meta")

    def logits(self, hidden: Float[Tensor, "*n D"], ids: Int[Tensor, "W"] | None = None) -> Float[Tensor, "*n W"]:
        """Return shapes without values."""
        return torch.empty(*hidden.shape[:-1], self.vocab_size if ids is None else len(ids), device="meta")

    def head_weight(self) -> Float[Tensor, "V D"]:
        """Return shapes without values."""
        return torch.empty(self.vocab_size, self.hidden_size, device="meta")


def plan(run: RunConfig) -> dict[str, Any]:
    """Return parameters, tokens, memory and disk of a run, in counts and bytes.

    Raises:
        ValueError: the target's configuration cannot be read, or the head is one to be loaded.
    """
    if run.init not in (None, AUTO):
        raise ValueError(f"init={run.init} brings the head's numbers, and plan=true loads nothing: leave init out")
    try:
        config = AutoConfig.from_pretrained(run.model.path, trust_remote_code=run.model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"model.path={run.model.path}: its configuration cannot be read ({reason})") from error
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config, trust_remote_code=run.model.trust_remote_code)
        text = config.get_text_config()
        ends = ShapesOnly(text.hidden_size, text.vocab_size, text.num_hidden_layers, layer_shape(text))
        head = HEADS[run.head.name](run.head, ends)
        whole = parameter_count(head)
        adapt(head, run.peft)
    place = torch.device(run.model.device or default_device())
    kind = fast_dtype(place) if run.model.dtype == "auto" else DTYPES[run.model.dtype]
    trained, resting = parameter_count(head), frozen_count(head)
    frozen = sum(p.numel() for p in target.parameters())
    rows = run.trainer.micro_tokens
    logits = 4 * rows * text.vocab_size * (2 * run.objective.depths + 1)
    return {
        "target_parameters": frozen,
        "head_parameters": whole,
        "trained_parameters": trained,
        "steps": run.trainer.steps,
        "tokens": run.trainer.steps * run.trainer.batch_tokens,
        "target_bytes": frozen * kind.itemsize,
        "head_and_optimizer_bytes": trained * ADAMW_BYTES + resting * 4,
        "logits_bytes": logits,
        "checkpoint_bytes": run.trainer.keep * (trained * 12 + resting * 4) + whole * 4,
    }


def table(run: RunConfig, planned: dict[str, Any]) -> Table:
    """Return the plan for the terminal."""
    shown = Table(title=f"plan: {run.name} -> {run.out}", show_header=False)
    for name, value in planned.items():
        text = f"{value / 2**20:,.1f} MiB" if name.endswith("_bytes") else f"{value:,}"
        shown.add_row(name.removesuffix("_bytes").replace("_", " "), text)
    return shown
