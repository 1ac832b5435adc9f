"""The types of conf/eval.yaml, and the checks of its values; the YAML explains the keys."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any

from eval.measures.results import LIVE, TEACHER_FORCED, TIERS
from heads.common.ranges import Count, NewTokens, Number, OneOf, Within
from heads.common.typed import from_yaml
from inference.request import RequestConfig
from inference.target.config import DTYPES
from inference.verification.verify import is_lossy

OWN, RECORDED = TEXTS = ("own", "recorded")
TURNS = ("first", "all")


@dataclass(frozen=True)
class TunerConfig:
    """The tuner's grid: depths, children and budgets of trees; and how many steps of every tree are timed."""

    depths: list[Count]
    top_k: list[Count]
    nodes: list[Count]
    samples: Count

    def __post_init__(self) -> None:
        """Refuse empty lists."""
        for key in ("depths", "top_k", "nodes"):
            if not getattr(self, key):
                raise ValueError(f"tuner.{key} is empty: give at least one number")

    def within(self, context: int) -> "TunerConfig":
        """Return the configuration with only the trees that fit into a target's context."""
        return replace(self, nodes=[nodes for nodes in self.nodes if nodes < context] or [1])


@dataclass(frozen=True)
class EngineConfig:
    """Engine settings: whether verification passes and drafting are compiled, or only drafting."""

    compile: bool
    compile_drafts: bool

    @property
    def label(self) -> str:
        """The engine's name in reports."""
        return "compiled" if self.compile else "eager, drafts compiled" if self.compile_drafts else "eager"


@dataclass(frozen=True)
class DraftersConfig:
    """The drafters to measure, by name, each with the options of a file of conf/drafter/."""

    drafter: dict[str, Any]
    run: Any  # a run's folder, a list of them, or None
    compare: list[str]
    tree: dict[str, Any]

    def runs(self) -> list[str]:
        """Return the folders of `run`."""
        return list(listed(self.run))


@dataclass(frozen=True)
class Selection:
    """The selection of a workload's prompts."""

    prompts: Count
    warmup: Number
    truncate: bool
    turns: Annotated[str, OneOf(TURNS)]
    balanced: bool


@dataclass(frozen=True)
class Conditions:
    """The conditions of decoding: every temperature with every batch size and request rate."""

    temperature: Any  # a number or a list of them
    batch_size: Any  # likewise
    request_rate: Any  # a number, None, or a list of them

    def temperatures(self) -> list[float]:
        """Return the temperatures as a list."""
        temperatures = items_of("temperature", self.temperature, is_number, "give a number, or a list of them")
        return [float(temperature) for temperature in temperatures]

    def batch_sizes(self) -> list[int]:
        """Return the batch sizes as a list."""

        def counts(size: Any) -> bool:
            return is_number(size) and size >= 1 and size == int(size)

        sizes = items_of("batch_size", self.batch_size, counts, "give 1 or more, whole numbers")
        return [int(size) for size in sizes]

    def request_rates(self) -> list[float | None]:
        """Return the request rates as a list; None if requests do not arrive at a rate."""

        def is_rate(rate: Any) -> bool:
            return rate is None or (is_number(rate) and 0 < rate < math.inf)

        remedy = "give requests per second, a number above 0, or null, or a list"
        rates = items_of("request_rate", self.request_rate, is_rate, remedy)
        return [None if rate is None else float(rate) for rate in rates]

    def conditions(self) -> Iterator[tuple[float, int, float | None]]:
        """Yield every temperature with every batch size and request rate."""
        return product(self.temperatures(), self.batch_sizes(), self.request_rates())


@dataclass(frozen=True)
class DecodingConfig(Conditions, RequestConfig):
    """Decoding settings of the prompts."""

    max_new_tokens: NewTokens
    seed: Number

    @property
    def can_be_teacher_forced(self) -> bool:
        """Whether the target's next-token probs depend only on the tokens before, as teacher forcing assumes."""
        return self.repetition_penalty == 1 and self.min_new_tokens == 0


@dataclass(frozen=True)
class TuneConfig(DraftersConfig, DecodingConfig):
    """A tuning of a run's head: the trees to try, and how they are timed."""

    engine: EngineConfig
    repeats: Count
    tuner: TunerConfig


