"""The three methods of heads that draft one token after another: EAGLE's family and multi-token prediction.

Such a head computes, from a token and the state before it, the next state and the input of its lm_head. At depth 1 the
state comes from the target's features, from then on it is the head's own. Training unrolls all rows at once, decoding
commits verified rows and grows a tree; the three differ in what a row attends to and in nothing else.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads import rows
from heads.base import Draft, Features, Level
from heads.modules.attention import KeyValue, attend_rows, pattern
from heads.modules.kv_cache import SPARE, KVCache
from heads.modules.layers import Attend, masked_attention


@runtime_checkable
class Recurrent(Protocol):
    """A head that drafts token after token; `config.length` is how far it looks back, `attentions` its layers.

    `injected` says that `inject` gives the context, and not the head's rows of depth 1.
    """

    config: Any
    attentions: int
    injected: bool

    def begin(self, features: Features) -> Float[Tensor, "B T D"]:
        """Return the states that depth 1 starts from."""
        ...

    def inject(self, start: Float[Tensor, "B T D"], position: Int[Tensor, "B T"], last: int) -> tuple[KeyValue, ...]:
        """Return keys and values of the context, a pair a layer, computed from the states of `begin`.

        Empty where later rows attend to the head's rows of depth 1 instead.
        """
        ...

    def advance(
        self,
        token: Int[Tensor, "B T"],
        state: Float[Tensor, "B T D"],
        position: Int[Tensor, "B T"],
        last: int,
        attend: list[Attend],
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Return the states that follow `state` once `token` is chosen, and the inputs of `score`.

        Args:
            token: the rows' chosen tokens.
            state: the states before them.
            position: the rows' positions.
            last: an upper bound of the positions.
            attend: each layer's attention.
        """
        ...

    def score(self, state: Float[Tensor, "*n D"], depth: int) -> Float[Tensor, "*n W"]:
        """Return the logits of states; they are read alike at every depth."""
        ...


def unroll(head: Recurrent, features: Features, depths: int, *, predicts: bool, detach: bool = False) -> list[Draft]:
    """Draft from all rows at once.

    Args:
        head: the head.
        features: the batch.
        depths: how many; beyond the first the head's own states are fed back.
        predicts: whether a state is a prediction of the target's feature.
        detach: cut the gradient between a state and the step that it enters.
    """
    position = rows.positions(features.document)
    last = position.shape[1] + depths
    state = head.begin(features)
    context = list(head.inject(state, position, last))
    drafted: list[list[KeyValue]] = [[] for _ in range(head.attentions)]
    injected, drafts, seen = bool(context), [], None
    for depth in range(1, depths + 1):
        seen = pattern(position, head.config.length, depth - 1, seen)

        def attend(i: int, query: Tensor, key: Tensor, value: Tensor, depth: int = depth, seen: Any = seen) -> Tensor:
            if depth == 1 and not injected:
                context.append((key, value))
            else:
                drafted[i].append((key, value))
            return attend_rows(query, context[i], drafted[i], seen)

        token = rows.drafted_token(features.token, depth, features.path)
        entering = state.detach() if detach and depth > 1 else state
        state, read = head.advance(token, entering, position + depth - 1, last, _by_layer(attend, head))
        drafts.append(Draft(read, state if predicts else None))
    return drafts


def extend(
    head: Recurrent,
    cache: KVCache | None,
    features: Features,
    token: Int[Tensor, "B T"],
    count: Int[Tensor, "B"] | None = None,
) -> tuple[KVCache, Level]:
    """Commit verified rows with their true states and score under the roots."""
    start = head.begin(features)
    cache = KVCache(len(token), head.config.length, token.device) if cache is None else cache
    position = cache.begin(token.shape[1], len(token))
    context = head.inject(start, position, cache.longest)
    if not context:
        hidden, read = commit(head, cache, start, token, position, count)
        return cache, Level(head.score(rows.last_valid(read, count), 1), rows.last_valid(hidden, count))
    for layer, pair in enumerate(context):
        cache.append(layer, *pair, position)
    cache.length[: len(token)] += token.shape[1] if count is None else count
    above, root = rows.last_valid(start, count), rows.last_valid(token, count)
    alone = torch.ones(len(token), 1, 1, dtype=torch.bool, device=token.device)
    level = _draft(head, cache, root, alone, above, 0)  # the root's row is drafted, like any other
    return cache, level._replace(
        root=tuple(row for layer in range(len(context)) for row in cache.drafted(layer, len(token), 1))
    )


def commit(
    head: Recurrent,
    cache: KVCache,
    start: Float[Tensor, "B T D"],
    token: Int[Tensor, "B T"],
    position: Int[Tensor, "B T"],
    count: Int[Tensor, "B"] | None,
) -> tuple[Tensor, Tensor]:
    """Append verified rows, which enter with the states `start` at `position`; return the result of `advance`."""
    if not cache.fresh and cache.window is not None and token.shape[1] > SPARE:
        pieces = []
        for first in range(0, token.shape[1], SPARE):
            piece = slice(first, first + SPARE)
            some = None if count is None else (count - first).clamp(0, SPARE)
            pieces.append(commit(head, cache, start[:, piece], token[:, piece], position[:, piece], some))
        return torch.cat([hidden for hidden, _ in pieces], 1), torch.cat([read for _, read in pieces], 1)
    # A whole prompt takes no mask of its length squared.
    sees = None if cache.fresh else cache.sees(position, position[:, -1])

    def attend(i: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        both = cache.append(i, key, value, position)
        if sees is None:
            return attend_rows(query, (key, value), [], pattern(position, head.config.length))
        return masked_attention(query, *both, sees)

    hidden, read = head.advance(token, start, position, cache.longest, _by_layer(attend, head))
    cache.length[: len(token)] += token.shape[1] if count is None else count
    return hidden, read


def expand(
    head: Recurrent,
    cache: KVCache,
    level: Level,
    token: Int[Tensor, "B N"],
    parent: Int[Tensor, "B N"],
    mask: Bool[Tensor, "B N M"],
    depth: int,
) -> Level:
    """Score the next tree level: every node enters with its parent's state."""
    if head.injected:  # the root's row is drafted too, and seen by all
        mask = torch.cat([mask.new_ones(*mask.shape[:2], 1), mask], -1)
    for layer in range(len(level.root) // 2):
        cache.draft(layer, level.root[2 * layer], level.root[2 * layer + 1], 0)
    return _draft(head, cache, token, mask, rows.of_parents(level.hidden, parent), depth)


def _draft(
    head: Recurrent, cache: KVCache, token: Tensor, mask: Bool[Tensor, "B N M"], above: Tensor, depth: int
) -> Level:
    """Score drafted rows at a depth; `mask` says which of the M drafted so far, these last, each sees."""
    last = cache.length[: len(token)] - 1
    position = (last + depth)[:, None].expand(-1, token.shape[1])
    sees = torch.cat([cache.sees(position, last), mask], -1)
    earlier = mask.shape[2] - token.shape[1]

    def attend(i: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return masked_attention(query, *cache.draft(i, key, value, earlier), sees)

    hidden, read = head.advance(token, above, position, cache.longest + mask.shape[2], _by_layer(attend, head))
    return Level(head.score(read, 1), hidden)


def _by_layer(attend: Callable[..., Tensor], head: Recurrent) -> list[Attend]:
    return [partial(attend, i) for i in range(head.attentions)]
