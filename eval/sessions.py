"""The rows of both tiers: timed sessions of every workload and setting, and heads teacher-forced along given text.

Both tiers measure the same τ. A lossless rule emits the target's text whatever is drafted, so one text serves all
heads: the baseline's answer, or one from a log.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from data.text.prompts import Prompt
from eval.config import DecodingConfig, EvalConfig, Selection
from eval.gates import agreement
from eval.inputs.drafters import Drafters, find_heads
from eval.inputs.workloads import Text, Workload, check_known, of_answer, read_log
from eval.live.extras import answers, paired, training, trees
from eval.live.interleaved import PLAIN, Setup, generations, measure, measure_rate, queued_rows, rows
from eval.measures.losslessness import Gate, SampledGate
from eval.measures.machine import peak_memory
from eval.measures.metrics import SpecDecodingStats, median_run
from eval.measures.results import TEACHER_FORCED, DrafterInfo, Request, ResultRow, result
from eval.teacher_forced import Overlap, RankedText, expected, overlap, passes_along, rank_text
from eval.tuning.grid import acceptance
from heads.common.progress import progress
from inference.decode import Generation, RequestParams, autoregress
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import BY_CONFIDENCE, TreeConfig
from inference.protocol import Drafter
from inference.target.target import Target
from inference.verification.rules import is_lossy
from inference.verification.sample import Sampling

RANKS = 10  # ranks of a depth's guesses that are counted separately
SAMPLED = ("chain", "sampled")  # kinds of tree with sampled nodes above temperature 0


@dataclass(frozen=True)
class Material:
    """The texts of a workload at a temperature, in its order."""

    workload: Workload[Any]
    temperature: float
    texts: list[Text]


def answered(
    workload: Workload[Prompt], target: Target, settings: RequestParams, runs: Sequence[Sequence[Generation]]
) -> Material:
    """Return the texts of autoregressive decoding, given the repeats of each prompt."""
    texts = [
        of_answer(target, prompt.token, median_run(repeats).tokens, settings)
        for prompt, repeats in zip(workload.prompts, runs, strict=True)
    ]
    return Material(workload, settings.sampling.temperature, texts)


def generate_answers(config: DecodingConfig, target: Target, workloads: Sequence[Workload[Prompt]]) -> list[Material]:
    """Let the target answer the prompts at every temperature."""
    materials = []
    for workload in workloads:
        for temperature in config.temperatures():
            settings = config.settings(temperature)
            prompts = progress(workload.prompts, "writing the texts")
            runs = [[autoregress(target, prompt.token, settings)] for prompt in prompts]
            materials.append(answered(workload, target, settings, runs))
    return materials


def recorded(selection: Selection, config: DecodingConfig, target: Target, names: Sequence[str]) -> list[Material]:
    """Return a log's answers, the same for every temperature; refuse logs without answers, or beyond the context."""
    materials = []
    for name in names:
        workload = read_log(name, target, selection, config.max_new_tokens)
        texts = [within_context(text, id_, name, target, selection.truncate) for id_, _, text in workload.prompts]
        materials += [Material(workload, temperature, texts) for temperature in config.temperatures()]
    return materials


def within_context(text: Text, id_: str, name: str, target: Target, truncate: bool) -> Text:
    """Return a text within the target's context, with the number of tokens that decoding would have allowed.

    Raises:
        ValueError: it is too long and may not be shortened, or has tokens that the target does not know.
    """
    check_known(text.token, f"workload {name}, record {id_}", target)
    over = max(len(text.token) - target.context, 0)
    if over and (not truncate or over >= text.start):
        raise ValueError(
            f"workload {name}, record {id_}: {len(text.token)} tokens with its answer, but the target's context is "
            f"{target.context}: give a smaller max_new_tokens, or truncate=true to keep each text's end"
        )
    start = text.start - over
    return Text(text.token[over:], start, min(text.limit, target.context - start))


