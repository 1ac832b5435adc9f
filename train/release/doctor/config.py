"""The doctor's part of conf/publish.yaml."""

from dataclasses import dataclass, fields

from omegaconf import DictConfig, OmegaConf

from heads.formats.published.export import assert_known


@dataclass(frozen=True)
class CheckupConfig:
    """The measurement of acceptance.

    Attributes:
        workload: prompts as eval/run.py takes them; None: the run's own held-out ones, else the bundled ones.
        prompts: how many of them.
        max_new_tokens: of each answer, at most; a report's own limit is kept where it is lower.
        depth: of the chain, where no report says which tree was measured.
        dtype: of the target and the head; auto: the fast one of the device.
        measure: whether to load the target's layers at all.
    """

    workload: str | None
    prompts: int
    max_new_tokens: int
    depth: int
    dtype: str
    measure: bool

    def __post_init__(self) -> None:
        for key in ("prompts", "max_new_tokens", "depth"):
            if getattr(self, key) < 1:
                raise ValueError(f"checkup.{key} is {getattr(self, key)}: give 1 or more")


@dataclass(frozen=True)
class DoctorConfig:
    """The keys of conf/publish.yaml that the doctor reads: head, target, and the engine to check for (None: all)."""

    doctor: str
    target: str | None
    format: str | None
    checkup: CheckupConfig

    def __post_init__(self) -> None:
        if self.format is not None:
            assert_known(self.format)


ALONE = ("doctor", "checkup")  # keys that publishing does not read


def part(cfg: DictConfig) -> DictConfig:
    """Return the keys of conf/publish.yaml that the doctor reads."""
    selected: DictConfig = OmegaConf.masked_copy(cfg, [field.name for field in fields(DoctorConfig)])
    return selected


def other_part(cfg: DictConfig) -> DictConfig:
    """Return the keys of conf/publish.yaml that publishing reads."""
    selected: DictConfig = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in ALONE])
    return selected
