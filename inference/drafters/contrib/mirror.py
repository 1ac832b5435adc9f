"""Mirror speculative decoding (arXiv 2510.13161): an assistant on another device drafts while the target verifies.

The most probable outcomes of the verification are drafted on from, all of them level by level in one pass of the
assistant; when the target's answer is among them, the next draft is there at once. The assistant may live on another
accelerator, or on the CPU. Drafts depend only on the text and the seed, so what was prepared is what would
have been drafted: preparing changes the time a step takes and nothing else.
"""

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from heads.common.ranges import Number
from inference.drafters.assistant import ROOT, Assistant, Chain, Outcome
from inference.drafters.host import DrafterState, HostDrafter
from inference.protocol import CommittedTokens, Context, Proposal, sampled_chain
from inference.target.target import Target
from inference.verification.tree import root

WORKERS = ThreadPoolExecutor(thread_name_prefix="mirror")


class Mirror(HostDrafter):
    """An assistant's chains, with the next one prepared during verification.

    It counts over all sequences how often drafts were accepted and found prepared, which changes what is prepared, and
    with it only the time of a step.
    """

    @dataclass(frozen=True)
    class Config:
        """The assistant, which drafts chains of a constant length, and for how many outcomes it drafts ahead."""

        outcomes: Number
        assistant: Assistant.Config

        def __post_init__(self) -> None:
            if (self.assistant.tree.kind, self.assistant.confidence) != ("chain", 0):
                raise ValueError(
                    "drafter.mirror.assistant: it drafts chains of one length; set tree.kind=chain and confidence=0"
                )

    def __init__(self, config: Config, target: Target, name: str) -> None:
        self.config, self.name = config, name
        self.assistant = Assistant(config.assistant, target, name)
        self.tree = self.assistant.tree
        if config.outcomes and not self.assistant.model.takes_trees:
            raise ValueError(
                f"drafter.mirror.outcomes is {config.outcomes}, but the attention of {config.assistant.model} does not "
                "honour a tree mask, which several outcomes need: use drafter=assistant"
            )
        self.current: MirrorState | None = None
        self.reset()

    def start(self, prompt: list[int]) -> "MirrorState":
        """Begin a sequence; what is still prepared for the last one ends."""
        self._finish()
        self.current = MirrorState(self, prompt)
        return self.current

    def reset(self) -> None:
        """Forget how often drafts were accepted and found prepared; the counts begin at three of four."""
        self.tried, self.accepted = 4, 3
        self.verified = self.prepared = 0

    def clone(self) -> "Mirror":
        """Return a drafter with the same assistant and counts of its own."""
        self._finish()
        return copy.copy(self)

    def _finish(self) -> None:
        if self.current is not None:
            self.current.join(())
            self.current = None