def teacher_forced_rows(
    config: DecodingConfig, target: Target, drafters: Mapping[str, Drafter], materials: Sequence[Material]
) -> tuple[list[ResultRow], dict[str, Any]]:
    """Return the rows of the heads along the texts, and the statistics of one pass over them by head.

    A tree with sampled siblings has no row above temperature 0: the text does not tell its nodes.

    Returns:
        The rows; and by head, of its first texts: `rank`, the share of tokens by depth and rank among its guesses;
        `n_alpha`, the acceptance rate of depth n + 1 after n drafted states, given the text's tokens; `at_every_token`,
        P(a >= k) of a chain that begins after every token, where decoding begins some.
    """
    rows: list[ResultRow] = []
    by_head: dict[str, Any] = {}
    for name, drafter in heads_of(drafters).items():
        tree = drafter.policy
        for material in materials:
            is_sampled = material.temperature > 0 and tree.kind in SAMPLED
            if is_sampled and tree.kind != "chain":
                continue
            sampling = config.sampling(material.temperature)
            statistics, counts = _along(target, drafter.head, tree, material.texts, sampling, draws=is_sampled)
            rule = "token" if is_sampled else "greedy" if material.temperature == 0 else "point_mass"
            workload = material.workload
            measurement = workload.measurement(material.temperature, 1, config.seed, tier=TEACHER_FORCED)
            info, texts = DrafterInfo(name, rule, tree.label), [Request(passes) for passes in counts]
            rows += [result(info, subset, subset.of(texts)) for subset in measurement.parts(len(texts))]
            conditions = {"workload": workload.name, "temperature": material.temperature}
            by_head.setdefault(name, conditions | statistics)
    return rows, by_head


def heads_of(drafters: Mapping[str, Drafter]) -> dict[str, HeadDrafter]:
    """Return the heads among the drafters, each with its tree for one sequence."""
    return {
        name: HeadDrafter(drafter.head, drafter.policy, name)
        for name, drafter in drafters.items()
        if isinstance(drafter, HeadDrafter)
    }


def _along(
    target: Target, head: Any, tree: TreeConfig, texts: Sequence[Text], sampling: Sampling, *, draws: bool
) -> tuple[dict[str, Any], list[SpecDecodingStats]]:
    """Return a head's statistics along texts, and each text's counts: expected ones for sampled chains."""
    depth = min(head.max_depth, tree.deepest)
    grown = [tree] if tree.kind in BY_CONFIDENCE else []
    read = progress(texts, "drafting along the texts")
    records = [rank_text(target, head, text, grown, depth, sampling=sampling) for text in read]
    ranked = table(records, depth)
    if draws:
        overlaps = [overlap(target, head, text, sampling, depth) for text in progress(texts, "comparing probs")]
        return ranked | sampled_table(overlaps), [expected(common, depth) for common in overlaps]
    return ranked, [passes_along(head_record, tree) for head_record in records]


def table(records: Sequence[RankedText], depth: int) -> dict[str, Any]:
    """Return acceptance by depth and rank, that of rank 0, and that of whole chains."""
    rank = torch.tensor([row for record in records for row in record.rank], dtype=torch.long)
    rank = rank.view(-1, depth)  # of no tokens too
    rates = acceptance(rank, RANKS)
    correct = (rank == 0).long().cumprod(1).double()
    counted_tokens = (rank >= 0).double()
    return {
        "tokens": len(rank),
        "rank": rates.tolist(),
        "n_alpha": rates[:, 0].tolist(),
        "at_every_token": (correct.sum(0) / counted_tokens.sum(0).clamp_min(1)).tolist(),
    }


def sampled_table(overlaps: Sequence[Overlap]) -> dict[str, Any]:
    """Return n_alpha, and P(a >= k) of chains after every token, for drafts sampled from the head's probs."""
    common = torch.cat([overlap.common for overlap in overlaps]).double()
    finite = common.isfinite()
    reached = torch.cat([overlap.accept_prob for overlap in overlaps]).double().cumprod(1)
    count = finite.sum(0).clamp_min(1)
    return {
        "n_alpha": (common.nan_to_num(0.0).sum(0) / count).tolist(),
        "at_every_token": ((reached * finite).sum(0) / count).tolist(),
    }


class Timed(NamedTuple):
    """The results of the live tier: rows, the baseline's texts, and the report's extras by key."""

    rows: list[ResultRow]
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
            hf = (
                config.hf and temperature == 0
            )  # HF's generate is timed greedily, so only greedy rows are compared with it
            how = setup, config.repeats, workload.warmup
            rounds = None if rate is None else measure_rate(*how, size, rate)
            runs = measure(*how, hf, size) if rounds is None else generations(rounds)
            if (size, rate) == (config.batch_sizes()[0], config.request_rates()[0]):
                measured.materials.append(answered(workload, target, setup.settings, runs[PLAIN]))
            checks = [check for check in sampled if check.temperature == temperature]
            measurement = workload.measurement(
                temperature,
                size,
                config.seed,
                memory_bytes=peak_memory(target.device),
                start=start,
                # Coupled noise replaces the rule, so it cannot test a lossy one.
                coupled={} if is_lossy(config.rule) else {check.drafter: check.coupled for check in checks},
                not_lossless=frozenset(check.drafter for check in checks if not check.passed),
                agreement=agreement(target, runs) if temperature == 0 and size == 1 else {},
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
            measured.rows.extend(timed if rounds is None else queued_rows(timed, rounds, measurement))
        start += len(workload.prompts)
    return measured
