"""The decoding engine: one loop for speculation and for plain decoding, which is speculation with an empty draft."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from inference import tree as trees
from inference.cache import TargetCache
from inference.drafters import Commit, Context, Drafter, Verified
from inference.drafters.plain import Plain
from inference.rng import Coupled, Generator, Rng
from inference.sample import Sampling, penalize
from inference.target import Pass, Target
from inference.tree import DraftTree
from inference.verify import COUPLED, check_rule, decide

OnTokens = Callable[[list[int], list[str]], None]


@dataclass(frozen=True)
class Settings:
    """How one prompt is decoded.

    Attributes:
        gaps: whether to record the target's top-2 logit gap at every emitted token.
        rule: a key of `inference.verify.RULES`, or auto for the one that accepts most of each draft.
        lossy: whether the rule may change the target's law.

    Raises:
        ValueError: an unknown rule, or a lossy one that is not allowed.
    """

    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    seed: int = 0
    gaps: bool = False
    rule: str = "auto"
    lossy: bool = False

    def __post_init__(self) -> None:
        """Check the rule."""
        check_rule(self.rule, self.lossy)


class Step(NamedTuple):
    """One target pass: nodes drafted, drafted tokens accepted, tokens committed after stops, seconds, and the rule."""

    drafted: int
    accepted: int
    committed: int
    draft_s: float
    verify_s: float
    other_s: float
    rule: str = "none"


@dataclass
class Generation:
    """What one prompt gave. The prefill's token is in `tokens` but in no step: τ = (len(tokens) - 1) / len(steps)."""

    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    finish: str = ""

    @property
    def tau(self) -> float:
        """Tokens committed per target pass, the bonus token included."""
        return (len(self.tokens) - 1) / len(self.steps) if self.steps else 0.0


