"""Speculative decoding of one sequence by a chain; the output has the distribution of autoregressive decoding.

The model scores a whole draft in one pass. A token that is drafted with probability q and that the model gives p is
taken with probability min(1, p / q), else one is sampled from what p exceeds q by (Leviathan et al., arXiv 2211.17192;
Chen et al., arXiv 2302.01318). Without sampling it is taken if it is the model's own choice.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from heads.base import Features, Level, NewRows, Nodes
from heads.formats.custom_generate.target import Embeddings, Seen, Target
from heads.modules.vocab import scatter_logits

# What a draft's logits go through as well, to be near the model's. Others may count their calls; the output does not
# depend on it.
SHARED = (
    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor,
)  # fmt: skip


class Settings(NamedTuple):
    """The settings that `generate` has prepared, and the number of tokens drafted at once."""

    processors: Any  # a LogitsProcessorList, which is annotated for types that torch does not make
    criteria: StoppingCriteriaList
    streamer: Any
    config: GenerationConfig
    draft_tokens: int


class Written(NamedTuple):
    """A finished sequence (1, T) with its prompt; passes that verified, the tokens they gave; scores and logits."""

    ids: Tensor
    passes: int
    verified: int
    scores: list[Tensor]
    logits: list[Tensor]


class Drafts:
    """A head with the state of one sequence; it drafts up to `depth` tokens from the model's `feature_layers`."""

    def __init__(self, head: Any) -> None:
        self.head, self.depth = head, int(head.max_depth)
        self.feature_layers: tuple[int, ...] = head.feature_layers
        self.restart()

    def restart(self) -> None:
        """Begin another sequence."""
        self.state: Any = None
        self.level: Level | None = None
        self.drafted = 0

    def commit(self, features: Features, token: Tensor) -> Tensor:
        """Take in T verified rows (B = 1), each with its chosen next token t + 1, (T,).

        Returns the logits (V,) of the token behind the last row, minus infinity for tokens that a head never drafts.
        """
        self.state, self.level = self.head.extend(self.state, NewRows(features, token[None]))
        self.drafted = 0
        return self.logits()

    def draft(self, token: Tensor) -> Tensor:
        """Take the token (1,) that was drafted last; return the logits (V,) of the one behind it."""
        self.drafted += 1
        path = torch.ones(1, 1, self.drafted, dtype=torch.bool, device=token.device)
        above = torch.zeros_like(token)[None]
        self.level = self.head.expand(self.state, self.level, Nodes(token[None], above, path, self.drafted))
        return self.logits()

    def logits(self) -> Tensor:
        """Return the level's logits over the model's vocabulary."""
        assert self.level is not None
        return scatter_logits(self.head.vocab, self.level.logits[0, 0])


class Sequence:
    """A sequence while it is written. `ids` (1, T) holds the prompt as it was given, padding included."""

    def __init__(self, ids: Tensor, settings: Settings) -> None:
        self.ids, self.settings, self.done = ids, settings, False
        self.shared: Any = LogitsProcessorList(step for step in settings.processors if isinstance(step, SHARED))
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []

    def room(self) -> int:
        """Return how many tokens may follow."""
        most = self.settings.criteria.max_length
        return 2**31 if most is None else most - self.ids.shape[1]

    def add(self, logits: Tensor, drafted: Tensor | None = None, q: Tensor | None = None) -> bool:
        """Choose the next token by the model's logits (V,), a drafted one (1,) if it stands; say whether it does."""
        raw = logits[None].to(self.ids.device, torch.float32, copy=True)
        if self.settings.config.output_logits:
            self.logits.append(raw.clone())
        scores = self.settings.processors(self.ids, raw)
        if self.settings.config.output_scores:
            self.scores.append(scores)
        token = self._choice(scores[0], drafted, q)
        self.ids = torch.cat([self.ids, token.to(self.ids)[None]], 1)
        if self.settings.streamer is not None:
            self.settings.streamer.put(token.cpu())
        self.done = bool(self.settings.criteria(self.ids, tuple(self.scores) or None).all())
        return drafted is not None and bool(token == drafted.to(token.device))

    def _choice(self, scores: Tensor, drafted: Tensor | None, q: Tensor | None) -> Tensor:
        if not self.settings.config.do_sample:
            return scores.argmax(keepdim=True)
        p = scores.softmax(-1)
        if drafted is not None and q is not None:
            p, accepted = verified(p, q.to(p.device), int(drafted))
            if accepted:
                return drafted.to(p.device)
        return torch.multinomial(p, 1)

    def guess(self, logits: Tensor, before: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Sample a drafted token (1,) by a head's logits (V,), behind those drafted before; return it and its probs."""
        ids = torch.cat([self.ids, *(token.to(self.ids)[None] for token in before)], 1)
        scores = self.shared(ids, logits[None].to(self.ids.device, torch.float32, copy=True))[0]
        if not self.settings.config.do_sample:
            return scores.argmax(keepdim=True), None
        q = scores.softmax(-1)
        return torch.multinomial(q, 1), q


def verified(p: Tensor, q: Tensor, drafted: int) -> tuple[Tensor, bool]:
    """Return whether a token sampled from q (V,) is accepted, and before that the probs (V,) to sample from if not."""
    if bool(torch.rand((), device=p.device) * q[drafted] < p[drafted]):
        return p, True
    rest = (p - q).clamp_min(0)
    return (rest if bool(rest.sum() > 0) else p), False  # nothing is left where p and q are equal but for rounding


def decode(target: Target, drafts: Drafts, embeddings: Embeddings, prompt: Tensor, sequence: Sequence) -> Written:
    """Write a sequence to its end behind a prompt (T,) without padding, which neither model nor head has seen yet."""
    passes, verified_tokens, start = 0, 0, sequence.ids.shape[1]
    seen = target.run(prompt, 1)
    sequence.add(seen.logits[-1])
    seen, token = seen.rows(len(prompt)), torch.cat([prompt[1:], _from(sequence, start, prompt)])
    while not sequence.done:
        begun = sequence.ids.shape[1]
        length = len(prompt) + begun - start  # the cache holds one token less
        count = min(sequence.settings.draft_tokens, drafts.depth, sequence.room() - 1, embeddings.context - length)
        guesses, probs = _chain(drafts, sequence, seen, token, count)
        out = target.run(torch.cat([token[-1:], *guesses]), len(guesses) + 1)
        stands, i = True, 0
        while stands and not sequence.done:
            here = i < len(guesses)
            stands = sequence.add(out.logits[i], guesses[i] if here else None, probs[i] if here else None)
            i += 1
        passes, verified_tokens = passes + 1, verified_tokens + i
        target.crop(len(guesses) + 1 - i)
        seen, token = out.rows(i), _from(sequence, begun, prompt)
    return Written(sequence.ids, passes, verified_tokens, sequence.scores, sequence.logits)


def _chain(
    drafts: Drafts, sequence: Sequence, seen: Seen, token: Tensor, count: int
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return `count` drafted tokens, (1,) each, with the probs (V,) that they were sampled from."""
    guesses: list[Tensor] = []
    probs: list[Tensor | None] = []
    for _ in range(count):
        logits = drafts.draft(guesses[-1]) if guesses else drafts.commit(seen.features, token)
        guess, q = sequence.guess(logits, guesses)
        guesses.append(guess.to(token.device))
        probs.append(q)
    return guesses, probs


def _from(sequence: Sequence, start: int, like: Tensor) -> Tensor:
    """Return the tokens written from an index on."""
    return sequence.ids[0, start:].to(like.device)
