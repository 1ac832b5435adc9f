"""A target worth measuring: a Llama trained for minutes on code, prose and dialogues, with prompts and a card.

    python benchmarks/gpu/target.py --out DIR [--text FOLDER] [--minutes 6] [--size embedded] [--toy]

FOLDER holds what of benchmarks/gpu/text.py's FILES there is; Python sources are the interpreter's own. There are three
parts, which benchmarks/gpu/run.py does one by one: text (tokenizer, tokens, what is held out), train (for the minutes
that are given, compilation included), measure (prompts, losses, samples, the card). A finished part is not done again.
--size embedded makes the bundled target anew, by the same recipe.

DIR is a Hugging Face folder, with code.jsonl, prose.jsonl and dialogue.jsonl to measure on, all of them in
prompts.jsonl, and train_prompts.jsonl, which the target answers for heads to train on (benchmarks/gpu/heads.py).
"""

import argparse
import itertools
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu.bench import Bench, Row, product_rate
from benchmarks.gpu.card import card
from benchmarks.gpu.text import KINDS, Chat, embedded_text, gathered, own_text
from benchmarks.gpu.workloads import choose, training_prompts, write_lines
from eval.measures.machine import peak_memory
from examples.tiny.recipe import (
    BACK,
    EMBEDDED,
    ENTRY,
    EXIT,
    SHALLOW_SHARE,
    TURN,
    Part,
    Point,
    Recipe,
    build,
    encoded,
    held_out_loss,
    make_tokenizer,
    save,
    stack,
    train,
)
from heads.common.files import atomic_write
from inference.request import clock
from inference.target.config import default_device

# SmolLM2-135M's widths at 24 layers: 94 M parameters.
LARGE = Recipe(
    vocab=16384, width=576, inner=1536, heads=9, kv_heads=3, layers=24, shallow=8, context=2048, window=1024,
    batch_tokens=32768, peak_lr=2e-3, warm_steps=80,
)  # fmt: skip
TOY = Recipe(
    vocab=512, width=128, inner=256, heads=4, kv_heads=2, layers=8, shallow=2, context=512, window=128,
    batch_tokens=512, peak_lr=6e-3, warm_steps=8,
)  # fmt: skip
SAMPLE = 30_000_000  # characters that the tokenizer is trained on
MEASURED = 400  # held-out chats of a kind
TRAINING, HELD_OUT, MEASURED_FILE = "training.json", "held_out.json", "measured.json"


def recipe_of(bench: Bench, size: str) -> Recipe:
    """Return the recipe of a size; at toy size all have one."""
    return TOY if bench.toy else {"large": LARGE, "embedded": EMBEDDED}[size]


def read_text(bench: Bench, out: Path, size: str = "large") -> None:
    """Write the tokenizer, the stream of tokens, what is held out, and the prompts to be answered."""
    recipe = recipe_of(bench, size)
    text = own_text(400) if bench.toy else gathered(bench.text) if size == "large" else embedded_text()
    out.mkdir(parents=True, exist_ok=True)
    found, left = text.documents(), SAMPLE
    sample = []
    for document in found:  # they are shuffled
        if (left := left - len(document)) < 0:
            break
        sample.append(document)
    tokenizer = make_tokenizer(sample, recipe, out)
    write_lines(out / "train_prompts.jsonl", training_prompts(text.chats, 60 if bench.toy else None))
    stream = encoded(tokenizer, found)
    save_file({"token": stream.to(torch.int32)}, out / "stream.safetensors.new")
    (out / "stream.safetensors.new").replace(out / "stream.safetensors")
    told = {
        "held_out": {kind: [list(each) for each in some] for kind, some in text.held_out.items()},
        "read": [each._asdict() for each in text.read],
        "stream": len(stream),
    }
    atomic_write(out / HELD_OUT, json.dumps(told).encode())
    print(f"{len(found)} documents, {len(stream) / 1e6:.2f} M tokens; {len(tokenizer)} tokens in the vocabulary")


