"""The types of conf/eval.yaml, and what a value may be."""

import math
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import OmegaConf

from data.answers.client import check_url
from eval.measures.results import LIVE, REPLAY, TEACHER_FORCED, TIERS
from heads.common.ranges import Count, NewTokens, Number
from heads.common.resolvers import ROOT
from heads.common.typed import typed
from inference.decode import Settings
from inference.target.config import DTYPES
from inference.verification.sample import Sampling
from inference.verification.verify import check_rule, is_lossy

AUTO, OWN, RECORDED = TEXTS = ("auto", "own", "recorded")
TURNS = ("first", "all")
# What an endpoint decides itself, or cannot be asked for, and the value that asks for nothing.
NEUTRAL: dict[str, Any] = {
    "run": None, "compare": [], "tune": False, "budget": None, "request_rate": None, "truncate": False,
    "rule": "auto", "lossy": False, "dtype": "auto",
}  # fmt: skip


@dataclass(frozen=True)
class ClientConfig:
    """How a served endpoint is asked.

    Attributes:
        model: the name that it serves the target by; None takes the only one there is.
        chat: ask chats as chats; otherwise the user's words as a text to go on with, for a model without a template.
        timeout: seconds for one reply, to its last byte.
        patience: seconds that its metrics may lag behind its answers.
        api_key_env: the environment variable with the key; unset, none is sent.
        extra: further fields of every request.
    """

    model: str | None
    chat: bool
    timeout: float
    patience: float
    api_key_env: str
    extra: dict[str, Any]

    def __post_init__(self) -> None:
        """Refuse times that ask for nothing."""
        if self.timeout <= 0 or self.patience < 0:
            raise ValueError(
                f"client.timeout={self.timeout:g}, client.patience={self.patience:g}: the first must be positive, the "
                "second not negative"
            )


@dataclass(frozen=True)
class TunerConfig:
    """What the tuner tries: depths, children and budgets of trees, contexts, and samples of every cost.

    `prompts` and `batch_sizes` are the report's: the texts along which it simulates them, and where it prices them.
    """

    depths: list[int]
    top_k: list[int]
    nodes: list[int]
    contexts: list[int]
    samples: int
    prompts: int
    batch_sizes: list[int]

    def __post_init__(self) -> None:
        """Check that there is something to try, and nothing below 1.

        Raises:
            ValueError: naming the key.
        """
        for key in ("depths", "top_k", "nodes", "batch_sizes"):
            if not getattr(self, key):
                raise ValueError(f"tuner.{key} is empty: give at least one number")
        for key in ("depths", "top_k", "nodes", "contexts", "samples", "prompts", "batch_sizes"):
            if any(value < 1 for value in listed(getattr(self, key))):
                raise ValueError(f"tuner.{key} is {getattr(self, key)}: give numbers of 1 or more")

    def within(self, context: int) -> "TunerConfig":
        """Return what a target can verify: trees that its context holds with their root."""
        return replace(self, nodes=[nodes for nodes in self.nodes if nodes < context] or [1])


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs: whether the target's verification passes are compiled."""

    compile: bool

    @property
    def label(self) -> str:
        """Return how reports call it."""
        return "compiled" if self.compile else "eager"


@dataclass(frozen=True)
class SourcesConfig:
    """What drafts.

    Attributes:
        drafter: the draft sources by name, each with its options: head, plain, or a file of conf/drafter/.
        run: a run's folder or a list of them; None for plain decoding alone.
        compare: further runs of the same target; or, without a run, reports to put side by side: what ends in .json.
        tree: what differs from each head's own tree.
        cold: whether sources that remember past requests have a second row, where they may not.
        budget: the depth below which no source drafts; None: each its own.
    """

    drafter: dict[str, Any]
    run: Any
    compare: list[str]
    tree: dict[str, Any]
    cold: bool
    budget: Count | None

    def runs(self) -> list[str]:
        """Return the folders of `run`."""
        runs: list[str] = listed(self.run)
        return runs

    def reports(self) -> list[str]:
        """Return the reports to put side by side: what of `compare` ends in .json."""
        return [each for each in self.compare if each.endswith(".json")]


@dataclass(frozen=True)
class PromptsConfig:
    """What is answered.

    Attributes:
        workload: a name, a file or a Hub data set, or a list of them; None for the run's own held-out prompts, else
            the model's `prompts`.
        prompts: how many of each.
        warmup: how many run before them.
        balanced: of all categories alike, rather than the first ones.
        turns: of dialogues, the first questions alone or all.
        truncate: shorten prompts that fill the context.
    """

    workload: Any
    prompts: Count
    warmup: Number
    balanced: bool
    turns: str
    truncate: bool


