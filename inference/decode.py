"""Speculative and autoregressive decoding in one engine: the baseline is speculation with empty drafts."""

from collections import deque
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, overload

import torch

from heads.base import Tokens
from inference.batch import DrafterLike, acquire, release
from inference.drafters.plain import Baseline
from inference.request import Generation, RequestParams, Step
from inference.target.target import Target, check_prompt

__all__ = ["Generation", "RequestParams", "Step", "autoregress", "speculate"]

OnTokens = Callable[[Tokens, list[str]], None]  # new tokens and their origins: "prefill", "draft", "bonus"
OnBatchTokens = Callable[[int, Tokens, list[str]], None]  # the prompt's index, then as `OnTokens`


@overload
def speculate(
    target: Target, drafter: DrafterLike, prompts: Tokens, params: RequestParams, on_tokens: OnTokens | None = None
) -> Generation: ...


@overload
def speculate(
    target: Target,
    drafter: DrafterLike,
    prompts: Sequence[Tokens],
    params: RequestParams | Sequence[RequestParams],
    on_tokens: OnBatchTokens | None = None,
    batch_size: int = 1,
) -> list[Generation]: ...


@torch.inference_mode()
def speculate(
    target: Target, drafter: DrafterLike, prompts: Any, params: Any, on_tokens: Any = None, batch_size: int = 1
) -> Any:
    """Decode one prompt or several with a drafter; each output is distributed as the target's own.

    Several prompts are decoded `batch_size` at a time: when a sequence ends, the next prompt takes its slot. Each
    request has its own params, seed and state; each slot has its own clone of a drafter with memory.

    Args:
        target: the frozen target.
        drafter: the drafter; a `SwappableDrafter` may be swapped meanwhile.
        prompts: token ids of one prompt, or of several.
        params: the request's parameters; for several prompts one for all, or a list with one each.
        on_tokens: called after every pass with the new tokens and their origins ("prefill", "draft", "bonus"); for
            several prompts the prompt's index comes first.
        batch_size: sequences in one target pass.

    Returns:
        One generation, or those of all prompts in their order.

    Raises:
        ValueError: no prompt or an empty one, one that fills the target's context or has unknown tokens; params for
            another number of prompts; a batch size below 1; a tree larger than the context; a rule that does not
            support the drafts; or a batch on a target whose attention ignores a custom mask.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: give 1 or more")
    kinds = (Integral, list)  # one prompt's token ids, or several such lists
    listed = isinstance(prompts, Sequence) and any(all(isinstance(one, kind) for one in prompts) for kind in kinds)
    if not listed:
        raise ValueError(
            f"prompts is a {type(prompts).__name__}: give a list of token ids, or a list of such lists; a tensor has "
            "tolist(), and inference.api.generate takes text"
        )
    shared = isinstance(params, RequestParams)
    is_single = not (len(prompts) and isinstance(prompts[0], list))
    if is_single and not shared:
        raise ValueError("params is a list, but the prompt is one: give its params, or a list of prompts")
    listed_prompts = [prompts] if is_single else prompts
    several = [params] * len(listed_prompts) if shared else list(params)
    if len(several) != len(listed_prompts):
        raise ValueError(
            f"there are {len(several)} params for {len(listed_prompts)} prompts: give one for all, or one each"
        )
    requests = list(zip(listed_prompts, several, strict=True))
    for prompt, _ in requests:
        check_prompt(target, prompt)
    batch = acquire(target, drafter, min(batch_size, len(requests)), requests)
    waiting = deque(enumerate(requests))
    generations = {}
    reported = [0] * len(requests)
    while waiting or batch.running:
        if waiting and batch.free:
            request_index, (prompt, params) = waiting.popleft()
            generations[request_index] = batch.admit(request_index, prompt, params)
        else:
            batch.step()
        if on_tokens is not None:
            for request in batch.running:
                begin = reported[request.request_index]
                generation = request.generation
                if len(generation.tokens) > begin:  # admitting a request gives the others no tokens
                    index = () if is_single else (request.request_index,)
                    on_tokens(*index, generation.tokens[begin:], generation.origins[begin:])
                    reported[request.request_index] = len(generation.tokens)
        batch.release()
    release(target, drafter, batch)
    return generations[0] if is_single else [generations[request_index] for request_index in range(len(requests))]


def autoregress(target: Target, prompt: Tokens, params: RequestParams, on_tokens: OnTokens | None = None) -> Generation:
    """Decode one prompt autoregressively, in the same engine."""
    return speculate(target, Baseline(target.device), prompt, params, on_tokens)
