"""Decoding one sequence: draft, verify, commit; its request settings and its result."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heads.common.progress import tick
from inference.limits import check_prompt, check_size
from inference.protocol import Commit, Context, Drafter, DrafterState, Proposal, Verified
from inference.target.cache import TargetCache
from inference.target.model import TargetOutput
from inference.target.target import Target
from inference.verification import tree as trees
from inference.verification.rng import CoupledRng, DraftRng, Rng
from inference.verification.sample import Sampling, penalize
from inference.verification.tree import DraftTree
from inference.verification.verify import COUPLED, check_rule, decide

TREE_ENTRIES = 64  # entries of the cache behind a text, for trees of drafters that do not say how many they need


@dataclass(frozen=True)
class RequestParams:
    """The request settings of one prompt.

    Attributes:
        gaps: whether to record the target's top-2 logit gap at every emitted token.
        rule: a key of `inference.verification.verify.RULES`, or auto for the one that accepts most of each draft.
        lossy: whether the rule may change the target's distribution.
        passes: whether to keep what the target's passes computed.
        min_new_tokens: before so many, an end of the answer has no probability.

    Raises:
        ValueError: an unknown rule, or a lossy one that is not allowed; max_new_tokens below 1, or min_new_tokens not
            between 0 and that; a stop that is one string and not a tuple, or that has an empty one.
    """

    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    seed: int = 0
    gaps: bool = False
    passes: bool = False
    rule: str = "auto"
    lossy: bool = False
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        """Check the rule and the lengths."""
        check_rule(self.rule, self.lossy)
        given: Any = self.stop
        if isinstance(given, str) or "" in given:  # of a string each letter would be one
            raise ValueError(f"stop is {given!r}: give a tuple of strings, none of them empty")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: give 1 or more")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}: give 0 to max_new_tokens, which is {self.max_new_tokens}"
            )


@dataclass(frozen=True)
class RequestConfig:
    """What commands say of their requests besides the temperature; their YAML says what each key means."""

    max_new_tokens: int
    min_new_tokens: int
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    rule: str
    lossy: bool
    seed: int

    def sampling(self, temperature: float) -> Sampling:
        """Return the sampling settings at a temperature."""
        return Sampling(temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)

    def settings(self, temperature: float, gaps: bool = False, stop: Sequence[str] = ()) -> RequestParams:
        """Return the request settings at a temperature."""
        return RequestParams(
            self.max_new_tokens,
            self.sampling(temperature),
            stop=tuple(stop),
            seed=self.seed,
            gaps=gaps,
            rule=self.rule,
            lossy=self.lossy,
            min_new_tokens=self.min_new_tokens,
        )


class Step(NamedTuple):
    """One target pass: nodes drafted, drafted tokens accepted, tokens committed after stops, seconds, and the rule.

    `ranks` holds for every accepted node its rank among its siblings, in the order in which they were drafted.
    """

    drafted: int
    accepted: int
    committed: int
    draft_s: float
    verify_s: float
    other_s: float
    rule: str = "none"
    ranks: tuple[int, ...] = ()


class Pass(NamedTuple):
    """A target pass: its committed rows as `Commit` has them, and the last hidden state of every node that it verified.

    A prefill has no tree.
    """

    token: Int[Tensor, "T"]
    features: TargetOutput
    tree: DraftTree | None
    path: list[int]
    last: Float[Tensor, "N D"]


@dataclass
class Generation:
    """The result of one prompt. The prefill's token is in `tokens` but in no step: τ = (len(tokens) - 1) / len(steps).

    In a batch, `decode_s` counts the sequence's share of the passes that it was in, so that the shares of all sum up to
    the time that passed; `latency_s` is what its user waited, from its prefill on.
    """

    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    finish: str = ""
    latency_s: float = 0.0
    passes: list[Pass] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens committed per target pass, the bonus token included."""
        return (len(self.tokens) - 1) / len(self.steps) if self.steps else 0.0


