"""The types of conf/train.yaml; the values are in the YAML, and `run_config` joins the two.

Invariants are checked here; an error names the key, its value and the remedy in one line.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from omegaconf import DictConfig

from data.config import DataConfig
from data.features.source import FeaturesConfig
from eval.config import EngineConfig
from eval.measures.results import TIERS
from heads import ENGINES, head_config, with_head
from heads.base import HeadConfig
from heads.common.typed import (
    MACHINE,
    Amount,
    Count,
    Decay,
    Fraction,
    Json,
    NewTokens,
    Number,
    OneOf,
    Positive,
    Share,
    Within,
    typed,
)
from heads.common.untrusted import shown
from heads.mtp import Mtp
from inference.drafters.policy import TreeConfig
from inference.target.config import Dtype, ModelConfig
from inference.target.loading import AS_IT_IS
from inference.target.placement import AUTO, check_weights
from train.losses import ObjectiveConfig
from train.start import CHECKPOINT, LAST_LAYER, STARTS, AdaptConfig, peft_config
from train.trackers import TRACKERS

HERE = "here"  # name of the device that stands for this machine's
IGNORE = "ignore"  # value of `plan` that starts a run even if it does not fit
STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")


@dataclass(frozen=True)
class TrainerConfig:
    """The trainer: batches in tokens, intervals in steps; `min_lr` is relative to `lr`, shares to `steps`.

    Where `micro_tokens` is null, `train.build` finds it on the device.
    """

    steps: Count
    batch_tokens: Count
    micro_tokens: Count | None
    optimizer: Annotated[str, OneOf(("adamw", "muon"))]
    lr: Amount
    lr_width: Count
    min_lr: Fraction
    warmup: Fraction
    cooldown: Fraction
    betas: tuple[Decay, Decay]
    momentum: Decay
    weight_decay: Amount
    clip: Amount
    precision: Annotated[str, OneOf(("auto", "bf16", "fp32"))]
    recompute: bool
    compile: bool
    seed: Number
    eval_every: Count
    eval_prompts: Number
    eval_tokens: Count
    save_every: Count
    keep: Count
    ema: Decay
    patience: Count | None
    log_every: Count
    trackers: list[Annotated[str, OneOf(tuple(TRACKERS))]]
    peak_tflops: Positive | None
    on_bad_step: Annotated[str, OneOf(("skip", "stop"))]
    bad_steps: Count
    spike: Annotated[float, Within(1, MACHINE.most, above=True)] | None
    timeout: Count


@dataclass(frozen=True)
class SlurmConfig:
    """The SLURM job of the processes; conf/launcher/slurm.yaml explains the keys."""

    cluster: Annotated[str, OneOf(("slurm", "local"))]
    folder: str
    partition: str | None
    account: str | None
    minutes: Count
    gpus_per_node: Count | None
    cpus_per_task: Count
    mem_gb: Count | None
    setup: list[str]
    extra: Json


@dataclass(frozen=True)
class LauncherConfig:
    """The processes: `num_processes` on each of `num_nodes` nodes; this node is `machine_rank`.

    `strategy`, one of STRATEGIES, says how the processes share the head. With `slurm` they run as a SLURM job.
    `train.resolve` fills in null and auto.
    """

    num_processes: Count | None
    num_nodes: Count
    machine_rank: int
    main_process_ip: str | None
    main_process_port: Number | None
    strategy: Annotated[str, OneOf((AUTO, *STRATEGIES))]
    slurm: SlurmConfig | None

    def __post_init__(self) -> None:
        if not 0 <= self.machine_rank < self.num_nodes:
            raise ValueError(
                f"launcher.machine_rank is {self.machine_rank} of {self.num_nodes} nodes: count from 0 (NODE_RANK)"
            )

    @property
    def local(self) -> int:
        """Return the processes per node; valid after `resolve`."""
        assert self.num_processes is not None
        return self.num_processes

    @property
    def world(self) -> int:
        """Return the processes on all nodes; valid after `resolve`."""
        return self.local * self.num_nodes


@dataclass(frozen=True)
class EvalSettings:
    """The final evaluation; 0 prompts switch it off; `repeats` and `warmup` count timed and untimed passes."""

    prompts: Number
    max_new_tokens: NewTokens
    temperature: list[Amount]
    repeats: Count
    warmup: Number
    hf: bool
    dtype: Dtype
    gate_dtype: Dtype
    tier: list[Annotated[str, OneOf(TIERS)]]
    engine: EngineConfig


@dataclass(frozen=True)
class DeviceConfig:
    """A device and its assumed efficiency; conf/device/here.yaml explains the keys."""

    name: str
    match: str | None
    type: Annotated[str, OneOf(("cuda", "cpu"))] | None
    count: Count | None
    memory_gb: Positive | None
    host_gb: Positive | None
    tflops: Positive | None
    mfu: Share
    context_gb: Amount
    slack: Amount


@dataclass(frozen=True)
class JobConfig:
    """The configuration that the trainings of heads and of streams share."""

    name: str
    out: str
    resume: bool
    overwrite: bool
    model: ModelConfig
    data: DataConfig
    trainer: TrainerConfig
    launcher: LauncherConfig
    tree: TreeConfig

    def __post_init__(self) -> None:
        """Refuse a name outside the folder of runs, and batches smaller than a packed sequence."""
        if Path(self.name).is_absolute() or ".." in Path(self.name).parts:
            raise ValueError(
                f"name is {shown(self.name)}, a folder below outputs: give it without .., and another folder by out"
            )
        for key in ("batch_tokens", "micro_tokens"):
            tokens = getattr(self.trainer, key)
            if tokens is not None and tokens < self.data.length:
                raise ValueError(
                    f"trainer.{key} is {tokens}, less than a sequence of data.length={self.data.length}: raise it"
                )


@dataclass(frozen=True)
class RunConfig(JobConfig):
    """A training run: the type of conf/train.yaml.

    `head` is the Config of the head that `head.name` chooses; it, `peft`, `objective`, `data`, `features` and `tree`
    belong to the modules that use them. `init` may name a head to start from, whose Config then replaces `head`. With
    init=checkpoint, `base` is the model whose checkpoint holds the MTP module.
    """

    plan: Any
    init: str | None
    base: str | None
    engine: Annotated[str, OneOf(tuple(ENGINES))] | None
    compare: list[str]
    workload: str | None
    head: HeadConfig
    peft: AdaptConfig
    objective: ObjectiveConfig
    features: FeaturesConfig
    device: DeviceConfig
    eval: EvalSettings

    @property
    def sequences_per_step(self) -> int:
        """Return the packed sequences per step, over all processes."""
        return self.trainer.batch_tokens // self.data.length

    @property
    def reads_target(self) -> bool:
        """Return whether the run needs the target's layers: for features, decoding, initial or changed weights."""
        # init=auto starts head=mtp from the last layer, whether or not features are stored.
        starts = self.init in (LAST_LAYER, CHECKPOINT) or (self.init == AUTO and isinstance(self.head, Mtp.Config))
        decodes = self.trainer.eval_prompts or self.objective.on_policy.prompts
        return starts or self.features.mode == "live" or bool(decodes) or not self.model.as_saved

    @property
    def alone_on_cpu(self) -> bool:
        """Return whether the run is a single process on a CPU, for which there is nothing to choose."""
        return self.launcher.world == 1 and self.device.type == "cpu"


