"""Loading of a target, with checks of everything that the engine relies on."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from heads.base import Tokens
from inference.target import loading, probe
from inference.target.attention import packing
from inference.target.compiled import Compiled, compiled_forwards
from inference.target.config import ModelConfig, device_named, dtype_named
from inference.target.model import TargetModel
from inference.target.packed import prepack_weights
from inference.target.placement import HERE, REPLICATE, Placed, Placement
from inference.target.placement import check as check_placement
from inference.target.placement import placed as placed_whole

log = logging.getLogger(__name__)


class Target(TargetModel):
    """A loaded target with checked masks, cache and teacher; it can be compiled."""

    def __init__(
        self,
        model: "transformers.PreTrainedModel",
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        placed: Placed | None = None,
    ) -> None:
        super().__init__(model, tokenizer, name, placed)
        self.takes_trees = probe.check(self)
        self.packing = packing(model)
        if self.packing is not None and not probe.packs(self):
            self.packing = None
        prepack_weights(model)  # after the checks, whose small passes would pack a target that only trains a head

    @classmethod
    def load(
        cls,
        path: str,
        dtype: str = "auto",
        device: str | None = None,
        trust_remote_code: bool = False,
        quantize: str | None = None,
        adapter: str | None = None,
        placement: Placement = HERE,
    ) -> "Target":
        """Load a target from a folder or the Hub.

        Args:
            dtype: a key of DTYPES, or "auto" for the fast one of the device.
            device: torch device; None takes an accelerator if there is one.
            quantize: a key of `loading.METHODS`; None or "none" for the checkpoint's weights.
            adapter: folder or Hub name of a PEFT adapter to merge into the weights; None or "none" for none.
            placement: of a target that does not fit one device; features are on `device` in any case.

        Raises:
            ValueError: the model or its tokenizer cannot be loaded, placed or verified, and why.
        """
        chosen_device = device_named(device)
        kind = dtype_named(dtype, chosen_device, path, trust_remote_code)
        merges = None if adapter == loading.AS_IT_IS else adapter
        if merges is not None:
            check_placement(placement, None, merges, chosen_device)
            folder = loading.check_adapter(merges, quantize)
        model, tokenizer = loading.load(path, kind, chosen_device, trust_remote_code, quantize, placement)
        placed = None
        if merges is not None:
            model, placed = loading.merge_adapter(model, path, merges, folder)
        elif placement.kind != REPLICATE:
            placed = placed_whole(model, placement, path, chosen_device, trust_remote_code)
        return cls(model, tokenizer, path, placed)

    @classmethod
    def of(cls, model: ModelConfig, dtype: str | None = None, device: str | None = None) -> "Target":
        """Load the target of a configuration, in another dtype or on another device if given."""
        target = cls.load(
            model.path, dtype or model.dtype, device or model.device, model.trust_remote_code, model.quantize,
            model.adapter, model.placed,
        )  # fmt: skip
        target.sibling = model.sibling
        return target

    def compile(self, *, drafts_only: bool = False) -> None:
        """Compile heads' drafting and the verification passes; prefill stays uncompiled.

        Raises:
            ValueError: its attention ignores a custom mask, so that the passes have too many shapes.
        """
        if not drafts_only:
            self.compiled = Compiled(self)
        self.compiles_drafts = True

    def compiled_forwards(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a context manager that runs its layers compiled, for passes of one shape; warn if it cannot."""
        if self.whole and self.placed.group is None and self.recurrence is None:
            return compiled_forwards(self.decoder_layers)
        log.warning("%s: trainer.compile leaves its layers as they are (parts, experts or recurrent states)", self.name)
        return nullcontext

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Context in which new batches neither capture steps nor compile drafts."""
        before = self.captures, self.compiles_drafts
        self.captures = self.compiles_drafts = False
        try:
            yield
        finally:
            self.captures, self.compiles_drafts = before


def check_prompt(target: Target, prompt: Tokens) -> None:
    """Check that a prompt can be decoded.

    Raises:
        ValueError: it is empty, holds a token that the target does not know, or fills the target's context.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token; of several prompts, at least one prompt")
    if len(prompt) >= target.max_model_len:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens but {target.name} reads at most {target.max_model_len}: shorten it"
        )
    last = target.embeddings.vocab_size - 1
    for token in (min(prompt), max(prompt)):
        if not 0 <= token <= last:
            raise ValueError(
                f"the prompt holds token {token} but those of {target.name} go from 0 to {last}: encode it with the "
                "target's own tokenizer"
            )


def check_size(target: Target, nodes: int, name: str) -> None:
    """Check that a tree of `nodes` nodes, the root included, fits into the target's context.

    Raises:
        ValueError: it does not; the error names its drafter.
    """
    if nodes > target.max_model_len:
        raise ValueError(
            f"{name}: a tree of {nodes} nodes is larger than the context of {target.name}, {target.max_model_len} "
            "tokens: draft fewer"
        )


def check_memory(nbytes: Mapping[torch.device, int], name: str, size: int) -> None:
    """Check that a batch's keys and values fit into the free memory of each CUDA device.

    Raises:
        ValueError: they do not: a batch that is too large fails before decoding starts.
    """
    for device, needed in nbytes.items():
        if needed > (free := free_memory(device)):
            raise ValueError(
                f"{name}: the keys and values of a batch of {size} take {needed / 1e9:.1f} GB, and {device} has "
                f"{free / 1e9:.1f} GB free: give a smaller batch_size, or fewer max_new_tokens"
            )


def free_memory(device: torch.device) -> float:
    """Return the free bytes of a CUDA device, with those that torch's allocator holds; infinity for other devices."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
