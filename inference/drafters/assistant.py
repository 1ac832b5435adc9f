"""A smaller causal LM drafts: speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

Any model that transformers loads, with the target's tokenizer or, by the tokens that both know (TLI, arXiv 2502.05202),
with another. It reads and drafts level by level as heads do, so that every tree policy takes it; a chain may besides
stop early.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor

from heads.base import LevelNodes, LevelOutput
from heads.common.ranges import Fraction, OneOf
from inference.drafters import runner
from inference.drafters.host import DrafterState, HostDrafter
from inference.drafters.policy import TreeConfig, grow
from inference.drafters.runner import DraftModelConfig, DraftModelRunner
from inference.drafters.vocabulary import SameVocabulary, SharedVocabulary
from inference.protocol import Commit, Context, Proposal, sampled_chain
from inference.target.target import Target
from inference.verification.rng import Draws
from inference.verification.sample import distribution, penalize
from inference.verification.tree import root

MATCHES: dict[str, type[SameVocabulary] | type[SharedVocabulary]] = {"same": SameVocabulary, "tli": SharedVocabulary}
Outcome = tuple[int, ...]  # what a verification commits: the accepted tokens, then the target's own


class Chain:
    """A chain of drafted tokens with the probs q they were sampled from, and the assistant's node under each.

    It begins under the node `above`, after a context and what a verification has committed since.
    """

    def __init__(
        self,
        logits: Float[Tensor, "1 V"],
        above: int,
        depth: int,
        draws: Draws,
        context: Context,
        outcome: Outcome = (),
    ) -> None:
        self.depth, self.draws, self.sampling = depth, draws, context.sampling
        self.answers = [logits]  # to the text, and to each drafted token that was run
        self.above = above
        self.token: list[int] = []
        self.q: list[Tensor] = []
        self.nodes: list[int] = []
        self.seen_tokens: Tensor | None = None  # the tokens in the text, where a penalty asks for them
        if context.sampling.repetition_penalty != 1:
            self.seen_tokens = torch.zeros_like(logits, dtype=torch.bool)
            self.seen_tokens[:, [*context.token, *outcome]] = True

    def sample(self, end: frozenset[int]) -> bool:
        """Sample one more token; whether another may follow it."""
        logits = self.answers[-1]
        if self.seen_tokens is not None:
            logits = penalize(logits, self.seen_tokens, self.sampling)
        self.q.append(distribution(logits, self.sampling))
        self.token.append(self.draws.token(self.q[-1], len(self.q)))
        if self.seen_tokens is not None:
            self.seen_tokens[:, self.token[-1]] = True
        return len(self.token) < self.depth and self.token[-1] not in end

    def reached(self, node: int, answer: Float[Tensor, "1 V"]) -> None:
        """Take in the assistant's answer to the last token."""
        self.nodes.append(node)
        self.above = node
        self.answers.append(answer)


class Assistant(HostDrafter):
    """Another causal LM as a draft source."""

    @dataclass(frozen=True)
    class Config(DraftModelConfig):
        """The model and how it drafts.

        A chain stops after a token that the assistant itself, at temperature 1, gives less than `confidence`.
        """

        match: Annotated[str, OneOf(tuple(MATCHES))]
        tree: TreeConfig
        confidence: Fraction

        def __post_init__(self) -> None:
            if self.tree.kind != "chain" and self.confidence > 0:
                raise ValueError(
                    f"drafter.assistant.tree.kind is {self.tree.kind!r}: only a chain stops by confidence; set "
                    "confidence=0, or tree.kind=chain"
                )

    def __init__(self, config: Config, target: Target, name: str) -> None:
        self.config, self.name = config, name
        self.tree = config.tree.label
        self.model = runner.load(config, target, "drafter.assistant")
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

    vocab = None

    def __init__(self, drafter: Assistant, prompt: list[int]) -> None:
        self.config, self.vocabulary, self.device = drafter.config, drafter.vocabulary, drafter.device
        self.eos = drafter.eos
        self.runner = DraftModelRunner(drafter.model)
        self.text = self.vocabulary.prompt(prompt)
        self.level: LevelOutput | None = None
        self.max_depth = 0  # of the tree at hand: how deep both contexts let it be

    @torch.inference_mode()
    def update(self, commit: Commit) -> None:
        """Read on: what was drafted, accepted and expanded is in the cache already."""
        self.text += self.vocabulary.follow(commit.token)
        fits = 0 < len(self.text) <= self.runner.model.context
        self.level = self.answer(self.runner.read(self.text)) if fits else None

    @torch.inference_mode()
    def propose(self, context: Context) -> Proposal:
        """Grow the tree; where the text is over the assistant's own context, draft nothing."""
        self.max_depth = min(context.max_draft_depth, self.runner.model.context - len(self.text))
        tree = self.config.tree
        if self.level is None or self.max_depth < 1:
            return Proposal(root(context.token[-1], self.device))
        if tree.kind == "chain":
            return self.chain(self.level.logits[0], context, min(self.max_depth, tree.depth))
        return grow(self, None, self.level, tree, context)

    def chain(self, logits: Float[Tensor, "1 V"], context: Context, depth: int) -> Proposal:
        """Sample one token after another, up to an end of the answer or to one that the assistant doubts.

        The chain ends after such a token and never without it: it stays a sample of its q.
        """
        chain = Chain(logits, runner.ROOT, depth, context.draws, context)
        least = self.config.confidence
        while chain.sample(self.eos):
            if least > 0 and float(chain.answers[-1][0].softmax(-1)[chain.token[-1]]) < least:
                break
            [(node, answer)] = self.run(chain.token[-1:], [chain.above])
            chain.reached(node, answer.to(self.device))
        return sampled_chain([context.token[-1], *chain.token], chain.q)

    def run(self, token: list[int], above: list[int]) -> list[tuple[int, Float[Tensor, "1 V"]]]:
        """Run tokens under nodes; return their own nodes, each with the assistant's answer, on its device."""
        number = self.vocabulary.to_assistant(torch.tensor(token, device=self.runner.model.device))
        answers = self.vocabulary.to_target(self.runner.branch(number, above)).split(1)
        return list(zip(self.runner.level, answers, strict=True))

    def expand(self, state: Any, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Score one more tree level, as `DraftHead.expand` says; the keys and values live in the runner's cache."""
        return self.answer(self.runner.expand(self.vocabulary.to_assistant(nodes.token[0]), nodes.parent[0]))

    def answer(self, logits: Tensor) -> LevelOutput:
        """Return the assistant's logits "N A" as a level in the target's vocabulary and on its device."""
        logits = self.vocabulary.to_target(logits).to(self.device)
        return LevelOutput(logits[None], logits[None, :, :0])
