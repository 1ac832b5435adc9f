"""Speculative decoding of the toy model as engines do it, and faults of public incidents where in it they happen.

A request is prefilled through a prefix cache, and that pass alone gives its first token. Every later pass drafts DEPTH
tokens, verifies them by rejection sampling and commits the accepted ones and one more.
"""

import threading
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple
from zlib import crc32

import numpy as np

from tests.ops import audit_model as model
from tests.ops.audit_model import END, SIZE, VOCAB, Array, Cursor, Grammar, Sampling
from tests.ops.endpoint_server import DEPTH

FAULTS = {
    "stale_cache": "the state behind a shared prefix is that of the request before it (vllm#43559)",
    "rejected_draft": "the first rejected token of a draft is kept (vllm#46834)",
    "draft_bonus": "the token behind a wholly accepted draft is the draft's (vllm#3951)",
    "prompt_chunk": "prompts longer than a chunk lose the last token of each whole chunk (vllm#53488)",
    "lost_token": "the text misses the last token of a pass now and then",
    "top_p": "drafted tokens are tested with the draft's probabilities before top_p (transformers#47932)",
    "penalty": "of the tokens of a pass the last alone is counted for penalties (sglang#33643)",
    "leak": "with several requests in flight, an answer goes on as another request's (vllm#9441)",
    "cancelled": "a request takes the next token of a cancelled one, whose slot it has",
    "seed": "the seed of a request is ignored (vllm#6038, TensorRT-LLM#17599)",
    "tool_call": "the arguments of a tool call of the model's own choice miss their last token (vllm#41967)",
    "schema": "a grammar does not hold for drafted tokens (vllm#9423)",
    "logprobs": "every token's logprob is 0 (llama.cpp#27972)",
    "copied_top": "a pass's tokens all have the alternatives of its first",
    "shifted_top": "a token of a pass has the alternatives of the one before it",
    "cut_top": "a pass's tokens but for the first have fewer alternatives than asked for",
    "early_stop": "an end token in a draft ends the answer though it was rejected (vllm#42781)",
    "usage": "accepted tokens behind the end are counted (sglang#39826)",
    "stop_string": "a stop string in the middle of a pass lets the rest of the pass out (vllm#47616, sglang#31599)",
    "limit": "a pass that crosses max_tokens is dropped (ik_llama.cpp#2358)",
    "streaming": "the text of a stream's last event is lost",
    "temperature": "drafted tokens are verified at temperature 0 (mistral.rs#2424)",
    "slow_concurrency": "with more than 4 requests in flight drafts cost more than they bring (llama.cpp#27117)",
    "history": "the last message of the assistant is not read",
}
ALTERNATIVES = ("copied_top", "shifted_top", "cut_top")  # faults of the lists of the most probable tokens
BLOCK = 16  # tokens of a block of the prefix cache
CHUNK = 512  # tokens of a prompt in one pass
CROWD = 4  # requests in flight from which on more cost a pass more, where they do at all
SILENCE = np.zeros((DEPTH + 1, 1))
OFTEN = 0.05  # probability of a fault that is there now and then


class Step(NamedTuple):
    """A committed token and the scores that it was chosen by: logits after penalties and grammar."""

    token: int
    scores: Array
    top: Array | None = None  # scores that its alternatives are listed by, where they are others
    fewer: int = 0  # alternatives that are left out

    @property
    def text(self) -> str:
        """Its text; the end has none."""
        return "" if self.token == END else VOCAB[self.token]


class Draft(NamedTuple):
    """A drafted token, the draft's probabilities there, and the cursor before it."""

    token: int
    q: Array
    cursor: Cursor


class Decoded:
    """A text in the making; `sampled` are its request's random numbers, `server` those of the server's own."""

    def __init__(self, cursor: Cursor, how: Sampling, penalties: tuple[float, float], seed: int | None) -> None:
        self.cursor, self.how, self.penalties = cursor, how, penalties
        self.sampled = np.random.default_rng(seed)
        self.server = np.random.default_rng(0)


