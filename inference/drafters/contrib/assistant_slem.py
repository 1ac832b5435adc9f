"""A smaller causal LM with any tokenizer drafts text: string-level exact match (SLEM; Timor et al., arXiv 2502.05202).

What the target wrote is encoded for the assistant, and what the assistant writes for the target. The target's tokens
for a text have no q, so they are verified as a point mass, and the assistant drafts its argmax.

Encoding a text anew can cut it differently than its tokens did, and a long one takes time. So only its end is encoded,
from a few tokens back, and joined where the old and the new tokens begin to agree.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from heads.common.ranges import Count, Fraction
from inference.drafters import runner
from inference.drafters.assistant import Length, Schedule, doubts
from inference.drafters.runner import DraftModelConfig, DraftModelRunner
from inference.drafters.vocabulary import encode, opening
from inference.protocol import Commit, Context, Drafter, DrafterState, Proposal
from inference.target.target import Target
from inference.text_stream import UNFINISHED, TextStream, decode
from inference.verification.tree import chain, root


class AssistantSlem(Drafter):
    """Another causal LM as a draft source, through text."""

    @dataclass(frozen=True)
    class Config(DraftModelConfig):
        """The model and how it drafts; `depth` counts the assistant's tokens."""

        depth: Count
        schedule: Schedule
        confidence: Fraction
        lookbehind: Count

    def __init__(self, config: Config, target: Target, name: str) -> None:
        self.config, self.name, self.tree = config, name, f"chain-{config.depth}"
        self.model = runner.load(config, target, "drafter.assistant_slem")
        self.device, self.tokenizer = target.device, target.tokenizer

    def start(self, prompt: list[int]) -> "SlemState":
        """Begin a sequence with the prompt's text."""
        return SlemState(self, prompt)


class SlemState(DrafterState):
    """An assistant reading one sequence's text along: its own tokens for it, its KV cache and its next logits."""

    def __init__(self, drafter: AssistantSlem, prompt: list[int]) -> None:
        self.config, self.device, self.tokenizer = drafter.config, drafter.device, drafter.tokenizer
        self.runner = DraftModelRunner(drafter.model)
        self.length = Length(self.config.schedule, self.config.depth)
        self.text = GrowingText(self.tokenizer, drafter.model.tokenizer, self.config.lookbehind, prompt)
        self.logits: Float[Tensor, "1 A"] | None = None

    @torch.inference_mode()
    def update(self, commit: Commit) -> None:
        """Read on: what of the drafted text stands is in the cache already."""
        following = commit.token.tolist()
        # A prefill's rows are the prompt's, which the text began with; only the last token is new.
        self.text.extend(following[-1:] if commit.verified is None else following)
        self.length.learn(commit.verified)
        fits = 0 < len(self.text.token) <= self.runner.model.context
        self.logits = self.runner.read(self.text.token) if fits else None

    @torch.inference_mode()
    def propose(self, context: Context) -> Proposal:
        """Draft text and encode it as the target's tokens; nothing inside a character or over the context."""
        room = self.runner.model.context - len(self.text.token)
        if self.logits is None or min(room, context.room) < 1 or not self.text.complete:
            return Proposal(root(context.token[-1], self.device))
        tail = self.text.token[-self.config.lookbehind :]
        drafted = decode(self.text.other, tail + self.draft(self.logits, min(room, self.length.now)))
        added = drafted[len(decode(self.text.other, tail)) :].split(UNFINISHED)[0]
        ahead = continuation(self.tokenizer, context.token[-self.config.lookbehind :], added) if added else []
        return Proposal(chain(torch.tensor([context.token[-1], *ahead[: context.room]], device=self.device)))

    def draft(self, logits: Float[Tensor, "1 A"], depth: int) -> list[int]:
        """Return the assistant's greedy tokens, up to the end of its answer or to one that it doubts."""
        device, end = self.runner.model.device, self.runner.model.eos
        above = torch.zeros(1, dtype=torch.long, device=device)
        drafted: list[int] = []
        while True:
            token = logits.argmax(-1)
            drafted.append(int(token))
            if len(drafted) == depth or drafted[-1] in end or doubts(logits, drafted[-1], self.config.confidence):
                return drafted
            logits = self.runner.expand(token, above)


class GrowingText:
    """The text of a sequence of tokens that grows, and the same text in another tokenizer's tokens.

    Attributes:
        token: the other tokenizer's tokens, its opening included.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, lookbehind: int, prompt: list[int]
    ) -> None:
        self.other, self.lookbehind, self.opening = other, lookbehind, opening(other)
        self.stream = TextStream(tokenizer)
        self.stream.tokens, self.stream.shown = list(prompt), len(prompt)
        self.stream.begin = max(0, len(prompt) - lookbehind)
        self.text = decode(tokenizer, prompt)
        self._encode_all()

    def extend(self, token: list[int]) -> None:
        """Append tokens; bytes of an unfinished character wait for the rest of it."""
        piece = "".join(self.stream.push(t) for t in token)
        if piece:
            self.text += piece
            self._encode_end()

    @property
    def complete(self) -> bool:
        """Whether the text holds all of the tokens' bytes."""
        return not self.stream.rest() and not self.text.endswith(UNFINISHED)

    def _encode_all(self) -> None:
        encoded, spans = encode(self.other, self.text)
        self.token, self.starts = self.opening + encoded, [0] * len(self.opening) + [start for start, _ in spans]

    def _encode_end(self) -> None:
        """Encode the last tokens' text anew, and join it at the first token that stands where it stood before.

        The first character is left out: some tokenizers put a space before whatever they encode.
        """
        keep = len(self.token) - self.lookbehind
        if keep <= len(self.opening):
            return self._encode_all()
        begin = self.starts[keep]
        encoded, spans = encode(self.other, self.text[begin:])
        starts = [begin + start for start, _ in spans]
        old = {(self.starts[i], self.token[i]): i for i in range(keep, len(self.token))}
        for i, start_and_token in enumerate(zip(starts, encoded, strict=True)):
            if start_and_token in old and start_and_token[0] > begin:
                self.token[old[start_and_token] :], self.starts[old[start_and_token] :] = encoded[i:], starts[i:]
                return None
        return self._encode_all()


def continuation(tokenizer: PreTrainedTokenizerBase, context: list[int], text: str) -> list[int]:
    """Return tokens that add exactly `text` to the text of `context`, its last tokens; none if none are found.

    The text is encoded behind that of the context, as the tokenizer would write it. Where a token would span the
    border, something else stands before it, or nothing; nothing will not do where a tokenizer puts a space first.
    """
    before = decode(tokenizer, context)
    for left in (before, before[-1:], "", "\n", "."):
        encoded, spans = encode(tokenizer, left + text)
        first = next((i for i, (_, end) in enumerate(spans) if end > len(left)), len(spans))
        if decode(tokenizer, context + encoded[first:]) == before + text:
            return encoded[first:]
    return []
