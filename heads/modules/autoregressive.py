"""Autoregressive heads, which draft one token after another: EAGLE's family and multi-token prediction.

Such a head computes the next state and the input of its lm_head from a token and the previous state. At depth 1 that
state comes from the target's features, later from the head itself. Training unrolls all rows at once, decoding appends
verified rows and expands a tree; the three differ only in the attention mask.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from heads.base import DepthOutput, Features, HeadModule, LevelNodes, LevelOutput, NewRows
from heads.modules.attention import KeyValue, Pattern, attend_rows, pattern
from heads.modules.kv_cache import SPARE, KVCache
from heads.modules.layers import LayerInputs, grouped_attention
from heads.rows import drafted_token, gather_parents, gather_rows, last_rows, positions, scatter_rows
from heads.shapes import Advanced, Anchors, Logits, NodeStates, Rows, Sequences, States


class Autoregressive(nn.Module):
    """The autoregressive part of a head, without its lm_head; `config.length` is its attention window."""

    config: Any
    num_attention_layers = 1  # the decoder layers
    injected = False  # whether the context's keys and values come from `inject`; otherwise from the pass at depth 1
    predicts_feature = True  # whether a state is a prediction of the target's feature
    detach = False  # whether the gradient stops between steps

    def initial_states(self, features: Features) -> Rows:
        """Return the states before depth 1: the target's features."""
        return features.last_hidden

    def inject(self, start: Rows, position: Sequences, max_position: int) -> tuple[KeyValue, ...]:
        """Return each layer's keys and values of the context, from the states of `initial_states`.

        The tuple is empty if later rows attend to the rows of depth 1 instead.
        """
        return ()

    def advance(self, token: Sequences, state: Rows, inputs: list[LayerInputs]) -> Advanced:
        """Return the states after `state` and `token`, and the inputs for `compute_logits`."""
        raise NotImplementedError

    def unroll(self, features: Features, depths: int, anchors: Anchors = None) -> list[DepthOutput]:
        """Draft from all rows, or from `anchors`; depths after the first read the head's own states.

        For rows that are not drafted from, the last layer computes only keys and values, at depth 1.
        """
        row_position = positions(features.document)
        length, max_position = row_position.shape[1], row_position.shape[1] + depths
        state = self.initial_states(features)
        context = list(self.inject(state, row_position, max_position))
        drafted: list[list[KeyValue]] = [[] for _ in range(self.num_attention_layers)]
        injected, drafts = bool(context), []
        position = gather_rows(row_position, anchors)

        def attend(
            is_context: bool, patterns: list[Pattern], i: int, query: Tensor, key: Tensor, value: Tensor
        ) -> Tensor:
            (context if is_context else drafted[i]).append((key, value))
            return attend_rows(query, context[i], drafted[i], patterns[i])

        if injected:
            state = gather_rows(state, anchors)
        for depth in range(1, depths + 1):
            attn_pattern = pattern(position, self.config.length, depth - 1, anchors)
            is_context = depth == 1 and not injected  # whether later rows attend to these rows
            others = self.num_attention_layers - 1
            by_all = pattern(row_position, self.config.length) if is_context and others else attn_pattern
            by_step = partial(attend, is_context, [by_all] * others + [attn_pattern])
            token = drafted_token(features.token, depth, features.path)
            entering = state.detach() if self.detach and depth > 1 else state
            if is_context:
                inputs = self.by_layer(row_position, max_position, by_step, anchors)
            else:
                token = gather_rows(token, anchors)
                inputs = self.by_layer(position + depth - 1, max_position, by_step)
            state, pre_logits = self.advance(token, entering, inputs)
            scored = scatter_rows(pre_logits, anchors, length)
            predicted = scored if state is pre_logits else scatter_rows(state, anchors, length)
            drafts.append(DepthOutput(scored, predicted if self.predicts_feature else None))
        return drafts

    def append_verified(self, cache: KVCache, start: Rows, new: NewRows, position: Sequences) -> Advanced:
        """Append verified rows, whose previous states are `start`; return the result of `advance`."""
        token, count = new.token, new.counts
        if not cache.fresh and cache.window is not None and token.shape[1] > SPARE:
            pieces = []
            for i, (tokens, before, at) in enumerate(
                zip(*(x.split(SPARE, 1) for x in (token, start, position)), strict=True)
            ):
                counts = None if count is None else (count - i * SPARE).clamp(0, SPARE)
                pieces.append(self.append_verified(cache, before, new._replace(token=tokens, counts=counts), at))
            hidden, pre_logits = (torch.cat(parts, 1) for parts in zip(*pieces, strict=True))
            return hidden, pre_logits
        # A whole prompt needs no mask; its size would be quadratic.
        attn_mask = None if cache.fresh else cache.attn_mask(position, position[:, -1])[:, None]

        def attend(i: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            both = cache.append(i, key, value, position)
            if attn_mask is None:
                return attend_rows(query, (key, value), [], pattern(position, self.config.length))
            return grouped_attention(query, *both, attn_mask)

        hidden, pre_logits = self.advance(token, start, self.by_layer(position, cache.longest, attend))
        cache.commit(new)
        return hidden, pre_logits

    def by_layer(
        self, position: Sequences, max_position: int, attend: Callable[..., Tensor], queries: Tensor | None = None
    ) -> list[LayerInputs]:
        """Return each layer's inputs; `attend` takes the layer's index first; `queries` applies to the last layer."""
        inputs = [LayerInputs(position, max_position, partial(attend, i)) for i in range(self.num_attention_layers)]
        return [*inputs[:-1], inputs[-1]._replace(queries=queries)]


class AutoregressiveHead(HeadModule, Autoregressive):
    """An autoregressive head with one `lm_head` for all depths."""

    max_depth, has_kv_cache = 64, True
    lm_head: nn.Module

    def compute_logits(self, state: States, depth: int) -> Logits:
        """Return the logits of states, the second output of `advance`."""
        return self.lm_head(state)

    def extend(self, state: KVCache | None, new: NewRows) -> tuple[KVCache, LevelOutput]:
        """Append verified rows with the target's features and score the roots' children."""
        start, token, count = self.initial_states(new.features), new.token, new.counts
        cache, position = KVCache.opened(state, self.config.length, token)
        context = self.inject(start, position, cache.longest)
        if not context:
            hidden, pre_logits = (last_rows(x, count) for x in self.append_verified(cache, start, new, position))
            return cache, LevelOutput(self.compute_logits(pre_logits, 1), hidden)
        for layer, pair in enumerate(context):
            cache.append(layer, *pair, position)
        cache.commit(new)
        above, root = last_rows(start, count), last_rows(token, count)
        only_root = torch.ones(len(token), 1, 1, dtype=torch.bool, device=token.device)
        # The root's row is drafted, like any other row.
        level = self._draft(cache, LevelNodes(root, torch.zeros_like(root), only_root, 0), above)
        return cache, level._replace(
            root=tuple(row for layer in range(len(context)) for row in cache.drafted(layer, len(token), 1))
        )

    def expand(self, state: KVCache, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Score the next tree level from each node's token and its parent's state."""
        if self.injected:  # the root's row is a drafted row too
            nodes = nodes._replace(mask=torch.cat([nodes.mask.new_ones(*nodes.mask.shape[:2], 1), nodes.mask], -1))
        for layer in range(len(level.root) // 2):
            state.draft(layer, level.root[2 * layer], level.root[2 * layer + 1], 0)
        return self._draft(state, nodes, gather_parents(level.hidden, nodes.parent))

    def _draft(self, cache: KVCache, nodes: LevelNodes, above: NodeStates) -> LevelOutput:
        """Score drafted rows; `above` are their parents' states."""
        token, mask = nodes.token, nodes.mask
        last = cache.length[: len(token)] - 1
        position = (last + nodes.depth)[:, None].expand(-1, token.shape[1])
        attn_mask = torch.cat([cache.attn_mask(position, last), mask], -1)[:, None]
        earlier = mask.shape[2] - token.shape[1]
        inputs = self.by_layer(
            position,
            cache.longest + mask.shape[2],
            lambda i, q, k, v: grouped_attention(q, *cache.draft(i, k, v, earlier), attn_mask),
        )
        hidden, pre_logits = self.advance(token, above, inputs)
        return LevelOutput(self.compute_logits(pre_logits, 1), hidden)
