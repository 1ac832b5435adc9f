"""Timing the baseline, every drafter and HF generate on the same prompts, interleaved in one process."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import track

from data.text.prompts import Prompt
from eval.live.hf import hf_generate
from eval.measures import metrics
from eval.measures.losslessness import UNCHECKED, Gate, labelled
from eval.measures.results import Measurement, Request, Row, Source, result, with_speedups
from inference.decode import Generation, Settings, autoregress, speculate
from inference.drafters.plain import Plain
from inference.protocol import Drafter
from inference.target.target import Target

T = TypeVar("T")
PLAIN, HF = "plain", "hf"  # the two baselines' names among the drafters'

Runner = Callable[[list[int]], Generation]
Runs = dict[str, list[list[Generation]]]  # by name, by prompt, the repeats


def measure(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    settings: Settings,
    repeats: int,
    warmup: Sequence[Prompt],
    hf: bool,
    batch_size: int = 1,
) -> Runs:
    """Run autoregressive decoding, every drafter and (if `hf`) HF generate `repeats` times on each prompt.

    In batches, a round is all prompts together, and HF generate is left out. The `warmup` prompts, which are none of
    these, run before anything counts.

    A drafter with memory starts every round over the prompts with nothing and learns from prompt to prompt, in the
    prompts' order: it never meets a prompt that it has answered before.

    Returns:
        For "plain", each drafter's name and "hf": the repeats of each prompt, in the prompts' order.
    """
    assert not {PLAIN, HF} & set(drafters), "a drafter has a baseline's name"
    if batch_size > 1:
        sources = {PLAIN: Plain(target.device), **drafters}
        tokens = [prompt.token for prompt in prompts]
        warm_up(target, sources, warmup, settings, batch_size)

        def answers(drafter: Drafter, _: int) -> Sequence[Generation]:
            return speculate(target, drafter, tokens, settings, batch_size=batch_size)

        return in_turns(sources, answers, len(prompts), repeats, settings.seed)
    runners: dict[str, Runner] = {PLAIN: partial(autoregress, target, settings=settings)}
    for name, drafter in drafters.items():
        runners[name] = partial(speculate, target, drafter, settings=settings)
    if hf:
        runners[HF] = partial(
            hf_generate,
            target,
            max_new_tokens=settings.max_new_tokens,
            penalty=settings.sampling.repetition_penalty,
            min_new_tokens=settings.min_new_tokens,
        )
    resets = [drafter.reset for drafter in drafters.values()]
    return interleave(runners, prompts, repeats, warmup, settings.seed, resets)


def warm_up(
    target: Target, drafters: Mapping[str, Drafter], prompts: Sequence[Prompt], settings: Settings, batch_size: int
) -> None:
    """Let every drafter decode prompts, if there are any, in a full batch before anything counts."""
    tokens = [prompt.token for prompt in prompts] * batch_size
    for drafter in drafters.values() if tokens else ():
        speculate(target, drafter, tokens[: max(batch_size, len(prompts))], settings, batch_size=batch_size)


def in_turns(
    drafters: Mapping[str, Drafter],
    answers: Callable[[Drafter, int], Sequence[T]],
    count: int,
    repeats: int,
    seed: int,
) -> dict[str, list[list[T]]]:
    """Let every drafter answer all `count` prompts in each round, in a new random order of drafters each round.

    A drafter with memory begins every round with nothing. `answers` takes the drafter and the number of the round.
    """
    shuffle = random.Random(seed)
    rounds: dict[str, list[list[T]]] = {name: [[] for _ in range(count)] for name in drafters}
    for number in range(repeats):
        for name in shuffle.sample(list(drafters), len(drafters)):
            drafters[name].reset()
            for repeats_of, answer in zip(rounds[name], answers(drafters[name], number), strict=True):
                repeats_of.append(answer)
    return rounds


def interleave(
    runners: Mapping[str, Runner],
    prompts: Sequence[Prompt],
    repeats: int,
    warmup: Sequence[Prompt],
    seed: int,
    begin: Sequence[Callable[[], None]] = (),
) -> Runs:
    """Call every runner on each prompt in turn, `repeats` rounds long, in a new random order of runners each time.

    Clock rates, other processes and memory drift during a session; side by side they hit all runners alike, and the
    order decides nothing. The first calls pay for lazy initialisation, so the `warmup` prompts go through every runner
    before anything counts. `begin` is called before each round.
    """
    shuffle = random.Random(seed)
    for prompt in warmup:
        for run in runners.values():
            run(prompt.token)
    runs: Runs = {name: [[] for _ in prompts] for name in runners}
    console = Console(stderr=True)
    work = [(index, prompt) for _ in range(repeats) for index, prompt in enumerate(prompts)]
    for index, prompt in track(work, "measuring", console=console, transient=True, disable=not console.is_terminal):
        if index == 0:
            for call in begin:
                call()
        order = list(runners)
        shuffle.shuffle(order)
        for name in order:
            runs[name][index].append(runners[name](prompt.token))
    return runs


def decoded_once(
    target: Target, drafters: Mapping[str, Drafter], prompts: Sequence[Prompt], settings: Settings, batch_size: int = 1
) -> dict[str, list[Generation]]:
    """Return one run of each prompt by autoregressive decoding and by every drafter: to compare tokens, not to time."""
    runs = measure(target, drafters, prompts, settings, 1, (), hf=False, batch_size=batch_size)
    return {name: [repeats[0] for repeats in by_prompt] for name, by_prompt in runs.items()}


def medians(runs: Runs) -> dict[str, list[Generation]]:
    """Return each prompt's median run, by name."""
    return {name: [metrics.median_run(repeats) for repeats in by_prompt] for name, by_prompt in runs.items()}


