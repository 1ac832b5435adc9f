"""What the target of target.py reads: Python sources, prose and dialogues, as chats and as running text.

Code is what examples/tiny/corpus.py finds on the machine: documented functions as chats, and whole modules. Prose and
dialogues come from a folder that the user names, from the files of FILES that are there. A passage of prose becomes a
chat too: the user gives its opening, the assistant goes on. What is held out is never trained on: the files that are
there for that, and of the others what a hash chooses.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from data.text.files import read_file
from data.text.parts import content_text
from data.text.records import parse
from examples.tiny.corpus import corpus, held_out
from examples.tiny.make_target import MAX_BODY, pieces
from examples.tiny.recipe import END, chat
from heads.common.resolvers import ROOT

KINDS = ("code", "prose", "dialogue")
TRAINED, KEPT, PARTED = "trained", "held out", "parted"  # parted: held out in part, by a hash
FILES = {
    "books_train_00.txt.xz": ("prose", TRAINED),
    "tinystories_10k.txt": ("prose", TRAINED),
    "books_valid.txt.xz": ("prose", KEPT),
    "tinystories_heldout.txt": ("prose", KEPT),
    "sgd_dialogues_train.jsonl.xz": ("dialogue", TRAINED),
    "topical_chat.jsonl.xz": ("dialogue", PARTED),
    "synthetic_conversations_1k.jsonl": ("dialogue", TRAINED),
    "sharegpt_gpt4_256.jsonl": ("dialogue", TRAINED),
    "gsm8k_train.jsonl": ("dialogue", TRAINED),
    "sgd_dialogues_dev.jsonl.xz": ("dialogue", KEPT),
}
MODULES = 60_000_000  # characters of whole modules, at most
PASSAGE = 1200  # characters of a passage of prose, at least, unless the document ends
OPENING = 160  # of them, at least, that the user gives
REST = 120  # that are left for the assistant, at least
SENTENCE = re.compile(r"(?<=[.!?])[\"”']?\s+")
CHAT_EVERY = 3  # every third passage of a book is a chat, the others are running text


class Chat(NamedTuple):
    """The user's turn and the assistant's, one after the other."""

    id: str
    turns: list[str]


class Read(NamedTuple):
    """What was read from where."""

    source: str
    kind: str
    chats: int
    held_out: int
    characters: int


@dataclass(frozen=True)
class Text:
    """Chats to train on and held-out ones by their kind, running text, and where all of it is from."""

    chats: dict[str, list[Chat]]
    held_out: dict[str, list[Chat]]
    plain: list[str]
    read: list[Read]

    def documents(self) -> list[str]:
        """Return what is trained on, shuffled."""
        found = [chat(each.turns) for some in self.chats.values() for each in some]
        found += [piece + END for piece in self.plain]
        random.Random(2).shuffle(found)
        return found

    def add(self, source: str, kind: str, trained: Sequence[Chat], kept: Sequence[Chat], plain: Sequence[str]) -> None:
        """Take in what one source gave."""
        self.chats[kind] += trained
        self.held_out[kind] += kept
        self.plain.extend(plain)
        characters = sum(len(turn) for each in trained for turn in each.turns) + sum(map(len, plain))
        self.read.append(Read(source, kind, len(trained), len(kept), characters))


def empty() -> Text:
    """Return a text that holds nothing yet."""
    return Text({kind: [] for kind in KINDS}, {kind: [] for kind in KINDS}, [], [])


def gathered(folder: Path | None) -> Text:
    """Return the machine's Python sources and what a folder holds of FILES."""
    found = empty()
    add_code(found, whole=True)
    for name in FILES if folder is not None else ():
        if (folder / name).is_file():
            add_file(found, folder / name)
    return found


def embedded_text() -> Text:
    """Return what examples/tiny/make_target.py reads."""
    found = empty()
    add_code(found, whole=False)
    return found


