"""Timing the baseline, every drafter and HF generate on the same prompts, interleaved in one process."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track

from data.text.prompts import Prompt
from eval.live.hf import hf_generate
from eval.measures import metrics
from eval.measures.builder import Request, Source, result, with_speedups
from eval.measures.losslessness import UNCHECKED, Gate, labelled
from eval.measures.results import Measurement, Row
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
    resets = [drafter.reset for drafter in drafters.values()]
    if batch_size > 1:
        sources = {PLAIN: Plain(target.device), **drafters}
        tokens = [prompt.token for prompt in prompts]
        warm_up(target, sources, warmup, settings, batch_size)

        def answers(name: str, *_: Any) -> Sequence[Generation]:
            return speculate(target, sources[name], tokens, settings, batch_size=batch_size)

        return in_turns(list(sources), answers, [range(len(prompts))], repeats, settings.seed, resets)
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
    return interleave(runners, prompts, repeats, warmup, settings.seed, resets)


def warm_up(
    target: Target, drafters: Mapping[str, Drafter], prompts: Sequence[Prompt], settings: Settings, batch_size: int
) -> None:
    """Let every drafter decode prompts, if there are any, in a full batch before anything counts."""
    tokens = [prompt.token for prompt in prompts] * batch_size
    for drafter in drafters.values() if tokens else ():
        speculate(target, drafter, tokens[: max(batch_size, len(prompts))], settings, batch_size=batch_size)


def interleave(
    runners: Mapping[str, Runner],
    prompts: Sequence[Prompt],
    repeats: int,
    warmup: Sequence[Prompt],
    seed: int,
    begin: Sequence[Callable[[], None]] = (),
) -> Runs:
    """Call every runner on each prompt in turn, as `in_turns`.

    The first calls pay for lazy initialisation, so the `warmup` prompts go through every runner before anything counts.
    """
    for prompt in warmup:
        for run in runners.values():
            run(prompt.token)

    def answer(name: str, indices: Sequence[int], _: int) -> list[Generation]:
        return [runners[name](prompts[index].token) for index in indices]

    return in_turns(list(runners), answer, [[index] for index in range(len(prompts))], repeats, seed, begin)


def in_turns(
    names: Sequence[str],
    answer: Callable[[str, Sequence[int], int], Sequence[T]],
    batches: Sequence[Sequence[int]],
    repeats: int,
    seed: int,
    begin: Sequence[Callable[[], None]] = (),
) -> dict[str, list[list[T]]]:
    """Let all that have a name answer every batch of prompts, in a new random order of names each time.

    Clock rates, other processes and memory drift during a session; side by side they hit all alike, and the order
    decides nothing.

    Args:
        names: of what answers.
        answer: takes a name, the indices of a batch's prompts and the number of the round; returns their answers.
        batches: all prompts, by their indices from 0.
        repeats: rounds over the batches.
        seed: of the order.
        begin: called before each round.

    Returns:
        By name, by prompt, the answers of all rounds.
    """
    shuffle = random.Random(seed)
    runs: dict[str, list[list[T]]] = {name: [[] for batch in batches for _ in batch] for name in names}
    work = [(number, batch) for number in range(repeats) for batch in batches]
    for number, batch in progress(work, "measuring"):
        for call in begin if batch is batches[0] else ():
            call()
        for name in shuffle.sample(list(names), len(names)):
            for index, answered in zip(batch, answer(name, batch, number), strict=True):
                runs[name][index].append(answered)
    return runs


def progress(work: Sequence[T], label: str) -> Iterable[T]:
    """Yield the items behind a progress bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    return track(work, label, console=console, transient=True, disable=not console.is_terminal)


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
