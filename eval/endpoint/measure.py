"""Measurement of a served endpoint: latencies by the client's clock, acceptance by the server's counts.

With the same model served without speculation as the baseline, both answer the same prompts alternately, greedy texts
are compared, and a speedup is reported. The batch size is the number of requests in flight.
"""

import platform
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eval.config import DecodingConfig, EndpointConfig, Selection
from eval.endpoint.client import BASELINE, Answer, Server
from eval.endpoint.questions import Question, read_questions
from eval.endpoint.rows import Runs, rows, text_gate
from eval.inputs.workloads import Workload, prompt_counts
from eval.live.interleaved import PLAIN, in_turns
from eval.live.request_rate import arrivals
from eval.measures.losslessness import Gate, labelled
from eval.measures.machine import cpu_name, provenance
from eval.measures.metrics import Passes
from eval.measures.results import ENDPOINT, Measurement
from eval.report.write import Report

Servers = Mapping[str, Server]  # by drafter name, the baseline's is PLAIN


class Measured(NamedTuple):
    """A measurement: its settings, its requests' ids, and the answers by drafter name."""

    measurement: Measurement
    ids: list[str]
    runs: dict[str, Runs]


def measure(
    served: EndpointConfig, prompts: Selection, config: DecodingConfig, repeats: int, workloads: Sequence[str]
) -> Report:
    """Measure the endpoint, and its baseline if there is one, on every workload, temperature and batch size.

    Raises:
        ValueError: a server does not answer, lacks the model, counts no drafts, restarted or served other clients
            meanwhile; a request failed; or a workload cannot be read. Nothing is written then.
    """
    assert served.endpoint is not None
    jobs = [read_questions(name, prompts, served.client.chat) for name in workloads]
    server = Server(served.endpoint, served.client, "endpoint")
    info = server.describe()
    servers = {info.get("speculative_algorithm", ENDPOINT).lower(): server}
    if served.baseline is not None:
        servers = {PLAIN: Server(served.baseline, served.client, BASELINE), **servers}
        servers[PLAIN].check_baseline_of(server)
    measured: list[Measured] = []
    checked = Counter[int]()  # greedy prompts so far, by batch size
    for job in jobs:
        ids = [request.id for request in job.prompts]
        for temperature, size, rate in config.conditions():
            measurement = job.measurement(temperature, size, config.seed, start=checked[size], request_rate=rate)
            checked[size] += len(ids) if temperature == 0 else 0
            runs = _runs(servers, job, _settings(config, temperature), measurement, repeats)
            measured.append(Measured(measurement, ids, runs))
    gates = _gates(measured) if served.baseline is not None else {}
    warnings = _whole(servers, measured)
    return Report(
        target={"name": server.model, "path": server.model},
        device={
            "name": " ".join(filter(None, (server.engine or ENDPOINT, info.get("version"), "at", server.url))),
            "type": ENDPOINT,
            "dtype": None,
            "client": cpu_name(),
            "python": platform.python_version(),
        },
        settings=_report_settings(served, prompts, config, repeats, jobs),
        gates=gates,
        rows=[row for one in measured for row in rows(one.runs, gates, one.measurement)],
        extras={"warnings": warnings} if warnings else {},
    )


def _whole(servers: Servers, measured: Sequence[Measured]) -> list[str]:
    """Return a warning for each server of which answers came at once."""
    warnings = []
    for name, server in servers.items():
        firsts = [answer.ttft_s for one in measured for repeats in one.runs[name].answers for answer in repeats]
        if whole := firsts.count(None):
            warnings.append(
                f"{server.url}: {whole} of {len(firsts)} answers came at once and not as they were written (it does "
                "not stream, or a gateway before it holds streams back): their rows have speeds end to end alone"
            )
    return warnings


def _settings(config: DecodingConfig, temperature: float) -> dict[str, Any]:
    """Return the sampling fields of every request, all of them, so that no server's default applies."""
    sampling = {"temperature": temperature, "top_p": config.top_p, "top_k": config.top_k or -1, "min_p": config.min_p}
    seed = {"seed": config.seed} if temperature else {}
    least = {"min_tokens": config.min_new_tokens} if config.min_new_tokens else {}
    penalty = {"repetition_penalty": config.repetition_penalty}
    return {"max_tokens": config.max_new_tokens, **sampling, **penalty, **seed, **least}


def _runs(
    servers: Servers, job: Workload[Question], settings: Mapping[str, Any], measurement: Measurement, repeats: int
) -> dict[str, Runs]:
    """Send all requests to all servers, `repeats` times, in turns: after each request, or after all in full batches.

    Requests that arrive at a rate are sent as full batches are.
    """
    in_flight, rate, gaps = measurement.batch_size, measurement.request_rate, random.Random(measurement.seed)
    count = len(job.prompts)
    when = [None if rate is None else arrivals(count, rate, gaps) for _ in range(repeats)]
    for server in servers.values() if job.warmup else ():
        server.send_all(job.warmup, settings, in_flight, None)
    passes: dict[str, list[Passes]] = {name: [] for name in servers}

    def answer(name: str, batch: Sequence[int], number: int) -> list[Answer]:
        requests = [job.prompts[i] for i in batch]
        answers, counts = servers[name].send_all(requests, settings, in_flight, when[number])
        passes[name].append(counts)
        return answers

    batches = [[i] for i in range(count)] if in_flight == 1 and rate is None else [range(count)]
    answers = in_turns(list(servers), answer, batches, repeats, measurement.seed)
    if PLAIN in servers:
        servers[PLAIN].refuse_drafts()
    return {name: Runs(answers[name], passes[name]) for name in servers}


def _gates(measured: Sequence[Measured]) -> dict[str, Gate]:
    """Check the greedy texts of all workloads for losslessness, at every batch size."""
    gates: dict[str, Gate] = {}
    for size in dict.fromkeys(one.measurement.batch_size for one in measured):
        greedy = [one for one in measured if one.measurement.temperature == 0 and one.measurement.batch_size == size]
        ids = [id_ for one in greedy for id_ in one.ids]
        texts = {name: [repeats for one in greedy for repeats in one.runs[name].texts()] for name in greedy[0].runs}
        plain = texts.pop(PLAIN)
        gates |= {labelled(name, size): text_gate(plain, drafted, ids) for name, drafted in texts.items()}
    return gates


def _report_settings(
    served: EndpointConfig, prompts: Selection, config: DecodingConfig, repeats: int, jobs: Sequence[Workload[Question]]
) -> dict[str, Any]:
    """Return the settings that the report shows: those of requests and workloads."""
    sampling = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return {
        **prompt_counts(jobs, "measured ones"),
        "endpoint": served.endpoint,
        "baseline": served.baseline,
        **{key: getattr(config, key) for key in ("max_new_tokens", "min_new_tokens", *sampling)},
        "repeats": repeats,
        **{key: getattr(prompts, key) for key in ("warmup", "turns", "balanced")},
        "engine": "as served",
        "provenance": provenance(),
    }
