"""The lengths at which a model's forward pass changes, as its configuration names them: windows, chunks, longrope."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import GenerationMixin, PreTrainedModel

APPLIED = "sliding_window"  # the one that `Target.attention_mask` applies
WINDOW = re.compile(r"window|chunk|local_attention")


def windows(model: PreTrainedModel, context: int) -> dict[str, int]:
    """Return the windows and chunks that sequences of up to `context` tokens outgrow, by their configuration's keys."""
    values: dict[str, Any] = vars(model.config.get_text_config())
    return {
        key: value for key, value in values.items() if WINDOW.search(key) and type(value) is int and 1 < value < context
    }


class Switch(NamedTuple):
    """Where longrope (arXiv 2402.13753) takes its long factors: in every pass that reaches beyond `length` tokens.

    So the text up to there comes of passes that end there. `renewed` says that the model's `generate` then computes all
    rows anew, under the long factors; else it goes on behind those of the short ones.
    """

    length: int
    renewed: bool

    def renews(self, prefix: int) -> bool:
        """Whether the pass behind so many cached rows computes them anew."""
        return self.renewed and prefix == self.length

    def room(self, prefix: int, room: int) -> int:
        """Return how much deeper than its root a pass behind `prefix` rows may reach, of `room` that there is."""
        if self.renews(prefix):
            return 0
        return min(room, self.length - 1 - prefix) if prefix < self.length else room

    def shared(self, prefixes: Sequence[int]) -> bool:
        """Whether sequences with so many cached rows may share a pass: all before the switch, or all behind it."""
        return max(prefixes) < self.length or min(prefixes) >= self.length + self.renewed


def switch_of(model: PreTrainedModel) -> Switch | None:
    """Return where a model's rope switches; None where it does not."""
    config: Any = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    each = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # some have one for a kind of layer
    lengths = [one["original_max_position_embeddings"] for one in each if one.get("rope_type") == "longrope"]
    if not lengths:
        return None
    kind: Any = type(model)
    own = kind.prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    return Switch(min(lengths), own and hasattr(config, "original_max_position_embeddings"))