class MirrorState(DrafterState):
    """One sequence: the assistant's state, and the chains that its worker prepares."""

    def __init__(self, drafter: Mirror, prompt: list[int]) -> None:
        self.drafter, self.config = drafter, drafter.config
        self.assistant = drafter.assistant.start(prompt)
        self.runner, self.vocabulary = self.assistant.runner, self.assistant.vocabulary
        self.work: Future[None] | None = None
        self.outcome: Outcome | None = None  # of the verification, once it is known
        self.ready: Chain | None = None
        self.chains: dict[Outcome, Chain] = {}
        self.beneath: dict[Outcome, int] = {}  # the node that ends each outcome

    @torch.inference_mode()
    def update(self, commit: CommittedTokens) -> None:
        """Take over what was prepared for this outcome, or let the assistant read on."""
        following, counts = tuple(commit.token), self.drafter
        if commit.verified is None:
            self.assistant.update(commit)
            return
        accepted, drafted = len(commit.verified.path) - 1, len(commit.verified.tree.token) - 1
        counts.accepted += accepted
        counts.tried += accepted + (accepted < drafted)
        counts.verified += 1
        self.ready = self.join(following)
        if self.ready is None:
            self.assistant.update(commit)
            return
        counts.prepared += 1
        source, chain = self.assistant, self.ready
        source.text += self.vocabulary.follow(list(following))
        node = self.beneath[following]
        self.runner.adopt(source.text, self.runner.path[node], chain.nodes)
        chain.nodes = list(range(len(chain.nodes)))
        chain.above = len(chain.nodes) - 1

    @torch.inference_mode()
    def propose(self, context: Context) -> Proposal:
        """Hand out the prepared chain, or draft one; then draft on in the background."""
        source = self.assistant
        chain, self.ready = self.ready, None
        if chain is None:
            depth = self._depth(context, 0)
            if depth < 1 or source.level is None:
                return Proposal(root(context.token[-1], source.device))
            chain = self._chain(source.level.logits[0], ROOT, depth, context, ())
            self._draft({(): chain}, lambda _: True)
        self.outcome, self.chains = None, {}
        if self.config.outcomes:
            self.work = WORKERS.submit(self._ahead, chain, context._replace(token=context.token.copy()))
        return sampled_chain([context.token[-1], *chain.token], chain.q)

    def _depth(self, context: Context, committed: int) -> int:
        """Return how long the chain may be that is drafted after `committed` more tokens."""
        free = self.runner.model.context - len(self.assistant.text)
        return min(self.config.assistant.tree.depth, context.max_draft_depth - committed, free - committed)

    def _chain(self, logits: Float[Tensor, "1 V"], above: int, depth: int, context: Context, outcome: Outcome) -> Chain:
        """Begin a chain after the context and an outcome; its randomness belongs to the position where it begins."""
        draws = context.draws.at(len(context.token) + len(outcome))
        return Chain(logits, above, depth, draws, context, outcome)

    def _draft(self, chains: dict[Outcome, Chain], possible: Callable[[Outcome], bool]) -> None:
        """Draft the chains of possible outcomes to their ends, level by level."""
        running, eos = chains, self.assistant.eos
        while True:
            running = {outcome: chain for outcome, chain in running.items() if possible(outcome) and chain.sample(eos)}
            if not running:
                return
            tokens = [chain.token[-1] for chain in running.values()]
            ran = self.assistant.run(tokens, [chain.above for chain in running.values()])
            for chain, reached in zip(running.values(), ran, strict=True):
                chain.reached(*reached)

    @torch.inference_mode()
    def _ahead(self, chain: Chain, context: Context) -> None:
        """Draft after the most probable outcomes of verifying the chain, while they are not known to be wrong."""
        if len(chain.nodes) < len(chain.token):
            chain.reached(*self.assistant.run(chain.token[-1:], [chain.above])[0])
        keys = [key for key in self._outcomes(chain) if self._possible(key) and self._depth(context, len(key)) > 0]
        if not keys:
            return
        above = [[ROOT, *chain.nodes][len(key) - 1] for key in keys]
        ran = dict(zip(keys, self.assistant.run([key[-1] for key in keys], above), strict=True))
        self.beneath = {key: node for key, (node, _) in ran.items()}
        self.chains = {
            key: self._chain(answer, node, self._depth(context, len(key)), context, key)
            for key, (node, answer) in ran.items()
        }
        self._draft(self.chains, self._possible)

    def _possible(self, outcome: Outcome) -> bool:
        """Whether an outcome is still possible."""
        return self.outcome is None or self.outcome == outcome

    def _outcomes(self, chain: Chain) -> list[Outcome]:
        """Return the most probable outcomes: as many accepted as lately, then the assistant's guess of what follows.

        After a rejection that is its guess among the other tokens. An outcome that ends the answer needs no draft.
        """
        rate, reach = self.drafter.accepted / self.drafter.tried, 1.0
        guesses: list[tuple[float, Outcome]] = []
        for depth, answer in enumerate(chain.answers):
            probs = answer[0].float().softmax(-1)
            rejected = depth < len(chain.token)
            if rejected:
                probs[chain.token[depth]] = 0
            best = probs.topk(min(self.config.outcomes, len(probs)))
            weight = reach * ((1 - rate) / probs.sum().clamp_min(1e-9) if rejected else 1)
            for value, token in zip((best.values * weight).tolist(), best.indices.tolist(), strict=True):
                if value > 0 and not self.assistant.eos & {token, *chain.token[:depth]}:
                    guesses.append((value, (*chain.token[:depth], token)))
            reach *= rate
        return [outcome for _, outcome in sorted(guesses, reverse=True)[: self.config.outcomes]]

    def join(self, outcome: Outcome) -> Chain | None:
        """Hand the worker the outcome of the verification, wait for it, and return the chain for that, if any."""
        work, self.work = self.work, None
        if work is None:
            return None
        self.outcome = outcome
        work.result()
        return self.chains.get(outcome)
