"""Prompt lookup: the tokens after an earlier occurrence of the last n-gram (Saxena, 2023; HF; vLLM `ngram`)."""

from dataclasses import dataclass
from typing import Annotated

import torch

from heads.base import Tokens
from heads.common.typed import Count, OneOf
from inference.drafters.host import DrafterState, HostDrafter
from inference.protocol import DraftContext, Proposal
from inference.target.target import Target
from inference.verification.tree import chain


class PromptLookup(HostDrafter):
    """Drafts a chain copied from an earlier occurrence of the last n tokens, the longest n that occurs."""

    @dataclass(frozen=True)
    class Config:
        """The n-gram lengths to try, the number of tokens to draft, and the occurrence to copy from."""

        ngram_min: Count
        ngram_max: Count
        tokens: Count
        match: Annotated[str, OneOf(("first", "last"))]

        def __post_init__(self) -> None:
            if self.ngram_max < self.ngram_min:
                raise ValueError(
                    f"drafter.prompt_lookup.ngram_max is {self.ngram_max}: give at least ngram_min, {self.ngram_min}"
                )

    def __init__(self, config: Config, target: Target, name: str) -> None:
        self.config, self.name = config, name
        self.tree = f"chain-{config.tokens}"
        self.eos = target.eos
        self.sizes = range(config.ngram_max, config.ngram_min - 1, -1)

    def start(self, prompt: Tokens) -> "TextIndex":
        """Begin a sequence: index the prompt."""
        return TextIndex(self, prompt)


class TextIndex(DrafterState):
    """The text of one sequence, and an index of the tokens after its n-grams.

    The index grows with the text, so a step costs a few lookups at any context length. Memory: at most one entry for
    each n-gram length and token of the text.
    """

    def __init__(self, drafter: PromptLookup, prompt: Tokens) -> None:
        self.drafter = drafter
        self.text: Tokens = []
        self.after: dict[tuple[int, ...], int] = {}  # the index of the token after an n-gram
        self.extend(prompt)

    def propose(self, context: DraftContext) -> Proposal:
        """Copy the tokens after the longest n-gram that occurred before."""
        self.extend(context.token[len(self.text) :])
        count = min(self.drafter.config.tokens, context.max_draft_depth)
        draft = Tokens()
        starts = (self.after.get(tuple(self.text[-n:])) for n in self.drafter.sizes)
        if (start := next((index for index in starts if index is not None), None)) is not None:
            draft = self.text[start : start + count]
            # No token after an end token can be accepted, and the end token can be the pass's bonus token.
            draft = draft[: next((i for i, token in enumerate(draft) if token in self.drafter.eos), len(draft))]
        return Proposal(chain(torch.tensor([context.token[-1], *draft])))

    def extend(self, tokens: Tokens) -> None:
        """Append tokens; an n-gram is indexed once a token follows it, so that the last one does not match itself."""
        text, after, first = self.text, self.after, self.drafter.config.match == "first"
        for token in tokens:
            end = len(text)
            for n in self.drafter.sizes:
                if n <= end:
                    gram = tuple(text[end - n :])
                    if not (first and gram in after):
                        after[gram] = end
            text.append(token)
