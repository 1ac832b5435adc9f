"""Tokens of answers per CPU second: data/run.py of one or more checkouts, and transformers' generate.

    python benchmarks/answers.py MODEL PROMPTS.jsonl CHECKOUT [CHECKOUT ...]

Each side answers 8 and then 72 prompts, at most 128 tokens each, 16 at a time at temperature 0.8; the difference of the
two leaves out what loading takes. generate has prompts of one batch padded on the left, and waits for its longest.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

NEW, BATCH, FEW, MANY = 128, 16, 8, 72

GENERATE = f"""
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
path, prompts, count, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
chats = [json.loads(line)["messages"] for line in open(prompts)][: int(count)]
tokens = 0
for begin in range(0, len(chats), {BATCH}):
    inputs = tokenizer.apply_chat_template(
        chats[begin : begin + {BATCH}], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    texts = model.generate(**inputs, do_sample=True, temperature=0.8, top_k=0, top_p=1.0, max_new_tokens={NEW})
    for text in texts[:, inputs["input_ids"].shape[1] :].tolist():
        end = tokenizer.eos_token_id
        tokens += text.index(end) + 1 if end in text else len(text)
json.dump(tokens, open(out, "w"))
"""


def cost(command: list[str], folder: str | None) -> float:
    """Return the CPU seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def answered(out: Path, model: str) -> int:
    """Return the tokens of a file of answers, an end token each included."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [json.loads(line)["messages"][-1] for line in out.read_text(encoding="utf-8").splitlines()]
    texts = [len(tokenizer(m["content"])["input_ids"]) + ("finish_reason" not in m) for m in messages]
    return sum(texts)


def main(model: str, prompts: str, *checkouts: str) -> None:
    """Print tokens per CPU second of each side."""
    model, prompts = (str(Path(path).resolve()) for path in (model, prompts))
    for side in (*checkouts, "generate"):
        tokens, seconds = [], []
        with tempfile.TemporaryDirectory() as folder:
            for count in (FEW, MANY):
                out = Path(folder) / f"{count}.jsonl"
                if side == "generate":
                    seconds.append(cost([sys.executable, "-c", GENERATE, model, prompts, str(count), str(out)], None))
                    tokens.append(json.loads(out.read_text()))
                    continue
                options = {
                    "model.path": model, "model.dtype": "bfloat16", "data.path": prompts, "data.held_out": 0,
                    "answers": out, "limit": count, "max_new_tokens": NEW, "batch_size": BATCH, "temperature": 0.8,
                    "keep_unfinished": "true",
                }  # fmt: skip
                given = [f"{key}={value}" for key, value in options.items()]
                seconds.append(cost([sys.executable, "data/run.py", *given], side))
                tokens.append(answered(out, model))
        rate = (tokens[1] - tokens[0]) / (seconds[1] - seconds[0])
        print(f"{side}: {tokens[1] - tokens[0]:,} tokens in {seconds[1] - seconds[0]:.0f} s: {rate:.1f} a CPU second")


if __name__ == "__main__":
    main(*sys.argv[1:])
