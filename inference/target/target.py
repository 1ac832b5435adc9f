"""Loading of a target, with checks of everything that the engine relies on."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property

import transformers
from transformers import PreTrainedTokenizerBase

from inference.target import adapter as adapters
from inference.target import loading, probe
from inference.target.adapter import Adapter
from inference.target.attention import packing
from inference.target.compiled import Compiled, compiled_forwards
from inference.target.config import ModelConfig, device_named, dtype_named
from inference.target.model import TargetModel
from inference.target.placed import Placed
from inference.target.placed import placed as placed_whole
from inference.target.placement import HERE, REPLICATE, Placement
from inference.target.placement import check as check_placement
from inference.target.stack import Parts

log = logging.getLogger(__name__)


class Target(TargetModel):
    """A loaded target with checked masks, cache and teacher; it can be compiled, and run in parts."""

    def __init__(
        self,
        model: "transformers.PreTrainedModel",
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        adapter: Adapter | None = None,
        placed: Placed | None = None,
    ) -> None:
        super().__init__(model, tokenizer, name, adapter, placed)
        self.takes_trees = probe.check(self)
        self.packing = packing(model)
        if self.packing is not None and not probe.packs(self):
            self.packing = None

    @classmethod
    def load(
        cls,
        path: str,
        dtype: str = "auto",
        device: str | None = None,
        trust_remote_code: bool = False,
        quantize: str | None = None,
        adapter: str | None = None,
        where: Placement = HERE,
    ) -> "Target":
        """Load a target from a folder or the Hub.

        Args:
            dtype: a key of DTYPES, or "auto" for the fast one of the device.
            device: torch device; None takes an accelerator if there is one.
            quantize: a key of `loading.METHODS`; None or "none" for the checkpoint's weights.
            adapter: folder or Hub name of a PEFT adapter to merge into the weights; None or "none" for none.
            where: the placement of a target that does not fit one device; features are on `device` in any case.

        Raises:
            ValueError: the model or its tokenizer cannot be loaded, placed or verified, and why.
        """
        chosen_device = device_named(device)
        kind = dtype_named(dtype, chosen_device, path, trust_remote_code)
        if adapter in (None, loading.AS_IT_IS):
            model, tokenizer = loading.load(path, kind, chosen_device, trust_remote_code, quantize, where)
            if where.placement == REPLICATE:
                return cls(model, tokenizer, path)
            return cls(model, tokenizer, path, None, placed_whole(model, where, path, chosen_device, trust_remote_code))
        check_placement(where, None, adapter, chosen_device)
        folder = adapters.check(adapter, quantize)
        model, tokenizer = loading.load(path, kind, chosen_device, trust_remote_code, quantize)
        merged, attached = adapters.merge(model, path, adapter, folder)
        return cls(merged, tokenizer, path, attached)

    @classmethod
    def of(cls, model: ModelConfig, dtype: str | None = None, device: str | None = None) -> "Target":
        """Load the target of a configuration, in another dtype or on another device if given."""
        target = cls.load(
            model.path, dtype or model.dtype, device or model.device, model.trust_remote_code, model.quantize,
            model.adapter, model.where,
        )  # fmt: skip
        target.sibling = model.sibling
        return target

    @cached_property
    def parts(self) -> Parts:
        """Passes through parts of its decoder stack, for self-speculation."""
        return Parts(self)

    def compile(self, *, drafts_alone: bool = False) -> None:
        """Compile heads' drafting and the verification passes; prefill stays uncompiled.

        Raises:
            ValueError: its attention takes no mask of ours, without which the passes have too many forms.
        """
        if not drafts_alone:
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