def add_code(found: Text, *, whole: bool) -> None:
    """Add the documented functions of the interpreter's library and the installed packages, and modules.

    Args:
        found: what to add them to.
        whole: whole modules, up to MODULES characters; False: beginnings, as the bundled target's recipe has them.
    """
    texts, trained, kept = corpus()
    chats = [
        [Chat(f"{i} {f.source}", [f.prompt, f.answer]) for i, f in enumerate(some) if len(f.answer) <= MAX_BODY]
        for some in (trained, kept)
    ]
    if whole:
        plain, left = [], MODULES
        for text in random.Random(1).sample(texts, len(texts)):
            if (left := left - len(text)) < 0:
                break
            plain.append(text)
    else:
        plain = pieces(texts, sum(len(chat(each.turns)) for each in chats[0]))
    found.add("Python sources", "code", chats[0], chats[1], plain)


def add_file(found: Text, path: Path) -> None:
    """Add one of FILES."""
    kind, part = FILES[path.name]
    chats, plain = list[Chat](), list[str]()
    for i, raw in enumerate(read_file(path)):
        if kind == "dialogue":
            chats += dialogue(raw, i, path.name)
        else:
            some, rest = prose(str(raw["text"]), f"{path.name} {i}")
            chats.extend(some)
            plain.extend(rest)
    kept = [each for each in chats if part == KEPT or (part == PARTED and held_out(each.id))]
    chosen = {each.id for each in kept}
    trained = [each for each in chats if each.id not in chosen]
    found.add(path.name, kind, trained, kept, plain if part == TRAINED else [])


def dialogue(raw: dict[str, Any], place: int, source: str) -> list[Chat]:
    """Return a record's chat up to where its turns stop alternating; none without an answer."""
    turns: list[str] = []
    for message in parse(raw, place, source).messages:
        if message["role"] == "system":
            continue
        text = content_text(message).strip()
        if message["role"] != ("assistant" if len(turns) % 2 else "user") or not text:
            break
        turns.append(text)
    turns = turns[: len(turns) // 2 * 2]
    return [Chat(f"{source} {place}", turns)] if turns else []


def prose(text: str, name: str) -> tuple[list[Chat], list[str]]:
    """Return a document's chats and its running text: of a short one the whole is a chat, of a long one every third."""
    chats, plain = [], list[str]()
    for i, passage in enumerate(passages(text)):
        parted = opened(passage) if i % CHAT_EVERY == 0 else None
        if parted is None:
            plain.append(passage)
        else:
            chats.append(Chat(f"{name} {i}", list(parted)))
    return chats, plain


def passages(text: str) -> Iterator[str]:
    """Yield a document in passages of whole paragraphs."""
    held: list[str] = []
    for paragraph in text.split("\n\n"):
        held.append(paragraph.strip())
        if sum(map(len, held)) >= PASSAGE:
            yield "\n\n".join(held)
            held = []
    if any(held):
        yield "\n\n".join(held)


def opened(passage: str) -> tuple[str, str] | None:
    """Return a passage's opening of whole sentences and the rest; None where that leaves too little."""
    cut = SENTENCE.search(passage, OPENING)
    if cut is None or len(passage) - cut.end() < REST:
        return None
    return passage[: cut.start()], passage[cut.end() :]


def own_text(chats: int) -> Text:
    """Return what a checkout holds itself, for a run at toy size: functions, its documentation, and talk about both."""
    found = empty()
    records = list(islice(read_file(ROOT / "examples" / "tiny" / "chats.jsonl.xz"), chats))
    code = [Chat(raw["id"], [raw["prompt"], raw["answer"]]) for raw in records]
    talk = [Chat(raw["id"], about(raw["id"], raw["prompt"])) for raw in records]
    for kind, some in (("code", code), ("dialogue", talk)):
        kept = [each for each in some if held_out(each.id)]
        found.add("chats.jsonl.xz", kind, [each for each in some if not held_out(each.id)], kept, [])
    files = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
    for i, path in enumerate(files):
        some, plain = prose(path.read_text(encoding="utf-8"), path.name)
        last = i + 2 >= len(files)
        found.add(path.name, "prose", [] if last else some, some if last else [], [] if last else plain)
    return found


def about(name: str, prompt: str) -> list[str]:
    """Return a talk about a function, whose id and signature with docstring these are."""
    function = name.rsplit(":", 1)[-1]
    signature, _, told = prompt.partition("\n")
    return [
        f"What does {function} do?",
        told.strip().strip('"') or "I do not know.",
        "And how is it called?",
        signature,
    ]
