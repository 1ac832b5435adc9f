"""Which documents to train on, as conf/data/ has it."""

from dataclasses import dataclass

CHOICES = {"turns": ("all", "last"), "reasoning": ("keep", "cut"), "on_bad": ("fail", "drop")}


@dataclass(frozen=True)
class DataConfig:
    """Which documents to train on.

    Attributes:
        path: a local file (.json, .jsonl, .txt, .parquet; also .gz, .xz) or a Hub dataset, `name` or `name:config`.
        split: the Hub dataset's split; a file has but one.
        length: tokens of a packed row.
        limit: samples at most; None takes all.
        prompts: a file or Hub dataset of held-out evaluation prompts; empty takes them from the end of `path`.
        held_out: how many records at the end of `path` are then kept away from training.
        max_tokens: tokens of a sample at most. A longer text is cut into several samples; of a longer chat the rest is
            dropped.
        turns: which of a chat's answers are trained: `all`, or those to the `last` user message.
        reasoning: `keep` what the template renders of it, or `cut` it from the answers.
        on_bad: `fail` at a chat that no answer can be trained of, or `drop` and count it.
    """

    path: str
    split: str
    length: int
    limit: int | None
    prompts: str
    held_out: int
    max_tokens: int
    turns: str
    reasoning: str
    on_bad: str

    def __post_init__(self) -> None:
        """Refuse sizes that leave nothing to train on."""
        for name in ("length", "max_tokens"):
            if getattr(self, name) < 2:
                raise ValueError(f"data.{name}={getattr(self, name)}: must be at least 2 tokens")
        if self.held_out < 0 or (self.limit is not None and self.limit < 1):
            raise ValueError("data.held_out must not be negative, and data.limit must be positive or null")
        for name, values in CHOICES.items():
            if getattr(self, name) not in values:
                raise ValueError(f"data.{name}={getattr(self, name)}: must be {' or '.join(values)}")
