"""The rows of all tiers: timed sessions of every workload and setting, and statistics along given texts.

And what is left out of them so that an evaluation ends within its minutes.
"""

import re
import shlex
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from torch import distributed

from data.text.prompts import Prompt
from eval.config import EvalConfig, eval_config, listed
from eval.gates import agreement
from eval.inputs.drafters import Drafters
from eval.inputs.runs import find_heads
from eval.inputs.workloads import Workload
from eval.live import request_rate
from eval.live.answers import answers
from eval.live.extras import paired, training, trees
from eval.live.interleaved import PLAIN, Setup, measure, rows
from eval.measures import chi_square
from eval.measures.losslessness import Gate, SampledGate
from eval.measures.machine import peak_memory
from eval.measures.results import LIVE, REPLAY, TEACHER_FORCED, Row
from eval.tiers import Material, answered, forced, other_trees, replayed, written
from heads.common.command import quoted
from heads.common.resolvers import ROOT
from inference.decode import autoregress
from inference.drafters.registry import reads_text_alone
from inference.protocol import Drafter
from inference.target.placement import TOGETHER
from inference.target.target import Target
from inference.verification.verify import is_lossy

FLOOR = 4  # prompts of a workload that the losslessness check keeps, of as many
TREES = 20_000  # steps of the baseline that a head's tiers without a clock take: measured with the embedded target
DRAW = 0.4  # of such a step, that a draw of the chi-square test takes: likewise, MTP in trees of 20 nodes
FREEDOM = 26  # of that test where nobody has seen the texts


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
                shown = answers(runs, drafters, workload.prompts, target, temperature)
                measured.extras.update(trees=trees(runs, drafters), answers=shown)
            timed = rows(runs, drafters, gates, measurement)
            if rate is None:
                whole = [row for row in timed if row.speedup is not None and not row.category]
                lossless = [row.drafter for row in whole if row.drafter != PLAIN]
                if len(lossless) > 1:
                    measured.extras.setdefault("paired", []).extend(paired(runs, lossless, measurement))
            measured.rows.extend(timed if rounds is None else request_rate.waited(timed, rounds, measurement))
        start += len(workload.prompts)
    return measured


def along_texts(
    config: EvalConfig,
    target: Target,
    workloads: Sequence[Workload[Prompt]],
    drafters: Mapping[str, Drafter],
    materials: list[Material],
    not_lossless: Collection[str],
) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows of the tiers without a clock, and their extras by the report's keys.

    `materials` are recorded texts, or those that the baseline has just written; where there are none, the target
    answers the prompts. Sources that are `not_lossless` failed a losslessness check: no speedup is predicted for them.
    """
    tiers = config.tiers()
    if not {REPLAY, TEACHER_FORCED} & set(tiers):
        return [], {}
    materials = materials or written(config, target, workloads)
    replay_rows = replayed(config, config.seed, target, materials) if REPLAY in tiers else []
    if TEACHER_FORCED not in tiers:
        return replay_rows, {}
    forced_rows, along = forced(config, target, drafters, materials)
    priced = set(drafters) - set(not_lossless) if LIVE in tiers else set()
    others = other_trees(config.tuner, config, target, drafters, materials, priced)
    return replay_rows + forced_rows, {"teacher_forced": along, "other_trees": others}


def check_sources(config: EvalConfig) -> None:
    """Refuse sources that can be measured in none of the tiers that are asked for."""
    tiers = config.tiers()
    takes = {name for name, options in config.drafter.items() if REPLAY in tiers and reads_text_alone(name, options)}
    takes |= {"head"} if TEACHER_FORCED in tiers else set()
    without = [name for name in config.drafter if name not in takes and (name != PLAIN or not takes)]
    if LIVE not in tiers and without:
        raise ValueError(
            f"tier is {', '.join(tiers)}, in which drafter={', '.join(without)} cannot be measured: replay takes "
            "prompt_lookup and suffix, teacher_forced takes head; leave out the others, or add live to tier"
        )


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
    least, draws = min(FLOOR, config.prompts), answer * _draws(config)
    share = max(0.0, most - draws) / (seconds - draws)  # as many tokens are sampled, however few the prompts
    reduced = replace(reduced, prompts=max(least, int(config.prompts * share)))
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
    hot = sum(temperature > 0 for temperature in config.temperatures())
    checked += config.prompts * hot * (1 + len({1, *config.batch_sizes()}) * (1 + heads))  # under coupled noise
    trees = heads * TREES / config.max_new_tokens if config.tiers() != [LIVE] else 0
    return answer * (workloads * (checked + timed) + trees + _draws(config))


def _draws(config: EvalConfig) -> float:
    """Return the answers of the baseline that take as long as the draws of every source at every temperature."""
    tests = sum(temperature > 0 for temperature in config.temperatures()) * (len(config.drafter) + len(config.compare))
    if not tests:
        return 0.0
    draws = chi_square.samples_needed(FREEDOM, config.gate_tv, chi_square.ALPHA / tests)
    return tests * draws * DRAW / config.max_new_tokens


def _left_out(full: EvalConfig, reduced: EvalConfig) -> str:
    """Return what is left out and how to measure it all; nothing where nothing is."""
    counts = [
        f"{getattr(reduced, key)} of {getattr(full, key)} {key}"
        for key in ("prompts", "repeats")
        if getattr(reduced, key) < getattr(full, key)
    ]
    if reduced.tiers() != full.tiers():
        counts.append("no prediction for other trees")
    assert full.minutes is not None
    seconds = 60 * full.minutes
    return f"shortened for {seconds:.0f} s: {', '.join(counts)}; all of it: {command_of(full)}" if counts else ""


def command_of(config: EvalConfig) -> str:
    """Return the command that measures an evaluation without a limit of minutes.

    It has every value that is not the one of conf/eval.yaml or of the source's file in conf/drafter.
    """
    standard = dict(_flat(asdict(eval_config())))
    for name in config.drafter:
        if (file := ROOT / "conf" / "drafter" / f"{name}.yaml").is_file():
            options: Any = OmegaConf.to_container(OmegaConf.load(file))
            standard |= dict(_flat({"drafter": {name: options}}))
    values = {"compare": config.compare, "drafter": [*config.drafter], "workload": config.workload}
    values |= dict(_flat(asdict(replace(config, run=None, minutes=None))))
    standard |= {"drafter": ["head"], "model.trust_remote_code": False}  # false is what a null means to most runs
    if config.model.get("placement") in TOGETHER:  # of the training's processes, and this command is one
        values.pop("model.placement")
        values.pop("model.device", None)
    words = [
        f"{key}={_written(value)}"
        for key, value in values.items()
        if value is not None and listed(value) != listed(standard.get(key))
    ]
    words = [f"run={','.join(map(_written, config.runs()))}", *words]
    plain = [word if re.fullmatch(r"[\w./:@+=,\[\]-]+", word) else shlex.quote(word) for word in words]
    return " ".join(["python eval/run.py", *plain])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by the keys of their overrides; an empty mapping has none."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _written(value: Any) -> str:
    """Return a value as an override has it."""
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = str(value)
    return text if re.fullmatch(r"[\w./:@+-]+", text) else quoted(text)
