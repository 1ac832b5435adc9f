"""The decoding engine: one loop for speculation and for plain decoding, which is speculation with an empty draft."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from inference.cache import TargetCache
from inference.drafters import Commit, Context, Drafter, Verified
from inference.drafters.plain import Plain
from inference.sample import Sampling, distribution
from inference.target import Pass, Target
from inference.verify import Generator, Rng, verify

OnTokens = Callable[[list[int], list[str]], None]


@dataclass(frozen=True)
class Settings:
    """How one prompt is decoded. `gaps` records the target's top-2 logit gap at every emitted token."""

    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    seed: int = 0
    gaps: bool = False


class Step(NamedTuple):
    """One target pass: nodes drafted, drafted tokens accepted, tokens committed after stops, and seconds."""

    drafted: int
    accepted: int
    committed: int
    draft_s: float
    verify_s: float
    other_s: float


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
        self.rng: Rng = Generator(settings.seed, target.device)
        self.cache: TargetCache = target.cache()
        self.context = list(prompt)
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
        law = distribution(_logits(out), self.settings.sampling)
        first = self.rng.draw(law)[0]
        self.emit([first], ["prefill"], _logits(out))
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
        path, bonus = verify(drafted, distribution(logits, self.settings.sampling), proposal.q, self.rng)
        self.cache.keep(prefix, path)
        index = torch.tensor(path, device=self.target.device)
        following = torch.cat([drafted.token[index[1:]], index.new_tensor([bonus])])
        committed = self.emit(following.tolist(), ["draft"] * (len(path) - 1) + ["bonus"], logits[index])
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
            )
        )
        self.made.decode_s += end - begin

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
        settings: length, sampling, stops, seed.
        on_tokens: called after every pass with the new tokens and their sources ("prefill", "draft", "bonus").

    Raises:
        ValueError: an empty prompt, or one that fills the target's context.
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
