"""Ranges of numbers and choices of names in configurations, stated with their types and checked by `typed`."""

from typing import Annotated, Any, NamedTuple


class Within(NamedTuple):
    """A range from `least` to `most`; `above` and `below` exclude the ends."""

    least: int | float
    most: int | float
    above: bool = False
    below: bool = False

    def remedy(self, value: Any) -> str | None:
        """Return the remedy for a value outside the range, None for a value inside."""
        if value < self.least or (self.above and value == self.least):
            return f"give a number above {self.least}" if self.above else f"give {self.least} or more"
        if value > self.most or (self.below and value == self.most):
            return f"give a number below {self.most}" if self.below else f"give {self.most} or less"
        return None


class OneOf(NamedTuple):
    """A choice among names."""

    names: tuple[str, ...]

    def remedy(self, value: Any) -> str | None:
        """Return the remedy for an unknown name, None for one of `names`."""
        return None if value in self.names else f"choose {', '.join(self.names)}"


SEVERAL = OneOf(())  # marks a list for which a single value may also be given; the list is not empty
MACHINE = Within(-(2**63), 2**63 - 1)  # the default range of a number
LARGEST = 2**31 - 1  # no tensor dimension of ours is larger

LmHead = Annotated[str, OneOf(("shared", "own"))]  # the target's lm_head, or one of the head's own
Count = Annotated[int, Within(1, LARGEST)]
Number = Annotated[int, Within(0, LARGEST)]
Parts = Annotated[int, Within(1, 256)]  # layers, heads or depths of a draft head
Width = Annotated[int, Within(1, 1 << 20)]  # a dimension of a head's weights
NewTokens = Annotated[int, Within(2, LARGEST)]  # at least two: the first token comes from the prefill, before any draft
RowLength = Annotated[int, Within(2, 1 << 24)]  # tokens
Amount = Annotated[float, Within(0, MACHINE.most)]
Positive = Annotated[float, Within(0, MACHINE.most, above=True)]
Fraction = Annotated[float, Within(0, 1)]
Decay = Annotated[float, Within(0, 1, below=True)]
