"""The MTP head of a target that was fine-tuned: stale, refreshed and new, by τ along the fine-tune's own answers.

    python benchmarks/mtp_after_finetune.py SmolLM2.gguf examples/smollm2/head stories.txt --tokens 150000 --seeds 3

The last file holds chats of another domain, or texts, which become chats that ask to go on. The target is tuned on some
by LoRA, and as that answers others: half the tokens, read twice. The head is measured as it is (stale) and trained on
for a tenth of the tokens (refreshed), heads from the tuned target's last layer (new) for a tenth and for all; all in
chains along greedy answers to further chats. What an earlier call made is used again.
"""

import argparse
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import torch
from peft import LoraConfig, get_peft_model

from data.batches import pack
from data.text.prompts import load_training
from data.text.sources import open_source
from eval.inputs.workloads import MASKING
from heads.formats.hub import resolve_head
from heads.formats.store import read_config
from inference.target.config import model_config
from inference.target.target import Target

LENGTH, ANSWER = 512, 128  # tokens of a row, which is a step; of an answer at most
OPENING, MEASURED = 8, 32  # words of a text that its chat gives; chats
KINDS = (("refreshed", 0.1), ("new", 0.1), ("new", 1.0))  # with the share of the tokens


def run(script: str, *words: str) -> None:
    """Run one of our commands; end where it fails."""
    subprocess.run([sys.executable, str(ROOT / script), *words], cwd=ROOT, check=True)


def divide(text: str, tuned: int, work: Path) -> None:
    """Write the chats to fine-tune on, to measure on and to answer, in one random order."""
    records = list(open_source(text, split=""))
    random.Random(0).shuffle(records)
    for record in records:
        if "text" in record:
            words = record.pop("text").split(" ")
            record |= {"prompt": "Go on: " + " ".join(words[:OPENING]), "answer": " ".join(words[OPENING:])}
    parts = records[:tuned], records[tuned : tuned + MEASURED], records[tuned + MEASURED :]
    for name, part in zip(("tune", "measure", "train"), parts, strict=True):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in part))


def fine_tune(model: str, work: Path, steps: int, rate: float) -> float:
    """Write a LoRA adapter for the answers of tune.jsonl; return the mean tokens of its chats."""
    target = Target.of(model_config(path=model, name="tuned", device="cpu"))
    data = load_training(replace(MASKING, path=str(work / "tune.jsonl")), target.tokenizer, 0)
    packed = pack(data.samples, LENGTH)
    torch.manual_seed(0)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    tuned: Any = get_peft_model(target.model.train(), lora)
    optimizer = torch.optim.AdamW(weight for weight in tuned.parameters() if weight.requires_grad)
    for step in range(steps):
        row = torch.randint(len(packed.token), (1,))
        token = packed.token[row].long()
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        loss = tuned(input_ids=token, labels=token.where(packed.loss_mask[row] > 0, -100)).loss
        loss.backward()
        optimizer.step()
        print(f"fine-tune {step + 1}/{steps}: {loss:.3f}", flush=True)
    tuned.save_pretrained(work / "adapter")
    return data.counts.tokens / data.counts.samples


def main() -> None:
    """Make what is missing, measure, print the table."""
    parser = argparse.ArgumentParser(description="A head after a fine-tune: stale, refreshed, new.")
    for name in ("model", "head", "text"):
        parser.add_argument(name)
    parser.add_argument("--tokens", type=int, default=150_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tuning", type=int, default=60)  # steps of the fine-tune
    parser.add_argument("--rate", type=float, default=1e-3)  # its learning rate at the start, falling to nothing
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "mtp_after_finetune")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    work, source = asked.work.resolve(), Path(asked.head).resolve()
    if not (size := work / "adapter" / "chat_tokens.json").is_file():
        divide(asked.text, 3 * asked.tuning, work)
        size.write_text(str(fine_tune(asked.model, work, asked.tuning, asked.rate)))
    model = f"model.path='{asked.model}'", f"model.adapter='{work / 'adapter'}'"
    chats = 1 + int(asked.tokens / 2 / float(size.read_text()))
    for name, limit, temperature in (("train", chats, 0.8), ("measure", MEASURED, 0.0)):
        if not (answers := work / f"answers_{name}.jsonl").is_file():
            given = f"data.path='{work / name}.jsonl'", "data.held_out=0", f"limit={limit}", f"answers='{answers}'"
            how = f"temperature={temperature}", f"max_new_tokens={ANSWER}", "batch_size=64"
            run("data/run.py", *model, *given, *how)
    text = f"data.path='{work / 'answers_train.jsonl'}'", "data.prompts=''", "data.held_out=0", f"data.length={LENGTH}"
    head = "head=mtp", f"head.draft_vocab={read_config(resolve_head(asked.head))['head']['draft_vocab'] or 'null'}"
    same = *model, *text, *head, "features=stored", f"features.path='{work / 'features'}'"
    run("data/run.py", *same)  # writes what is missing
    heads = {str(source): ("stale", 0)}
    for kind, share, seed in ((*each, seed) for each in KINDS for seed in range(asked.seeds)):
        steps = max(1, round(share * asked.tokens / LENGTH))
        out = work / f"{kind}-{steps}-{seed}"
        heads[str(out)] = kind, steps * LENGTH
        if not (out / "training.json").is_file():
            start = f"init='{source}'" if kind == "refreshed" else "init=auto"
            sizes = [f"trainer.{key}={LENGTH}" for key in ("batch_tokens", "micro_tokens")]
            how = f"trainer.steps={steps}", f"trainer.seed={seed}", "trainer.eval_prompts=0", "eval.prompts=0"
            run("train/run.py", "launcher=inline", *same, start, *how, *sizes, "overwrite=true", f"out='{out}'")
    along = "tier=teacher_forced", "text=recorded", f"workload='{work / 'answers_measure.jsonl'}'", "turns=all"
    how = f"prompts={MEASURED}", f"max_new_tokens={ANSWER}", "tree=chain", f"out='{work / 'report'}'"
    run("eval/run.py", f"run={[*heads]}", *model, "model.sibling=true", *along, *how)
    taus: dict[tuple[str, int], list[float]] = {}
    for row in json.loads((work / "report" / "report.json").read_text())["rows"]:
        taus.setdefault(heads[row["drafter"].removeprefix("mtp ")], []).append(row["tau"])
    *_, new = taus.values()
    for (kind, tokens), each in taus.items():
        share = sum(each) / len(each) / (sum(new) / len(new))
        print(f"{kind:10s} {tokens:>9,} tokens  {share:.3f} of new  τ", *(f"{tau:.3f}" for tau in each))


if __name__ == "__main__":
    main()
