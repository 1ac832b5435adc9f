"""A smaller causal LM drafts: speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

Any model that transformers loads, with the target's tokenizer or, by the tokens that both know (TLI, arXiv 2502.05202),
with another. It reads and drafts level by level as heads do, so that every tree policy takes it; a chain may besides
adapt its length and stop early.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heads.base import Level, Nodes
from heads.common.ranges import Fraction, OneOf
from inference.drafters import runner
from inference.drafters.policy import ContextRoots, Growth, TreeConfig, grow
from inference.drafters.runner import DraftModelRunner
from inference.drafters.vocabulary import SameVocabulary, SharedVocabulary
from inference.protocol import Commit, Context, Drafter, DrafterState, Proposal, Verified
from inference.target.target import Target
from inference.verification.sample import distribution
from inference.verification.tree import root

MATCHES: dict[str, type[SameVocabulary] | type[SharedVocabulary]] = {"same": SameVocabulary, "tli": SharedVocabulary}
Schedule = Annotated[str, OneOf(("constant", "heuristic"))]


class Length:
    """How many tokens a chain drafts: constantly the same, or transformers' heuristic, anew for every sequence.

    The heuristic drafts two more after a chain that was accepted whole, else one less.
    """

    def __init__(self, schedule: str, start: int) -> None:
        self.adapts, self.now = schedule == "heuristic", start

    def learn(self, verified: Verified | None) -> None:
        """Take in what became of a chain."""
        drafted = 0 if verified is None else len(verified.tree.token) - 1
        if self.adapts and verified is not None and drafted:
            self.now = self.now + 2 if len(verified.path) - 1 == drafted else max(1, self.now - 1)


def doubts(logits: Float[Tensor, "1 V"], token: Int[Tensor, "1"], confidence: float) -> bool:
    """Whether a model gives its drafted token less than `confidence`, at temperature 1; 0 is never asked."""
    return confidence > 0 and bool(logits[0].softmax(-1)[token] < confidence)


class Assistant(Drafter):
    """Another causal LM as a draft source."""

    @dataclass(frozen=True)
    class Config:
        """The model and how it drafts; a null takes the target's. `schedule` and `confidence` are for chains.

        A chain stops after a token that the assistant itself, at temperature 1, gives less than `confidence`.
        """

        model: str
        match: str
        dtype: str | None
        device: str | None
        trust_remote_code: bool
        tree: TreeConfig
        schedule: Schedule
        confidence: Fraction

        def __post_init__(self) -> None:
            if self.match not in MATCHES:
                raise ValueError(
                    f"drafter.assistant.match is {self.match!r}: choose one of {', '.join(MATCHES)}, or "
                    "drafter=assistant_slem to exchange text"
                )
            if self.tree.kind != "chain" and (self.schedule != "constant" or self.confidence > 0):
                raise ValueError(
                    f"drafter.assistant.tree.kind is {self.tree.kind!r}: only a chain has a schedule or stops by "
                    "confidence; set schedule=constant and confidence=0, or tree.kind=chain"
                )

    def __init__(self, config: Config, target: Target, name: str) -> None:
        self.config, self.name = config, name
        self.tree = config.tree.label
        self.model = runner.load(
            config.model, config.dtype, config.device, config.trust_remote_code, target, "drafter.assistant"
        )
        if config.tree.kind != "chain" and not self.model.takes_trees:
            raise ValueError(
                f"drafter.assistant.tree.kind is {config.tree.kind!r}, but the attention of {config.model} does not "
                "honour a tree mask: set tree.kind=chain"
            )
        self.vocabulary = MATCHES[config.match](target, self.model)
        self.device, self.eos = target.device, target.eos

    def start(self, prompt: list[int]) -> "AssistantState":
        """Begin a sequence with the prompt in the assistant's tokens."""
        return AssistantState(self, prompt)


class AssistantState(DrafterState):
    """An assistant reading one sequence along: its text and KV cache, and its scores under the next root.

    It is an `Expander`, so that every tree policy grows from it.
    """

    max_depth = 1 << 20  # the room in its context limits it, step by step
    vocab = None

    def __init__(self, drafter: Assistant, prompt: list[int]) -> None:
        self.config, self.vocabulary, self.device = drafter.config, drafter.vocabulary, drafter.device
        self.eos = drafter.eos
        self.runner = DraftModelRunner(drafter.model)
        self.length = Length(self.config.schedule, self.config.tree.depth)
        self.text = self.vocabulary.prompt(prompt)
        self.level: Level | None = None

    @torch.inference_mode()
    def update(self, commit: Commit) -> None:
        """Read on: what was drafted, accepted and expanded is in the cache already."""
        following = commit.token.tolist()
        # A prefill's rows are the prompt's, which start() took; only the last token is new.
        self.text += self.vocabulary.follow(following[-1:] if commit.verified is None else following)
        self.length.learn(commit.verified)
        fits = 0 < len(self.text) <= self.runner.model.context
        self.level = self.answer(self.runner.read(self.text)) if fits else None

    @torch.inference_mode()
    def propose(self, context: Context) -> Proposal:
        """Grow the tree; where the text is over the assistant's own context, draft nothing."""
        room = min(context.room, self.runner.model.context - len(self.text))
        token, tree = context.token[-1], self.config.tree
        if self.level is None or room < 1:
            return Proposal(root(token, self.device))
        if tree.kind == "chain":
            return self.chain(self.level, context, min(room, self.length.now))
        return grow(self, None, self.level, tree, [context._replace(room=room)])[0]

    def chain(self, level: Level, context: Context, depth: int) -> Proposal:
        """Sample one token after another, up to an end of the answer or to one that the assistant doubts.

        The chain ends after such a token and never without it: it stays a sample of its q.
        """
        contexts = [context._replace(room=depth)]
        growth = Growth(self, None, level, ContextRoots(contexts, level.logits.shape[-1], self.device))
        above = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        q: list[Tensor] = []
        while True:
            q.append(distribution(growth.logits()[0], context.sampling))
            token = context.rng.distinct(q[-1], 1, len(q))
            nodes = growth.add(token, above)
            logits = growth.level.logits[0]
            if len(q) == depth or int(token) in self.eos or doubts(logits, token[0], self.config.confidence):
                break
            growth.descend(token, above, nodes)
        return Proposal(growth.trees(contexts)[0], torch.cat([*q, torch.zeros_like(q[-1])]))

    def expand(self, state: Any, level: Level, nodes: Nodes) -> Level:
        """Score one more tree level, as `DraftHead.expand` says; the keys and values live in the runner's cache."""
        return self.answer(self.runner.expand(self.vocabulary.to_assistant(nodes.token[0]), nodes.parent[0]))

    def answer(self, logits: Tensor) -> Level:
        """Return the assistant's logits "N A" as a level in the target's vocabulary and on its device."""
        logits = self.vocabulary.to_target(logits).to(self.device)
        return Level(logits[None], logits[None, :, :0])
