"""The types of conf/ops/doctor.yaml."""

from dataclasses import dataclass

from heads.common.ranges import Count
from heads.formats.published.export import assert_known


@dataclass(frozen=True)
class DoctorConfig:
    """The head (`run`), its target, and how its acceptance is measured; conf/ops/doctor.yaml explains each key."""

    run: str
    target: str | None
    format: str | None
    sibling: bool
    measure: bool
    workload: str | None
    prompts: Count
    max_new_tokens: Count
    depth: Count
    dtype: str

    def __post_init__(self) -> None:
        if self.format is not None:
            assert_known(self.format)
