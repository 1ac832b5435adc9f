"""Load a target and prove on the loaded model what the engine relies on."""

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
    """A target whose masks, cache and teacher are proven; it can be compiled, and run in parts."""

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
            dtype: a name in DTYPES, or "auto" for the one that is fast on the device.
            device: torch device; None takes an accelerator if there is one.
            quantize: a key of `loading.METHODS`; None or "none" for the weights as the checkpoint has them.
            adapter: folder or Hub name of a PEFT adapter to merge into the weights; None or "none" for none.
            where: how it is placed, for a target that does not fit one device; features come on `device` all the same.

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
        """Load the target of a configuration as `load` does, in another dtype or on another device if one is given."""
        target = cls.load(
            model.path, dtype or model.dtype, device or model.device, model.trust_remote_code, model.quantize,
            model.adapter, model.where,
        )  # fmt: skip
        target.sibling = model.sibling
        return target

    @cached_property
    def parts(self) -> Parts:
        """Its decoder stack in parts, for drafting with some of them."""
        return Parts(self)

    def compile(self, *, drafts_alone: bool = False) -> None:
        """Compile what heads draft for it, and the passes that verify; those that take in prompts stay as they are.

        Raises:
            ValueError: its attention takes no mask of ours, without which the passes have too many forms.
        """
        if not drafts_alone:
            self.compiled = Compiled(self)
        self.compiles_drafts = True

    def compiled_forwards(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what lets its layers run compiled, for passes of one shape; warn where they stay as they are."""
        if self.whole and self.placed.group is None and self.recurrence is None:
            return compiled_forwards(self.decoder_layers)
        log.warning("%s: trainer.compile leaves its layers as they are (parts, experts or recurrent states)", self.name)
        return nullcontext

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Let the steps of batches that are made meanwhile be neither captured nor have compiled drafts."""
        before = self.captures, self.compiles_drafts
        self.captures = self.compiles_drafts = False
        try:
            yield
        finally:
            self.captures, self.compiles_drafts = before
