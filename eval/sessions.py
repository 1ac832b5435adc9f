"""The live tier: every workload at every temperature, batch size and request rate, a session each."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from eval.config import EvalConfig
from eval.gates import agreement, settings_at
from eval.inputs.drafters import Drafters
from eval.inputs.runs import find_heads
from eval.inputs.workloads import Workload
from eval.live import request_rate
from eval.live.answers import answers
from eval.live.extras import training, trees
from eval.live.interleaved import PLAIN, Session, measure, rows
from eval.measures.losslessness import Gate, SampledGate
from eval.measures.machine import peak_memory
from eval.measures.results import Row
from eval.tiers import Material, answered
from inference.target.target import Target


def timed_rows(
    config: EvalConfig,
    target: Target,
    workloads: Sequence[Workload],
    drafters: Drafters,
    gates: dict[str, Gate],
    sampled: Sequence[SampledGate],
    extras: dict[str, Any],
    materials: list[Material],
) -> list[Row]:
    """Return the rows of all workloads, temperatures, batch sizes and rates, each an interleaved session of its own.

    `extras` takes what the report shows besides: training curves, and trees and answers of the first session.
    `materials` takes what plain decoding wrote.
    """
    if "head" in config.drafter:
        extras["training"] = training(find_heads([*config.runs(), *config.compare]))
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    made: list[Row] = []
    start = 0
    for workload in workloads:
        for temperature, size, rate in itertools.product(
            config.temperatures(), config.batch_sizes(), config.request_rates()
        ):
            settings = settings_at(temperature, config)
            hf = config.hf and temperature == 0  # HF's own is timed greedily, so only greedy rows compare with it
            how = target, drafters, workload.prompts, settings, config.repeats, workload.warmup
            rounds = None if rate is None else request_rate.measure(*how, size, rate)
            runs = measure(*how, hf, size) if rounds is None else request_rate.generations(rounds)
            if (size, rate) == (config.batch_sizes()[0], config.request_rates()[0]):
                materials.append(answered(workload, target, settings, runs[PLAIN]))
            here = [each for each in sampled if each.temperature == temperature]
            session = Session(
                workload.name,
                temperature,
                size,
                peak_memory(target.device),
                config.seed,
                start=start,
                categories=workload.categories(),
                conversations=workload.conversations,
                coupled={each.drafter: each.coupled for each in here},
                untrusted=frozenset(each.drafter for each in here if not each.passed),
                agreement=agreement(target, workload.prompts, runs, settings) if temperature == 0 and size == 1 else {},
                request_rate=rate,
            )
            if not made:
                extras["trees"] = trees(runs, drafters)
                extras["answers"] = answers(runs, drafters, workload.prompts, target, temperature)
            timed = rows(runs, drafters, gates, session)
            made += timed if rounds is None else request_rate.waited(timed, rounds, session)
        start += len(workload.prompts)
    return made
