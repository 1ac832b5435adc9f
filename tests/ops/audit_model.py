"""A toy language model whose logits take microseconds: hashes of the last tokens and of the whole context.

Texts become ids of two bytes: those below SIZE are written, all others are words of prompts that the model only reads.
"""

import json
import re
from array import array
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Item = Any  # a set of ids, of which one is written, or a tuple of alternative programs
Program = tuple[Item, ...]
Grammar = frozenset[Program]  # what may be written from here on; nothing of it is forced where it is empty

_LINES = """river stone light grey hill field rain wall quiet old bird road tree wind cloud lake snow path gate roof
moon star leaf sand wave shore boat bridge house garden summer winter night early late small wide deep high low green
blue red white dark warm cold bright slow fast near far under over along across behind before after while runs falls"""
_WORDS = _LINES.split()
_PIECES = ['{"', '": "', '": ', '", "', '", ', ', "', '"}', "true", "false", "null", "city", "degrees", "sunny", "name"]
VOCAB = ["</s>", *(f" {word}" for word in _WORDS), "\n", *map(chr, range(32, 127)), *_PIECES]
IDS = {text: i for i, text in enumerate(VOCAB)}
END, SIZE = 0, len(VOCAB)
LONGEST = max(map(len, VOCAB))
WORD_IDS = frozenset(range(1, len(_WORDS) + 1))
_BYTES = [array("H", [i]).tobytes() for i in range(SIZE)]
SHORTEST = 12  # tokens before a text may end
_ROWS = 8191, 4093

_rng = np.random.default_rng(0)
_COMMON = np.array([*WORD_IDS, IDS[","], IDS["."], IDS["\n"]])


def _table(rows: int, favour: Array) -> Array:
    """Return logits of random contexts, in each of which one common token has a lead of `favour`."""
    table = _rng.normal(0, 0.5, (rows, SIZE))
    table[np.arange(rows), _rng.choice(_COMMON, rows)] += favour
    return table


# What the last tokens favour wins two times in three over what the whole context favours, mostly by 1 to 4 nats.
_LAST = _table(_ROWS[0], np.full(_ROWS[0], 5.0))
_LAST[:, np.setdiff1d(np.arange(SIZE), _COMMON)] -= 4.0
_WHOLE = _table(_ROWS[1], 5.0 + _rng.normal(np.where(_rng.random(_ROWS[1]) < 0.65, -2.5, 2.5), 1.5))
_WHOLE[:, END] = np.where(_rng.random(_ROWS[1]) < 0.008, 12.0, -12.0)
_DRAFT = _table(_ROWS[1], np.where(_rng.random(_ROWS[1]) < 0.3, 6.0, 0.0))
_DRAFT[:, END] = np.where(_rng.random(_ROWS[1]) < 0.03, 24.0, 0.0)


class Cursor(NamedTuple):
    """Where a text goes on: a hash of the whole context, its last tokens, how many of them the model wrote.

    `counts` are how often it wrote each token, None without penalties; `grammar` is what it may write, None without.
    """

    state: int
    last: tuple[int, int, int]
    length: int = 0
    counts: Array | None = None
    grammar: Grammar | None = None

    def after(self, token: int) -> "Cursor":
        """Return the cursor behind one more token."""
        counts = self.counts
        if counts is not None:
            counts = counts.copy()
            counts[token] += 1
        grammar = None if self.grammar is None else following(self.grammar, token)
        state = crc32(_BYTES[token], self.state)
        return Cursor(state, (self.last[1], self.last[2], token), self.length + 1, counts, grammar)


def target(cursor: Cursor) -> Array:
    """Return the target's logits of the next token."""
    first, second, third = cursor.last
    logits = _LAST[(first * 7919 + second * 104729 + third * 1299709) % _ROWS[0]] + _WHOLE[cursor.state % _ROWS[1]]
    if cursor.length < SHORTEST:
        logits[END] = -24.0
    return logits


def draft(cursor: Cursor) -> Array:
    """Return the draft model's: the target's, disturbed."""
    return target(cursor) + _DRAFT[(cursor.last[1] * 7919 + cursor.last[2] * 104729) % _ROWS[1]]


def tokenize(text: str) -> list[int]:
    """Return a prompt's tokens: its words and signs."""
    words = re.findall(r"\w+|[^\w\s]|\n", text)
    return [IDS.get(f" {word}") or IDS.get(word) or SIZE + crc32(word.encode()) % (65536 - SIZE) for word in words]


class Sampling(NamedTuple):
    """How tokens are sampled; temperature 0 takes the largest logit."""

    temperature: float = 1.0
    top_p: float = 1.0


def probs(scores: Array, how: Sampling) -> Array:
    """Return the probabilities of the next token."""
    if how.temperature == 0:
        p = np.zeros(SIZE)
        p[scores.argmax()] = 1.0
        return p
    p = np.exp((scores - scores.max()) / how.temperature)
    p /= p.sum()
    if how.top_p < 1:
        order = np.argsort(-p)
        sums = p[order].cumsum()
        p[order[1:][sums[:-1] >= how.top_p]] = 0.0
        p /= p.sum()
    return p


def sample(p: Array, rng: np.random.Generator) -> int:
    """Return a token; `p` need not sum to 1."""
    sums = p.cumsum()
    return int(sums.searchsorted(rng.random() * sums[-1], side="right"))


def _heads(program: Program) -> list[tuple[frozenset[int], Program]]:
    """Return with which tokens a program may go on, each set with what follows it."""
    if not program:
        return [(frozenset([END]), ())]
    first, rest = program[0], program[1:]
    if isinstance(first, frozenset):
        return [(first, rest)]
    return [head for alternative in first for head in _heads(alternative + rest)]


@lru_cache(100_000)
def following(grammar: Grammar, token: int) -> Grammar:
    """Return what may follow a token; nothing where the token breaks the grammar."""
    return frozenset(rest for program in grammar for ids, rest in _heads(program) if token in ids)


@lru_cache(100_000)
def mask(grammar: Grammar) -> Array:
    """Return what a grammar adds to logits."""
    allowed = [token for program in grammar for ids, _ in _heads(program) for token in ids]
    mask = np.full(SIZE, -np.inf if allowed else 0.0)
    mask[allowed] = 0.0
    return mask


def literal(text: str) -> Program:
    """Return a program that writes a text in the longest tokens."""
    items: list[Item] = []
    while text:
        piece = next(text[:n] for n in range(LONGEST, 0, -1) if text[:n] in IDS)
        items.append(frozenset([IDS[piece]]))
        text = text[len(piece) :]
    return tuple(items)


def repeated(program: Program, least: int, most: int) -> Program:
    """Return a program that repeats another."""
    more: Program = ()
    for _ in range(most - least):
        more = (((), program + more),)
    return program * least + more


def json_program(schema: dict[str, Any]) -> Program:
    """Return a program that writes JSON of a schema of the audit, all of an object's properties."""
    if schema["type"] == "object":
        program, between = literal("{"), ""
        for key, inner in schema["properties"].items():
            program += literal(f"{between}{json.dumps(key)}: ") + json_program(inner)
            between = ", "
        return program + literal("}")
    if schema["type"] == "string":
        return literal('"') + repeated((WORD_IDS,), 1, min(4, schema["maxLength"] // 8)) + literal('"')
    return (tuple(map(literal, map(str, range(100)))),)
