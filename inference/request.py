"""A request: its parameters, its text so far, its limits and stops, and its result."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heads.base import Layers, Tokens
from inference.protocol import DraftContext
from inference.target.cache import TargetCache
from inference.target.model import TargetOutput
from inference.target.target import Target, check_prompt
from inference.verification.rng import RequestRng, sample_tokens, seed_key
from inference.verification.rules import AUTO, COUPLED, RULES, is_lossy
from inference.verification.sample import Sampling, process_logits, top2_gap
from inference.verification.tree import DraftTree

NextLogits = Float[Tensor, "1 V"]


@dataclass(frozen=True)
class RequestParams:
    """The parameters of one request.

    Attributes:
        logit_gaps: whether to record the target's top-2 logit gap at every emitted token.
        rule: a key of `inference.verification.rules.RULES`, or auto for the one that accepts most of each draft.
        lossy: whether the rule may change the target's distribution.
        keep_passes: whether to keep the outputs of the target's passes.
        min_new_tokens: EOS tokens are masked before this many tokens.

    Raises:
        ValueError: an unknown rule, or a lossy one that is not allowed; max_new_tokens below 1, or min_new_tokens not
            between 0 and that; a stop that is one string and not a tuple, or that has an empty one.
    """

    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    seed: int = 0
    logit_gaps: bool = False
    keep_passes: bool = False
    rule: str = "auto"
    lossy: bool = False
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        if self.rule not in (AUTO, *RULES):
            raise ValueError(f"rule is {self.rule!r}: choose {AUTO} or one of {', '.join(RULES)}")
        if is_lossy(self.rule) and not self.lossy:
            raise ValueError(
                f"rule={self.rule} changes the target's distribution: set lossy=true to allow it, or choose rule={AUTO}"
            )
        given: Any = self.stop
        if isinstance(given, str) or "" in given:  # a string would be a tuple of letters
            raise ValueError(f"stop is {given!r}: give a tuple of strings, none of them empty")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: give 1 or more")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}: give 0 to max_new_tokens, which is {self.max_new_tokens}"
            )


@dataclass(frozen=True)
class RequestConfig:
    """The request's parameters of a command, without the temperature; the command's YAML explains the keys."""

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
        """Return the sampling parameters at a temperature."""
        return Sampling(temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)

    def params(self, temperature: float, logit_gaps: bool = False, stop: Sequence[str] = ()) -> RequestParams:
        """Return the request's parameters at a temperature."""
        return RequestParams(
            self.max_new_tokens,
            self.sampling(temperature),
            stop=tuple(stop),
            seed=self.seed,
            logit_gaps=logit_gaps,
            rule=self.rule,
            lossy=self.lossy,
            min_new_tokens=self.min_new_tokens,
        )


class Step(NamedTuple):
    """One target pass: nodes drafted, drafted tokens accepted, tokens committed after stops, seconds, and the rule.

    `ranks` has the rank of every accepted node among its siblings, in drafting order.
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
    """A target pass: the tokens that follow its committed rows, these rows, and the last hidden state of every node.

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

    In a batch, `decode_s` is the sequence's share of the time of its passes: the shares of all sequences sum up to the
    elapsed time. `latency_s` is the time from the start of its prefill to its end.
    """

    tokens: Tokens = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    logit_gaps: list[float] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    finish_reason: str = ""
    latency_s: float = 0.0
    target_passes: list[Pass] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens committed per target pass, the bonus token included."""
        return (len(self.tokens) - 1) / len(self.steps) if self.steps else 0.0


