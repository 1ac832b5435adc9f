"""What a server is asked: the prompts of a workload as requests of OpenAI's API."""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from data.text.prompts import OPENING, Prompt, before_answers
from data.text.records import Record, content_text
from eval.config import Selection
from eval.inputs.workloads import Readable, Workload, gathered


class Question(NamedTuple):
    """A request: its id, its path, its fields besides those that all share, and its category."""

    id: str
    path: str
    body: Mapping[str, Any]
    category: str = ""

    @property
    def chat(self) -> bool:
        """Whether it is a chat."""
        return "messages" in self.body

    @property
    def prompt(self) -> str:
        """Its prompt as a text."""
        messages = self.body.get("messages")
        return "\n".join(str(m.get("content")) for m in messages) if messages else str(self.body.get("prompt"))

    @property
    def content(self) -> tuple[str, str]:
        """What it asks: the same of two questions that differ in their ids alone."""
        return self.path, json.dumps(self.body, sort_keys=True)

    def having(self, suffix: str, **fields: Any) -> "Question":
        """Return the same question with further fields, under an id of its own."""
        return self._replace(id=f"{self.id} {suffix}", body={**self.body, **fields})


def read_questions(name: str, selection: Selection, chat: bool) -> Workload[Question]:
    """Read a workload's questions; one without further prompts for the warm-up repeats its last ones."""

    def read(record: Readable, turns: str) -> Iterator[Question]:
        return questions_of(record, turns, chat)

    return gathered(name, selection, read, lambda question: question.content, lambda question: question)


def questions_of(record: Readable, turns: str, chat: bool) -> Iterator[Question]:
    """Yield a record's questions: its first question, or every question behind the messages before it.

    A plain text's prompt is the end of its first half, at most OPENING words. Without `chat`, messages are sent as one
    text.

    Raises:
        ValueError: the record has no prompt, or no recorded answer before a question.
    """
    if isinstance(record, Record) and record.exact:
        for prompt in before_answers(record, turns):
            yield Question(prompt.id, "/completions", {"prompt": prompt.token}, prompt.category)
        return
    if isinstance(record, Prompt):
        yield Question(record.id, "/completions", {"prompt": list(record.token)}, record.category)
        return
    questions = [i for i, message in enumerate(record.messages) if message["role"] == "user"]
    if not questions:
        words = record.text.split()
        if not words:
            raise ValueError(f"prompt {record.id}: has no user message and no text; remove it")
        half = max(1, len(words) // 2)
        text = " ".join(words[max(0, half - OPENING) : half])
        yield Question(record.id, "/completions", {"prompt": text}, record.category)
        return
    for turn, index in enumerate(questions if turns == "all" else questions[:1], 1):
        messages = record.messages[: index + 1]
        if any(first["role"] == second["role"] == "user" for first, second in itertools.pairwise(messages)):
            raise ValueError(
                f"prompt {record.id}: nobody recorded the answer before question {turn}; give a log with answers, or "
                "turns=first"
            )
        name = f"{record.id}.{turn}" if turns == "all" and len(questions) > 1 else record.id
        if chat:
            body = {"messages": list(messages), **({"tools": list(record.tools)} if record.tools else {})}
            yield Question(name, "/chat/completions", body, record.category)
        else:  # the prompt of a tokenizer without a chat template
            text = "\n\n".join(map(content_text, messages if turn > 1 else messages[-1:]))
            yield Question(name, "/completions", {"prompt": text}, record.category)
