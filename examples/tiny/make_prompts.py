"""Choose the demo's prompts from the held-out functions, and the prompts that the target answers for training.

    python examples/tiny/make_prompts.py

Reads held_out.jsonl and trained.jsonl, which make_target.py wrote. A held-out prompt is taken if it is short enough and
the target's greedy answer has no loop; how many were passed over for a loop is printed, for the card.
"""

import argparse
import json
import random
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

PROMPT_TOKENS = (16, 110)
ANSWER_TOKENS = (24, 160)
WANTED = 48
LOOK_AT = 160
NEW_TOKENS = 128
GRAM, REPEATS = 6, 4


def read(path: Path) -> list[dict[str, str]]:
    """Read JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def loops(tokens: list[int]) -> bool:
    """Whether some run of GRAM tokens comes REPEATS times or more."""
    grams = Counter(tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1))
    return bool(grams) and max(grams.values()) >= REPEATS


@torch.no_grad()
def greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]) -> list[list[int]]:
    """Answer a batch of prompts greedily."""
    width = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    answers = [row[width:].tolist() for row in out]
    return [a[: a.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in a else a for a in answers]


def main() -> None:
    """Write prompts.jsonl and train_prompts.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    folder = parser.parse_args().folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def encode(prompt: str) -> list[int]:
        chat = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]

    def fits(record: dict[str, str]) -> bool:
        prompt, answer = len(encode(record["prompt"])), len(tokenizer(record["answer"]).input_ids)
        return PROMPT_TOKENS[0] <= prompt <= PROMPT_TOKENS[1] and ANSWER_TOKENS[0] <= answer <= ANSWER_TOKENS[1]

    held_out = read(folder / "held_out.jsonl")
    random.Random(0).shuffle(held_out)
    some = [record for record in held_out if fits(record)][:LOOK_AT]
    chosen, passed_over, short = [], 0, 0
    for start in range(0, len(some), 32):
        batch = some[start : start + 32]
        for record, answer in zip(batch, greedy(model, tokenizer, [encode(r["prompt"]) for r in batch]), strict=True):
            if loops(answer):
                passed_over += 1
            elif len(answer) < ANSWER_TOKENS[0]:
                short += 1
            else:
                chosen.append({"id": record["id"], "prompt": record["prompt"]})
        if len(chosen) >= WANTED:
            break
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chosen[:WANTED]))
    trained = [r for r in read(folder / "trained.jsonl") if len(encode(r["prompt"])) <= PROMPT_TOKENS[1]]
    random.Random(0).shuffle(trained)
    lines = [json.dumps({"id": r["id"], "prompt": r["prompt"]}) + "\n" for r in trained]
    (folder / "train_prompts.jsonl").write_text("".join(lines))
    print(f"{len(chosen)} prompts; passed over: {passed_over} for a loop, {short} for a short answer")
    print(f"{len(lines)} training prompts for the target to answer")


if __name__ == "__main__":
    main()
