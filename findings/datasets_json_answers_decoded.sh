#!/usr/bin/env bash
# datasets 5.2.0: if the values of a JSON field differ in type, such as a message's content that is a text here and a list of parts
# there, load_dataset keeps the field as Json, and then reads each text of it that is valid JSON as the value it spells, without
# a warning. An answer '{"city": "Rome"}' becomes an object, "42" and "007" become integers, "null" and "NaN" become None. One
# message with parts is enough to change all answers of the file. Seen: as asserted below; without that message all stay texts.
# headstart reads local JSON files itself; of a Hub data set it refuses a turn whose content is neither a text nor parts, such as 42,
# but one of None is an empty text: fetch such a set's files and give the folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0
cd "$folder"
export HF_HOME="$folder/cache"
venv/bin/python - <<'PYTHON'
import json
from pathlib import Path

from datasets import load_dataset

answers = ['{"city": "Rome"}', "[1, 2]", "42", "007", "true", "null", "NaN", '"quoted"', "It is Rome."]
changed = [{"city": "Rome"}, [1, 2], 42, 7, True, None, None, "quoted", "It is Rome."]


def load(name, ask):
    chats = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for answer in answers]
    chats[1:] = [[{"role": "user", "content": "And now?"}, chat[1]] for chat in chats[1:]]
    Path(name).write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    table = load_dataset("json", data_files=name, split="train")
    print(table.features["messages"].feature["content"])
    return [row["messages"][1]["content"] for row in table]


texts = load("texts.jsonl", "Where is it? Answer in JSON.")
mixed = load("mixed.jsonl", [{"type": "text", "text": "Where is it? Answer in JSON."}])
for pair in zip(texts, mixed, strict=True):
    print(*map(repr, pair), sep="  ->  ")
assert texts == answers and mixed == changed and type(mixed[4]) is bool
PYTHON