class Session:
    """One sequence being decoded."""

    def __init__(self, target: Target, drafter: Drafter, prompt: list[int], settings: Settings) -> None:
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        if len(prompt) >= target.context:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens but {target.name} reads at most {target.context}: shorten it"
            )
        self.target, self.drafter, self.settings = target, drafter, settings
        self.cache: TargetCache = target.cache()
        self.context = list(prompt)
        self.rng: Rng = Generator(settings.seed, target.device)
        if settings.rule == COUPLED:
            self.rng = Coupled(settings.seed, target.device, lambda: len(self.context))
        self.seen: Tensor | None = None  # which tokens stand in the context, where a penalty asks for it
        if settings.sampling.repetition_penalty != 1:
            self.seen = torch.zeros(target.ends.vocab_size, dtype=torch.bool, device=target.device)
            self.seen[prompt] = True
        self.limit = min(settings.max_new_tokens, target.context - len(prompt))
        self.made = Generation()

    def clock(self) -> float:
        """Return seconds, after the device has finished what it was given."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def prefill(self) -> None:
        """Run the prompt and choose the first token; the drafter sees every prompt row with the token that follows."""
        start = self.clock()
        self.drafter.reset(self.context)
        token = torch.tensor(self.context, device=self.target.device)
        out = self.target.prefill(token, self.cache)
        root = trees.root(self.context[-1], self.target.device)
        logits = self.penalized(_logits(out), root)
        first = decide(root, logits, None, self.settings.sampling, self.rng).token
        self.emit([first], ["prefill"], logits)
        following = torch.cat([token[1:], token.new_tensor([first])])
        self.drafter.observe(Commit(following, out, None))
        self.made.prefill_s = self.clock() - start

    def step(self) -> None:
        """Draft, verify in one target pass, keep the accepted path."""
        begin = self.clock()
        room = self.limit - len(self.made.tokens) - 1
        prefix = self.cache.length
        proposal = self.drafter.propose(Context(self.context, self.settings.sampling, self.rng, room, self.cache))
        drafted = proposal.tree
        drafted_at = self.clock()
        if proposal.entered is None:
            out = self.target.score(drafted, self.cache, proposal.riders)
        else:
            out = self.target.parts.score_from(proposal.entered, drafted, self.cache)
        verified_at = self.clock()
        logits, riders = _logits(out).tensor_split([len(drafted.token)])
        sampling, asked = self.settings.sampling, self.settings.rule
        scores = self.penalized(logits, drafted)
        path, bonus, rule = decide(drafted, scores, proposal.q, sampling, self.rng, asked, proposal.replacement)
        self.cache.keep(prefix, path)
        index = torch.tensor(path, device=self.target.device)
        following = torch.cat([drafted.token[index[1:]], index.new_tensor([bonus])])
        committed = self.emit(following.tolist(), ["draft"] * (len(path) - 1) + ["bonus"], scores[index])
        settled = self.clock()
        if not self.made.finish:
            rows = Pass(out.hidden[:, index], out.last[:, index], None)
            seen = Verified(drafted, path, logits, None if proposal.riders is None else riders)
            self.drafter.observe(Commit(following, rows, seen))
        end = self.clock()
        self.made.steps.append(
            Step(
                len(drafted.token) - 1,
                min(len(path) - 1, committed),
                committed,
                (drafted_at - begin) + (end - settled),
                verified_at - drafted_at,
                settled - verified_at,
                rule,
            )
        )
        self.made.decode_s += end - begin

    def penalized(self, logits: Tensor, drafted: DraftTree) -> Tensor:
        """Return the logits "N V" after each node, the repetition penalty for the node's own prefix applied."""
        if self.seen is None:
            return logits
        return penalize(logits, trees.seen_tokens(drafted, self.seen), self.settings.sampling)

    def emit(self, tokens: list[int], sources: list[str], logits: Tensor) -> int:
        """Append tokens up to the first end of the answer; return how many were taken."""
        made, before = self.made, len(self.made.tokens)
        for i, token in enumerate(tokens):
            made.tokens.append(token)
            made.sources.append(sources[i])
            if self.settings.gaps:
                top = logits[i].float().topk(2).values
                made.gaps.append(float(top[0] - top[1]))
            if token in self.target.eos:
                made.finish = "eos"
            elif self.stopped():
                made.finish = "stop"
            elif len(made.tokens) >= self.limit:
                made.finish = "length"
            if made.finish:
                break
        taken = len(made.tokens) - before
        self.context.extend(tokens[:taken])
        if self.seen is not None:
            self.seen[tokens[:taken]] = True
        return taken

    def stopped(self) -> bool:
        """Whether the text so far holds a stop string; a token adds few characters, so its last ones suffice."""
        if not self.settings.stop:
            return False
        tail = max(map(len, self.settings.stop)) + 8
        text = self.target.tokenizer.decode(self.made.tokens[-tail:])
        return any(stop in text for stop in self.settings.stop)


def _logits(out: Pass) -> Tensor:
    assert out.logits is not None
    return out.logits[0]


@torch.inference_mode()
def speculate(
    target: Target, drafter: Drafter, prompt: list[int], settings: Settings, on_tokens: OnTokens | None = None
) -> Generation:
    """Decode one prompt with a draft source; the output follows the target's own law.

    Args:
        target: the frozen target.
        drafter: the draft source; its feature layers are read from every pass.
        prompt: token ids.
        settings: length, sampling, stops, seed, rule.
        on_tokens: called after every pass with the new tokens and their sources ("prefill", "draft", "bonus").

    Raises:
        ValueError: an empty prompt, one that fills the target's context, or a rule that is not right for the drafts.
    """
    target.feature_layers = drafter.feature_layers
    session = Session(target, drafter, prompt, settings)
    session.prefill()
    reported = 0
    while True:
        made = session.made
        if on_tokens is not None:
            on_tokens(made.tokens[reported:], made.sources[reported:])
            reported = len(made.tokens)
        if made.finish:
            return made
        session.step()


def autoregress(target: Target, prompt: list[int], settings: Settings, on_tokens: OnTokens | None = None) -> Generation:
    """Decode one prompt plainly, in the same engine."""
    return speculate(target, Plain(target.device), prompt, settings, on_tokens)