@dataclass(frozen=True)
class EvalConfig(TuneConfig, Selection):
    """An evaluation: conf/eval.yaml, with all keys at one level; a component takes the base class that it needs."""

    workload: Any  # a name, a list of them, or None
    out: str | None
    model: dict[str, Any]
    dtype: Annotated[str, OneOf(("auto", *DTYPES))]
    gate_dtype: Annotated[str, OneOf(tuple(DTYPES))]
    gate_tv: Annotated[
        float, Within(0, 0.25, above=True, below=True)
    ]  # the negative control's total variation is at most p (1 - p)
    hf: bool
    tier: Any  # one of TIERS or a list of them
    text: Annotated[str, OneOf(TEXTS)]
    tune: bool

    def __post_init__(self) -> None:
        """Refuse values out of range, or contradictory ones."""
        if not self.drafter:
            raise ValueError("drafter is empty: name at least one drafter, or plain")
        for key, kind in (("run", "a run's folder"), ("workload", "a name, a file or a Hub data set")):
            if not all(isinstance(name, str) for name in listed(getattr(self, key))):
                raise ValueError(f"{key} is {getattr(self, key)!r}: give {kind}, or a list of them")
        for temperature in self.temperatures():
            self.settings(temperature)
        self.batch_sizes()
        self.request_rates()
        tiers = listed(self.tier)
        if not tiers or not set(tiers) <= set(TIERS) or len(set(tiers)) < len(tiers):
            raise ValueError(f"tier is {self.tier!r}: choose {', '.join(TIERS)}, or a list of them, each once")
        if tiers == [LIVE] and self.text == RECORDED:
            raise ValueError("text=recorded is for teacher forcing: add teacher_forced to tier=live")
        if LIVE not in tiers and (others := [name for name in self.drafter if name != "head"]):
            raise ValueError(
                f"tier is {TEACHER_FORCED}, which takes drafter=head: leave out {', '.join(others)}, or add live"
            )
        if TEACHER_FORCED in tiers and LIVE not in tiers and not self.can_be_teacher_forced:
            raise ValueError(
                "tier=teacher_forced takes the target's probs as they are: leave repetition_penalty=1 and "
                "min_new_tokens=0, or choose tier=live"
            )
        if self.tune:
            self._check_tune()

    def _check_tune(self) -> None:
        if list(self.drafter) != ["head"]:
            raise ValueError(
                f"drafter is {', '.join(self.drafter)}: tune=true finds the tree of a head, set drafter=head"
            )
        if self.engine.compile_drafts:
            raise ValueError("tune=true times the parts of drafts as they are: leave engine.compile_drafts=false")
        if len(self.runs()) != 1 or self.compare:
            raise ValueError("tune=true takes the head of one run: give run=outputs/NAME, and no compare")
        if self.temperatures() != [0.0] or self.repetition_penalty != 1 or is_lossy(self.rule):
            raise ValueError(
                "tune=true replays greedy text: leave temperature=0, repetition_penalty=1 and a rule that is not lossy"
            )
        if self.request_rate is not None:
            raise ValueError(f"request_rate is {self.request_rate!r}: tune=true times full batches, leave it null")
        if self.min_new_tokens:
            raise ValueError(f"min_new_tokens is {self.min_new_tokens}: tune=true lets answers end where they do")

    def tiers(self) -> list[str]:
        """Return the configured tiers, without those that cannot be measured."""
        return [tier for tier in listed(self.tier) if tier != TEACHER_FORCED or self.can_be_teacher_forced]


def eval_config(**values: Any) -> EvalConfig:
    """Return conf/eval.yaml with these values replaced, for callers without Hydra."""
    return from_yaml(EvalConfig, "eval", **{"drafter": {"head": {}}, **values})


def items_of(key: str, value: Any, right: Callable[[Any], bool], remedy: str) -> list[Any]:
    """Return a value or a list of values as a list; refuse an empty list and wrong items."""
    items = value if isinstance(value, list) else [value]
    if not items or not all(map(right, items)):
        raise ValueError(f"{key} is {value!r}: {remedy}")
    return items


def is_number(value: Any) -> bool:
    """Whether a value is a number, not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def listed(value: Any) -> list[Any]:
    """Return a list as it is, a single value as a list of one, and None as an empty one."""
    return value if isinstance(value, list) else [] if value is None else [value]
