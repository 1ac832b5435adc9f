"""Real template families, as golden/ has them: their chat templates, special tokens, chats and expected masks."""

import json
import re
from collections import Counter
from copy import deepcopy
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.text.masks import Sample, samples_of
from data.text.records import Record, parse
from tests.data.chatml import data_config

GOLDEN = Path(__file__).parent / "golden"
TINY = Path(__file__).parents[2] / "examples" / "tiny"
TAGS = re.compile(r"\{%-? (?:end)?generation -?%\}\n?")
FAMILIES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "families.json").read_text(encoding="utf-8"))
CHATS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "chats.json").read_text(encoding="utf-8"))
CASES = [
    (family, chat, reasoning)
    for family, about in FAMILIES.items()
    for chat in about["chats"]
    for reasoning in (("keep", "cut") if "reasoning" in chat or chat == "think" else ("keep",))
]


@cache
def _tiny() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY)


@cache
def family_tokenizer(family: str, tagged: bool) -> PreTrainedTokenizerBase:
    """Return the embedded target's tokenizer with a family's special tokens and template, with or without its tags."""
    about = FAMILIES[family]
    tokenizer = deepcopy(_tiny())
    known = [token for token in (about["bos"], about["eos"], *about["special"]) if token]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in known], special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token = about["bos"] or None, about["eos"]
    template = (GOLDEN / f"{family}.jinja").read_text(encoding="utf-8")
    tokenizer.chat_template = template if tagged else TAGS.sub("", template)
    return tokenizer


def chat_record(family: str, chat: str) -> Record:
    """Return one of the chats as it is read from a file, without its system prompt where the family has none."""
    record = parse({"id": chat, **CHATS[chat]}, 0, "chats.json")
    if FAMILIES[family].get("system", True):
        return record
    return record._replace(messages=[message for message in record.messages if message["role"] != "system"])


def masked(record: Record, tokenizer: PreTrainedTokenizerBase, **changed: Any) -> list[Sample]:
    """Return a record's samples under some options."""
    return samples_of(record, tokenizer, "f.jsonl", data_config("f.jsonl", **changed), Counter())


def marked(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sample's text, with ⟦ ⟧ around what is trained."""
    parts = []
    for on, pairs in groupby(zip(sample.loss_mask, sample.token, strict=True), key=lambda pair: pair[0]):
        text = str(tokenizer.decode([token for _, token in pairs], clean_up_tokenization_spaces=False))
        parts.append(f"⟦{text}⟧" if on else text)
    return "".join(parts)


def trained(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of the sample's trained runs."""
    return re.findall("⟦(.*?)⟧", marked(sample, tokenizer), re.DOTALL)


def golden(family: str, tagged: bool) -> str:
    """Return what a family's golden file should hold: every chat's samples, marked."""
    tokenizer = family_tokenizer(family, tagged)
    parts = []
    for name, chat, reasoning in CASES:
        if name == family:
            samples = masked(chat_record(family, chat), tokenizer, reasoning=reasoning)
            parts += [f"=== {sample.id}, reasoning={reasoning}\n{marked(sample, tokenizer)}\n" for sample in samples]
    return "".join(parts)
