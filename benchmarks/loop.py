"""A head in service whose traffic, or target, changes: alarm, adaptation, proof and swap, by the loop's own command.

python benchmarks/loop.py [case=domain] [seed=0] [steps=800] [quiet=600] [new=450] [more=8] [proof=64] [work=FOLDER]
The bundled target answers documented functions, its own domain; then parts of modules, written on without a chat form
(case=domain), or the same functions as a fine-tuned sibling of it (case=sibling). The head in service was trained on
the functions for `steps` steps; it is adapted in a tenth of them, and beside it a new head is trained on new traffic
alone, `more` times as many requests, for all of them. Our engine serves with the head and logs tokens and accepted
counts. What is there from an earlier call is used again. 20 minutes on two idle cores a case and seed; seeds 0 to 2.
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "tiny")]

import corpus
import torch

from data.text.prompts import prompt_of
from data.text.records import parse
from data.text.sources import open_source
from eval.measures.metrics import sum_counts
from heads.common.typed import from_yaml
from inference import api
from inference.batch import batch_of
from inference.decode import RequestParams
from inference.drafters.plain import Baseline
from inference.protocol import Drafter
from inference.target.config import model_config
from inference.target.target import Target
from inference.verification.rules import COUPLED
from inference.verification.sample import Sampling
from ops.watch import WatchConfig, replayed

TINY = ROOT / "examples" / "tiny"
TEMPERATURE = 0.5  # that the bundled target's chats were written at
TRAINED = 3500  # samples that a head is trained on at most; the functions behind them are asked for
PROMPT = 96  # tokens of a module
SLOTS = 16
TUNING = {"steps": 60, "lr": 3e-4, "rows": 4, "tokens": 256}  # of the sibling


def words_of(arguments: list[str], **defaults: str) -> dict[str, str]:
    """Return the command's words over their defaults."""
    return defaults | dict(word.split("=", 1) for word in arguments)


def functions(target: Target, begin: int) -> Iterator[list[int]]:
    """Yield the prompts of documented functions, from one on, and around."""
    source = list(open_source(str(TINY / "chats.jsonl.xz"), split="train"))
    for index, raw in enumerate(source[begin:] + source[:begin]):
        yield prompt_of(parse(raw, index, "chats"), target.tokenizer).token


def modules(target: Target, seed: int) -> Iterator[list[int]]:
    """Yield parts of modules, one of each, in an order of the seed."""
    texts = [text for _, text in corpus.modules()]
    order = random.Random(seed)
    order.shuffle(texts)
    for text in texts * 4:
        lines = text.splitlines()
        begin = order.randrange(max(1, len(lines) - 30))
        token = target.tokenizer("\n".join(lines[begin : begin + 24]) + "\n")["input_ids"][:PROMPT]
        if len(token) >= PROMPT // 2:
            yield token


def serve(target: Target, drafter: Drafter, prompts: Iterator[list[int]], count: int, tokens: int, file: Path) -> Path:
    """Answer prompts as a service would, and log tokens and what each pass accepted."""
    if file.is_file():
        return file
    batch, running, records, started = batch_of(target, drafter, SLOTS), [], [], 0
    with torch.inference_mode():
        while len(records) < count:
            while batch.free and started < count:
                prompt = next(prompts)
                settings = RequestParams(tokens, Sampling(TEMPERATURE, 0, 1.0), seed=started, rule=COUPLED)
                running.append((started, prompt, batch.admit(started, prompt, settings)))
                started += 1
            batch.step()
            for number, prompt, answer in running:
                if answer.finish_reason:
                    accepted = [step.accepted for step in answer.steps]
                    record = {"prompt_token_ids": prompt, "token_ids": list(answer.tokens), "accepted": accepted}
                    records.append((number, record))
            running = [one for one in running if not one[2].finish_reason]
            batch.release()
    lines = [json.dumps(record) + "\n" for _, record in sorted(records, key=lambda one: one[0])]
    file.write_text("".join(lines), encoding="utf-8")
    return file


def run(script: str, *words: str) -> int:
    """Run a command in one process; return its exit status."""
    command = [sys.executable, str(ROOT / script), "launcher=inline", *words]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def head_in_service(work: Path, steps: int, seed: int, data: Path | None = None, model: Path = TINY) -> Path:
    """Train a head unless it is there; return its run's folder."""
    if not (work / "training.json").is_file():
        given = [f"data.path='{data or TINY / 'chats.jsonl.xz'}'", "data.prompts=''", "data.contamination=null"]
        status = run(
            "train/run.py", "head=mtp", f"model.path='{model}'", *given, f"trainer.steps={steps}",
            f"trainer.seed={seed}", "trainer.eval_prompts=0", "eval.prompts=0",
            "overwrite=true", f"data.limit={TRAINED}", f"out='{work}'",
        )  # fmt: skip
        assert status == 0
    return work


