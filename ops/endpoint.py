"""Measure a served model's acceptance and speed, with baseline=URL its speedup: python ops/endpoint.py url=URL.

Latencies are by the client's clock, acceptance from the server's counters. If the baseline serves the same model
without speculation, both answer the same prompts alternately, greedy texts are compared, and a speedup is reported. The
batch size is the number of requests in flight.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout's root replaces the script's folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import platform
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from omegaconf import DictConfig

from data.answers.client import base_url
from eval.config import Conditions, Selection, Turns
from eval.inputs.workloads import Workload, prompt_counts, workload_names
from eval.live import arrivals, in_turns, queued_rows, with_gate_result
from eval.measures.losslessness import Divergence, Gate, drafter_label, gate_of, shared_length
from eval.measures.machine import cpu_name, provenance
from eval.measures.metrics import SpecDecodingStats, sum_counts
from eval.measures.results import (
    BASELINE,
    ENDPOINT,
    UNTIMED,
    MeasuredRequest,
    Measurement,
    ResultRow,
    Subset,
    known,
    result,
)
from eval.report.write import Report
from eval.run import publish
from heads.common.command import command
from heads.common.errors import report_on_interrupt
from heads.common.files import check_writable
from heads.common.progress import progress
from heads.common.typed import Count, Number, typed
from ops.served import BASELINE_KEY, Answer, Question, Record, Server, ServersConfig, read_questions

REPORTED = ("max_new_tokens", "seed", "repeats", "warmup", "turns")
# Every request sets all sampling fields, so that no server's default applies; client.extra sets others.
SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
SHOWN = 24  # characters shown of a text, from the first difference
Servers = Mapping[str, Server]  # drafter name -> server, including BASELINE


@dataclass(frozen=True)
class ServedConfig(Conditions, ServersConfig):
    """A served model to measure, its baseline, and the requests; conf/ops/endpoint.yaml explains the keys."""

    warmup: Number
    turns: Turns
    repeats: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline is not None:
            if base_url(self.baseline) == base_url(self.url):
                raise ValueError("baseline is url itself: serve the model without speculation at another port")
            if 0.0 not in self.temperature:
                raise ValueError(
                    f"temperature is {self.temperature!r}: texts can be compared at 0 only, so give temperature=[0,…] "
                    "or no baseline"
                )


class Runs(NamedTuple):
    """One server's answers to a workload: the repeats of each request, and the counts of passes per batch."""

    answers: list[list[Answer]]
    passes: list[SpecDecodingStats]


def measure(config: ServedConfig) -> Report:
    """Measure the endpoint, and its baseline if there is one, on every workload, temperature and batch size.

    Refuse, and write nothing: a server without the model, without drafts or with other clients, and a failed request.
    """
    selection = Selection(config.prompts, config.warmup, False, config.turns, True)
    jobs = [read_questions(name, selection, config.client.chat) for name in workload_names(config.workload)]
    servers = {ENDPOINT: (server := Server(config.url, config.client, "url"))}
    if config.baseline is not None:
        servers = {BASELINE: Server(config.baseline, config.client, BASELINE_KEY), **servers}
        servers[BASELINE].check_baseline_of(server)
    measured = []
    # batch size -> greedy texts of the baseline and of the endpoint, and the prompt's id
    greedy = defaultdict[int, list[tuple[list[str], list[str], str]]](list)
    for job in jobs:
        for temperature, size, rate in config.conditions():
            measurement = job.measurement(temperature, size, config.seed, start=len(greedy[size]), request_rate=rate)
            seed = {"seed": config.seed} if temperature else {}
            settings = {"max_tokens": config.max_new_tokens, "temperature": temperature, **SAMPLING, **seed}
            measured.append((measurement, _runs(servers, job, settings, measurement, config.repeats)))
            if temperature == 0:
                by_server = [runs.answers for runs in measured[-1][1].values()]  # the baseline's answers come first
                for request, plain, drafted in zip(job.prompts, by_server[0], by_server[-1], strict=True):
                    texts = [answer.text for answer in plain], [answer.text for answer in drafted]
                    greedy[size].append((*texts, request.id))
    compared = greedy.items() if BASELINE in servers else ()
    gates = {drafter_label(ENDPOINT, size): text_gate(*zip(*given, strict=True)) for size, given in compared}
    return Report(
        target={"name": server.model, "path": server.model},
        device={
            "name": f"{server.engine or ENDPOINT} at {server.url}",
            "type": ENDPOINT,
            "dtype": None,
            "client": cpu_name(),
            "python": platform.python_version(),
        },
        settings={
            **prompt_counts(jobs),
            "endpoint": config.url,
            "baseline": config.baseline,
            **{key: getattr(config, key) for key in REPORTED},
            "engine": "as served",
            "provenance": provenance(),
        },
        gates=gates,
        rows=[row for measurement, runs in measured for row in rows(runs, gates, measurement)],
    )


