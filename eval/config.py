"""The types of conf/eval.yaml, and the checks of its values; the YAML explains the keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

from eval.measures.results import LIVE, TEACHER_FORCED, TIERS
from heads.common.typed import SEVERAL, Amount, Count, Json, NewTokens, Number, OneOf, Positive, Within, from_yaml
from inference.request import RequestConfig
from inference.target.config import Dtype, NamedDtype
from inference.verification.rules import is_lossy

OWN, RECORDED = TEXTS = ("own", "recorded")
Turns = Annotated[str, OneOf(("first", "all"))]
Grid = Annotated[list[Count], SEVERAL]


@dataclass(frozen=True)
class TunerConfig:
    """The tuner's grid: depths, children and budgets of trees, and the number of timed steps per tree."""

    depths: Grid
    top_k: Grid
    nodes: Grid
    samples: Count


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

    drafter: Json
    run: Annotated[list[str], SEVERAL] | None  # folders of runs
    compare: list[str]
    tree: Json

    def runs(self) -> list[str]:
        """Return the folders of `run`."""
        return self.run or []


@dataclass(frozen=True)
class Selection:
    """Which prompts of a workload are measured."""

    prompts: Count
    warmup: Number
    truncate: bool
    turns: Turns
    balanced: bool


@dataclass(frozen=True)
class Conditions:
    """The conditions of decoding: every temperature with every batch size and request rate."""

    temperature: Annotated[list[Amount], SEVERAL]
    batch_size: Grid
    request_rate: Annotated[list[Positive | None], SEVERAL]  # None: a request starts when an earlier one has ended

    def conditions(self) -> Iterator[tuple[float, int, float | None]]:
        """Yield every temperature with every batch size and request rate."""
        return product(self.temperature, self.batch_size, self.request_rate)


@dataclass(frozen=True)
class DecodingConfig(Conditions, RequestConfig):
    """Decoding settings of the prompts."""

    max_new_tokens: NewTokens
    seed: Number

    @property
    def can_be_teacher_forced(self) -> bool:
        """Return whether next-token probs depend only on the preceding tokens, as teacher forcing assumes."""
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

    workload: Annotated[list[str], SEVERAL] | None
    out: str | None
    model: Json
    dtype: Dtype
    gate_dtype: NamedDtype
    # The negative control's total variation is at most p (1 - p).
    gate_tv: Annotated[float, Within(0, 0.25, above=True, below=True)]
    hf: bool
    tier: Annotated[list[Annotated[str, OneOf(TIERS)]], SEVERAL]
    text: Annotated[str, OneOf(TEXTS)]
    tune: bool

    def __post_init__(self) -> None:
        if not self.drafter:
            raise ValueError("drafter is empty: name at least one drafter, or plain")
        for temperature in self.temperature:
            self.params(temperature)
        tiers = self.tier
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
        if not self.tune:
            return
        if list(self.drafter) != ["head"]:
            raise ValueError(
                f"drafter is {', '.join(self.drafter)}: tune=true finds the tree of a head, set drafter=head"
            )
        if len(self.runs()) != 1 or self.compare:
            raise ValueError("tune=true takes the head of one run: give run=outputs/NAME, and no compare")
        greedy = self.temperature == [0.0] and self.repetition_penalty == 1 and not is_lossy(self.rule)
        if not greedy or self.min_new_tokens or self.request_rate != [None] or self.engine.compile_drafts:
            raise ValueError(
                "tune=true replays greedy text in full batches: leave temperature=0, repetition_penalty=1, "
                "min_new_tokens=0, request_rate=null, engine.compile_drafts=false and a rule that is not lossy"
            )

    def tiers(self) -> list[str]:
        """Return the configured tiers, except tiers that cannot be measured."""
        return [tier for tier in self.tier if tier != TEACHER_FORCED or self.can_be_teacher_forced]


def eval_config(**values: Any) -> EvalConfig:
    """Return conf/eval.yaml with these values replaced, for callers without Hydra."""
    return from_yaml(EvalConfig, "eval", **{"drafter": {"head": {}}, **values})
