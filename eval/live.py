"""Timing the baseline, every drafter and HF's own `generate` on the same prompts, interleaved in one process.

Under load, requests arrive at a rate (a Poisson process), whether or not the engine is free, and queue for a free slot.
All drafters and the baseline get the same arrivals, so latencies are compared request by request. Tokens per second
are not comparable, since the arrivals bound them.
"""

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import GenerationConfig

from data.text.prompts import Prompt
from eval.inputs.workloads import cycled
from eval.measures import metrics, results
from eval.measures.losslessness import UNCHECKED, Gate, drafter_label
from heads.base import Tokens
from heads.common.progress import progress
from heads.common.typed import Json
from inference.batch import Batch, acquire, release
from inference.decode import Generation, RequestParams, speculate
from inference.drafters.plain import Baseline
from inference.protocol import Drafter
from inference.target.target import Target
from inference.verification.sample import top2_gap

T = TypeVar("T")
HF = "hf"  # name of transformers' own generate among the drafters

Prompts = Sequence[Prompt]
Runner = Callable[[Any], Any]  # runs a prompt's tokens, or a batch's
Runs = dict[str, list[list[Generation]]]  # name -> prompt -> repeats


class Setup(NamedTuple):
    """The setup of a measurement: the target and its drafters, the prompts, and every request's parameters."""

    target: Target
    drafters: Mapping[str, Drafter]
    prompts: Prompts
    params: RequestParams

    def all_drafters(self) -> dict[str, Drafter]:
        """Return the baseline and the drafters by name."""
        return {results.BASELINE: Baseline(self.target.device), **self.drafters}


def measure(setup: Setup, repeats: int, warmup: Prompts, hf: bool, batch_size: int = 1) -> Runs:
    """Run autoregressive decoding, every drafter and (if `hf`) HF generate `repeats` times on each prompt.

    In batches, a round decodes all prompts together, and HF generate is left out. The `warmup` prompts, which are not
    measured, run first. A drafter with memory starts every round empty, so it never sees a prompt twice.
    """
    target, drafters, prompts, params = setup
    assert not {results.BASELINE, HF} & set(drafters), "a drafter has a baseline's name"
    runners = {
        name: partial(speculate, target, drafter, params=params, batch_size=batch_size)
        for name, drafter in setup.all_drafters().items()
    }
    if hf and batch_size == 1:
        runners[HF] = partial(hf_generate, target, params=params)
    resets = [drafter.reset for drafter in drafters.values()]
    return interleave(runners, prompts, repeats, warmup, params.seed, resets, batch_size)


def interleave(
    runners: Mapping[str, Runner],
    prompts: Prompts,
    repeats: int,
    warmup: Prompts,
    seed: int,
    begin: Sequence[Callable[[], None]] = (),
    batch_size: int = 1,
) -> Runs:
    """Call every runner on each prompt, or in batches on all prompts, in the order of `in_turns`.

    `warmup` prompts run first for lazy initialisation; they fill one batch.
    """
    tokens = [prompt.token for prompt in prompts]
    further: list[Any] = [prompt.token for prompt in warmup]
    if batch_size > 1 and further:
        further = [cycled(further, batch_size)]
    for run in progress(further, "warming up"):
        for runner in runners.values():
            runner(run)
    every = range(len(prompts))
    if batch_size > 1:
        return in_turns(runners, lambda name, *_: runners[name](tokens), [every], repeats, seed, begin)
    batches = [[index] for index in every]
    return in_turns(runners, lambda name, at, _: [runners[name](tokens[at[0]])], batches, repeats, seed, begin)


def in_turns(
    names: Collection[str],
    answer: Callable[[str, Sequence[int], int], Sequence[T]],
    batches: Sequence[Sequence[int]],
    repeats: int,
    seed: int,
    begin: Sequence[Callable[[], None]] = (),
) -> dict[str, list[list[T]]]:
    """Return, by name and prompt, the answers of `repeats` rounds over all batches, each in a random order of names.

    Clock rates, other processes and memory drift during a session; interleaving spreads the drift over all drafters.
    `answer` takes a name, the indices of a batch's prompts and the round; `begin` is called before each round.
    """
    shuffle = random.Random(seed)
    runs: dict[str, list[list[T]]] = {name: [[] for batch in batches for _ in batch] for name in names}
    work = [(turn, batch) for turn in range(repeats) for batch in batches]
    for turn, batch in progress(work, "measuring"):
        for call in begin if batch is batches[0] else ():
            call()
        for name in shuffle.sample(list(names), len(names)):
            for index, answered in zip(batch, answer(name, batch, turn), strict=True):
                runs[name][index].append(answered)
    return runs


