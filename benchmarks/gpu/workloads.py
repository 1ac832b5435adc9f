"""The prompts of a target made here: held-out ones to measure on, and those that it answers for heads to train on."""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.gpu.text import Chat
from examples.tiny.make_prompts import greedy, loops
from heads.common.files import atomic_write

WANTED, LEAST = 48, 4  # prompts of a workload; so many even where their answers repeat themselves
LOOKED = 160  # candidates
TOY_WANTED, TOY_LEAST, TOY_LOOKED = 2, 2, 4
PROMPT_TOKENS = (8, 256)
ANSWER_TOKENS = 24  # that an answer has at least
TOGETHER = 32  # prompts that are answered at once
ANSWERED = {"code": 12_000, "prose": 4_000, "dialogue": 4_000}  # prompts to be answered, at most
TURNS = 6  # of a dialogue that are put to the target, its own answers in the place of every other
PROMPT_CHARACTERS = 1200


class Picked(NamedTuple):
    """A workload's prompts, how many candidates were passed over and why, and one prompt with its greedy answer."""

    records: list[dict[str, Any]]
    counts: dict[str, int]
    sample: dict[str, str]


def choose(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kept: Sequence[Chat], toy: bool) -> Picked:
    """Return prompts whose greedy answer neither repeats itself nor ends at once.

    A target that loops makes any drafter look good. Where hardly any prompt is left, some of the others are taken, and
    counted as `kept_anyway`.

    Args:
        model: the target.
        tokenizer: its own.
        kept: held-out chats, in the order in which they are looked at.
        toy: look at few.
    """
    wanted, least, looked = (TOY_WANTED, TOY_LEAST, TOY_LOOKED) if toy else (WANTED, LEAST, LOOKED)
    prompts = [(each, prompt_tokens(tokenizer, each)) for each in kept]
    low, high = PROMPT_TOKENS
    some = [(each, token) for each, token in prompts if low <= len(token) <= high][:looked] or prompts[:least]
    good, others = list[tuple[Chat, list[int]]](), list[tuple[Chat, list[int]]]()
    counts = {"loops": 0, "short": 0}
    for start in range(0, len(some), TOGETHER):
        batch = some[start : start + TOGETHER]
        for (each, _), answer in zip(batch, greedy(model, tokenizer, [token for _, token in batch]), strict=True):
            fault = "loops" if loops(answer) else "short" if len(answer) < ANSWER_TOKENS else ""
            (others if fault else good).append((each, answer))
            if fault:
                counts[fault] += 1
        if len(good) >= wanted:
            break
    anyway = others[: max(0, least - len(good))]
    taken = good[:wanted] + anyway
    first, answer = taken[0]
    sample = {"prompt": first.turns[0], "answer": str(tokenizer.decode(answer, skip_special_tokens=True))}
    return Picked(
        [asked_of(*each) for each, _ in taken], {"prompts": len(taken), "kept_anyway": len(anyway), **counts}, sample
    )


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> list[int]:
    """Return the tokens of a chat's first question, up to the answer."""
    asked = [{"role": "user", "content": chat.turns[0]}]
    return tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]


def asked_of(name: str, turns: Sequence[str]) -> dict[str, Any]:
    """Return a chat as a record of what the user says; a dialogue's answers stay, for who wants its later turns."""
    if len(turns) == 2:
        return {"id": name, "prompt": turns[0]}
    roles = ("user", "assistant")
    return {"id": name, "messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def training_prompts(chats: dict[str, list[Chat]], limit: int | None) -> list[dict[str, Any]]:
    """Return chats that are trained on as prompts for the target to answer, all kinds shuffled.

    Args:
        chats: by their kind.
        limit: of all kinds together; None: as many as ANSWERED says.
    """
    drawn = random.Random(3)
    found = []
    for kind, most in ANSWERED.items():
        fitting = [each for each in chats[kind] if len(each.turns[0]) <= PROMPT_CHARACTERS]
        some = drawn.sample(fitting, min(len(fitting), most))
        found += [asked_of(f"{kind} {each.id}", each.turns[:TURNS]) for each in some]
    drawn.shuffle(found)
    return found[:limit]


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write records as JSON Lines."""
    atomic_write(path, "".join(json.dumps(each) + "\n" for each in records).encode())
