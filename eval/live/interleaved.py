"""The wall clock: plain decoding, every drafter and HF generate on the same prompts, interleaved, in one process."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from data.text.prompts import Prompt
from eval.live.hf import hf_generate
from eval.measures import metrics
from eval.measures.losslessness import UNCHECKED, Gate, labelled
from eval.measures.results import Row
from inference.decode import Generation, Settings, autoregress, speculate
from inference.drafters.plain import Plain
from inference.protocol import Drafter
from inference.target.target import Target

PLAIN, HF = "plain", "hf"  # the two baselines' names among the drafters'

Runner = Callable[[list[int]], Generation]
Runs = dict[str, list[list[Generation]]]  # by name, by prompt, the repeats


@dataclass(frozen=True)
class Session:
    """What all rows of one interleaved measurement share.

    Attributes:
        start: the place of its first prompt among those that the gates compared.
        categories: the places of each category's prompts in it.
        conversations: of each prompt; intervals come from resampling these. Empty: each prompt is one.
        coupled: at a temperature above 0, each drafter's verdict under coupled noise.
        untrusted: drafters that are given no speedup at this temperature.
        agreement: of each drafter's timed tokens with plain decoding's.
    """

    workload: str
    temperature: float
    batch_size: int
    memory_bytes: int
    seed: int
    start: int = 0
    categories: Mapping[str, list[int]] = field(default_factory=dict)
    conversations: Sequence[int] = ()
    coupled: Mapping[str, Gate] = field(default_factory=dict)
    untrusted: frozenset[str] = frozenset()
    agreement: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    request_rate: float | None = None


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
    """Run plain decoding, every drafter and (if `hf`) HF generate `repeats` times on each prompt.

    In batches, a round is all prompts together, and HF generate is left out. The `warmup` prompts, which are none of
    these, run before anything counts.

    A drafter that remembers starts every round over the prompts with nothing and learns from prompt to prompt, in the
    prompts' order: it never meets a prompt that it has answered before.

    Returns:
        For "plain", each drafter's name and "hf": the repeats of each prompt, in the prompts' order.
    """
    assert not {PLAIN, HF} & set(drafters), "a drafter has a baseline's name"
    if batch_size > 1:
        together = {PLAIN: Plain(target.device), **drafters}
        return _in_batches(target, together, prompts, settings, repeats, warmup, batch_size)
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
    return interleave(runners, prompts, repeats, warmup, settings.seed, [each.forget for each in drafters.values()])


def _in_batches(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    settings: Settings,
    repeats: int,
    warmup: Sequence[Prompt],
    batch_size: int,
) -> Runs:
    """Let every drafter decode all prompts in a continuous batch, in turns, in a new random order each round."""
    shuffle, tokens = random.Random(settings.seed), [prompt.token for prompt in prompts]
    runs: Runs = {name: [[] for _ in prompts] for name in drafters}
    before = [prompt.token for prompt in warmup]
    for drafter in drafters.values() if before else ():
        speculate(target, drafter, (before * batch_size)[:batch_size], settings, batch_size=batch_size)
    for _ in range(repeats):
        for name in shuffle.sample(list(drafters), len(drafters)):
            drafters[name].forget()
            made = speculate(target, drafters[name], tokens, settings, batch_size=batch_size)
            for each, run in zip(runs[name], made, strict=True):
                each.append(run)
    return runs


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


def rows(runs: Runs, drafters: Mapping[str, Drafter], gates: Mapping[str, Gate], session: Session) -> list[Row]:
    """Assemble the report's rows of one session, plain decoding first: all prompts together, then each category.

    Args:
        runs: what `measure` returned.
        drafters: those it was called with.
        gates: each drafter's verdict; a drafter without a green one gets no speedup, at any temperature.
        session: what the rows share.
    """
    middle = {name: [metrics.median_run(repeats) for repeats in each] for name, each in runs.items()}
    hf = middle.pop(HF, None)
    sources: dict[str, Drafter] = {PLAIN: Plain(torch.device("cpu")), **drafters}
    made = []
    for category, places in {"": list(range(len(middle[PLAIN]))), **session.categories}.items():
        plain = [middle[PLAIN][place] for place in places]
        other = None if hf is None else [hf[place] for place in places]
        groups = [session.conversations[place] for place in places] if session.conversations else None
        for name, each in middle.items():
            mine = [each[place] for place in places]
            gate = gates.get(labelled(name, session.batch_size), UNCHECKED)
            trusted = gate.passed or (name == PLAIN and not gate.checked)  # by itself it is what the gate compares with
            shown = (gate if session.temperature == 0 else session.coupled.get(name, UNCHECKED)).among(
                [session.start + place for place in places]
            )
            row = _row(name, sources[name], mine, shown, session, groups)
            if category:
                row = replace(row, category=category, workload=f"{session.workload}/{category}", agreement={})
            trusted = trusted and name not in session.untrusted
            made.append(replace(row, **_speedups(mine, plain, other, session.seed, groups)) if trusted else row)
    return made


def _row(
    name: str, drafter: Drafter, runs: list[Generation], gate: Gate, session: Session, groups: metrics.Groups
) -> Row:
    """Return one drafter's row, without a speedup."""
    found = metrics.acceptance(runs)
    return Row(
        drafter=name,
        rule=metrics.rules_used(runs),
        tree=drafter.tree,
        workload=session.workload,
        temperature=session.temperature,
        batch_size=session.batch_size,
        steps=found.steps,
        tokens=found.tokens,
        tau=found.tau,
        tau_ci=metrics.tau_interval(runs, session.seed, groups),
        tau_request_mean=found.tau_request_mean,
        accepted_by_depth=found.accepted_by_depth,
        conditional_by_depth=found.conditional_by_depth,
        draft_tokens=found.draft_tokens,
        accepted_per_draft_token=found.accepted_per_draft_token,
        tokens_per_second=metrics.tokens_per_second(runs),
        speedup=None,
        speedup_ci=None,
        speedup_hf=None,
        overlap_headroom=metrics.overlap_headroom(metrics.seconds(runs)),
        seconds=metrics.seconds(runs),
        latency_s=statistics.median(run.latency_s for run in runs),
        memory_bytes=session.memory_bytes,
        lossless=gate.counts(),
        prompts=len(runs),
        state=drafter.memory,
        definitions=metrics.definitions(runs),
        tau_within_depth=[metrics.tau_within(found, depth + 1) for depth in range(len(found.accepted_by_depth))],
        by_request=metrics.by_request(runs, None),
        prefill_s=sum(run.prefill_s for run in runs),
        whole_tokens_per_second=metrics.whole_tokens_per_second(runs),
        agreement=session.agreement.get(name, {}),
        request_rate=session.request_rate,
    )


def _speedups(
    runs: list[Generation],
    plain: list[Generation],
    hf: list[Generation] | None,
    seed: int,
    groups: metrics.Groups,
) -> dict[str, Any]:
    """Return the columns of a row that only a lossless drafter has."""
    return {
        "by_request": metrics.by_request(runs, plain),
        "whole_speedup": metrics.whole_speedup(runs, plain),
        "whole_speedup_ci": metrics.whole_speedup_interval(runs, plain, seed, groups),
        "speedup": metrics.speedup(runs, plain),
        "speedup_ci": metrics.speedup_interval(runs, plain, seed, groups),
        "speedup_hf": None if hf is None else metrics.speedup(runs, hf),
    }