def _runs(
    servers: Servers, job: Workload[Question], settings: Record, measurement: Measurement, repeats: int
) -> dict[str, Runs]:
    """Send all requests to all servers `repeats` times, alternating after each request, or for batches after all.

    Requests that arrive at a rate are sent like batches.
    """
    in_flight, rate, gaps = measurement.batch_size, measurement.request_rate, random.Random(measurement.seed)
    count = len(job.prompts)
    when = [None if rate is None else arrivals(count, rate, gaps) for _ in range(repeats)]
    for server in progress(servers.values() if job.warmup else (), "warming up"):
        server.send_all(job.warmup, settings, in_flight, None)
    passes: dict[str, list[SpecDecodingStats]] = {name: [] for name in servers}

    def answer(name: str, batch: Sequence[int], number: int) -> list[Answer]:
        answers, counts = servers[name].send_all([job.prompts[i] for i in batch], settings, in_flight, when[number])
        passes[name].append(counts)
        return answers

    batches = [[i] for i in range(count)] if in_flight == 1 and rate is None else [range(count)]
    answers = in_turns(servers, answer, batches, repeats, measurement.seed)
    if BASELINE in servers:
        servers[BASELINE].refuse_drafts()
    return {name: Runs(answers[name], passes[name]) for name in servers}


def text_gate(plain: Sequence[Sequence[str]], drafted: Sequence[Sequence[str]], ids: Sequence[str]) -> Gate:
    """Check greedy texts for losslessness: the baseline's first text of a prompt against all repeats with drafts.

    Logits are unknown, so a difference is a failure, unless the baseline's own repeats differ there or earlier: then
    rounding decides, and the difference is a near tie.
    """
    compared: list[tuple[Divergence | None, bool]] = []
    for ours, theirs, prompt in zip(plain, drafted, ids, strict=True):
        first = ours[0]
        unstable = min((shared_length(first, other) for other in ours if other != first), default=None)
        differences = [(shared_length(first, other), other) for other in theirs if other != first]
        if not differences:
            compared.append((None, False))
            continue
        at, other = min(differences)
        shown = f"{other[at : at + SHOWN]!r} instead of {first[at : at + SHOWN]!r}"
        divergence = Divergence(prompt, at, None, None, None, shown)
        compared.append((divergence, unstable is not None and at >= unstable))
    return gate_of(compared)


def rows(by_server: Mapping[str, Runs], gates: Mapping[str, Gate], measurement: Measurement) -> list[ResultRow]:
    """Return the servers' rows of a measurement, given their answers by drafter name; the baseline may be missing."""
    requests = {name: [median_answer(repeats) for repeats in runs.answers] for name, runs in by_server.items()}
    timed = [
        with_gate_result(_row(name, runs, subset, subset.of(requests[name])), subset, requests, gates)
        for subset in measurement.parts(len(next(iter(requests.values()))))
        for name, runs in by_server.items()
    ]
    if measurement.request_rate is None:
        return timed
    rounds = {name: runs.answers for name, runs in by_server.items()}
    return queued_rows(timed, {BASELINE: next(iter(rounds.values())), **rounds}, measurement)


def median_answer(repeats: Sequence[Answer]) -> Answer:
    """Return an answer with the times of the median repeat (the lower of two) and the counts of all repeats."""
    run = sorted(repeats, key=lambda run: run.end_to_end[1])[(len(repeats) - 1) // 2]
    passes = known(repeats, "passes")
    seconds = UNTIMED | {"other": sum(repeat.seconds["other"] for repeat in repeats)}
    return replace(run, passes=sum_counts(passes) if passes else None, seconds=seconds)


def _row(name: str, runs: Runs, subset: Subset, requests: Sequence[MeasuredRequest]) -> ResultRow:
    total = sum_counts(known(requests, "passes") if subset.category else runs.passes)
    rule = "none" if name == BASELINE else "greedy" if subset.measurement.temperature == 0 else "the server's"
    depths = f"served, depth {len(total.by_depth)}" if total.by_depth else "served"
    row = result(name, rule, "none" if name == BASELINE else depths, subset, requests, total)
    return replace(row, tokens=sum(int(run.decoded) for repeats in subset.of(runs.answers) for run in repeats))


@command("ops/endpoint")
def main(cfg: DictConfig) -> None:
    """Measure, and write the report; exit with 1 if texts differ from the baseline's, 2 for invalid input."""
    config = typed(ServedConfig, cfg)
    out = Path(config.out).expanduser()
    check_writable(out, "out")
    with report_on_interrupt(lambda: "nothing was written; the same command measures again"):
        report = measure(config)
        publish(report, out)
    if not report.passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
