"""Checks of rotary positions and of the context length in config.json against those of the training."""

from typing import Any

from heads.common.target_config import UNBOUNDED
from heads.formats.published.plan import THETA
from heads.formats.store import CONFIG
from heads.modules.rope import SCALINGS, Rope, scaling_of
from train.release.doctor.examined import OWN, Against, Examined
from train.release.doctor.finding import Findings, ok, unknown, wrong

ROTATED = ("eagle3", "eagle", "dflash", "mimo")
LENGTH = "max_position_embeddings"
SILENT_LENGTH = 2048  # the default of transformers for a Llama


def ropes(config: dict[str, Any]) -> dict[str, Rope]:
    """Return the rotary positions of a config.json by key: none, one, or two."""
    parameters, by_key = config.get("rope_parameters"), {}
    if isinstance(parameters, dict) and parameters.get("rope_theta") is not None:
        by_key["rope_parameters"] = Rope(float(parameters["rope_theta"]), scaling_of(parameters))
    scaling = config.get("rope_scaling")
    if config.get("rope_theta") is not None or isinstance(scaling, dict):
        theta = config.get("rope_theta") or (parameters or {}).get("rope_theta") or THETA
        by_key["rope_theta"] = Rope(float(theta), scaling_of(scaling if isinstance(scaling, dict) else {}))
    return by_key


def effective(head: Examined) -> Rope | None:
    """Return the positions that the head runs with, None where it has none or of a kind not known here."""
    if head.form == OWN:
        values = head.part("head")
        return Rope(values["rope_theta"], values.get("rope_scaling")) if "rope_theta" in values else None
    if head.form not in ROTATED:
        return None
    by_key = ropes(head.layer)
    rope = by_key.get("rope_theta") or by_key.get("rope_parameters") or Rope(THETA, None)
    return rope if supported(rope) else None


def supported(rope: Rope) -> bool:
    """Say whether a head here can run with these positions."""
    return rope.scaling is None or rope.scaling["rope_type"] in SCALINGS


def theta(head: Examined, against: Against) -> Findings:
    """Whether theta and scaling are unambiguous, and those of the training where that is recorded."""
    declared = effective(head)
    if head.form == OWN or head.form not in ROTATED:
        yield ok("none" if declared is None else f"{shown(declared)}, as it was trained")
        return
    by_key = ropes(head.layer)
    recorded = ropes(head.trained).get("rope_theta")
    if len(set(map(shown, by_key.values()))) > 1:
        right = recorded or against.rope
        yield wrong(
            " and ".join(f"{key} says {shown(rope)}" for key, rope in by_key.items()),
            "engines on transformers 5 take the one, older SGLang and TensorRT-LLM the other: in one of them attention "
            "is turned by wrong angles, and acceptance falls with the distance",
            f"set both to what it was trained with{'' if right is None else f', {shown(right)} by all that is known'}",
        )
    elif recorded is not None and shown(recorded) != shown(declared or Rope(THETA, None)):
        yield wrong(
            f"{CONFIG} says {shown(declared or Rope(THETA, None))}, the training's config.yaml {shown(recorded)}",
            "attention is turned by other angles than in training: acceptance falls with the distance, no error",
            f"set {remedy(recorded)} in {CONFIG}",
        )
    elif declared is None:
        yield unknown("rope_scaling is of a kind that heads here do not have")
    elif recorded is not None or against.rope is None or shown(declared) == shown(against.rope):
        yield ok(f"{shown(declared)}, {'as it was trained' if recorded is not None else 'as the target has it'}")
    else:
        yield unknown(f"{shown(declared)} where the target has {shown(against.rope)}: right only if it was trained so")


def remedy(rope: Rope) -> str:
    """Return the keys and values of these positions."""
    scaling = "null" if rope.scaling is None else str(rope.scaling).replace("'", '"')
    return f'"rope_theta": {rope.theta:g} and "rope_scaling": {scaling}'


def shown(rope: Rope) -> str:
    """Return positions for reading."""
    return f"theta {rope.theta:g}" + ("" if rope.scaling is None else f" scaled by {rope.scaling}")


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
