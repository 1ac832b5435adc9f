"""Write the prompts that SmolLM2 answers for training: its own questions, Python's documented functions, given files.

    python examples/smollm2/make_prompts.py MODEL prompts.jsonl [FILE …]

MODEL is the GGUF, or a folder of the model. Its own questions are what it writes after the chat template's beginning of
a user's turn (Magpie, arXiv 2406.08464). The files are chats or prompts of any shape that data.path takes, such as
openai/gsm8k's training questions; of each the first LIMIT first questions are taken.
"""

import importlib
import inspect
import itertools
import json
import random
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

from data.text.prompts import load_prompts
from heads.common.errors import user_errors
from heads.common.progress import Bar
from inference.api import load
from inference.decode import RequestParams, speculate
from inference.target.target import Target
from inference.verification.sample import Sampling

OWN, CODE, LIMIT = 620, 160, 800
LONGEST = 90  # tokens of an own question
MODULES = [
    "ast", "bisect", "calendar", "colorsys", "configparser", "contextlib", "copy", "csv", "difflib", "dis",
    "email.utils", "fnmatch", "fractions", "functools", "glob", "hashlib", "heapq", "hmac", "html", "http.cookies",
    "inspect", "ipaddress", "itertools", "json", "linecache", "locale", "mimetypes", "ntpath", "operator", "posixpath",
    "pprint", "random", "re", "secrets", "shlex", "shutil", "socket", "ssl", "statistics", "string", "struct",
    "tempfile", "textwrap", "timeit", "tokenize", "trace", "types", "urllib.parse", "uuid", "warnings", "zipfile",
]  # fmt: skip


def own_questions(target: Target) -> list[str]:
    """Return different questions that the model asks itself, by sampling at temperature 1."""
    mark = "QUESTION"
    chat = target.tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    start = target.tokenizer(chat[: chat.index(mark)], add_special_tokens=False).input_ids
    settings = [RequestParams(LONGEST, Sampling(1.0, 0, 0.95), seed=seed) for seed in range(OWN)]
    written = itertools.count(1)
    with Bar(OWN * LONGEST, "own questions, tokens at most") as bar:
        answers = speculate(
            target, load(None, target=target)[1], [start] * OWN, settings, lambda *_: bar.show(next(written)), 64
        )
    texts = [target.tokenizer.decode(answer.tokens[:-1]).strip() for answer in answers if answer.finish_reason == "eos"]
    return [*{text.lower(): text for text in texts if len(text) >= 15}.values()]


def functions() -> list[str]:
    """Return requests for the documented functions of Python's standard library, half of them as code to complete."""
    found = []
    for name in MODULES:
        for key, value in sorted(vars(importlib.import_module(name)).items()):
            if inspect.isfunction(value) and value.__module__ == name and 40 < len(value.__doc__ or "") < 500:
                found.append((f"{key}{inspect.signature(value)}", inspect.cleandoc(str(value.__doc__))))
    return [
        f'Complete the code I provided.\n\ndef {head}:\n    """{text}"""\n'
        if i % 2
        else f"Write a Python function `{head}`. {text}"
        for i, (head, text) in enumerate(found[:CODE])
    ]


def main(model: str, out: str, *files: str) -> None:
    """Write the prompts of all kinds, shuffled."""
    target, _ = load(None, f"model.path={model}")
    texts = {"own": own_questions(target), "code": functions()}
    for file in files:
        texts[Path(file).stem] = [prompt.text for prompt in load_prompts(file, target.tokenizer, LIMIT)]
    lines = [
        json.dumps({"id": f"{kind}-{i}", "messages": [{"role": "user", "content": text}]}, ensure_ascii=False) + "\n"
        for kind, several in texts.items()
        for i, text in enumerate(several)
    ]
    random.Random(0).shuffle(lines)
    Path(out).write_text("".join(lines), encoding="utf-8")
    print(f"{out}: " + ", ".join(f"{len(several)} {kind}" for kind, several in texts.items()))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    with user_errors():
        main(*sys.argv[1:])