def decoded_once(setup: Setup, batch_size: int) -> dict[str, list[Generation]]:
    """Return one run of each prompt by the baseline and by every drafter, whose tokens are compared."""
    runs = measure(setup, 1, (), hf=False, batch_size=batch_size)
    return {name: [repeats[0] for repeats in by_prompt] for name, by_prompt in runs.items()}


def medians(runs: Runs) -> dict[str, list[Generation]]:
    """Return each prompt's median run, by name."""
    return {name: [metrics.median_run(repeats) for repeats in by_prompt] for name, by_prompt in runs.items()}


def rows(
    runs: Runs, drafters: Mapping[str, Drafter], gates: Mapping[str, Gate], measurement: results.Measurement
) -> list[results.ResultRow]:
    """Assemble the report's rows of one session, the baseline first: for all prompts, then for each category.

    A drafter without a passed losslessness check in `gates` gets no speedup at any temperature.
    """
    middle = medians(runs)
    requests = {name: [timed(run) for run in runs_of] for name, runs_of in middle.items()}
    measured = []
    for subset in measurement.parts(len(requests[results.BASELINE])):
        for name in (name for name in requests if name != HF):
            rule = metrics.rules_used([middle[name][index] for index in subset.indices])
            tree = Baseline.tree if name == results.BASELINE else drafters[name].tree
            row = results.result(name, rule, tree, subset, subset.of(requests[name]))
            measured.append(with_gate_result(row, subset, requests, gates))
    return measured


def paired(runs: Runs, drafters: Sequence[str], measurement: results.Measurement) -> list[Json]:
    """Return each drafter's difference from the first in τ and in tokens per second, over the same prompts.

    The median run of each prompt counts, as in the report's rows. Empty with one drafter or one prompt.
    """
    middle = medians({name: runs[name] for name in drafters})
    overall = next(measurement.parts(len(runs[drafters[0]])))
    pairs = {
        name: {
            "tau": [(run.tokens, run.steps) for run in map(metrics.passes, of_prompts)],
            "tokens_per_second": metrics.decoding(of_prompts),
        }
        for name, of_prompts in middle.items()
    }
    shared = {key: getattr(measurement, key) for key in ("workload", "temperature", "batch_size")}
    records = []
    for name in drafters[1:]:
        both = {
            key: metrics.difference(values, pairs[drafters[0]][key], measurement.seed, overall.groups)
            for key, values in pairs[name].items()
        }
        if None not in both.values():
            records.append({"drafter": name, "base": drafters[0], **shared, "prompts": len(overall.indices), **both})
    return records


def with_gate_result(
    row: results.ResultRow,
    subset: results.Subset,
    requests: Mapping[str, Sequence[results.MeasuredRequest]],
    gates: Mapping[str, Gate],
) -> results.ResultRow:
    """Return a row with its losslessness check, and with speedups if the check did not fail."""
    measurement, gate = subset.measurement, gates.get(drafter_label(row.drafter, row.batch_size), UNCHECKED)
    shown = gate if measurement.temperature == 0 else measurement.coupled.get(row.drafter, UNCHECKED)
    row = replace(row, lossless=shown.among([measurement.start + index for index in subset.indices]).counts())
    # a baseline without a check of its own (endpoint, tune) is trusted
    trusted = gate.passed or (row.drafter == results.BASELINE and not gate.checked)
    if not trusted or row.drafter in measurement.not_lossless or results.BASELINE not in requests:
        return row
    mine, baseline = subset.of(requests[row.drafter]), subset.of(requests[results.BASELINE])
    ours, theirs = results.known(mine, "end_to_end"), results.known(baseline, "end_to_end")
    fast, slow = results.known(mine, "decoding"), results.known(baseline, "decoding")
    hf = results.known(subset.of(requests[HF]), "decoding") if HF in requests else None
    seed, streamed = measurement.seed, bool(fast and slow)  # otherwise the prefill cannot be separated
    return replace(
        row,
        by_request=results.by_request(mine, baseline),
        whole_speedup=metrics.speed_ratio(ours, theirs),
        whole_speedup_ci=metrics.paired_interval(ours, theirs, seed, subset.groups),
        speedup=metrics.speed_ratio(fast, slow) if streamed else None,
        speedup_ci=metrics.paired_interval(fast, slow, seed, subset.groups) if streamed else None,
        speedup_hf=None if hf is None else metrics.speed_ratio(fast, hf),
    )


