"""The text's own answers to the prompts of the bundled target's chats: what a head trains on instead of its target's.

    python benchmarks/corpus_text.py corpus.jsonl
    python benchmarks/heads.py --seeds 0 1 2 --out table.jsonl --prompts 32 corpus trainer.steps=800 \
        data.path=corpus.jsonl data.prompts=examples/tiny/prompts.jsonl

The first command reads the corpus that the bundled target was trained on anew (examples/tiny/corpus.py), which takes
minutes; of the bundled prompts it leaves out those whose function is not found there.
"""

import argparse
import importlib
import json
import lzma
import sys
from pathlib import Path
from typing import Any

TINY = Path(__file__).resolve().parent.parent / "examples" / "tiny"
sys.path[0] = str(TINY)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="The corpus's own answers to the embedded prompts.")
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    corpus: Any = importlib.import_module("corpus")
    functions = {each.source: each for each in corpus.corpus()[1]}
    with lzma.open(TINY / "chats.jsonl.xz", "rt", encoding="utf-8") as lines:
        wanted = [json.loads(line)["id"] for line in lines]
    found = [functions[name] for name in wanted if name in functions]
    records = [{"id": each.source, "prompt": each.prompt, "answer": each.answer} for each in found]
    asked.out.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    print(f"{asked.out}: {len(found)} of {len(wanted)} prompts with the corpus's own answers")


if __name__ == "__main__":
    main()
