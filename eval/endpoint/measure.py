"""A served endpoint measured like a local drafter: latencies on this side's clock, acceptance by the server's counts.

The same model served without speculation may stand beside it as the baseline: then both answer the same prompts in
turns, greedy texts are compared, and there is a speedup. Requests in flight take the place of the batch.
"""

import itertools
import json
import platform
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track

from eval.config import DecodingConfig, EndpointConfig, PromptsConfig
from eval.endpoint.client import Asked, Server, requests_of
from eval.endpoint.rows import Runs, Session, Timed, row_of, text_gate
from eval.inputs.workloads import Selection, chosen, short_name
from eval.live.interleaved import PLAIN
from eval.measures import metrics
from eval.measures.losslessness import UNCHECKED, Gate, labelled
from eval.measures.machine import cpu_name, provenance
from eval.measures.results import Row
from eval.report.write import Report

Servers = Mapping[str, Server]  # by the names of their rows, the baseline as PLAIN


class Job(NamedTuple):
    """A workload's requests: those to measure, those before, `fresh` if these are others, and how many differ."""

    name: str
    asked: list[Asked]
    warmup: list[Asked]
    fresh: bool
    distinct: int


def measure(
    served: EndpointConfig, asked: PromptsConfig, config: DecodingConfig, repeats: int, workloads: Sequence[str]
) -> Report:
    """Measure the endpoint, and the baseline where there is one, on every workload, temperature and batch size.

    Raises:
        ValueError: nobody answers, the model is not served, the server counts no drafts or was started anew or asked by
            others meanwhile, a request failed, a workload cannot be read; one line, and nothing is written.
    """
    assert served.endpoint is not None
    jobs = [_job(name, asked, chat=served.client.chat) for name in workloads]
    server = Server(served.endpoint, served.client, "endpoint")
    told = server.says()
    servers = {told.get("speculative_algorithm", "endpoint").lower(): server}
    if served.baseline is not None:
        servers = {PLAIN: _baseline(served, server), **servers}
    sessions, runs = [], []
    start = 0
    for job in jobs:
        for temperature, size in itertools.product(config.temperatures(), config.batch_sizes()):
            sessions.append(Session(job.name, temperature, size, config.seed, start, job.asked))
            runs.append(_session(servers, job, _settings(config, temperature), size, repeats, config.seed))
        start += len(job.asked)
    gates = _gates(sessions, runs) if served.baseline is not None else {}
    return Report(
        target={"name": server.model, "path": server.model},
        device={
            "name": " ".join(filter(None, (server.engine or "endpoint", told.get("version"), "at", server.url))),
            "type": "endpoint",
            "dtype": None,
            "client": cpu_name(),
            "python": platform.python_version(),
        },
        settings=_told(served, asked, config, repeats, jobs),
        gates=gates,
        rows=_rows(sessions, runs, gates),
    )


def _job(name: str, config: PromptsConfig, *, chat: bool) -> Job:
    """Return a workload's requests; where it has no further ones for the warm-up, its last ones."""
    wanted = Selection(config.prompts, config.warmup, False, config.turns, config.balanced)
    measured, spare = chosen(name, wanted)
    try:
        asked = [each for place, record in measured for each in requests_of(record, place, config.turns, chat)]
        warmup = [each for record in spare for each in requests_of(record, -1, "first", chat)]
    except ValueError as error:
        raise ValueError(f"workload {name}, {error}") from error
    bodies = [(each.path, json.dumps(each.body, sort_keys=True)) for each in asked]
    places = metrics.clustered(bodies, [each.conversation for each in asked])
    asked = [replace(each, conversation=place) for each, place in zip(asked, places, strict=True)]
    fresh = len(warmup) == config.warmup
    warmup += [asked[-1 - i % len(asked)] for i in range(config.warmup - len(warmup))]
    return Job(short_name(name), asked, warmup, fresh, len(set(bodies)))


def _baseline(config: EndpointConfig, server: Server) -> Server:
    """Return the baseline.

    Raises:
        ValueError: it serves another model, or speculates.
    """
    assert config.baseline is not None
    base = Server(config.baseline, config.client, "baseline")
    if base.model != server.model:
        raise ValueError(
            f"{base.url} serves {base.model} and {server.url} {server.model}: the baseline is the same model, served "
            "under the same name (--served-model-name)"
        )
    base.refuse_drafts()
    return base