def sibling(folder: Path, seed: int) -> Path:
    """Fine-tune the bundled target on modules for a moment, unless that is done; return its folder."""
    if (folder / "config.json").is_file():
        return folder
    target = Target.of(model_config(path=str(TINY), name="tiny", dtype="float32", device="cpu"))
    model: Any = target.model.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=TUNING["lr"])
    texts = modules(target, seed + 1000)
    width = int(TUNING["tokens"])
    for _ in range(int(TUNING["steps"])):
        rows = [(next(texts) + next(texts) + next(texts) + next(texts) + next(texts))[:width] for _ in range(4)]
        token = torch.tensor([row for row in rows if len(row) == width])
        loss = model(input_ids=token, labels=token).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def tau(run: Path, model: Path, records: list[dict[str, Any]]) -> float:
    """Return a head's τ along logged answers."""
    loaded: Any = api.load(str(run), f"model.path={model}", "model.sibling=true", "model.dtype=float32")
    target, drafter = loaded
    config = from_yaml(WatchConfig, "ops/watch", log="log", max_new_tokens=2048)
    counts = sum_counts(
        [replayed(target, drafter, config, record, index, "log") for index, record in enumerate(records)]
    )
    return float(counts.tokens / counts.steps)


def records_of(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Run a case with a seed, and print."""
    words = words_of(
        sys.argv[1:], case="domain", seed="0", steps="800", quiet="600", new="450", tokens="64", more="8", proof="64",
        work=str(ROOT / "outputs" / "loop-benchmark"), reference="300",
    )  # fmt: skip
    seed, steps, quiet, new, tokens = (int(words[key]) for key in ("seed", "steps", "quiet", "new", "tokens"))
    work = Path(words["work"]) / f"seed-{seed}"
    case = work / words["case"]
    case.mkdir(parents=True, exist_ok=True)
    first = head_in_service(work / "head", steps, seed)
    target, drafter = api.load(str(first), "model.dtype=float32")
    log = serve(target, drafter, functions(target, TRAINED), quiet, tokens, work / "quiet.jsonl")
    model = TINY if words["case"] == "domain" else sibling(case / "target", seed)
    served, drafter = api.load(str(first), f"model.path={model}", "model.sibling=true", "model.dtype=float32")
    texts = modules(served, seed) if model == TINY else functions(served, TRAINED + quiet)
    fallen = serve(served, drafter, texts, new, tokens, case / "new.jsonl")
    more = serve(served, Baseline(served.device), texts, int(words["more"]) * new, tokens, case / "more.jsonl")
    both = case / "log.jsonl"
    both.write_text(log.read_text(encoding="utf-8") + fallen.read_text(encoding="utf-8"), encoding="utf-8")
    scratch = head_in_service(case / "scratch", steps, seed, more, model)
    if not (case / "served").is_dir():
        subprocess.run(["cp", "-r", str(first), str(case / "served")], check=True)
    status = run(
        "ops/loop.py", f"log='{both}'", f"serve='{case / 'served'}'", f"out='{case / 'loop'}'",
        f"loop.watcher.reference={words['reference']}", f"trainer.steps={max(1, steps // 10)}",
        f"loop.requests={words['proof']}", f"trainer.seed={seed}",
        f"model.path='{model}'",
        "model.dtype=float32", f"model.sibling={str(model != TINY).lower()}", f"eval.max_new_tokens={tokens}",
    )  # fmt: skip
    state = json.loads((case / "loop" / "state.json").read_text(encoding="utf-8"))
    for one in state["decisions"]:
        print(f"{one['stage']}: {one['decision']}")
    alarm = state["decisions"][0]["evidence"]
    if "at" in alarm:
        print(f"alarm after {alarm['at'] - quiet + 1} requests of the new traffic")
    rounds = case / "loop" / "round-1"
    held_out = records_of(rounds / "traffic" / "proof_new.jsonl")
    old, adapted, ideal = (tau(run, model, held_out) for run in (first, rounds / "adapted", scratch))
    print(f"τ on {len(held_out)} held-out new requests: in service {old:.3f}, adapted {adapted:.3f}, new {ideal:.3f}")
    share, gain = adapted / ideal, (adapted - old) / (ideal - old)
    print(f"at a tenth of its tokens the adapted head has {share:.0%} of the new one's τ, {gain:.0%} of its gain")
    print(f"status {status}")


if __name__ == "__main__":
    main()