def teach(bench: Bench, out: Path, size: str = "large", minutes: float | None = None) -> None:
    """Train the target, for 6 minutes unless it is said otherwise, and save it with what its training cost."""
    torch.manual_seed(0)
    recipe, minutes = recipe_of(bench, size), minutes or (0.2 if bench.toy else 6)
    tokenizer = AutoTokenizer.from_pretrained(out)
    stream = load_file(out / "stream.safetensors")["token"].long().to(bench.device)
    recipe = replace(recipe, batch_tokens=min(recipe.batch_tokens, len(stream) // 2 // recipe.context * recipe.context))
    seconds, curve, kind = minutes * 60, list[Point](), bench.device.type
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
    model: Any = build(recipe, recipe.shallow, len(tokenizer))
    model = model.to(bench.device)
    seen = train(model, stream, recipe, Part(seconds * SHALLOW_SHARE, ENTRY, TURN, 0), curve)
    model = stack(model, recipe, len(tokenizer))
    seen = train(model, stream, recipe, Part(seconds * (1 - SHALLOW_SHARE), BACK, EXIT, seen), curve)
    clock(bench.device)
    save(model, recipe, out, len(tokenizer))
    told = {
        "parameters": sum(each.numel() for each in model.parameters()),
        "tokens_seen": seen,
        "stream": len(stream),
        "minutes": minutes,
        "curve": [each._asdict() for each in curve],
        "peak_memory_bytes": peak_memory(bench.device),
        **speeds(curve, recipe, len(tokenizer), bench),
    }
    atomic_write(out / TRAINING, (json.dumps(told, indent=1) + "\n").encode())


def speeds(curve: list[Point], recipe: Recipe, vocab: int, bench: Bench) -> dict[str, Any]:
    """Return tokens per second and MFU of each depth, by the median interval between two points of its curve.

    What a step compiles is in no median. MFU is against the rate of a large bf16 product on this device.
    """
    rate, found = product_rate(bench), {}
    for layers in sorted({each.layers for each in curve}):
        mine = [each for each in curve if each.layers == layers]
        steps = sorted((b.tokens - a.tokens) / (b.seconds - a.seconds) for a, b in itertools.pairwise(mine))
        if steps:
            speed = steps[len(steps) // 2]
            mfu = speed * flops_per_token(recipe, layers, vocab) / rate
            found[str(layers)] = {"tokens_per_second": speed, "mfu": mfu}
    return {"product_rate": rate, "speed": found}


def flops_per_token(recipe: Recipe, layers: int, vocab: int) -> float:
    """Return the operations of forward and backward pass for a token of a row of `window` tokens.

    Six for each weight that multiplies (Kaplan et al., arXiv 2001.08361), the lm_head's included, and attention over
    half of the window on average, as it is causal.
    """
    width, head = recipe.width, recipe.width // recipe.heads
    attention = 2 * width * width + 2 * width * recipe.kv_heads * head
    weights = layers * (attention + 3 * width * recipe.inner) + vocab * width
    return 6.0 * weights + 6.0 * layers * width * recipe.window


def measure(bench: Bench, out: Path, size: str = "large") -> None:
    """Choose the prompts, measure losses on what is held out, write samples, the card and the numbers."""
    recipe = recipe_of(bench, size)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    model = model.to(bench.device).eval()
    told = json.loads((out / HELD_OUT).read_text(encoding="utf-8"))
    numbers: dict[str, Any] = {
        "shape": vars(recipe), "read": told["read"], **json.loads((out / TRAINING).read_text()), "kinds": {},
    }  # fmt: skip
    chosen = []
    for kind in KINDS:
        kept = [Chat(*each) for each in told["held_out"][kind]]
        random.Random(0).shuffle(kept)
        if not kept:
            continue
        loss = held_out_loss(model, tokenizer, [each.turns for each in kept[:MEASURED]], recipe.context)
        picked = choose(model, tokenizer, kept, bench.toy)
        numbers["kinds"][kind] = {
            "chats": min(len(kept), MEASURED), "nats_per_token": loss.mean, "perplexity": loss.perplexity,
            "bits_per_byte": loss.bits_per_byte, "tokens": loss.tokens, "bytes": loss.bytes, **picked.counts,
            "sample": picked.sample,
        }  # fmt: skip
        write_lines(out / f"{kind}.jsonl", picked.records)
        chosen += [each | {"category": kind} for each in picked.records]
    write_lines(out / "prompts.jsonl", chosen)
    (out / "README.md").write_text(card(numbers, size), encoding="utf-8")
    atomic_write(out / MEASURED_FILE, json.dumps(numbers, indent=1).encode())


def rows_of(out: Path, part: str) -> list[Row]:
    """Return the figures of a part that is done."""
    file = {"text": HELD_OUT, "train": TRAINING, "measure": MEASURED_FILE}[part]
    numbers = json.loads((out / file).read_text(encoding="utf-8"))
    if part == "text":
        return [("tokens of text", numbers["stream"], None)]
    if part == "train":
        keys = ("parameters", "tokens_seen", "minutes", "product_rate")
        rows: list[Row] = [(key, numbers[key], None) for key in keys]
        rows += [(f"{layers} layers: {key}", value, None) for layers, speed in numbers["speed"].items()
                 for key, value in speed.items()]  # fmt: skip
        return [*rows, ("loss of the last step", numbers["curve"][-1]["loss"], None)]
    return [(f"{kind}: nats a token", one["nats_per_token"], None) for kind, one in numbers["kinds"].items()]


def main() -> None:
    """Do the parts that are not done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="the folder of prose and dialogues; without it it reads code alone")
    parser.add_argument("--minutes", type=float, help="of training")
    parser.add_argument("--size", choices=("large", "embedded"), default="large")
    parser.add_argument("--toy", action="store_true", help="a size for a CPU")
    options = parser.parse_args()
    if options.text is not None and not options.text.is_dir():
        raise SystemExit(f"--text {options.text}: is no folder; name the one that holds the text, or leave it out")
    bench = Bench(torch.device("cpu" if options.toy else default_device()), options.toy, options.out, options.text)
    if not (options.out / HELD_OUT).exists():
        read_text(bench, options.out, options.size)
    if not (options.out / TRAINING).exists():
        teach(bench, options.out, options.size, options.minutes)
    measure(bench, options.out, options.size)


if __name__ == "__main__":
    main()
