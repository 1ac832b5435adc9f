"""The losslessness checks of an evaluation: greedy tokens, sampled tokens and timed tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from data.text.prompts import Prompt
from eval.config import DecodingConfig
from eval.inputs.drafters import Drafters
from eval.live.interleaved import HF, PLAIN, Runs, Setup, decoded_once, medians
from eval.live.sampled import sampled_gates
from eval.measures.losslessness import EPSILON, Gate, SampledGate, divergence, gate, labelled
from heads.common.progress import progress
from inference.decode import autoregress, reference
from inference.drafters.plain import Plain
from inference.target.target import Target
from inference.verification.verify import is_lossy


def check(
    target: Target, drafters: Drafters, prompts: Sequence[Prompt], config: DecodingConfig, total_variation: float
) -> tuple[dict[str, Gate], list[SampledGate]]:
    """Return the losslessness check of each drafter at each batch size, and at each temperature above 0.

    Greedily every prompt runs once. All are compared with autoregressive decoding of each prompt alone by the reference
    engine; so is the baseline, which the drafters' engine decodes. Above 0 a chi-square test reveals a total variation
    of `total_variation`.
    """
    sizes = config.batch_sizes()
    if not drafters and sizes == [1]:
        return {}, []
    setup, ids = Setup(target, drafters, prompts, config.settings(0.0, gaps=True)), [prompt.id for prompt in prompts]
    plain = Plain(target.device)
    alone = [
        reference(target, plain, prompt.token, setup.settings) for prompt in progress(prompts, "the baseline alone")
    ]
    gates = {}
    for size in sorted(sizes):
        for name, runs_of in decoded_once(setup, size).items():
            verdict = gate(alone, runs_of, ids, target.dtype)
            gates[labelled(name, size)] = replace(verdict, lossy=name != PLAIN and is_lossy(config.rule))
    hot = [temperature for temperature in config.temperatures() if temperature > 0] if drafters else []
    tests, sampled = len(hot) * len(drafters), []
    for temperature in hot:
        sampled += sampled_gates(setup._replace(settings=config.settings(temperature)), total_variation, tests, sizes)
    return gates, sampled


def agreement(setup: Setup, runs: Runs) -> Mapping[str, dict[str, Any]]:
    """Return how many of each drafter's timed greedy texts equal the baseline's, and the logit gaps where they part.

    Only where they part is the prompt decoded once more, autoregressively and up to there, for the gap.
    """
    target, _, prompts, settings = setup
    middle = medians({name: runs_of for name, runs_of in runs.items() if name != HF})
    plain, epsilon = middle.pop(PLAIN), EPSILON.get(target.dtype, 0.0)

    @cache
    def gap(index: int, position: int) -> float:  # the baseline's, between its two best logits
        most = max(2, position + 1)
        how = replace(settings, gaps=True, max_new_tokens=most, min_new_tokens=min(settings.min_new_tokens, most))
        gaps = autoregress(target, prompts[index].token, how).gaps
        return gaps[position] if position < len(gaps) else float("inf")

    results: dict[str, dict[str, Any]] = {}
    for name, runs_of in middle.items():
        parted = [divergence(ours, theirs, p.id) for ours, theirs, p in zip(plain, runs_of, prompts, strict=True)]
        mine = [gap(index, where.position) for index, where in enumerate(parted) if where is not None]
        near = sum(gap < epsilon for gap in mine)
        counts = {"identical": len(prompts) - len(mine), "near_tie": near, "beyond": len(mine) - near}
        dtype = str(target.dtype).removeprefix("torch.")
        results[name] = {"dtype": dtype, "checked": len(prompts), **counts, "gaps": mine}
    return results
