"""The records of a log, old and new: what is wrong with them, in a line each, and which are for what.

Old and new are divided by time: of both, the last ones are for the proof and are never trained on.
"""

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from data.text.records import Record, content_text, parse, readable
from eval.inputs.workloads import Text, check_known, recorded
from eval.sessions import within_context
from heads.common.files import write_whole
from heads.common.redact import SHAPES
from heads.common.untrusted import parse_json
from inference.target.target import Target
from ops.log import growing
from ops.proof import LEAST

REPEATS = 0.12  # of an answer's length, packed: one that packs to less repeats itself
LONG = 400  # bytes of an answer that is looked at for this
ONE_USER = 0.5  # of all requests that those of one user may be
SAMPLE = 32  # records along which the target's own probabilities are taken
UNLIKELY = 0.75  # of the nats of a random token: what is no more likely is of another tokenizer or model


@dataclass(frozen=True)
class Entry:
    """A line of a log that can be trained on."""

    line: bytes
    user: str
    text: Text


class Hygiene:
    """What keeps lines of a log out of training, and their counts."""

    def __init__(self, target: Target, name: str, most: int) -> None:
        self.target, self.name, self.most = target, name, most
        self.seen: set[bytes] = set()
        self.left_out: Counter[str] = Counter()
        self.total = 0

    def entries(self, lines: Iterable[bytes]) -> list[Entry]:
        """Return the lines that can be trained on, those of a user with more than half of them cut to as many."""
        entries = [entry for line in lines if line.strip() for entry in self._checked(line)]
        counts = Counter(entry.user for entry in entries)
        user, count = counts.most_common(1)[0] if counts else ("", 0)
        others = len(entries) - count
        if not user or not others or count <= ONE_USER * len(entries):
            return entries
        self.left_out[f"beyond half of all, of one user with {count / len(entries):.0%}"] += count - others
        numbers = {entry.line: i for i, entry in enumerate(one for one in entries if one.user == user)}
        spaced = {i * count // others for i in range(others)}
        return [entry for entry in entries if entry.user != user or numbers[entry.line] in spaced]

    def _checked(self, line: bytes) -> Iterator[Entry]:
        """Yield the line, unless something is wrong with it."""
        self.total += 1
        why = ""
        try:
            raw = parse_json(line)
            if not isinstance(raw, dict):
                raise ValueError("it is no JSON object")
            entry = parse(readable(raw, self.total, self.name), self.total, self.name)
            for document in entry.exact:  # of which training reads more than the first answer
                check_known(document.token, f"record {entry.id}", self.target)
            answers = [one.text for one in recorded(entry, self.target, "all", self.most)]
            text = within_context(answers[0], entry.id, self.name, self.target, truncate=True)
        except ValueError as error:
            why = "with tokens of another tokenizer" if "none of the target's" in str(error) else "of no known shape"
        else:
            words = worded(entry, self.target)
            key = " ".join(words.split()).casefold().encode(errors="replace")
            if SHAPES.search(words) or SHAPES.search(line.decode(errors="replace")):
                why = "with a secret"
            elif key in self.seen:
                why = "copies of others"
            elif any(map(self._repeats, answers)):
                why = "that repeat themselves"
            elif text.generated < 2:
                why = "without an answer"
            else:
                self.seen.add(key)
                yield Entry(line if line.endswith(b"\n") else line + b"\n", user_of(raw), text)
        self.left_out[why] += bool(why)

    def _repeats(self, answer: Text) -> bool:
        answered = str(self.target.tokenizer.decode(answer.token[answer.start :])).encode(errors="replace")
        return len(answered) >= LONG and len(zlib.compress(answered)) < REPEATS * len(answered)

    def remarks(self) -> list[str]:
        """Return a line for each cause that left out records."""
        counts = self.left_out.items()
        return [f"{self.name}: left out {n:,} of {self.total:,} records {why}" for why, n in counts if n]

    @torch.inference_mode()
    def check_likely(self, entries: list[Entry]) -> float:
        """Return the nats of an answer's token, by the target; refuse answers that it would never write."""
        vocabulary = float(torch.tensor(float(self.target.spec.vocab_size)).log())
        nats = [_nats(self.target, entry.text) for entry in entries[:: max(1, len(entries) // SAMPLE)]]
        if median(nats) > UNLIKELY * vocabulary:
            raise ValueError(
                f"{self.name}: its answers are as good as random to the target ({median(nats):.1f} nats a token): they "
                "are of another tokenizer or another model; give the log of this one"
            )
        return median(nats)


def user_of(raw: dict[str, Any]) -> str:
    """Return the user of a log's record, or of the request in it; empty where it names none."""
    request = raw.get("request")
    return str(raw.get("user") or (request.get("user") if isinstance(request, dict) else None) or "")


def asked_anew(held_out: Iterable[Entry], trained: Iterable[Entry]) -> list[Entry]:
    """Return the held-out requests whose prompt no earlier one has, nor one that is trained on."""
    seen = {tuple(entry.text.prompt) for entry in trained}
    anew: dict[tuple[int, ...], Entry] = {}
    for entry in held_out:
        anew.setdefault(tuple(entry.text.prompt), entry)
    return [entry for prompt, entry in anew.items() if prompt not in seen]


def worded(record: Record, target: Target) -> str:
    """Return a record's text, that of its tokens where it gives them."""
    if record.exact:
        return str(target.tokenizer.decode([token for document in record.exact for token in document.token]))
    return "\n".join([*(content_text(message) for message in record.messages), record.text])


def _nats(target: Target, text: Text) -> float:
    token = torch.tensor(text.token, device=target.device)
    features = target.features(token[None], torch.zeros_like(token)[None], ())
    log = target.embeddings.logits(features.last[0, text.start - 1 : -1]).float().log_softmax(-1)
    return float(-log.gather(1, token[text.start :, None]).mean())


def split(
    log: Path, since: int, hygiene: Hygiene, held_out: float, least: int, folder: Path, names: tuple[str, ...]
) -> dict[str, Any]:
    """Write a log's old and new records, each in two parts by time, as the files `names`; return their counts.

    The proof leaves out a request whose prompt is trained on, with another answer or in the same dialogue.

    Raises:
        ValueError: too few of them can be used, or are left for the proof.
    """
    lines = growing(log, follow=False, poll=1.0)
    old = hygiene.entries(islice(lines, since))
    new = hygiene.entries(lines)
    if len(new) < least:
        raise ValueError(
            f"{log}: {len(new)} new records can be used ({'; '.join(hygiene.remarks()) or 'the others are older'}), "
            f"and loop.least={least} are needed: wait for more, or lower it"
        )
    counts: dict[str, Any] = {"nats": hygiene.check_likely(new), "remarks": hygiene.remarks()}
    for (trained, proof), entries in zip((names[:2], names[2:]), (new, old), strict=True):
        cut = len(entries) - round(held_out * len(entries))
        anew = asked_anew(entries[cut:], entries[:cut])
        if entries is new and len(anew) < LEAST:
            raise ValueError(
                f"{log}: of the {len(new) - cut} new requests held out for the proof, {len(anew)} have a prompt that "
                f"no other one has, and {LEAST} are needed: wait for more that ask anew, or raise loop.held_out"
            )
        if again := len(entries) - cut - len(anew):
            counts["remarks"].append(f"{proof}: left out {again:,} requests whose prompt another one has")
        for name, some in ((trained, entries[:cut]), (proof, anew)):
            write_whole(folder / name, iter([entry.line for entry in some]) if some else b"")
            counts[name] = len(some)
    return counts
