"""How other projects count the layers that a head reads, and the keys under which config.json has them.

A layer is here its output, from 0 (heads/base.py), as SGLang and SpecForge count within `eagle_config` and DFlash
in `target_layer_ids`. EAGLE, vLLM and speculators count hidden states, of which the embedding is the first.
"""

from collections.abc import Sequence

STATES = "eagle_aux_hidden_state_layer_ids"  # hidden states at the top level, outputs within `eagle_config`
BLOCK_STATES, BLOCK_OUTPUTS = "aux_hidden_state_layer_ids", "target_layer_ids"  # of a block head


def as_states(outputs: Sequence[int]) -> list[int]:
    """Return the hidden states, counted from the embedding, that are these layers' outputs."""
    return [i + 1 for i in outputs]


def as_outputs(states: Sequence[int]) -> list[int]:
    """Return the layers whose outputs these hidden states are; the embedding is -1."""
    return [i - 1 for i in states]