def rows(runs: Runs, drafters: Mapping[str, Drafter], gates: Mapping[str, Gate], measurement: Measurement) -> list[Row]:
    """Assemble the report's rows of one session, the baseline first: all prompts together, then each category.

    Args:
        runs: what `measure` returned.
        drafters: those it was called with.
        gates: each drafter's losslessness check; a drafter that did not pass gets no speedup, at any temperature.
        measurement: the settings and checks that the rows share.
    """
    middle = medians(runs)
    requests = {name: [timed(run) for run in runs_of] for name, runs_of in middle.items()}
    hf = requests.pop(HF, None)
    sources: dict[str, Drafter] = {PLAIN: Plain(torch.device("cpu")), **drafters}
    measured = []
    for subset in measurement.parts(len(requests[PLAIN])):
        plain = [requests[PLAIN][index] for index in subset.indices]
        other = None if hf is None else [hf[index] for index in subset.indices]
        for name, runs_of in requests.items():
            mine = [runs_of[index] for index in subset.indices]
            rule = metrics.rules_used([middle[name][index] for index in subset.indices])
            source = Source(name, rule, sources[name].tree, sources[name].memory)
            gate = gates.get(labelled(name, measurement.batch_size), UNCHECKED)
            shown = gate if measurement.temperature == 0 else measurement.coupled.get(name, UNCHECKED)
            counts = shown.among([measurement.start + index for index in subset.indices]).counts()
            row = replace(result(source, measurement, subset, mine), lossless=counts)
            trusted = gate.passed or (name == PLAIN and not gate.checked)  # alone, it is the reference of the gate
            trusted = trusted and name not in measurement.not_lossless
            measured.append(with_speedups(row, mine, plain, subset, measurement.seed, other) if trusted else row)
    return measured


def timed(run: Generation) -> Request:
    """Return a run as a measured request."""
    return Request(
        passes=metrics.passes(run),
        decoding=metrics.decoding([run])[0],
        end_to_end=metrics.end_to_end([run])[0],
        prefill_s=run.prefill_s,
        seconds=metrics.seconds([run]),
        waits={"latency_s": run.latency_s},
    )
