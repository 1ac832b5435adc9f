"""Prompts to measure on: the bundled workload by its name, or the user's own file."""

from pathlib import Path

from data.prompts import WORKLOADS, Prompt, load_prompts, locate
from inference.target import Target

# Below this, generation would end at the context's edge and not at the answer's, and measure next to nothing.
ROOM = 8


def load_workload(name: str, target: Target, limit: int, truncate: bool = False) -> list[Prompt]:
    """Read the first prompts of a workload as tokens of the target.

    Args:
        name: a key of `WORKLOADS`, or whatever `load_prompts` reads: a file, a Hub name.
        target: whose tokenizer and context count.
        limit: how many prompts at most.
        truncate: shorten prompts that leave no room to their end, rather than refuse them.

    Raises:
        ValueError: unknown workload, no prompts, or a prompt that leaves no room in the context.
    """
    prompts = load_prompts(locate(name), target.tokenizer, limit)[:limit]
    if not prompts:
        raise ValueError(f"workload {name} has no prompts: give a file with one prompt a line")
    room = target.context - ROOM
    if truncate:
        return [prompt._replace(token=prompt.token[-room:]) for prompt in prompts]
    for prompt in prompts:
        if len(prompt.token) > room:
            raise ValueError(
                f"workload {name}, prompt {prompt.id}: {len(prompt.token)} tokens, but the target's context of "
                f"{target.context} leaves room for {room}: shorten it, or set truncate=true to keep each prompt's end"
            )
    return prompts


def short_name(name: str) -> str:
    """Return what reports call a workload: its name, a file's name without its folder, or the Hub's name."""
    path = Path(name).expanduser()
    known = [key for key, bundled in WORKLOADS.items() if path.resolve() == bundled]
    return known[0] if known else path.name if path.is_file() else name
