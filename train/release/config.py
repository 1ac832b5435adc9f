"""The type of conf/publish.yaml."""

import re
from dataclasses import dataclass

from huggingface_hub.utils._validators import validate_repo_id

from heads.formats.hub import REPO
from heads.formats.published.export import assert_known
from inference.target.config import DTYPES

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
    verify_prompts: int
    verify_tokens: int
    tag: str | None
    format: str | None
    target: str | None
    dtype: str
    draft_tokens: int

    def __post_init__(self) -> None:
        if not REPO.fullmatch(self.repo):
            raise ValueError(f"repo is {self.repo!r}: give OWNER/NAME")
        validate_repo_id(self.repo)  # the Hub's own rules, such as on length and doubled signs
        if self.format is not None:
            assert_known(self.format)
        if self.dtype not in DTYPES or self.draft_tokens < 1:
            names = ", ".join(DTYPES)
            raise ValueError(f"dtype is {self.dtype}, draft_tokens {self.draft_tokens}: give one of {names}; 1 or more")
        if self.verify_prompts < 0 or self.verify_tokens < 2:
            raise ValueError(
                f"verify_prompts is {self.verify_prompts}, verify_tokens {self.verify_tokens}: give at least 0 and 2"
            )
        if self.tag is not None and (not TAG.fullmatch(self.tag) or ".." in self.tag or self.tag == "main"):
            raise ValueError(f"tag is {self.tag!r}: give letters, digits, '.', '_' and '-', such as v1, or null")
