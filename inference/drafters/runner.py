"""Another causal LM that reads along with the target and drafts: its cache follows a text that may be revised."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.target.config import DTYPES
from inference.target.target import Target

ROOT = -1  # the number of the last token read, above the drafted nodes


@dataclass(frozen=True)
class DraftModelConfig:
    """A draft model; a null takes the target's.

    On another device than the target's, tokens go there and logits come back at every pass.
    """

    model: str
    dtype: str | None
    device: str | None
    trust_remote_code: bool


class DraftModelRunner:
    """A model with the tokens it has read, and behind them in its cache the drafted nodes of one tree.

    Nodes are numbered in order of expansion. Reading on keeps what still stands of both, so that a pass runs over
    what is missing alone: after a verification the tokens that no expanded node holds, the next root among them.
    """

    def __init__(self, model: Target) -> None:
        self.model = model
        self.clear()

    def clear(self) -> None:
        """Begin with no text."""
        self.cache = self.model.cache()
        self.token: list[int] = []
        self._drop_drafts()

    def _drop_drafts(self) -> None:
        self.below: dict[tuple[int, int], int] = {}  # (node above, token) -> node
        self.path: list[list[int]] = []  # each node's nodes from the top down, its own the last
        self.level = [ROOT]

    def read(self, token: list[int]) -> Float[Tensor, "1 V"]:
        """Take `token`, one or more, as the whole text from now on; return the logits of what follows."""
        common = len(self.token)
        if token[:common] != self.token:
            common = next(i for i in range(common) if self.token[i : i + 1] != token[i : i + 1])
        common = min(common, len(token) - 1)  # the last one is run for its logits in any case
        nodes: list[int] = []  # the expanded ones that hold what comes next, from the root down
        for t in token[common:-1] if common == len(self.token) else ():
            node = self.below.get((nodes[-1] if nodes else ROOT, t))
            if node is None:
                break
            nodes.append(node)
        self.cache.keep(common, nodes)
        missing = torch.tensor(token[common + len(nodes) :], device=self.model.device)
        logits = self.model.prefill(missing, self.cache).logits
        assert logits is not None
        self.token = list(token)
        self._drop_drafts()
        return logits[0]

    def expand(self, token: Int[Tensor, "N"], parent: Int[Tensor, "N"]) -> Float[Tensor, "N V"]:
        """Run one more tree level, the parents as indices into the last one, and return its logits."""
        return self.branch(token, [self.level[above] for above in parent.tolist()])

    @torch.inference_mode()
    def branch(self, token: Int[Tensor, "N"], above: list[int]) -> Float[Tensor, "N V"]:
        """Run a new node under each of the nodes `above`, ROOT the last token read, and return their logits."""
        model, device = self.model, self.model.device
        first, text = len(self.path), len(self.token)
        self.level = list(range(first, first + len(above)))
        for node, parent, t in zip(self.level, above, token.tolist(), strict=True):
            self.below[parent, t] = node
            self.path.append([*(self.path[parent] if parent != ROOT else []), node])
        depth = torch.tensor([len(path) for path in self.path], device=device)
        key_position = torch.cat([torch.arange(text, device=device), text - 1 + depth])[None]
        position = key_position[:, self.cache.length :]
        attn_mask = None
        # A chain sees all that is before it, which needs no attention that takes a mask.
        if any(len(self.path[node]) < len(self.path) for node in self.level):
            attn_mask = torch.zeros(1, len(above), text + len(self.path), dtype=torch.bool, device=device)
            attn_mask[..., :text] = True
            for row, node in enumerate(self.level):
                attn_mask[0, row, [text + ancestor for ancestor in self.path[node]]] = True
        last = model.run(token[None].to(device), position, attn_mask, self.cache, key_position=key_position).last_hidden
        return model.embeddings.logits(last)[0]

    def adopt(self, token: list[int], nodes: list[int], live: list[int]) -> None:
        """Read on by expanded nodes alone: `nodes` become text, now `token`, and the chain `live` stays drafted.

        A chain begins under the last of the nodes; the other drafts are dropped.
        """
        size = len(self.token)
        assert token[:size] == self.token
        assert len(token) == size + len(nodes)
        number = {node: new for new, node in enumerate(live)} | {nodes[-1]: ROOT}
        below = {(number[a], t): number[n] for (a, t), n in self.below.items() if n in live}
        self.cache.keep(size, [*nodes, *live])
        self.token = list(token)
        self._drop_drafts()
        self.below = below
        self.path = [list(range(node + 1)) for node in range(len(live))]
        self.level = [len(live) - 1]  # ROOT if there is none


def load(config: DraftModelConfig, target: Target, key: str) -> Target:
    """Load a draft model for a target from a folder or the Hub, under the configuration's name for errors.

    Raises:
        ValueError: no such model, dtype or device.
    """
    same = next(name for name, kind in DTYPES.items() if kind == target.dtype)
    where = config.device or str(target.device)
    try:
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"{key}.device is {where!r}, which is not to be had here: give cpu, cuda:N or null for the target's"
        ) from error
    try:
        model = Target.load(config.model, config.dtype or same, where, config.trust_remote_code)
        if model.recurrence is not None:
            raise ValueError(
                f"{model.incompatibility}, and a text that is revised needs those of others: choose another one"
            )
        return model
    except ValueError as error:
        raise ValueError(f"{key}.model={config.model} cannot be used: {error}") from error