def run_config(cfg: DictConfig) -> RunConfig:
    """Return the composed configuration as typed objects; refuse unknown keys, wrong types and broken invariants."""
    cfg = with_head(cfg)
    data = typed(DataConfig, cfg.data)  # first, since the trainer's batch depends on its length
    chosen = {"head": head_config(cfg.head), "peft": peft_config(cfg.peft)}  # a name in the values chooses the type
    return checked(typed(RunConfig, cfg, built_fields={"data": data, **chosen}))


def checked(run: RunConfig) -> RunConfig:
    """Return the run; refuse sections that contradict each other."""
    placed = run.model.placed
    objective = run.objective
    predicts = getattr(run.head, "confidence", False)
    if run.plan != IGNORE and not isinstance(run.plan, bool):
        raise ValueError(f"plan is {shown(run.plan)}: give true, false, or {IGNORE} to start a run that does not fit")
    if run.trainer.optimizer == "muon" and run.launcher.strategy.startswith("zero"):
        raise ValueError(
            f"trainer.optimizer=muon does not run under launcher.strategy={run.launcher.strategy}, which cuts matrices "
            "up into flat pieces: choose adamw with its rate, trainer.optimizer=adamw trainer.lr=3e-3, or "
            "launcher.strategy=fsdp2"
        )
    quantize, adapter = (None if value == AS_IT_IS else value for value in (run.model.quantize, run.model.adapter))
    check_weights(placed, quantize, adapter)
    if placed.needs_all_ranks and objective.on_policy.prompts:
        raise ValueError(
            f"model.placement={placed.kind} takes all processes for a pass, and in a rollout each decodes its own "
            "prompts: give objective.on_policy.prompts=0, or model.placement=replicate"
        )
    if (getattr(run.head, "candidates", None) is not None) != bool(objective.losses.get("candidates")):
        raise ValueError(
            "head.candidates and objective.losses.candidates belong together: give experiment=candidates and the "
            "kind of the head, or leave both out"
        )
    if run.init in STARTS:  # otherwise `init` names a head with its own configuration
        if predicts and not objective.losses.get("confidence"):
            raise ValueError(
                "head.confidence=true predicts each draft's acceptance, and no loss teaches it: give "
                "+objective.losses.confidence=1.0, or head.confidence=false"
            )
        for key, losses in (("losses", objective.losses), ("on_policy.losses", objective.on_policy.losses or {})):
            if not predicts and "confidence" in losses:
                raise ValueError(
                    f"objective.{key}.confidence: head={run.head.name} predicts no acceptance; give head=block with "
                    "head.confidence=true, or leave the loss out"
                )
    return run