def timed(run: Generation) -> results.MeasuredRequest:
    """Convert a run to a measured request."""
    return results.MeasuredRequest(
        passes=metrics.passes(run),
        decoding=metrics.decoding([run])[0],
        end_to_end=(len(run.tokens), run.prefill_s + run.decode_s),
        prefill_s=run.prefill_s,
        seconds={key: sum(getattr(step, f"{key}_s") for step in run.steps) for key in metrics.PARTS},
        latencies={"latency_s": run.latency_s},
    )


@torch.inference_mode()
def hf_generate(target: Target, prompt: Tokens, params: RequestParams) -> Generation:
    """Run HF's greedy `generate` on the target's model with the repetition penalty, timed like our engine.

    The result has no steps. It runs in inference mode, like our engine, which is faster than `no_grad`.
    """
    eos, most = sorted(target.eos), min(params.max_new_tokens, target.max_model_len - len(prompt))
    # Without these values the checkpoint's sampling values would apply, with a warning.
    configure: Any = GenerationConfig
    config = configure(
        max_new_tokens=most,
        min_new_tokens=min(params.min_new_tokens, most),
        do_sample=False,
        temperature=1.0,
        top_p=1.0,
        top_k=50,
        repetition_penalty=params.sampling.repetition_penalty,
        use_cache=True,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
        return_dict_in_generate=True,
        output_scores=params.logit_gaps,
    )
    token, times = torch.tensor([prompt], device=target.device), []
    # It hands on the prompt, before its prefill, and then each token.
    clock = SimpleNamespace(put=lambda _: times.append(time.perf_counter()), end=lambda: None)
    generate: Any = target.model.generate  # transformers types it on a mixin that AutoModel lacks
    out = generate(token, attention_mask=torch.ones_like(token), generation_config=config, streamer=clock)
    begin, first, *_, last = (*times, times[-1])
    tokens = out.sequences[0, len(prompt) :].tolist()
    return Generation(
        tokens,
        ["prefill"] + ["bonus"] * (len(tokens) - 1),
        logit_gaps=[float(top2_gap(logits[0])) for logits in out.scores or ()],
        prefill_s=first - begin,
        decode_s=last - first,
        finish_reason="eos" if tokens[-1] in target.eos else "length",
    )


class Served(NamedTuple):
    """An answered request, in seconds; `arrived` counts from the round's first arrival."""

    generation: Generation  # with the latency from the arrival
    arrived: float
    queue_s: float  # seconds from the arrival to the prefill
    ttft_s: float  # seconds from the arrival to the first token

    def request(self) -> results.MeasuredRequest:
        """Convert to a measured request; latencies count from the arrival."""
        latencies = {"latency_s": self.generation.latency_s, "ttft_s": self.ttft_s, "queue_s": self.queue_s}
        return replace(timed(self.generation), latencies=latencies, arrived=self.arrived)


Rounds = dict[str, list[list[Served]]]  # drafter -> prompt -> round