class Request:
    """One sequence being decoded: `prefill`, then `draft` and `commit` around each target pass until it finishes."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompt: list[int],
        settings: RequestParams,
        cache: TargetCache | None = None,
    ) -> None:
        check_prompt(target, prompt)
        self.target, self.drafter, self.settings = target, drafter, settings
        self.layers = drafter.feature_layers
        self.state: DrafterState  # the drafter's for this sequence, from the prefill on
        self.limit = min(settings.max_new_tokens, target.context - len(prompt))
        self.cache = target.cache(len(prompt) + self.limit + TREE_ENTRIES) if cache is None else cache
        self.context = list(prompt)
        self.rng = CoupledRng(settings.seed, target.device, self.context)  # of verification
        self.drafting: Rng = self.rng
        if settings.rule != COUPLED:
            self.drafting = DraftRng(settings.seed, target.device, self.context)
        self._seen_tokens: Tensor | None = None
        self._noted = 0  # tokens of the context that `_seen_tokens` holds
        self.generation = Generation()
        self.draft_s = 0.0
        self.prefix = 0  # committed cache entries before the pass at hand

    def clock(self) -> float:
        """Return seconds, after the device has finished what it was given."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def prefill(self) -> None:
        """Run the prompt and choose the first token; the drafter sees every prompt row with the token that follows."""
        start = self.clock()
        self.state = self.drafter.start(self.context)
        token = torch.tensor(self.context, device=self.target.device)
        out = self.target.prefill(token, self.cache, self.layers)
        root = trees.root(self.context[-1], self.target.device)
        processed_logits = self.processed(_logits(out), root)
        first = decide(root, processed_logits, None, self.settings.sampling, self.rng).token
        self.emit([first], ["prefill"], self.gaps(processed_logits))
        following = torch.cat([token[1:], token.new_tensor([first])])
        self.update(Commit(following, out, None), out.last_hidden[0])
        self.generation.prefill_s = self.clock() - start

    @torch.inference_mode()
    def state_of(self, drafter: Drafter) -> DrafterState:
        """Return another drafter's state for the text so far: as after a prompt, by a target pass over all of it."""
        token = torch.tensor(self.context, device=self.target.device)
        state = drafter.start(self.context[:-1])
        out = self.target.prefill(token[:-1], self.target.cache(len(token)), drafter.feature_layers)
        state.update(Commit(token[1:], out, None))
        return state

    def swap(self, drafter: Drafter, state: DrafterState) -> None:
        """Let another drafter propose from the next step on; `state` is its `state_of` the text so far."""
        self.state.leave()
        self.drafter, self.state, self.layers = drafter, state, drafter.feature_layers

    def begin(self) -> Context:
        """Begin a step; return what its proposal may read."""
        max_draft_depth, _ = self.left
        self.prefix = self.cache.length
        if self.target.switch is not None:
            max_draft_depth = self.target.switch.max_draft_depth(self.prefix, max_draft_depth)
        return Context(self.context, self.settings.sampling, self.drafting, max_draft_depth, self.cache)

    def draft(self) -> Proposal:
        """Let the drafter propose what the next target pass scores."""
        begin = self.clock()
        proposal = self.state.propose(self.begin())
        check_size(self.target, len(proposal.tree.token), self.drafter.name)
        self.draft_s = self.clock() - begin
        return proposal

    def step(self) -> None:
        """Draft, verify and commit once."""
        tick()
        self.verify(self.draft())

    def verify(self, proposal: Proposal) -> None:
        """Run the target over the proposal, for this sequence alone, and commit."""
        begin = self.clock()
        if self.target.switch is not None and self.target.switch.recomputes(self.prefix):
            out = self.renew()
        elif proposal.first_layers is None:
            out = self.target.score(proposal.tree, self.cache, proposal.look_ahead, self.layers)
        else:
            out = self.target.parts.score_from(proposal.first_layers, proposal.tree, self.cache, self.layers)
        self.commit(proposal, out, self.clock() - begin)

    def renew(self) -> TargetOutput:
        """Recompute all cache entries under the other side of the rope's switch; return the root's output."""
        self.cache.keep(0, [])
        out = self.target.prefill(torch.tensor(self.context, device=self.target.device), self.cache, self.layers)
        return TargetOutput(out.hidden[:, -1:], out.last_hidden[:, -1:], out.logits)

    def commit(self, proposal: Proposal, out: TargetOutput, verify_s: float) -> None:
        """Decide what is accepted, keep its cache entries and tokens, and update the drafter.

        Args:
            proposal: what was drafted.
            out: the target's output for it, whose entries stand behind the committed ones in the cache.
            verify_s: the seconds that the pass took, or this sequence's share of them.
        """
        begin = self.clock()
        drafted = proposal.tree
        logits, look_ahead = _logits(out).tensor_split([len(drafted.token)])
        sampling, rule_name = self.settings.sampling, self.settings.rule
        processed_logits = self.processed(logits, drafted)
        path, bonus, rule = decide(drafted, processed_logits, proposal.q, sampling, self.rng, rule_name)
        self.cache.keep(self.prefix, path)
        index = torch.tensor(path, device=self.target.device)
        following = torch.cat([drafted.token[index[1:]], index.new_tensor([bonus])])
        committed = self.emit(
            following.tolist(), ["draft"] * (len(path) - 1) + ["bonus"], self.gaps(processed_logits[index])
        )
        committed_at = self.clock()
        if not self.generation.finish:
            rows = TargetOutput(out.hidden[:, index], out.last_hidden[:, index], None)
            verified = Verified(drafted, path, logits, None if proposal.look_ahead is None else look_ahead)
            self.update(Commit(following, rows, verified), out.last_hidden[0, : len(drafted.token)])
        draft_s, other_s = self.draft_s + self.clock() - committed_at, committed_at - begin
        accepted = min(len(path) - 1, committed)
        # For reports: no part of the step's time.
        ranks = trees.ranks(drafted, path[: accepted + 1]) if accepted else ()
        nodes = len(drafted.token) - 1
        self.record_step(Step(nodes, accepted, committed, draft_s, verify_s, other_s, rule, ranks))

    def update(self, commit: Commit, last: Float[Tensor, "N D"]) -> None:
        """Update the drafter, and keep the pass if asked to."""
        self.state.update(commit)
        if self.settings.passes:
            tree, path = (None, []) if commit.verified is None else commit.verified[:2]
            self.generation.passes.append(Pass(commit.token, commit.features._replace(logits=None), tree, path, last))

    def record_step(self, step: Step) -> None:
        """Take note of a step and its seconds."""
        self.generation.steps.append(step)
        self.generation.decode_s += step.draft_s + step.verify_s + step.other_s

    def processed(self, logits: Tensor, drafted: DraftTree) -> Tensor:
        """Return the logits "N V" after each node as its own prefix has them: penalised, and no end before its time."""
        seen_tokens = self.seen_tokens()
        if seen_tokens is not None:
            logits = penalize(logits, trees.seen_tokens(drafted, seen_tokens), self.settings.sampling)
        _, lacking = self.left
        if lacking > 0 and self.target.eos:
            logits = logits.clone()
            early = trees.depth(drafted) < lacking
            logits[early.nonzero(), torch.tensor(sorted(self.target.eos), device=logits.device)] = float("-inf")
        return logits

    def gaps(self, logits: Float[Tensor, "N V"]) -> list[float]:
        """Return the gap between the two largest logits of each row, if gaps are recorded."""
        if not self.settings.gaps:
            return []
        top = logits.float().topk(2).values
        gaps: list[float] = (top[:, 0] - top[:, 1]).tolist()
        return gaps

    @property
    def left(self) -> tuple[int, int]:
        """How many drafted tokens may still be accepted, and how many tokens must come before an end may."""
        count = len(self.generation.tokens)
        return self.limit - count - 1, self.settings.min_new_tokens - count

    def seen_tokens(self) -> Tensor | None:
        """Return which tokens stand in the context, where a penalty asks for it."""
        if self.settings.sampling.repetition_penalty == 1:
            return None
        if self._seen_tokens is None:
            self._seen_tokens = torch.zeros(
                self.target.embeddings.vocab_size, dtype=torch.bool, device=self.target.device
            )
        if new := self.context[self._noted :]:
            self._seen_tokens[new] = True
            self._noted = len(self.context)
        return self._seen_tokens

    def emit(self, tokens: list[int], sources: list[str], gaps: list[float]) -> int:
        """Append tokens up to the first end of the answer; return how many were taken."""
        generation, before = self.generation, len(self.generation.tokens)
        for i, token in enumerate(tokens):
            generation.tokens.append(token)
            generation.sources.append(sources[i])
            if self.settings.gaps:
                generation.gaps.append(gaps[i])
            if token in self.target.eos:
                generation.finish = "eos"
            elif self.stopped():
                generation.finish = "stop"
            elif len(generation.tokens) >= self.limit:
                generation.finish = "length"
            if generation.finish:
                break
        taken = len(generation.tokens) - before
        self.context.extend(tokens[:taken])
        return taken

    def stopped(self) -> bool:
        """Whether the text so far holds a stop string; a token adds a byte or more, so its last ones suffice."""
        if not self.settings.stop:
            return False
        tail = max(len(stop.encode()) for stop in self.settings.stop) + 8
        text = self.target.tokenizer.decode(self.generation.tokens[-tail:])
        return any(stop in text for stop in self.settings.stop)


def _logits(out: TargetOutput) -> Tensor:
    assert out.logits is not None
    return out.logits[0]