@dataclass(frozen=True)
class DecodingConfig:
    """How prompts are answered.

    Attributes:
        max_new_tokens, min_new_tokens: where every answer ends at the latest, and at the earliest.
        temperature: a number or a list of them; the gate runs at 0 whatever they are.
        top_k, top_p, min_p: filters at temperatures above 0.
        repetition_penalty: of what stands in the prompt or the answer, at temperature 0 too.
        rule: a key of `inference.verification.verify.RULES`, or auto for the one that accepts most of each draft.
        lossy: whether a rule may change the target's law; its rows then have no speedup.
        batch_size: sequences in one target pass: a number or a list of them.
        request_rate: requests a second, which come at random; None: each as another ends. Or a list of such.
        seed: of sampling, of arrivals, of the order of measurement and of the intervals.
    """

    max_new_tokens: NewTokens
    min_new_tokens: int
    temperature: Any
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    rule: str
    lossy: bool
    batch_size: Any
    request_rate: Any
    seed: Number

    @property
    def lawful(self) -> bool:
        """Whether the target's law after a token follows from the text alone, as teacher forcing takes it."""
        return self.repetition_penalty == 1 and self.min_new_tokens == 0

    def temperatures(self) -> list[float]:
        """Return the temperatures as a list."""
        return numbers("temperature", self.temperature)

    def batch_sizes(self) -> list[int]:
        """Return the batch sizes as a list."""
        sizes = numbers("batch_size", self.batch_size)
        if any(size < 1 or size != int(size) for size in sizes):
            raise ValueError(f"batch_size is {self.batch_size!r}: give 1 or more, whole numbers")
        return [int(size) for size in sizes]

    def request_rates(self) -> list[float | None]:
        """Return the request rates as a list; None where nobody waits for an arrival."""
        rates = [None] if self.request_rate is None else listed(self.request_rate)
        if not rates or not all(rate is None or _is_rate(rate) for rate in rates):
            raise ValueError(
                f"request_rate is {self.request_rate!r}: give requests a second, a number above 0, or null, or a list"
            )
        return [None if rate is None else float(rate) for rate in rates]

    def sampling(self, temperature: float) -> Sampling:
        """Return how tokens are drawn at a temperature."""
        return Sampling(temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)

    def settings(self, temperature: float, gaps: bool = False) -> Settings:
        """Return how prompts are decoded at a temperature, with the logit gap of every token if asked for."""
        return Settings(
            self.max_new_tokens,
            self.sampling(temperature),
            seed=self.seed,
            gaps=gaps,
            rule=self.rule,
            lossy=self.lossy,
            min_new_tokens=self.min_new_tokens,
        )


@dataclass(frozen=True)
class EndpointConfig:
    """A served model that is measured in place of run and drafter.

    Attributes:
        endpoint: its URL; None for none.
        baseline: the URL of the same model served without speculation.
        client: how both are asked.
    """

    endpoint: str | None
    baseline: str | None
    client: ClientConfig