def arrivals(count: int, rate: float, rng: random.Random) -> list[float]:
    """Return the requests' arrival times in seconds, the first at 0, with exponential gaps of mean 1 / rate."""
    return list(accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def serve(batch: Batch, prompts: Sequence[Tokens], when: Sequence[float], params: RequestParams) -> list[Served]:
    """Answer requests in the order of arrival, `when` seconds from now, in an empty continuous batch.

    An arrived request is admitted as soon as a slot is free, before the next pass. Without requests the engine sleeps
    until the next arrival. Results are in the order of the requests.
    """
    begin, waiting = time.perf_counter(), deque(range(len(prompts)))
    running = []
    served = {}
    while waiting or batch.running:
        now = time.perf_counter() - begin
        if waiting and batch.free and when[waiting[0]] <= now:
            index = waiting.popleft()
            generation = batch.admit(index, prompts[index], params)
            arrived = when[index]
            served[index] = Served(generation, arrived, now - arrived, time.perf_counter() - begin - arrived)
            running.append(index)
        elif batch.running:
            batch.step()
        else:
            time.sleep(when[waiting[0]] - now)
        batch.release()
        for index in [index for index in running if served[index].generation.finish_reason]:
            running.remove(index)
            served[index].generation.latency_s = time.perf_counter() - begin - when[index]
    return [served[index] for index in range(len(prompts))]


@torch.inference_mode()
def measure_rate(setup: Setup, repeats: int, warmup: Prompts, batch_size: int, request_rate: float) -> Rounds:
    """Let the baseline and every drafter answer all prompts as they arrive, in a new random order each round.

    Each round has its own arrivals, the same for all drafters; a rate only scales them. A drafter with memory starts
    every round empty. The `warmup` prompts run before.
    """
    all_drafters, params = setup.all_drafters(), setup.params
    tokens, gaps = [prompt.token for prompt in setup.prompts], random.Random(params.seed)
    when = [arrivals(len(tokens), request_rate, gaps) for _ in range(repeats)]
    size, first = min(batch_size, len(tokens)), [prompt.token for prompt in warmup]
    requests = [(token, params) for token in (*tokens, *first)]

    def served(name: str, prompts: Sequence[Tokens], times: Sequence[float]) -> list[Served]:
        # Room for all requests, or the graphs would be dropped.
        batch = acquire(setup.target, all_drafters[name], size, requests)
        answered = serve(batch, prompts, times, params)
        release(setup.target, all_drafters[name], batch)
        return answered

    full = cycled(first, size)  # at least one full batch
    for name in all_drafters if first else ():
        served(name, full, [0.0] * len(full))
    resets = [drafter.reset for drafter in setup.drafters.values()]
    return in_turns(
        list(all_drafters), lambda name, _, turn: served(name, tokens, when[turn]), [range(len(tokens))], repeats,
        params.seed, resets,
    )  # fmt: skip


def requests_of(rounds: Rounds) -> dict[str, list[list[results.MeasuredRequest]]]:
    """Return the measured requests of all rounds."""
    return {name: [[one.request() for one in repeats] for repeats in prompts] for name, prompts in rounds.items()}


def queued_rows(
    rows: Sequence[results.ResultRow],
    rounds: Mapping[str, Sequence[Sequence[results.MeasuredRequest]]],
    measurement: results.Measurement,
) -> list[results.ResultRow]:
    """Return the rows of a session under load with waiting times, given the requests by drafter and prompt.

    Latencies are over all rounds, since each round had other arrivals. A speedup is a ratio of mean latencies.
    """
    subsets = {subset.category: subset for subset in measurement.parts(len(rounds[results.BASELINE]))}
    queued = []
    for row in rows:
        subset = subsets[row.category]
        mine, baseline = (subset.of(rounds[name]) for name in (row.drafter, results.BASELINE))
        # The inverse of each prompt's total latency, so that a ratio is a speedup.
        fast, slow = ([(1, sum(one.latency_s for one in several)) for several in of] for of in (mine, baseline))
        requests = [*chain.from_iterable(mine)]
        cuts = results.by_request(requests)
        cuts.pop("tokens_per_second", None)  # arrivals bound the throughput
        trusted, seed = row.whole_speedup is not None, measurement.seed
        turns = list(zip(*mine, strict=True))  # each round's seconds are from its first arrival to its last end
        seconds = sum(max(one.arrived + one.latency_s for one in turn) for turn in turns)
        seconds -= sum(min(one.arrived for one in turn) for turn in turns)
        queued.append(
            replace(
                row,
                tokens_per_second=metrics.ratio(sum(one.decoded for one in requests), seconds),
                latency_s=statistics.median(one.latency_s for one in requests),
                speedup=metrics.speed_ratio(fast, slow) if trusted else None,
                speedup_ci=metrics.paired_interval(fast, slow, seed, subset.groups) if trusted else None,
                speedup_hf=None,
                whole_tokens_per_second=None,
                whole_speedup=None,
                whole_speedup_ci=None,
                by_request=cuts,
            )
        )
    return queued