class Request:
    """A running request: its text so far, its limits and stops, and its result."""

    def __init__(
        self, target: Target, prompt: Tokens, params: RequestParams, cache: TargetCache, request_index: int = 0
    ) -> None:
        check_prompt(target, prompt)
        self.target, self.params, self.cache = target, params, cache
        self.request_index = request_index
        self.limit = min(params.max_new_tokens, target.max_model_len - len(prompt))
        self.token_ids = list(prompt)
        self.generation = Generation()
        self.rng_key = seed_key(params.seed)  # random key of the request
        self.start_s = time.perf_counter()

    @torch.inference_mode()
    def prefill(self, layers: Layers) -> TargetOutput:
        """Run the prompt and choose the first token."""
        token = torch.tensor(self.token_ids, device=self.target.device)
        key, position = torch.tensor([[self.rng_key], [len(token)]], device=token.device)
        params = self.params
        out = self.target.prefill(token, self.cache, layers)
        assert out.logits is not None
        logits = self.process_logits(out.logits[0])
        first = sample_tokens(logits, params.sampling, key, position)
        self.emit(first.tolist(), ["prefill"], top2_gap(logits).tolist() if params.logit_gaps else [])
        if params.keep_passes:
            self.generation.target_passes.append(
                Pass(torch.cat([token[1:], first]), out._replace(logits=None), None, [], out.last_hidden[0])
            )
        return out

    def process_logits(self, logits: NextLogits) -> NextLogits:
        """Return the next token's logits after the repetition penalty; EOS tokens are masked before min_new_tokens."""
        seen = self.draft_context().seen_tokens(logits)
        early = self.target.eos_mask if self.min_tokens_left > 0 else None
        return process_logits(logits, self.params.sampling, None if seen is None else seen[0], early)

    def draft_context(self) -> DraftContext:
        """Return the context that a drafter on the host reads."""
        max_draft_depth = self.max_draft_depth
        if self.target.longrope is not None:
            max_draft_depth = self.target.longrope.max_draft_depth(self.cache.length, max_draft_depth)
        draws = RequestRng(self.rng_key, len(self.token_ids), self.params.rule == COUPLED)
        return DraftContext(self.token_ids, self.params.sampling, draws, max_draft_depth, self.cache)

    @property
    def max_draft_depth(self) -> int:
        """The drafted tokens that may still be accepted."""
        return self.limit - len(self.generation.tokens) - 1

    @property
    def min_tokens_left(self) -> int:
        """The tokens that are left until min_new_tokens."""
        return self.params.min_new_tokens - len(self.generation.tokens)

    def emit(self, tokens: Tokens, origins: list[str], gaps: list[float]) -> int:
        """Append tokens up to the end of the answer; return how many were appended."""
        generation, before = self.generation, len(self.generation.tokens)
        for i, token in enumerate(tokens):
            generation.tokens.append(token)
            generation.origins.append(origins[i])
            if self.params.logit_gaps:
                generation.logit_gaps.append(gaps[i])
            if token in self.target.eos:
                generation.finish_reason = "eos"
            elif self.stopped():
                generation.finish_reason = "stop"
            elif len(generation.tokens) >= self.limit:
                generation.finish_reason = "length"
            if generation.finish_reason:
                break
        taken = len(generation.tokens) - before
        self.token_ids.extend(tokens[:taken])
        return taken

    def stopped(self) -> bool:
        """Whether the text has a stop string; only the last tokens are decoded, since each adds a byte or more."""
        if not self.params.stop:
            return False
        tail = max(len(stop.encode()) for stop in self.params.stop) + 8
        text = self.target.tokenizer.decode(self.generation.tokens[-tail:])
        return any(stop in text for stop in self.params.stop)


def clock(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class PhaseTimer:
    """Measures the seconds of each phase of a step, on a GPU by CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.events = device, device.type == "cuda"
        self.marks: list[tuple[str | None, Any]] = []

    def mark(self, ended: str | None) -> None:
        """End the current phase, whose name is `ended`; None drops its time."""
        if not self.events:
            self.marks.append((ended, time.perf_counter()))
            return
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.marks.append((ended, event))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each ended phase; those that a GPU has not finished are returned by the next call."""
        sums: defaultdict[str, float] = defaultdict(float)
        while len(self.marks) > 1 and (not self.events or self.marks[1][1].query()):
            (_, first), (ended, last) = self.marks[:2]
            if ended is not None:
                sums[ended] += first.elapsed_time(last) / 1e3 if self.events else last - first
            del self.marks[0]
        return sums