class Engine:
    """The decoder of a server, with a `fault` of FAULTS if it speculates; a pass takes `pass_s` seconds.

    `noise` is the standard deviation, in nats, of what rounding adds to each logit of the target's passes.
    """

    def __init__(
        self, speculates: bool = True, fault: str = "", noise: float = 0.0, pass_s: float = 0.0, seed: int = 0
    ) -> None:
        if fault and fault not in FAULTS:
            raise ValueError(f"no fault is named {fault!r}: take one of {', '.join(FAULTS)}")
        self.speculates, self.fault, self.noise, self.pass_s = speculates, fault if speculates else "", noise, pass_s
        self.running: list[Decoded] = []
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.seeds = np.random.default_rng(seed)
        self.states: dict[int, int] = {}  # behind every block of prompts, by a hash of all tokens until there
        self.behind: dict[int, int] = {}  # likewise the state one block further, of the last request there
        self.orphans: list[Decoded] = []  # cancelled, their slots not cleared

    def prefill(self, tokens: Sequence[int]) -> int:
        """Return the state behind a prompt, of whose blocks the cached ones are not read again."""
        blocks = [array("H", tokens[i : i + BLOCK]).tobytes() for i in range(0, len(tokens), BLOCK)]
        keys = list(accumulate(blocks, lambda key, block: crc32(block, key), initial=0))  # before each block
        state, at = 0, 0
        while at < len(blocks) - 1 and keys[at + 1] in self.states:
            at += 1
            state = self.states[keys[at]]
        if at and self.fault == "stale_cache" and keys[at] in self.behind:
            state, at = self.behind[keys[at]], at + 1
        for i in range(at, len(blocks)):
            lost = (i + 1) * BLOCK % CHUNK == 0 and len(tokens) > CHUNK and self.fault == "prompt_chunk"
            state = crc32(blocks[i][:-2] if lost else blocks[i], state)
            self.states[keys[i + 1]] = self.behind[keys[i]] = state
        return state

    def step(self, text: Decoded) -> list[Step]:
        """Do a pass over a text and return what it commits."""
        if self.pass_s or len(self.running) > 1:
            time.sleep(self._seconds())  # even 0 lets other requests' threads run
        first = text.cursor.length == 0
        draft = self._draft(text) if self.speculates and not first else []
        noise = text.server.normal(0, self.noise, (len(draft) + 1, SIZE)) if self.noise else SILENCE
        steps = self._mixed_up(text, noise) or self._verify(text, draft, noise)
        if self.fault == "early_stop" and any(drafted.token == END for drafted in draft):
            steps.append(Step(END, steps[-1].scores))
        self._commit(text, [step.token for step in steps])
        return self._listed(steps)

    def _listed(self, steps: list[Step]) -> list[Step]:
        """Return a pass's tokens with the alternatives that are listed of them."""
        if self.fault in ("copied_top", "shifted_top"):
            far = self.fault == "copied_top"
            return [step._replace(top=steps[0 if far else max(0, i - 1)].scores) for i, step in enumerate(steps)]
        return [step._replace(fewer=2 * (i > 0 and self.fault == "cut_top")) for i, step in enumerate(steps)]

    def _seconds(self) -> float:
        crowded = self.fault == "slow_concurrency" and len(self.running) > CROWD
        return self.pass_s * (2 * DEPTH if crowded else 1)

    def _scores(self, text: Decoded, cursor: Cursor, logits: Array, free: bool = False) -> Array:
        """Return logits after penalties and grammar, without the latter where they are `free`."""
        if cursor.counts is not None:
            presence, frequency = text.penalties
            logits = logits - presence * (cursor.counts > 0) - frequency * cursor.counts
        return logits if cursor.grammar is None or free else logits + model.mask(cursor.grammar)

    def _draft(self, text: Decoded) -> list[Draft]:
        drafts = []
        cursor = text.cursor
        raw = text.how._replace(top_p=1.0) if self.fault == "top_p" else text.how
        for _ in range(DEPTH):
            scores = self._scores(text, cursor, model.draft(cursor), self.fault == "schema")
            q = model.probs(scores, text.how)
            token = model.sample(q, text.sampled)
            drafts.append(Draft(token, q if raw == text.how else model.probs(scores, raw), cursor))
            cursor = cursor.after(token)
        return drafts

    def _verify(self, text: Decoded, draft: Sequence[Draft], noise: Array) -> list[Step]:
        """Accept what rejection sampling accepts, and add a token: the residual's, or the target's behind them all."""
        steps: list[Step] = []
        how = text.how._replace(temperature=0.0) if self.fault == "temperature" else text.how
        for drafted in draft:
            logits = model.target(drafted.cursor) + noise[len(steps)]
            scores = self._scores(text, drafted.cursor, logits, self.fault == "schema")
            p = model.probs(scores, how)
            if text.sampled.random() * drafted.q[drafted.token] >= p[drafted.token]:
                self._count(draft, len(steps))
                kept = [Step(drafted.token, scores)] if self.fault == "rejected_draft" else []
                residual = np.maximum(p - drafted.q, 0.0)
                token = model.sample(residual if residual.any() else p, text.sampled)
                return [*steps, *kept, Step(token, scores)]
            steps.append(Step(drafted.token, scores))
        self._count(draft, len(steps))
        cursor = draft[-1].cursor.after(draft[-1].token) if draft else text.cursor
        logits = model.draft(cursor) if draft and self.fault == "draft_bonus" else model.target(cursor)
        scores = self._scores(text, cursor, logits + noise[len(steps)])
        return [*steps, Step(model.sample(model.probs(scores, text.how), text.sampled), scores)]

    def _mixed_up(self, text: Decoded, noise: Array) -> list[Step]:
        """Return the token of another request that a pass commits by mistake, mostly none."""
        other = None
        if self.fault == "leak" and text.server.random() < OFTEN:
            other = next((other for other in self.running if other is not text), None)
        elif self.fault == "cancelled" and text.cursor.length and self.orphans:
            other = self.orphans.pop()
        if other is None:
            return []
        if self.fault == "leak":
            text.cursor = other.cursor
        scores = self._scores(text, other.cursor, model.target(other.cursor) + noise[0])
        return [Step(model.sample(model.probs(scores, text.how), text.sampled), scores)]

    def _commit(self, text: Decoded, tokens: Sequence[int]) -> None:
        counts = text.cursor.counts
        for token in tokens:
            text.cursor = text.cursor.after(token)
        if self.fault == "penalty" and counts is not None:
            counts = counts.copy()
            counts[tokens[-1]] += 1
            text.cursor = text.cursor._replace(counts=counts)

    def _count(self, draft: Sequence[Draft], accepted: int) -> None:
        if draft:
            with self.lock:
                self.counts["passes"] += 1
                self.counts["accepted"] += accepted
                self.counts.update(f"depth{depth}" for depth in range(accepted))

    def start(
        self,
        prompt: Sequence[int],
        how: Sampling,
        penalties: tuple[float, float],
        seed: int | None,
        grammar: Grammar | None,
    ) -> Decoded:
        """Return a text to be written after a prompt; it runs until `finish`."""
        first, second, third = (0, 0, 0, *prompt)[-3:]
        counts = np.zeros(SIZE) if any(penalties) else None
        with self.lock:
            cursor = Cursor(self.prefill(prompt), (first, second, third), 0, counts, grammar)
            own = self.seeds.integers(2**63)
            text = Decoded(cursor, how, penalties, own if seed is None or self.fault == "seed" else seed)
            text.server = np.random.default_rng(self.seeds.integers(2**63))
            self.running.append(text)
        return text

    def finish(self, text: Decoded, cancelled: bool) -> None:
        """Take a text out of those that run."""
        with self.lock:
            self.running.remove(text)
            self.counts["finished"] += 1
            if cancelled and self.running:
                self.orphans.append(text)
