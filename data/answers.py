"""Let the frozen target answer the prompts, so that heads train on what the target itself would say.

Plain batched decoding by transformers' `generate`. The file is JSON Lines, `{"id", "prompt", "answer"}`, and where the
prompt had one, `"system"`; for a target without a chat template `"text"` holds both, as one plain document. `data.path`
reads it. It grows by one batch at a time, and a second call goes on where the first one stopped.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.prompts import Prompt

log = logging.getLogger(__name__)


@runtime_checkable
class Answerer(Protocol):
    """What answers: a `Target`."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    eos: frozenset[int]
    context: int
    device: torch.device


@dataclass(frozen=True)
class AnswerSettings:
    """How the target answers.

    Attributes:
        temperature: 0 is greedy.
        top_p: 1 is off (Holtzman et al., 2020).
        max_new_tokens: tokens of an answer at most.
        keep_unfinished: keep answers that reach that without an end token.
        seed: of the sampling; a batch's draws depend on it and the batch's place alone.
    """

    temperature: float
    top_p: float
    max_new_tokens: int
    keep_unfinished: bool
    seed: int

    def __post_init__(self) -> None:
        """Refuse settings that no sampler takes."""
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"temperature={self.temperature}, top_p={self.top_p}, max_new_tokens={self.max_new_tokens}: "
                "they must be at least 0, in (0, 1], and at least 1"
            )


class Written(NamedTuple):
    """What a call did: answers written, unfinished ones left out, prompts too long for the context left out."""

    answers: int
    unfinished: int
    too_long: int


def write_answers(
    target: Answerer, prompts: Sequence[Prompt], settings: AnswerSettings, out: Path, batch_size: int
) -> Written:
    """Append the target's answers to `out`, but for the prompts whose ids it already holds.

    Raises:
        ValueError: no prompt fits the context, no answer could ever count as finished, or `out` is not such a file.
    """
    if not target.eos and not settings.keep_unfinished:
        raise ValueError("the target has no end token, so no answer ever ends; set keep_unfinished=true")
    room = target.context - settings.max_new_tokens
    fitting = [prompt for prompt in prompts if len(prompt.token) <= room]
    if not fitting:
        raise ValueError(
            f"no prompt leaves max_new_tokens={settings.max_new_tokens} free in the target's context of "
            f"{target.context} tokens; lower max_new_tokens or give shorter prompts"
        )
    done = _resume(out)
    answers = unfinished = 0
    starts = range(0, len(fitting), batch_size)
    with out.open("a", encoding="utf-8") as file, torch.random.fork_rng():
        for start in track(starts, description="answers"):
            batch = [prompt for prompt in fitting[start : start + batch_size] if prompt.id not in done]
            if not batch:
                continue
            torch.manual_seed(settings.seed + start)
            made = _answer(target, batch, settings)
            lines = [_line(target, p, token) for p, token in zip(batch, made, strict=True) if token is not None]
            answers, unfinished = answers + len(lines), unfinished + len(batch) - len(lines)
            file.write("".join(lines))
            file.flush()
    written = Written(answers, unfinished, len(prompts) - len(fitting))
    if written.unfinished or written.too_long:
        log.warning("%s: %s; raise max_new_tokens for unfinished ones, lower it for too long ones", out, written)
    return written


def _resume(out: Path) -> set[str]:
    """Return the ids that `out` holds, after cutting off a last line that was not written to its end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.exists():
        return set()
    data = out.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        done = {str(json.loads(line)["id"]) for line in whole.splitlines()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{out}: holds lines that are no answers ({error!r}); name another file") from error
    if len(whole) < len(data):
        with out.open("r+b") as file:
            file.truncate(len(whole))
    return done


def _answer(target: Answerer, batch: list[Prompt], settings: AnswerSettings) -> list[list[int] | None]:
    """Answer one batch; None stands for an answer that was not finished and is not kept."""
    token, attention = _left_padded([prompt.token for prompt in batch], pad=min(target.eos, default=0))
    with _own_generation_config(target.model), torch.no_grad():
        made = target.model.generate(
            input_ids=token.to(target.device),
            attention_mask=attention.to(target.device),
            max_new_tokens=settings.max_new_tokens,
            do_sample=settings.temperature > 0,
            temperature=settings.temperature or 1.0,
            top_p=settings.top_p if settings.temperature else 1.0,
            top_k=0,
            eos_token_id=sorted(target.eos) or None,
            pad_token_id=min(target.eos, default=0),
        )
    rows: list[list[int]] = made[:, token.shape[1] :].tolist()
    ends = [next((i for i, token in enumerate(row) if token in target.eos), None) for row in rows]
    return [
        None if end is None and not settings.keep_unfinished else row[:end] for row, end in zip(rows, ends, strict=True)
    ]


def _left_padded(tokens: list[list[int]], pad: int) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    longest = max(len(token) for token in tokens)
    rows = [[pad] * (longest - len(token)) + token for token in tokens]
    attention = [[0] * (longest - len(token)) + [1] * len(token) for token in tokens]
    return torch.tensor(rows), torch.tensor(attention)


def _line(target: Answerer, prompt: Prompt, answer: list[int]) -> str:
    tokenizer = target.tokenizer
    line = {"id": prompt.id, "prompt": prompt.text, "answer": tokenizer.decode(answer, skip_special_tokens=True)}
    if prompt.system:
        line["system"] = prompt.system
    if not tokenizer.chat_template:
        line["text"] = tokenizer.decode([*prompt.token, *answer], skip_special_tokens=True)
    return json.dumps(line, ensure_ascii=False) + "\n"


@contextmanager
def _own_generation_config(model: Any) -> Iterator[None]:
    """Take away the generation settings that came with the model: `generate` would fill ours up with them."""
    saved = model.generation_config
    model.generation_config = type(saved)()
    try:
        yield
    finally:
        model.generation_config = saved
