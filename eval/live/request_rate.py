"""Measuring under load: requests arrive at a rate, whether or not the engine is free, and their waiting times count.

An open loop: arrivals follow a clock of their own (Poisson), as users do, and not the ends of answers. A request that
finds no free slot in the batch waits in a queue. The baseline and every drafter meet the same arrivals, so that their
latencies can be compared request by request; their tokens per second cannot, for it is the arrivals that bound them.
"""

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from data.text.prompts import Prompt
from eval.live.interleaved import PLAIN, Runs, Setup, in_turns, timed
from eval.measures import metrics
from eval.measures.results import Measurement, Request, Row, Subset, by_request
from inference.batch import Batch, acquire, release
from inference.decode import Generation, Settings


class Served(NamedTuple):
    """A request that was answered; seconds, of which `arrived` counts from the round's first arrival, 0."""

    generation: Generation  # its latency counts from the arrival
    arrived: float
    queue_s: float  # from the arrival to the prefill
    ttft_s: float | None  # from the arrival to the first token; None where a server does not stream

    @property
    def ended(self) -> float:
        """When the answer was complete."""
        return self.arrived + self.generation.latency_s

    def request(self) -> Request:
        """Return it as a measured request, its waits counted from its arrival."""
        waits = {"latency_s": self.generation.latency_s, "ttft_s": self.ttft_s, "queue_s": self.queue_s}
        return replace(timed(self.generation), waits=waits)


Rounds = dict[str, list[list[Served]]]  # by name, by prompt, the rounds


def arrivals(count: int, rate: float, rng: random.Random) -> list[float]:
    """Return the seconds at which requests come, the first at 0, with exponential gaps of 1 / rate on average."""
    return list(accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def serve(
    batch: Batch,
    prompts: Sequence[list[int]],
    when: Sequence[float],
    settings: Settings,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Served]:
    """Answer requests in the order of their arrivals, `when` seconds from now, in a continuous batch that is empty.

    A request that has arrived is admitted as soon as a slot is free, before the next pass. Without requests the engine
    sleeps until the next arrival. Results are in the requests' order.
    """
    begin, waiting = clock(), deque(range(len(prompts)))
    running: list[int] = []
    served: dict[int, Served] = {}
    while waiting or batch.running:
        now = clock() - begin
        if waiting and batch.free and when[waiting[0]] <= now:
            number = waiting.popleft()
            generation = batch.admit(number, prompts[number], settings)
            arrived = when[number]
            served[number] = Served(generation, arrived, now - arrived, clock() - begin - arrived)
            running.append(number)
        elif batch.running:
            batch.step()
        else:
            sleep(when[waiting[0]] - now)
        batch.release()
        for number in [number for number in running if served[number].generation.finish]:
            running.remove(number)
            served[number].generation.latency_s = clock() - begin - when[number]
    return [served[number] for number in range(len(prompts))]


@torch.inference_mode()
def measure(setup: Setup, repeats: int, warmup: Sequence[Prompt], batch_size: int, request_rate: float) -> Rounds:
    """Let the baseline and every drafter answer all prompts as they arrive, in turns, in a new random order each round.

    A round has arrivals of its own, the same for all; another rate has the same ones, stretched. A drafter with memory
    begins every round with nothing. The `warmup` prompts run before, without waiting.
    """
    sources, settings = setup.sources(), setup.settings
    tokens, gaps = [prompt.token for prompt in setup.prompts], random.Random(settings.seed)
    when = [arrivals(len(tokens), request_rate, gaps) for _ in range(repeats)]
    size, first = min(batch_size, len(tokens)), [prompt.token for prompt in warmup]
    requests = [(token, settings) for token in (*tokens, *first)]

    def served(name: str, prompts: Sequence[list[int]], times: Sequence[float]) -> list[Served]:
        batch = acquire(
            setup.target, sources[name], size, requests
        )  # with room for all, or its graphs would be dropped
        answered = serve(batch, prompts, times, settings)
        release(setup.target, sources[name], batch)
        return answered

    def answers(name: str, _: Sequence[int], number: int) -> list[Served]:
        return served(name, tokens, when[number])

    for name in sources if first else ():
        count = max(size, len(first))  # a full batch at least
        served(name, (first * count)[:count], [0.0] * count)
    return in_turns(list(sources), answers, [range(len(tokens))], repeats, settings.seed, setup.resets())


def generations(rounds: Rounds) -> Runs:
    """Return the answers alone."""
    return {name: [[one.generation for one in repeats] for repeats in prompts] for name, prompts in rounds.items()}


def queued_rows(rows: Sequence[Row], rounds: Rounds, measurement: Measurement) -> list[Row]:
    """Return the rows that `live.rows` made of a session under load, with the waiting times of its requests.

    Latencies are those of all rounds: each had other arrivals, so none is more typical than another. What had a speedup
    has one of latencies.
    """
    subsets = {subset.category: subset for subset in measurement.parts(len(rounds[PLAIN]))}
    return [_waited(row, rounds, subsets[row.category]) for row in rows]


def _waited(row: Row, rounds: Rounds, subset: Subset) -> Row:
    mine, plain = (subset.of(rounds[name]) for name in (row.drafter, PLAIN))
    fast, slow = latencies(mine), latencies(plain)
    requests = [one.request() for one in chain.from_iterable(mine)]
    cuts = by_request(requests)
    cuts.pop("tokens_per_second", None)  # the arrivals bound them
    trusted = row.whole_speedup is not None
    return replace(
        row,
        tokens_per_second=throughput(mine),
        latency_s=statistics.median(one.generation.latency_s for one in chain.from_iterable(mine)),
        speedup=metrics.over(fast, slow) if trusted else None,
        speedup_ci=metrics.paired_interval(fast, slow, subset.measurement.seed, subset.groups) if trusted else None,
        speedup_hf=None,
        whole_tokens_per_second=None,
        whole_speedup=None,
        whole_speedup_ci=None,
        by_request=cuts,
    )


def throughput(rounds: Sequence[Sequence[Served]]) -> float | None:
    """Return the tokens after the prefill's over the seconds from each round's first arrival to its last end."""
    by_round = list(zip(*rounds, strict=True))
    seconds = sum(max(one.ended for one in turn) - min(one.arrived for one in turn) for turn in by_round)
    return metrics.ratio(sum(metrics.decoded(one.generation) for turn in by_round for one in turn), seconds)


def latencies(rounds: Sequence[Sequence[Served]]) -> metrics.Pairs:
    """Return one and the total latency of each request, whose speeds compare as mean latencies do: higher is faster."""
    return [(1, sum(request.generation.latency_s for request in repeats)) for repeats in rounds]
