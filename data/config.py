"""The configuration of the training data, whose values are in conf/data/."""

from dataclasses import dataclass
from typing import Annotated, Any

from heads.common.ranges import Count, Number, OneOf, RowLength


@dataclass(frozen=True)
class DataConfig:
    """The documents to train on.

    Attributes:
        path: one source or a list of them; each a local file (.json, .jsonl, .txt, .parquet; also .gz, .xz), a folder
            of such files, a glob, or a Hub data set, `name` or `name:config`.
        weights: of a mixture, one a source: the probability that the next record comes from it, up to a common factor.
            The mixture ends where a source does. null: all of one source after all of the other.
        seed: of the mixture's order.
        streaming: read Hub data sets without downloading them, and no source further than `limit` needs.
        split: the Hub data set's split, and the files of a folder that are named after it.
        length: tokens of a packed row.
        limit: samples at most; None takes all.
        prompts: a file or Hub data set of held-out evaluation prompts; empty takes them from the end of `path`.
        held_out: how many records at the end of `path` are then kept away from training.
        max_tokens: tokens of a sample at most. A longer text is cut into several samples; of a longer chat the rest is
            dropped.
        min_tokens: tokens of a sample at least; shorter ones are dropped.
        dedup: drop records that equal an earlier or a held-out one but for case and white space.
        contamination: drop records that share so many words in a row with an evaluation prompt; None: none.
        cache: the folder of tokenised samples; None: every process tokenises them again.
        turns: which of a chat's answers are trained: `all`, or those to the `last` user message.
        reasoning: `keep` it as the template renders it, or `cut` it from the answers.
        on_bad: `fail` at a chat without a trainable answer, or `drop` and count it.
    """

    path: Any
    weights: list[float] | None
    seed: Number
    streaming: bool
    split: str
    length: RowLength
    limit: Count | None
    prompts: str
    held_out: Number
    max_tokens: RowLength
    min_tokens: int
    dedup: bool
    contamination: Count | None
    cache: str | None
    turns: Annotated[str, OneOf(("all", "last"))]
    reasoning: Annotated[str, OneOf(("keep", "cut"))]
    on_bad: Annotated[str, OneOf(("fail", "drop"))]

    def __post_init__(self) -> None:
        """Refuse sizes that leave nothing to train on, and invalid mixtures."""
        if not self.paths or not all(isinstance(path, str) and path for path in self.paths):
            raise ValueError(f"data.path={self.path}: give a file, a folder, a glob, a Hub data set, or a list of them")
        weights, count = self.weights, len(self.paths)
        if weights is not None and not (len(weights) == count and all(weight > 0 for weight in weights)):
            raise ValueError(
                f"data.weights={weights}: give {count} positive numbers, one a source of data.path, or null"
            )
        if self.streaming and self.limit is None:
            raise ValueError("data.streaming=true reads on without an end: set data.limit to the samples that you want")
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"data.min_tokens={self.min_tokens}: must be between 1 and data.max_tokens")

    @property
    def paths(self) -> list[Any]:
        """The sources' names."""
        return list(self.path) if isinstance(self.path, list | tuple) else [self.path]

    @property
    def named(self) -> str:
        """The sources' names in messages."""
        return ", ".join(self.paths)
