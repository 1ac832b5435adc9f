"""The types of conf/publish.yaml."""

import re
from dataclasses import dataclass

from heads.common.typed import Count, NewTokens, Number
from heads.formats.hub import REPO
from heads.formats.published.export import assert_known
from inference.target.config import NamedDtype

CHECKPOINT = "checkpoint"  # the format that copies the whole target
OPENVINO = "openvino"  # the format that optimum-intel converts
TEMPLATE = "chat_template_sha256"  # key in provenance.json and tokenizer_reference.json


@dataclass(frozen=True)
class PublishConfig:
    """What is published, where, and how it is verified; conf/publish.yaml explains the keys."""

    run: str
    repo: str
    private: bool
    license: str
    dry_run: bool
    out: str | None
    verify_prompts: Number
    verify_tokens: NewTokens
    tag: str | None
    format: str | None
    base: str | None
    target: str | None
    gguf: str | None
    dtype: NamedDtype
    draft_tokens: Count

    def __post_init__(self) -> None:
        if not REPO.fullmatch(self.repo):
            raise ValueError(f"repo is {self.repo!r}: give OWNER/NAME")
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
        if self.tag is not None and not re.fullmatch(r"\w[\w.-]*", self.tag):
            raise ValueError(f"tag is {self.tag!r}: give letters, digits, '.', '_' and '-', such as v1, or null")
