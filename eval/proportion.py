"""An evaluation in proportion: its estimate, and what is left out so that it ends within its minutes."""

import time
from dataclasses import dataclass, replace

from torch import distributed

from data.text.prompts import Prompt
from eval.config import EvalConfig
from eval.inputs.workloads import Workload
from eval.measures.results import LIVE
from inference.decode import autoregress
from inference.target.target import Target

FLOOR = 4  # prompts of a workload that the losslessness check keeps, of as many
TREES = 20_000  # steps of the baseline that a head's tiers without a clock take: measured with the embedded target


@dataclass(frozen=True)
class Reduced:
    """An evaluation that ends within its minutes, or is the smallest there is: its estimate, and what it leaves out."""

    config: EvalConfig
    seconds: float
    left_out: str

    def __str__(self) -> str:
        begin = f"evaluation: about {self.seconds:.0f} s"
        return f"{begin}; {self.left_out}" if self.left_out else begin


def in_proportion(config: EvalConfig, target: Target, workloads: list[Workload[Prompt]]) -> Reduced:
    """Return the evaluation for `config.minutes`: other trees are left out first, then repeats, then prompts.

    One answer of the baseline is timed for the estimate, by the first process where a pass takes all of them.
    """
    assert config.minutes is not None
    answer, most = _answer_seconds(config, target, workloads[0].prompts[0]), 60 * config.minutes
    config = replace(config, prompts=min(config.prompts, max(len(workload.prompts) for workload in workloads)))
    reduced = config
    for smaller in (config, replace(config, tier=[LIVE]), replace(config, tier=[LIVE], repeats=1)):
        reduced = smaller
        if (seconds := _estimate(reduced, len(workloads), answer)) <= most:
            return Reduced(reduced, seconds, _left_out(config, reduced))
    least = min(FLOOR, config.prompts)
    reduced = replace(reduced, prompts=max(least, int(config.prompts * most / seconds)))
    return Reduced(reduced, _estimate(reduced, len(workloads), answer), _left_out(config, reduced))


def _answer_seconds(config: EvalConfig, target: Target, prompt: Prompt) -> float:
    begin = time.perf_counter()
    autoregress(target, prompt.token, config.settings(0.0))
    measured = [time.perf_counter() - begin]
    if target.placed.together:
        distributed.broadcast_object_list(measured)
    return measured[0]


def _estimate(config: EvalConfig, workloads: int, answer: float) -> float:
    """Return the seconds of an evaluation whose answers take as long as the baseline's, without loading the target."""
    heads = len(config.drafter) + len(config.compare)
    sizes, sessions = len(config.batch_sizes()), len(config.temperatures()) * len(config.request_rates())
    checked = config.prompts * (1 + sizes * (1 + heads))
    timed = (config.prompts * config.repeats + config.warmup) * (1 + heads + config.hf) * sizes * sessions
    trees = heads * TREES / config.max_new_tokens if config.tiers() != [LIVE] else 0
    return answer * (workloads * (checked + timed) + trees)


def _left_out(full: EvalConfig, reduced: EvalConfig) -> str:
    """Return what is left out and how to measure it all; nothing where nothing is."""
    counts = [
        f"{getattr(reduced, key)} of {getattr(full, key)} {key}"
        for key in ("prompts", "repeats")
        if getattr(reduced, key) < getattr(full, key)
    ]
    if reduced.tiers() != full.tiers():
        counts.append("no prediction for other trees")
    drafters, workloads = [] if [*full.drafter] == ["head"] else full.drafter, full.workload
    several = {"compare": full.compare, "drafter": drafters, "workload": workloads or []}
    shown = {key: it if isinstance(it, str) else f"[{','.join(it)}]" for key, it in several.items() if it}
    words = [f"{key}={value}" for key, value in shown.items()]
    whole = " ".join([f"python eval/run.py run={','.join(full.runs())}", *words])
    assert full.minutes is not None
    seconds = 60 * full.minutes
    return f"shortened for {seconds:.0f} s: {', '.join(counts)}; all of it: {whole}" if counts else ""
