"""Heads with a module for each depth and no attention to drafted rows: Medusa, Hydra, the MLP speculator."""

from typing import Any

from torch import Tensor, nn

from heads.base import DepthOutput, Features, HeadModule, LevelNodes, LevelOutput, NewRows
from heads.rows import drafted_token, gather_parents, gather_rows, last_rows, scatter_rows
from heads.shapes import Anchors, Inputs, Logits, States, TokenIds


class PerDepthHead(HeadModule):
    """A head whose depth d reads the state of depth d - 1 and token t+d; at depth 1 the target's last feature."""

    lm_heads: nn.ModuleList

    def initial_states(self, last: States) -> States:
        """Return the states that depth 1 reads."""
        return last

    def step(self, state: Inputs, token: TokenIds, depth: int) -> tuple[Tensor, States]:
        """Return a depth's states for the next depth, and the inputs of its lm_head."""
        raise NotImplementedError

    def compute_logits(self, state: States, depth: int) -> Logits:
        """Return the logits of a depth's states, counted from 1, by its own lm_head."""
        return self.lm_heads[depth - 1](state)

    def unroll(self, features: Features, depths: int, anchors: Anchors = None) -> list[DepthOutput]:
        """Draft from all rows, or from `anchors`, at every depth."""
        self.check_depths(depths)
        state, drafts = self.initial_states(gather_rows(features.last_hidden, anchors)), []
        for depth in range(1, depths + 1):
            token = drafted_token(features.token, depth, features.path)
            state, pre_logits = self.step(state, gather_rows(token, anchors), depth)
            drafts.append(DepthOutput(scatter_rows(pre_logits, anchors, token.shape[1])))
        return drafts

    def extend(self, state: Any, new: NewRows) -> tuple[Any, LevelOutput]:
        """Score depth 1 from the last row; the state stays unchanged."""
        last, root = (last_rows(x, new.counts) for x in (new.features.last_hidden, new.token))
        return state, self.level(self.initial_states(last), root, 1)

    def expand(self, state: Any, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Score the next depth from each node's token and its parent's state."""
        return self.level(gather_parents(level.hidden, nodes.parent), nodes.token, nodes.depth + 1)

    def level(self, before: Tensor, token: Tensor, depth: int) -> LevelOutput:
        """Return the level of nodes with these tokens, whose parents have the states `before`."""
        hidden, pre_logits = self.step(before, token, depth)
        return LevelOutput(self.compute_logits(pre_logits, depth), hidden)
