"""Another causal LM that reads along with the target and drafts: its cache follows a text that may be revised."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from inference.target import DTYPES, Target

ROOT = -1  # the number of the last token read, above the drafted nodes


class Follower:
    """A model with the tokens it has read, and behind them in its cache the drafted nodes of one tree.

    Nodes are numbered in order of expansion. Reading on keeps what still stands of both, so that a pass runs over
    what is missing alone: after a verification the tokens that no expanded node holds, the next root among them.
    """

    def __init__(self, model: Target) -> None:
        self.model = model
        self.clear()

    def clear(self) -> None:
        """Forget everything read."""
        self.cache = self.model.cache()
        self.token: list[int] = []
        self._forget_drafts()

    def _forget_drafts(self) -> None:
        self.below: dict[tuple[int, int], int] = {}  # (node above, token) -> node
        self.level = [ROOT]
        self.depth = torch.zeros(0, dtype=torch.long, device=self.model.device)

    def read(self, token: list[int]) -> Float[Tensor, "1 V"]:
        """Take `token`, one or more, as the whole text from now on; return the logits of what follows."""
        known = len(self.token)
        if token[:known] != self.token:
            known = next(i for i in range(known) if self.token[i : i + 1] != token[i : i + 1])
        known = min(known, len(token) - 1)  # the last one is run for its logits in any case
        nodes = self._drafted(token[known:-1]) if known == len(self.token) else []
        self.cache.keep(known, nodes)
        missing = torch.tensor(token[known + len(nodes) :], device=self.model.device)
        logits = self.model.prefill(missing, self.cache).logits
        assert logits is not None
        self.token = list(token)
        self._forget_drafts()
        return logits[0]

    def _drafted(self, token: list[int]) -> list[int]:
        """Return the expanded nodes that hold the first of these tokens, from the root down."""
        nodes: list[int] = []
        above = ROOT
        for t in token:
            node = self.below.get((above, t))
            if node is None:
                break
            nodes.append(node)
            above = node
        return nodes

    @torch.inference_mode()
    def expand(
        self, token: Int[Tensor, "N"], parent: Int[Tensor, "N"], mask: Bool[Tensor, "N M"]
    ) -> Float[Tensor, "N V"]:
        """Run one more tree level and return its logits; arguments as of `DraftHead.expand`, in the model's tokens."""
        model, device = self.model, self.model.device
        token, mask = token.to(device), mask.to(device)
        nodes = list(range(len(self.depth), len(self.depth) + len(token)))
        for node, above, t in zip(nodes, parent.tolist(), token.tolist(), strict=True):
            self.below[self.level[above], t] = node
        self.level = nodes
        self.depth = torch.cat([self.depth, mask.sum(-1)])
        text = len(self.token)
        position = torch.cat([torch.arange(text, device=device), text - 1 + self.depth])[None]
        earlier, own = position.split([self.cache.length, len(token)], 1)
        # A chain sees all that is before it, which needs no attention that takes a mask.
        seen = None if bool(mask.all()) else torch.cat([mask.new_ones(len(mask), text), mask], 1)[None]
        return model.ends.logits(model.run(token[None], own, seen, self.cache, earlier).last)[0]


def load(path: str, dtype: str | None, device: str | None, trust_remote_code: bool, target: Target, key: str) -> Target:
    """Load the model that follows a target.

    Args:
        path: folder or Hub name.
        dtype: as of `Target.load`; None for the target's.
        device: torch device; None for the target's. Elsewhere, tokens go there and logits come back at every pass.
        trust_remote_code: passed to transformers.
        target: the target.
        key: the configuration's name, for errors.

    Raises:
        ValueError: no such model, dtype or device.
    """
    own = next(name for name, kind in DTYPES.items() if kind == target.dtype)
    place = device or str(target.device)
    try:
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"{key}.device is {place!r}, which is not to be had here: give cpu, cuda:N or null for the target's"
        ) from error
    try:
        return Target.load(path, dtype or own, place, trust_remote_code)
    except ValueError as error:
        raise ValueError(f"{key}.model={path} cannot be used: {error}") from error
