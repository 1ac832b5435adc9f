"""What fits into a target's context, and what does not: one line for the user, before anything is computed."""

import math
from collections.abc import Mapping

import torch

from inference.target.target import Target


def check_prompt(target: Target, prompt: list[int]) -> None:
    """Check that a prompt can be decoded.

    Raises:
        ValueError: it is empty, holds a token that the target does not know, or fills the target's context.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token; of several prompts, at least one prompt")
    if len(prompt) >= target.context:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens but {target.name} reads at most {target.context}: shorten it"
        )
    last = target.embeddings.vocab_size - 1
    for token in (min(prompt), max(prompt)):
        if not 0 <= token <= last:
            raise ValueError(
                f"the prompt holds token {token} but those of {target.name} go from 0 to {last}: encode it with the "
                "target's own tokenizer"
            )


def check_size(target: Target, nodes: int, name: str) -> None:
    """Check that a tree of so many nodes, the root included, fits into the context, which a cache must be able to hold.

    Raises:
        ValueError: naming what drafts it.
    """
    if nodes > target.context:
        raise ValueError(
            f"{name}: a tree of {nodes} nodes is larger than the context of {target.name}, {target.context} tokens: "
            "draft fewer"
        )


def check_memory(nbytes: Mapping[torch.device, int], name: str, size: int) -> None:
    """Check that a batch's keys and values fit into what is free of each CUDA device's memory.

    Raises:
        ValueError: they do not; a mistake of the batch's size is then one of the first line, and not of the last.
    """
    for device, needed in nbytes.items():
        if needed > (free := free_memory(device)):
            raise ValueError(
                f"{name}: the keys and values of a batch of {size} take {needed / 1e9:.1f} GB, and {device} has "
                f"{free / 1e9:.1f} GB free: give a smaller batch_size, or fewer max_new_tokens"
            )


def free_memory(device: torch.device) -> float:
    """Return the free bytes of a CUDA device, with those that torch's allocator holds; infinity for other devices."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
