"""The types of conf/publish.yaml: what publishing reads of it, and what the doctor reads."""

import re
from dataclasses import dataclass
from typing import Annotated

from huggingface_hub.utils._validators import validate_repo_id

from data.answers.client import check_url
from heads.common.ranges import Count, NewTokens, Number, OneOf, Positive
from heads.formats.hub import REPO
from heads.formats.published.export import assert_known
from inference.target.config import DTYPES

CHECKPOINT = "checkpoint"  # the format of a whole target
TAG = re.compile(r"\w[\w.-]*(?<!\.lock)(?<!\.)")


@dataclass(frozen=True)
class PublishConfig:
    """Configure what is published, where, and how it is verified; conf/publish.yaml explains each key."""

    run: str
    repo: str
    private: bool
    license: str
    dry_run: bool
    out: str | None
    reverify: bool
    verify_prompts: Number
    verify_tokens: NewTokens
    tag: str | None
    format: str | None
    base: str | None
    target: str | None
    gguf: str | None
    dtype: Annotated[str, OneOf(tuple(DTYPES))]
    draft_tokens: Count

    def __post_init__(self) -> None:
        if not REPO.fullmatch(self.repo):
            raise ValueError(f"repo is {self.repo!r}: give OWNER/NAME")
        validate_repo_id(self.repo)  # the Hub's own rules, such as on length and doubled signs
        if self.format == CHECKPOINT:
            if self.out is None or not self.dry_run:
                raise ValueError(
                    "format=checkpoint writes a folder as large as the target's and uploads nothing: give out=FOLDER "
                    "and dry_run=true"
                )
        elif self.format is not None:
            assert_known(self.format)
        if self.base is not None and (self.format is not None or not REPO.fullmatch(self.base)):
            raise ValueError(
                f"base is {self.base!r}: give OWNER/NAME, the head on the Hub that this run adapted, and no format: "
                "engines read whole heads"
            )
        if (self.format == "gguf") != (self.gguf is not None):
            raise ValueError(
                "format=gguf and gguf=FILE go together: the head's file has the tokenizer of its target's GGUF file"
            )
        if self.tag is not None and (not TAG.fullmatch(self.tag) or ".." in self.tag or self.tag == "main"):
            raise ValueError(f"tag is {self.tag!r}: give letters, digits, '.', '_' and '-', such as v1, or null")


@dataclass(frozen=True)
class ServeConfig:
    """The running server whose head is replaced by the one that was written; conf/publish.yaml explains each key."""

    link: str | None
    command: str | None
    url: str
    start_s: Positive

    def __post_init__(self) -> None:
        check_url("serve.url", self.url)
        if (self.link is None) != (self.command is None):
            raise ValueError(
                "serve.link and serve.command go together: the link that the server loads its head from, and what "
                "starts it again"
            )


@dataclass(frozen=True)
class CheckupConfig:
    """The measurement of acceptance."""

    workload: str | None  # prompts as eval/run.py takes them; None: the run's own held-out ones, else the bundled ones
    prompts: Count
    max_new_tokens: Count  # of each answer, at most; a report's own limit is kept where it is lower
    depth: Count  # of the chain, where no report says which tree was measured
    dtype: str  # of the target and the head; auto: the fast one of the device
    measure: bool  # whether to load the target's layers at all


@dataclass(frozen=True)
class SiblingConfig:
    """Whether the target may be another checkpoint, of the same shape, than the one that the head was made for."""

    sibling: bool


@dataclass(frozen=True)
class DoctorConfig:
    """The keys of conf/publish.yaml that the doctor reads: head, target, and the engine to check for (None: all)."""

    doctor: str
    target: str | None
    format: str | None
    checkup: CheckupConfig
    model: SiblingConfig

    def __post_init__(self) -> None:
        if self.format is not None:
            assert_known(self.format)
