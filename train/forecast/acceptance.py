"""What a head is worth on prompts, one by one: tokens, passes and seconds of the real verifier, and of the baseline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.measures.metrics import decoded
from heads.common.progress import progress
from inference.decode import Settings, autoregress, speculate
from inference.drafters.head import HeadDrafter, load_for
from inference.drafters.policy import TreeConfig, verifiable
from inference.target.target import Target
from inference.verification.sample import GREEDY

Measured = dict[str, Any]  # by kind of decoding its counts, a list for every prompt


def measured(target: Target, folder: Path, tree: TreeConfig, prompts: Sequence[list[int]], tokens: int) -> Measured:
    """Decode greedily with the head of a folder, each prompt right after the baseline has.

    `head` has a prompt's tokens after the first, passes and seconds, `plain` the baseline's tokens and seconds.
    """
    drafter: Any = HeadDrafter(load_for(folder, target), verifiable(target, tree), folder.name)
    settings = Settings(tokens, GREEDY)
    result: Measured = {"head": [], "plain": []}
    autoregress(target, prompts[0], settings)  # the first passes cost more
    speculate(target, drafter, prompts[0], settings)
    for prompt in progress(prompts, "measuring"):
        plain = autoregress(target, prompt, settings)
        run = speculate(target, drafter, prompt, settings)
        result["plain"].append([decoded(plain), plain.decode_s])
        result["head"].append([decoded(run), len(run.steps), run.decode_s])
    return result


def baseline(target: Target, prompts: Sequence[list[int]], tokens: int) -> list[tuple[int, float]]:
    """Return of each prompt's autoregressive answer the tokens after the first, and the seconds of all."""
    runs = (autoregress(target, prompt, Settings(tokens, GREEDY)) for prompt in progress(prompts, "the baseline"))
    return [(decoded(run), run.prefill_s + run.decode_s) for run in runs]


def tau(result: Measured) -> float:
    """Return τ, pooled over the prompts."""
    tokens, passes, _ = np.sum(result["head"], 0)
    return float(tokens / passes)


def pass_cost(results: Sequence[Measured], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a pass's seconds over those of an autoregressive token, by [resamples, prompts] as the prompts' weight.

    τ over it is the speedup. All results are of the same prompts.
    """
    head, plain = (np.sum([result[kind] for result in results], 0) for kind in ("head", "plain"))
    _, passes, seconds = (weight @ head).T
    tokens, alone = (weight @ plain).T
    return np.asarray(seconds / passes / (alone / tokens))
