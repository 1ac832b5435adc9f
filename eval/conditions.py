"""The conditions that an evaluation's numbers hold under: target, devices, settings, and what to compare with care."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import distributed

from eval.config import EvalConfig
from eval.inputs.runs import find_heads
from eval.inputs.workloads import Workload, prompt_counts
from eval.measures.machine import provenance
from eval.measures.results import TEACHER_FORCED
from eval.tuning.results import is_tuned
from heads.common.target_config import experts_of
from heads.formats.hub import made_for
from inference.target.target import Target


def remarks_of(config: EvalConfig, target: Target) -> list[str]:
    """Return warnings: a losslessness check in a coarse dtype, a sharded target, heads made for another target."""
    remarks = []
    if config.gate_dtype in ("bfloat16", "float16"):
        remarks.append(f"losslessness is checked in {config.gate_dtype}, in which more of the tokens are near ties")
    if target.placed.together:
        remarks.append(
            f"the target is sharded among {distributed.get_world_size()} processes, which all decode the same"
        )
    remarks += _half_tuned(config)
    for name, folder in find_heads([*config.runs(), *config.compare]).items() if target.sibling else ():
        saved = made_for(folder)
        if saved is not None and saved.fingerprint != target.spec.fingerprint:
            remarks.append(f"{name} was made for {saved} and is measured on {target.spec}")
    return remarks


def _half_tuned(config: EvalConfig) -> list[str]:
    """Return that the trees of some heads were tuned and those of others were not, where each has its own."""
    if "head" not in config.drafter or any(value is not None for value in config.tree.values()):
        return []
    heads = find_heads([*config.runs(), *config.compare])
    tuned = [name for name, folder in heads.items() if is_tuned(folder)]
    others = ", ".join(name for name in heads if name not in tuned)
    if not tuned or not others:
        return []
    return [f"the tree of {', '.join(tuned)} was tuned, that of {others} was not: tune it too, by tune=true"]


def described(target: Target) -> dict[str, Any]:
    """Return the metadata that identifies the target."""
    parameters = sum(parameter.numel() for parameter in target.model.parameters())
    spec = {key: value for key, value in asdict(target.spec).items() if key != "name"}
    facts = {"parameters": parameters, "context": target.context, "quantized": target.quantized}
    return {**spec, **facts, "experts": experts_of(target.config)}


def devices_of(target: Target) -> dict[str, int]:
    """Return the number of devices that hold the target as the report's `count`, where they are several."""
    here = {parameter.device for parameter in target.model.parameters() if parameter.device.type not in ("cpu", "meta")}
    count = max(len(here), 1) * (distributed.get_world_size() if target.placed.together else 1)
    return {"count": count} if count > 1 else {}


def settings_of(config: EvalConfig, workloads: Sequence[Workload[Any]]) -> dict[str, Any]:
    """Return the settings that the numbers depend on besides models and machine."""
    sampling = ("top_k", "top_p", "min_p", "repetition_penalty", "rule", "lossy", "seed")
    protocol = ("gate_dtype", "repeats", "warmup", "truncate", "turns", "balanced", "gate_tv")
    return {
        **prompt_counts(workloads, "measured ones, halves swapped"),
        **{key: getattr(config, key) for key in ("max_new_tokens", "min_new_tokens", *sampling, *protocol)},
        **({"text": config.text} if TEACHER_FORCED in config.tiers() else {}),
        "engine": config.engine.label,
        "provenance": provenance(),
    }