def _settings(config: DecodingConfig, temperature: float) -> dict[str, Any]:
    """Return what every request says of sampling, nothing of which is left to the server's own defaults."""
    sampling = {"temperature": temperature, "top_p": config.top_p, "top_k": config.top_k or -1, "min_p": config.min_p}
    drawn = {"seed": config.seed} if temperature else {}
    least = {"min_tokens": config.min_new_tokens} if config.min_new_tokens else {}
    penalty = {"repetition_penalty": config.repetition_penalty}
    return {"max_tokens": config.max_new_tokens, **sampling, **penalty, **drawn, **least}


def _session(
    servers: Servers, job: Job, settings: Mapping[str, Any], in_flight: int, repeats: int, seed: int
) -> dict[str, Runs]:
    """Let all servers answer all requests, `repeats` times, in turns, in a new random order each time.

    One request at a time, they take turns on each; with more in flight, a turn is all requests.
    """
    shuffle = random.Random(seed)
    for name, server in servers.items() if job.warmup else ():
        server.round(job.warmup, settings, in_flight, name != PLAIN)
    runs = {name: Runs([[] for _ in job.asked], []) for name in servers}
    every = list(range(len(job.asked)))
    turns = [[place] for place in every] if in_flight == 1 else [every]
    console = Console(stderr=True)
    work = [places for _ in range(repeats) for places in turns]
    for places in track(work, "measuring", console=console, transient=True, disable=not console.is_terminal):
        for name in shuffle.sample(list(servers), len(servers)):
            made = servers[name].round([job.asked[place] for place in places], settings, in_flight, name != PLAIN)
            share = made.wall_s / sum(each.latency_s for each in made.answers) if in_flight > 1 else 1.0
            for place, answer in zip(places, made.answers, strict=True):
                own = made.verified if len(places) == 1 else answer.verified
                runs[name].answers[place].append(Timed(answer, share, own))
            runs[name].verified.append(made.verified)
    if PLAIN in servers:
        servers[PLAIN].refuse_drafts()
    return runs


def _gates(sessions: Sequence[Session], runs: Sequence[Mapping[str, Runs]]) -> dict[str, Gate]:
    """Return the verdict on the greedy texts of all workloads at every batch size."""
    found: dict[str, Gate] = {}
    for size in dict.fromkeys(session.batch_size for session in sessions):
        both = [
            (made, session)
            for made, session in zip(runs, sessions, strict=True)
            if session.temperature == 0 and session.batch_size == size
        ]
        ids = [each.id for _, session in both for each in session.asked]
        plain = [texts for made, _ in both for texts in made[PLAIN].texts()]
        for name in both[0][0]:
            if name != PLAIN:
                drafted = [texts for made, _ in both for texts in made[name].texts()]
                found[labelled(name, size)] = text_gate(plain, drafted, ids)
    return found


def _rows(sessions: Sequence[Session], runs: Sequence[Mapping[str, Runs]], gates: Mapping[str, Gate]) -> list[Row]:
    rows: list[Row] = []
    for session, made in zip(sessions, runs, strict=True):
        for category, places in {"": list(range(len(session.asked))), **session.categories()}.items():
            for name, each in made.items():
                gate = gates.get(labelled(name, session.batch_size), UNCHECKED)
                base = made.get(PLAIN) if gate.passed or name == PLAIN else None
                rows.append(row_of(name, each, base, gate, session, (category, places)))
    return rows


def _told(
    served: EndpointConfig, asked: PromptsConfig, config: DecodingConfig, repeats: int, jobs: Sequence[Job]
) -> dict[str, Any]:
    """Return what the numbers depend on besides the server."""
    sampling = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return {
        "prompts": sum(len(job.asked) for job in jobs),
        "distinct_prompts": sum(job.distinct for job in jobs),
        "warmup_prompts": "further ones" if all(job.fresh for job in jobs) else "measured ones",
        "endpoint": served.endpoint,
        "baseline": served.baseline,
        **{key: getattr(config, key) for key in ("max_new_tokens", "min_new_tokens", *sampling)},
        "repeats": repeats,
        **{key: getattr(asked, key) for key in ("warmup", "turns", "balanced")},
        "engine": "as served",
        "provenance": provenance(),
    }
