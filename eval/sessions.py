"""The rows of all tiers: timed sessions of every workload and setting, and statistics along given texts."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from data.text.prompts import Prompt
from eval.config import EvalConfig
from eval.gates import agreement
from eval.inputs.drafters import Drafters
from eval.inputs.runs import find_heads
from eval.inputs.workloads import Workload
from eval.live import request_rate
from eval.live.extras import answers, paired, training, trees
from eval.live.interleaved import PLAIN, Setup, measure, rows
from eval.measures.losslessness import Gate, SampledGate
from eval.measures.machine import peak_memory
from eval.measures.results import LIVE, TEACHER_FORCED, Row
from eval.tiers import Material, answered, generate_answers, teacher_forced_rows
from inference.protocol import Drafter
from inference.target.target import Target
from inference.verification.verify import is_lossy


class Timed(NamedTuple):
    """The results of the live tier: rows, the texts of the baseline, and the report's extras by key."""

    rows: list[Row]
    materials: list[Material]
    extras: dict[str, Any]


def timed_rows(
    config: EvalConfig,
    target: Target,
    workloads: Sequence[Workload[Prompt]],
    drafters: Drafters,
    gates: Mapping[str, Gate],
    sampled: Sequence[SampledGate],
) -> Timed:
    """Measure all workloads, temperatures, batch sizes and rates, each in an interleaved session of its own.

    The extras are training curves, and trees and answers of the first session.
    """
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    curves = training(find_heads([*config.runs(), *config.compare])) if "head" in config.drafter else None
    measured = Timed([], [], {} if curves is None else {"training": curves})
    start = 0
    for workload in workloads:
        for temperature, size, rate in config.conditions():
            setup = Setup(target, drafters, workload.prompts, config.settings(temperature))
            hf = config.hf and temperature == 0  # HF's own is timed greedily, so only greedy rows compare with it
            how = setup, config.repeats, workload.warmup
            rounds = None if rate is None else request_rate.measure(*how, size, rate)
            runs = measure(*how, hf, size) if rounds is None else request_rate.generations(rounds)
            if (size, rate) == (config.batch_sizes()[0], config.request_rates()[0]):
                measured.materials.append(answered(workload, target, setup.settings, runs[PLAIN]))
            checks = [check for check in sampled if check.temperature == temperature]
            measurement = workload.measurement(
                temperature,
                size,
                config.seed,
                memory_bytes=peak_memory(target.device),
                start=start,
                # Coupled noise replaces the rule: it says nothing of one that is lossy.
                coupled={} if is_lossy(config.rule) else {check.drafter: check.coupled for check in checks},
                not_lossless=frozenset(check.drafter for check in checks if not check.passed),
                agreement=agreement(setup, runs) if temperature == 0 and size == 1 else {},
                request_rate=rate,
            )
            if not measured.rows:
                shown = answers(runs, list(drafters), workload.prompts, target.tokenizer)
                measured.extras.update(trees=trees(runs, drafters), answers=shown)
            timed = rows(runs, drafters, gates, measurement)
            if rate is None:
                whole = [row for row in timed if row.speedup is not None and not row.category]
                lossless = [row.drafter for row in whole if row.drafter != PLAIN]
                if len(lossless) > 1:
                    measured.extras.setdefault("paired", []).extend(paired(runs, lossless, measurement))
            measured.rows.extend(timed if rounds is None else request_rate.queued_rows(timed, rounds, measurement))
        start += len(workload.prompts)
    return measured


def along_texts(
    config: EvalConfig,
    target: Target,
    workloads: Sequence[Workload[Prompt]],
    drafters: Mapping[str, Drafter],
    materials: list[Material],
) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows of the heads along texts, and their extras by the report's keys.

    `materials` are recorded texts, or those that the baseline has just written; where there are none, the target
    answers the prompts.
    """
    if TEACHER_FORCED not in config.tiers():
        return [], {}
    materials = materials or generate_answers(config, target, workloads)
    rows, along = teacher_forced_rows(config, target, drafters, materials)
    return rows, {"teacher_forced": along}


def check_sources(config: EvalConfig) -> None:
    """Refuse other sources than heads where nothing is decoded."""
    if LIVE not in config.tiers() and (others := [name for name in config.drafter if name != "head"]):
        raise ValueError(
            f"tier is {TEACHER_FORCED}, which takes drafter=head: leave out {', '.join(others)}, or add live to tier"
        )
