"""Checks of rotary positions and of the context length in config.json against those of the training."""

from heads.common.rope import Rope, positions_of
from heads.common.target_config import UNBOUNDED
from heads.formats.published.plan import PLAIN
from heads.formats.store import CONFIG
from train.release.doctor.examined import OWN, Against, Examined
from train.release.doctor.finding import Findings, ok, unknown, wrong

ROTATED = ("eagle3", "eagle", "dflash", "mimo")
LENGTH = "max_position_embeddings"
SILENT_LENGTH = 2048  # the default of transformers for a Llama
# NVIDIA modelopt 0.47 writes it when it exports a head that was trained without (eagle_export_rope_scaling).
MODELOPT = {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 2048}


def effective(head: Examined) -> Rope | None:
    """Return the positions that the head runs with, None where it has none; refuse values that cannot be read."""
    if head.form == OWN:
        return positions_of(head.part("head"))
    return (positions_of(head.layer) or PLAIN) if head.form in ROTATED else None


def theta(head: Examined, against: Against) -> Findings:
    """Whether the positions are the same to every engine, and those of the training where that is recorded."""
    declared = effective(head)
    if declared is None or head.form == OWN:
        yield ok("none" if declared is None else f"{shown(declared)}, as it was trained")
        return
    older = positions_of({key: value for key, value in head.layer.items() if key != "rope_parameters"})
    recorded = positions_of(head.trained)
    if older not in (None, declared):
        right = recorded or against.rope
        yield wrong(
            f"rope_parameters says {shown(declared)} and rope_theta with rope_scaling {shown(older)}",
            "engines on transformers 5 take the one, older SGLang and TensorRT-LLM the other: in one of them attention "
            "is turned by wrong angles, and acceptance falls with the distance",
            f"set both to what it was trained with{'' if right is None else f', {shown(right)} by all that is known'}",
        )
    elif recorded not in (None, declared):
        assert recorded is not None
        yield wrong(
            f"{CONFIG} says {shown(declared)}, the training's config.yaml {shown(recorded)}",
            "attention is turned by other angles than in training: acceptance falls with the distance, no error",
            f"set {remedy(recorded)} in {CONFIG}",
        )
    elif recorded is not None or against.rope in (None, declared):
        yield ok(f"{shown(declared)}, {'as the target has it' if recorded is None else 'as it was trained'}")
    else:
        assert against.rope is not None
        added = against.rope.scaling is None and declared.scaling == MODELOPT
        why = "NVIDIA modelopt adds this scaling to heads that were trained without it" if added else "right only if it"
        why += ": τ with and without it is below" if added else " was trained so"
        yield unknown(f"{shown(declared)} where the target has {shown(against.rope)}: {why}")


def remedy(rope: Rope) -> str:
    """Return the keys and values of these positions."""
    scaling = "null" if rope.scaling is None else str(rope.scaling).replace("'", '"')
    return f'"rope_theta": {rope.theta:g} and "rope_scaling": {scaling}'


def shown(rope: Rope) -> str:
    """Return positions for reading."""
    scaling = "" if rope.scaling is None else f" scaled by {rope.scaling}"
    return f"theta {rope.theta:g}{scaling}" + ("" if rope.share == 1 else f" over {rope.share:g} of the width")


def length(head: Examined, against: Against) -> Findings:
    """Whether the head's context is as long as the target's."""
    if head.form not in ROTATED:
        yield ok("no limit of its own")
        return
    declared, context = head.layer.get(LENGTH), against.context
    if context == UNBOUNDED:
        yield unknown("the target does not say how long a text it reads")
        return
    limit = declared if isinstance(declared, int) else SILENT_LENGTH
    if limit < context:
        stated = f"is {declared}" if isinstance(declared, int) else f"is missing, which stands for {limit}"
        yield wrong(
            f"{LENGTH} {stated}, the target reads {context} tokens",
            f"older vLLM caps the context that it serves at {limit} or gathers out of bounds beyond it (0.32 raises "
            "the length, but for scalings that depend on it), SGLang crashes or slows down there",
            f'set "{LENGTH}": {context} in {CONFIG}',
        )
    else:
        yield ok(f"{limit} tokens, the target reads {context}")
