"""Acceptance of heads after short and long contexts: the same questions behind more and more earlier turns of a chat.

    python benchmarks/context.py SmolLM2.gguf examples/smollm2/head [HEAD …] [--lengths 256 1024 4096] [--questions 8]

The earlier turns are chats of `--chats`, as many as fit into the length, none where the question alone fills it. Each
head drafts chains along the target's own greedy answers. The table has τ and the acceptance by depth, a line a head and
length; the report is in `--out`.
"""

import argparse
import json
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from data.text.sources import open_source
from inference.target.loading import load_tokenizer

SMOLLM2 = ROOT / "examples" / "smollm2"


def write(path: Path, tokenizer: Any, questions: list[str], chats: str, lengths: list[int]) -> None:
    """Write a workload: every question behind earlier turns of each length, which is its category."""
    earlier = cycle([record["messages"] for record in open_source(chats, split="")])
    with path.open("w") as file:
        for length in lengths:
            for i, question in enumerate(questions):
                messages: list[Any] = []
                asked = [{"role": "user", "content": question}]
                token: list[int] = []
                for chat in earlier:
                    more = tokenizer.apply_chat_template(
                        messages + asked, add_generation_prompt=True, return_dict=False
                    )
                    if token and len(more) > length:
                        break
                    token, messages = more, messages + chat
                record = {
                    "id": f"{length}-{i}",
                    "category": str(length),
                    "input_ids": token,
                    "loss_mask": [0] * len(token),
                }
                file.write(json.dumps(record) + "\n")


def main() -> None:
    """Write the workload, measure, print the table."""
    parser = argparse.ArgumentParser(description="Acceptance after short and long contexts.")
    parser.add_argument("model")
    parser.add_argument("heads", nargs="+")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--prompts", type=Path, default=SMOLLM2 / "measured.jsonl")
    parser.add_argument("--chats", default=str(SMOLLM2 / "answers.jsonl.xz"))
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "context")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    lines = asked.prompts.read_text().splitlines()[: asked.questions]
    workload = asked.out.resolve() / "workload.jsonl"
    write(
        workload,
        load_tokenizer(asked.model, False),
        [json.loads(line)["turns"][0] for line in lines],
        asked.chats,
        asked.lengths,
    )
    count = len(asked.lengths) * asked.questions
    words = f"run={[str(Path(head).resolve()) for head in asked.heads]}", f"model.path='{asked.model}'", "tree=chain"
    how = "tier=teacher_forced", f"workload='{workload}'", f"prompts={count}", "max_new_tokens=96", f"out='{asked.out}'"
    subprocess.run([sys.executable, str(ROOT / "eval/run.py"), *words, *how], cwd=ROOT, check=True)
    for row in json.loads((asked.out / "report.json").read_text())["rows"]:
        if row["category"]:
            by_depth = " ".join(f"{share:.3f}" for share in row["accepted_by_depth"])
            print(f"{row['category']:>6s} tokens  τ {row['tau']:.3f}  P(a≥1), … {by_depth}  {row['drafter']}")


if __name__ == "__main__":
    main()