@dataclass(frozen=True)
class EvalConfig(SourcesConfig, PromptsConfig, DecodingConfig, EndpointConfig):
    """One evaluation: conf/eval.yaml, whose keys stand side by side; a component takes the part that it needs.

    Attributes:
        out: folder of the report; None for the first run's.
        model: what differs from the first run's `model`; a None differs in nothing.
        dtype: in which speed is measured.
        gate_dtype: in which tokens are compared with plain decoding's.
        gate_tv: the total variation that the chi-square test above temperature 0 must reveal.
        engine: how both plain and speculative decoding run.
        repeats: timed passes over the prompts.
        hf: whether HF generate is timed too.
        tier: what is measured: `live`, `teacher_forced`, `replay`, or a list of them.
        text: along which the tiers without a clock measure: the target's `own` answers, or the workload's `recorded`
            ones; auto: recorded where no target is loaded, else own.
        tune: find the head's best tree at every batch size and write that of the smallest into its config, in place
            of a report.
        tuner: what is tried for that.
    """

    out: str | None
    model: dict[str, Any]
    dtype: str
    gate_dtype: str
    gate_tv: float
    engine: EngineConfig
    repeats: Count
    hf: bool
    tier: Any
    text: str
    tune: bool
    tuner: TunerConfig

    def __post_init__(self) -> None:
        """Check what the types cannot say.

        Raises:
            ValueError: naming the key, its value and the remedy.
        """
        if not self.drafter:
            raise ValueError("drafter is empty: name at least one draft source, or plain")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype is {self.dtype!r}: choose auto, {', '.join(DTYPES)}")
        if self.gate_dtype not in DTYPES:
            raise ValueError(f"gate_dtype is {self.gate_dtype!r}: choose {', '.join(DTYPES)}")
        if not all(isinstance(run, str) for run in listed(self.run)):
            raise ValueError(f"run is {self.run!r}: give a run's folder, or a list of them")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}: give 0 to max_new_tokens, which is {self.max_new_tokens}"
            )
        check_rule(self.rule, self.lossy)
        for temperature in self.temperatures():
            self.sampling(temperature)
        self.batch_sizes()
        self._check_compare()
        self.request_rates()
        self._check_protocol()
        self._check_tiers()
        check_endpoint(self)
        if self.tune:
            self._check_tune()

    def _check_compare(self) -> None:
        found = self.reports()
        if found and (self.run is not None or found != self.compare):
            raise ValueError(
                f"compare names the report {found[0]}, which is read and not measured: give reports alone, without "
                "run, or runs alone"
            )
        if len(found) == 1:
            raise ValueError(f"compare is {found[0]}: give two reports or more to put side by side")
        if repeated := sorted({file for file in found if found.count(file) > 1}):
            raise ValueError(f"compare names {', '.join(repeated)} twice: leave one out")

    def _check_protocol(self) -> None:
        if self.turns not in TURNS:
            raise ValueError(f"turns is {self.turns!r}: choose {' or '.join(TURNS)}")
        if not 0 < self.gate_tv < 1:
            raise ValueError(f"gate_tv is {self.gate_tv}: give a number between 0 and 1")
        if not all(isinstance(name, str) for name in listed(self.workload)):
            raise ValueError(f"workload is {self.workload!r}: give a name, a file or a Hub data set, or a list of them")

    def _check_tiers(self) -> None:
        asked = listed(self.tier)
        wrong = [tier for tier in asked if tier not in TIERS]
        if wrong or not asked or len(set(asked)) < len(asked):
            raise ValueError(f"tier is {self.tier!r}: choose {', '.join(TIERS)}, or a list of them, each once")
        if self.text not in TEXTS:
            raise ValueError(f"text is {self.text!r}: choose {', '.join(TEXTS)}")
        if asked == [LIVE] and self.text == RECORDED:
            raise ValueError("text=recorded is for tiers without a clock: add replay or teacher_forced to tier=live")
        if TEACHER_FORCED in asked and LIVE not in asked and not self.lawful:
            raise ValueError(
                "tier=teacher_forced takes the target's law as it is: leave repetition_penalty=1 and min_new_tokens=0, "
                "or choose tier=live"
            )

    def _check_tune(self) -> None:
        if list(self.drafter) != ["head"]:
            raise ValueError(
                f"drafter is {', '.join(self.drafter)}: tune=true finds the tree of a head, set drafter=head"
            )
        if len(self.runs()) != 1 or self.compare:
            raise ValueError("tune=true takes the head of one run: give run=outputs/NAME, and no compare")
        if self.temperatures() != [0.0] or self.repetition_penalty != 1 or is_lossy(self.rule):
            raise ValueError(
                "tune=true replays greedy text: leave temperature=0, repetition_penalty=1 and a rule that is not lossy"
            )
        if self.request_rate is not None:
            raise ValueError(f"request_rate is {self.request_rate!r}: tune=true times full batches, leave it null")
        if self.min_new_tokens:
            raise ValueError(f"min_new_tokens is {self.min_new_tokens}: tune=true lets answers end by themselves")

    def tiers(self) -> list[str]:
        """Return the tiers that are asked for and can be measured."""
        return [tier for tier in listed(self.tier) if tier != TEACHER_FORCED or self.lawful]

    @property
    def from_log(self) -> bool:
        """Whether the tiers without a clock measure along recorded answers."""
        return self.text == RECORDED or (self.text == AUTO and listed(self.tier) == [REPLAY])


def eval_config(**values: Any) -> EvalConfig:
    """Return conf/eval.yaml's evaluation with these values in place of its own, for callers without Hydra."""
    own = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "eval.yaml"))
    assert isinstance(own, dict)
    values = {"drafter": {"head": {}}} | values
    return typed(
        EvalConfig, {str(key): value for key, value in own.items() if key not in ("defaults", "hydra")} | values
    )


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def numbers(key: str, value: Any) -> list[float]:
    """Return a number or a list of numbers as a list.

    Raises:
        ValueError: it is neither, or empty.
    """
    found = listed(value)
    if not found or not all(isinstance(item, int | float) and not isinstance(item, bool) for item in found):
        raise ValueError(f"{key} is {value!r}: give a number, or a list of them")
    return [float(item) for item in found]


def check_endpoint(config: EvalConfig) -> None:
    """Refuse what an endpoint cannot be asked for.

    Raises:
        ValueError: naming the key and the remedy.
    """
    if config.endpoint is None:
        if config.baseline is not None:
            raise ValueError(f"baseline is {config.baseline}, but there is no endpoint: give endpoint= as well")
        return
    for key in ("endpoint", "baseline"):
        if (url := getattr(config, key)) is not None:
            check_url(key, url)
    if config.baseline is not None and _place(config.baseline) == _place(config.endpoint):
        raise ValueError("baseline is the endpoint itself: serve the model without speculation at another port")
    given = [key for key, neutral in NEUTRAL.items() if getattr(config, key) != neutral]
    given += ["model"] * any(value is not None for value in config.model.values())
    given += [] if list(config.drafter) == ["head"] else ["drafter"]
    if given:
        raise ValueError(f"{', '.join(given)}: an endpoint is measured as it is served; leave that out")
    if LIVE not in listed(config.tier):
        raise ValueError(f"tier is {config.tier!r}: an endpoint is measured live alone")
    if config.baseline is not None and 0.0 not in config.temperatures():
        raise ValueError(
            f"temperature is {config.temperature!r}: texts can be compared at 0 alone, so give temperature=[0,…] or "
            "no baseline"
        )


def _place(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def listed(value: Any) -> list[Any]:
    """Return a list as it is, a single value as a list of one, and None as an empty one."""
    return value if isinstance(value, list) else [] if value is None else [value]
