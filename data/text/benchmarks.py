"""Records of published prompt sets, as the Hub and their authors have them, in a shape that `records.parse` reads."""

from typing import NamedTuple

from data.text.files import Raw
from data.text.records import ANSWERS, IDS, QUESTIONS

SUMMARIZE = "Summarize: {}"  # Spec-Bench's prompt for CNN/DM's articles
UNFETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench's placeholder for text under others' licences


class Shape(NamedTuple):
    """The keys that identify a set, those whose texts make up the prompt, in order, and the answer's key."""

    keys: tuple[str, ...]
    prompt: tuple[str, ...]
    answer: str = ""


CHOICES = tuple(f"choice_{letter}" for letter in "ABCD")
SETS = (
    Shape(("problem", "solution"), ("problem",), "solution"),  # MATH-500, AIME
    Shape(("Problem", "Solution"), ("Problem",), "Solution"),  # AIME
    Shape(("text", "code", "test_list"), ("text",), "code"),  # MBPP
    Shape(("question_content", "starter_code"), ("question_content", "starter_code")),  # LiveCodeBench
    Shape(("instance_id", "problem_statement", "text"), ("text",), "patch"),  # SWE-bench with the files to change
    Shape(("instance_id", "problem_statement"), ("problem_statement",), "patch"),  # SWE-bench
    Shape(("context", "input", "answers"), ("context", "input")),  # LongBench
    Shape(("context", "question", *CHOICES), ("context", "question", *CHOICES)),  # LongBench v2
)


def readable(raw: Raw, index: int, path: str) -> Raw:
    """Return a record of a published set in a shape that `parse` reads, and any other as it is.

    CNN/DM has an article and its highlights, question sets have lists of answers, dialogues without answers have turns.

    Raises:
        ValueError: it holds a placeholder for a text that must be fetched first.
    """
    if isinstance(raw.get("article"), str) and "highlights" in raw:
        return {**raw, "prompt": SUMMARIZE.format(raw["article"])}
    turns = raw.get("turns") or raw.get("prompt")
    if isinstance(turns, list):
        turns = [turn.get("content") if isinstance(turn, dict) else turn for turn in turns]  # a dict in Arena-Hard
        if all(isinstance(turn, str) for turn in turns):
            return _dialogue(raw, turns, index, path)
    for shape in SETS:
        if raw.keys() >= {*shape.keys} and all(isinstance(raw[key], str) for key in shape.prompt):
            names = {key: raw[key] for key in (*IDS, "category") if key in raw}
            prompt = "\n\n".join(raw[key] for key in shape.prompt if raw[key])
            return {**names, "prompt": prompt, "answer": raw.get(shape.answer)}
    if any(isinstance(raw.get(key), str) for key in QUESTIONS):
        return {key: value for key, value in raw.items() if key not in ANSWERS or isinstance(value, str)}
    return raw


def _dialogue(raw: Raw, turns: list[str], index: int, path: str) -> Raw:
    if any(turn.startswith(UNFETCHED) for turn in turns):
        raise ValueError(
            f"{path}: record {raw.get('question_id', index)} holds a placeholder in place of its text: fetch the "
            "texts with SPEED-Bench's own prepare_data.py first"
        )
    messages = [{"role": "user", "content": turn} for turn in turns]
    return {key: value for key, value in raw.items() if key not in ("turns", "prompt")} | {"messages": messages}
