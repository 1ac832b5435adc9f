"""The configuration of the training data, whose values are in conf/data/."""

from dataclasses import dataclass
from typing import Annotated, Any

from heads.common.typed import Count, Json, Number, OneOf, RowLength


@dataclass(frozen=True)
class DataConfig:
    """The training data; conf/data/default.yaml explains the keys."""

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
    turns: Annotated[str, OneOf(("all", "last", "text"))]
    reasoning: Annotated[str, OneOf(("keep", "cut"))]
    on_bad: Annotated[str, OneOf(("fail", "drop"))]
    where: Json | None

    def __post_init__(self) -> None:
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
