"""Checks of the layers that a head's config.json names: each engine reads its own key and counts in its own way.

hs[j] is the target's hidden state j, counted from the embedding: the output of layer j - 1. vLLM and speculators read
ids at the top level as hs[j]; SGLang reads them within `eagle_config` as hs[j + 1].
"""

from typing import Any

from heads.formats.layer_ids import BLOCK_OUTPUTS, BLOCK_STATES, STATES, as_outputs, as_states
from heads.formats.published.eagle3 import COUNTED_BY_FIRST
from heads.modules.fusion import EAGLE3_LAYERS, chosen_layers, default_layers
from train.release.doctor.examined import OWN, Against, Examined
from train.release.doctor.finding import Findings, wrong

WITHIN = f"eagle_config.{STATES}"
BLOCK = f"dflash_config.{BLOCK_OUTPUTS}"
SILENT = "it reads other layers than those it was trained on: acceptance falls, often to nothing, without an error"


def declared(head: Examined, against: Against) -> Findings:
    """Whether the ids are layers of the target, and the same ones under each key."""
    checks = {"eagle3": _eagle3, "dflash": _dflash, OWN: _own}
    if head.form in checks:
        yield from list(checks[head.form](head, against)) or _recorded(head, against)


def _recorded(head: Examined, against: Against) -> Findings:
    """Compare the ids with the layers that the training's own config.yaml names."""
    if "feature_layers" not in head.trained or head.form == OWN:
        return
    layers = head.trained["feature_layers"]
    count = EAGLE3_LAYERS if head.form == "eagle3" else _joined(head, against)
    right = sorted(chosen_layers(layers, count, against.layers))
    read = as_read(head) if head.form == "eagle3" else head.part("dflash_config")[BLOCK_OUTPUTS]
    if read is not None and read != right:
        yield wrong(
            f"engines read the outputs of layers {read}, and it was trained on {right} (config.yaml)",
            SILENT,
            set_to(head, right),
        )


def set_to(head: Examined, outputs: list[int]) -> str:
    """Return the remedy that makes engines read these layers."""
    if head.form == "eagle3":
        return f"set {STATES} to {as_states(outputs)} and {WITHIN} to {outputs}"
    return f"set {BLOCK if head.form == 'dflash' else 'head.feature_layers'} to {outputs}"


def as_read(head: Examined) -> list[int] | None:
    """Return the layers whose outputs the engines read, vLLM first, None where no ids name them."""
    top, nested = head.config.get(STATES), head.part("eagle_config").get(STATES)
    if head.form != "eagle3" or (top is None and nested is None):
        return None
    return as_outputs(top) if top is not None else list(nested or [])


def summary(head: Examined, _against: Against) -> str:
    """Return the layers that engines read."""
    if head.form not in ("eagle3", "dflash", OWN):
        return "reads the target's last state alone"
    if head.form == "eagle3":
        top, nested = head.config.get(STATES), head.part("eagle_config").get(STATES)
        return "the default three" if top is None and nested is None else f"{top} for vLLM, {nested} for SGLang"
    layers = head.part("dflash_config").get(BLOCK_OUTPUTS) or head.part("head").get("feature_layers")
    return f"outputs of layers {layers}" if layers else "the last state, or the default layers"


def _own(head: Examined, against: Against) -> Findings:
    layers = head.part("head").get("feature_layers")
    if layers is not None:
        yield from _in_range(layers, "head.feature_layers", 0, against.layers - 1, ordered=False)


def _eagle3(head: Examined, against: Against) -> Findings:
    top, nested = head.config.get(STATES), head.part("eagle_config").get(STATES)
    layers = against.layers
    default = as_states(default_layers(EAGLE3_LAYERS, layers))
    joined = _joined(head, against)
    both = [(top, STATES, 1), (nested, WITHIN, 0)]
    broken = [f for ids, key, first in both if ids is not None for f in _in_range(ids, key, first, layers - 2 + first)]
    yield from broken
    if broken:
        return
    if top is None and nested is None:
        if joined != EAGLE3_LAYERS or sorted(set(default)) != default or default[0] > layers - 1 or default[-1] < 1:
            yield wrong(
                f"{STATES} is missing, and fc.weight joins {joined} layers of a target of {layers}",
                f"every engine takes {default} for it, and {SILENT}, or stops at the shape of fc",
                f"set {STATES} to what it was trained on, counted from the embedding, and {WITHIN} one lower each",
            )
        return
    yield from _compare_keys(top, nested, default)
    ids: list[int] = top if top is not None else nested or []
    yield from _counted(head, ids, nested, joined)
    shifted = COUNTED_BY_FIRST & set(against.config.get("architectures") or [])
    if shifted and nested is not None and nested[0] != 1:
        yield wrong(
            f"{WITHIN} begins with {nested[0]}",
            f"SGLang counts those of {min(shifted)} one lower unless the first is 1: {SILENT}",
            "train on layers of which the first is 1, or serve it in vLLM: python train/publish.py format=vllm",
            "sglang",
        )


