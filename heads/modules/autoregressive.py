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
from heads.base import Draft, DraftVocabulary, Features, Level
from heads.modules.attention import KeyValue, attend_rows, pattern
from heads.modules.kv_cache import Committed, committing, joined, near
from heads.modules.layers import Attend, masked_attention
from heads.modules.vocab import scatter_logits


@runtime_checkable
class Recurrent(Protocol):
    """A head that drafts token after token; `config.length` is how far it looks back, `attentions` its layers."""

    config: Any
    attentions: int
    vocab: DraftVocabulary | None

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
    injected, drafts = bool(context), []
    for depth in range(1, depths + 1):
        seen = pattern(position, head.config.length, depth - 1)

        def attend(i: int, query: Tensor, key: Tensor, value: Tensor, depth: int = depth, seen: Any = seen) -> Tensor:
            if depth == 1 and not injected:
                context.append((key, value))
            else:
                drafted[i].append((key, value))
            return attend_rows(query, context[i], drafted[i], seen)

        token = rows.drafted_token(features.token, depth)
        entering = state.detach() if detach and depth > 1 else state
        state, read = head.advance(token, entering, position + depth - 1, last, _by_layer(attend, head))
        drafts.append(Draft(read, state if predicts else None))
    return drafts


def extend(head: Recurrent, state: Committed | None, features: Features, token: Tensor) -> tuple[Committed, Level]:
    """Commit verified rows with their true states and score under the root."""
    end = (state.length if state else 0) + len(token)
    position = torch.arange(end - len(token), end, device=token.device)
    start = head.begin(features)
    context = head.inject(start, position[None], end)
    if not context:
        committed, hidden, read = commit(head, state, start, token)
        return committed, Level(scatter_logits(head.vocab, head.score(read[0, -1:], 1)), hidden[0, -1:], ())
    pairs = tuple(joined(state.layers[i] if state else None, pair) for i, pair in enumerate(context))
    committed = Committed(end, pairs)
    alone = torch.ones(1, 0, dtype=torch.bool, device=token.device)
    before = Level(start.new_zeros(1, 0), start[0, -1:], ())  # the root's row is drafted, like any other
    level = _draft(head, committed, before, token[-1:], alone, start[:, -1:])
    return committed.trimmed(head.config.length), level


def commit(
    head: Recurrent, state: Committed | None, start: Float[Tensor, "1 T D"], token: Int[Tensor, "T"]
) -> tuple[Committed, Tensor, Tensor]:
    """Append verified rows, which enter with the states `start`; return the cache and the result of `advance`."""
    past = state.length if state else 0
    end = past + len(token)
    position = torch.arange(past, end, device=token.device)
    sees = None if state is None else committing(state, position, head.config.length)[None]
    grown: list[KeyValue] = []

    def attend(i: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if state is None or sees is None:  # a whole prompt: no mask of its length squared
            grown.append((key, value))
            return attend_rows(query, (key, value), [], pattern(position[None], head.config.length))
        grown.append(joined(state.layers[i], (key, value)))
        return masked_attention(query, *grown[i], sees)

    hidden, read = head.advance(token[None], start, position[None], end, _by_layer(attend, head))
    return Committed(end, tuple(grown)).trimmed(head.config.length), hidden, read


def expand(
    head: Recurrent,
    state: Committed,
    level: Level,
    token: Int[Tensor, "N"],
    parent: Int[Tensor, "N"],
    mask: Bool[Tensor, "N M"],
) -> Level:
    """Score the next tree level: every node enters with its parent's state."""
    return _draft(head, state, level, token, mask, level.hidden[parent][None])


def _draft(
    head: Recurrent, state: Committed, level: Level, token: Tensor, mask: Bool[Tensor, "N M"], above: Tensor
) -> Level:
    """Score drafted rows; those of an injected head have the root's row before the tree's."""
    position = state.length - 1 + mask.sum(-1)
    count = level.drafted[0].shape[2] if level.drafted else 0
    root = mask.new_ones(len(mask), count + len(token) - mask.shape[1])
    sees = torch.cat([near(position, state.position(), head.config.length), root, mask], 1)
    drafted: list[Tensor] = []

    def attend(i: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        before = (level.drafted[2 * i], level.drafted[2 * i + 1]) if level.drafted else None
        pair = joined(before, (key, value))
        drafted.extend(pair)
        return masked_attention(query, *joined(state.layers[i], pair), sees[None])

    last = state.length + mask.shape[1]
    hidden, read = head.advance(token[None], above, position[None], last, _by_layer(attend, head))
    return Level(scatter_logits(head.vocab, head.score(read[0], 1)), hidden[0], tuple(drafted))


def _by_layer(attend: Callable[..., Tensor], head: Recurrent) -> list[Attend]:
    return [partial(attend, i) for i in range(head.attentions)]