def _compare_keys(top: Any, nested: Any, default: list[int]) -> Findings:
    """Compare the ids of the two keys."""
    if top is None:
        if as_states(nested) != default:
            yield wrong(
                f"{STATES} is missing at the top level, {WITHIN} is {nested}",
                f"vLLM does not look there and takes {default}: {SILENT}",
                f"set {STATES} to {as_states(nested)}",
                "vllm", "speculators",
            )  # fmt: skip
    elif nested is None:
        if top != default:
            yield wrong(
                f"{WITHIN} is missing, {STATES} is {top}",
                f"SGLang looks there alone and takes the states {default}: {SILENT}",
                f"set {WITHIN} to {as_outputs(top)}",
                "sglang",
            )
    elif nested != as_outputs(top):
        yield wrong(
            f"{STATES} is {top}, {WITHIN} is {nested}: not the same layers",
            f"vLLM reads the states {top} and SGLang {as_states(nested)}; in one of them {SILENT}",
            f"set {WITHIN} to {as_outputs(top)} if {STATES} is right, else {STATES} to {as_states(nested)}",
        )


def _counted(head: Examined, ids: list[int], nested: Any, joined: int) -> Findings:
    """Compare the number of ids with the layers that fc joins and with config.json's count."""
    count = head.config.get("num_aux_hidden_states")
    if joined and len(ids) != joined:
        yield wrong(
            f"there are {len(ids)} ids and fc.weight joins {joined} layers",
            "every engine stops at the shape of fc, or reads too few columns",
            f"name {joined} layers, those that it was trained on",
        )
    elif count is not None and count != len(ids):
        yield wrong(
            f"num_aux_hidden_states is {count} and there are {len(ids)} ids",
            "vLLM and SGLang make fc of the wrong shape and stop",
            f"set num_aux_hidden_states to {len(ids)}",
            "vllm", "sglang",
        )  # fmt: skip
    elif count is None and len(ids) != EAGLE3_LAYERS and (nested is None or len(nested) != len(ids)):
        yield wrong(
            f"num_aux_hidden_states is missing and there are {len(ids)} ids",
            "vLLM does not count those at the top level, makes fc for three and stops at its shape",
            f"set num_aux_hidden_states to {len(ids)}",
            "vllm",
        )


def _dflash(head: Examined, against: Against) -> Findings:
    nested, flat = head.part("dflash_config").get(BLOCK_OUTPUTS), head.config.get(BLOCK_STATES)
    if nested is None:
        meant = as_outputs(flat) if isinstance(flat, list) else "the layers that it was trained on"
        yield wrong(
            f"{BLOCK} is missing",
            "SGLang looks there alone and stops",
            f"set {BLOCK} to {meant}",
            "sglang",
        )
        return
    broken = list(_in_range(nested, BLOCK, 0, against.layers - 2))
    yield from broken
    if broken:
        return
    joined = _joined(head, against)
    if joined and len(nested) != joined:
        yield wrong(
            f"{BLOCK} names {len(nested)} layers and fc.weight joins {joined}",
            "every engine stops at the shape of fc",
            f"name {joined} layers, those that it was trained on",
        )
    if flat is not None and flat != as_states(nested):
        yield wrong(
            f"{BLOCK_STATES} is {flat}, {BLOCK} is {nested}: not the same layers",
            f"speculators counts from the embedding, and {SILENT}",
            f"set {BLOCK_STATES} to {as_states(nested)}",
            "speculators", "vllm",
        )  # fmt: skip


def _in_range(ids: Any, key: str, first: int, last: int, *, ordered: bool = True) -> Findings:
    """Check that these are increasing numbers of layers."""
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        yield wrong(f"{key} is {ids!r}", "no engine reads it", f"set {key} to a list of layers")
    elif any(not first <= i <= last for i in ids):
        yield wrong(
            f"{key} is {ids}, and of this target {first} to {last} can be read",
            "engines stop, or never fill the state that is not there: no draft is accepted",
            f"set {key} to the layers that it was trained on, from {first} to {last}; is this its target?",
        )
    elif len(set(ids)) != len(ids) or (ordered and sorted(ids) != ids):
        yield wrong(
            f"{key} is {ids}, which does not increase",
            "engines sort the ids and drop repeated ones, and fc reads the layers in another order than it was trained",
            f"set {key} to {sorted(set(ids))}, and put the columns of fc.weight in the same order",
        )


def _joined(head: Examined, against: Against) -> int:
    """Return the number of layers that fc joins, 0 where it is missing."""
    fc = head.stripped.get("fc.weight")
    return 0 if fc is None or fc.ndim != 2 else fc.shape[1] // against.width
