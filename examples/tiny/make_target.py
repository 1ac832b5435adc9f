"""Make the bundled target: tokenizer, training by depth stacking, held-out loss, prompts and card figures.

    python examples/tiny/make_target.py --minutes 60 --out examples/tiny

A deep and narrow Llama, so that a draft step costs about as little beside a target step as it does for real models; how
it is trained stands in recipe.py. On an accelerator `python benchmarks/gpu/target.py --size embedded` does the same.
"""

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from examples.tiny.corpus import Function, corpus
from examples.tiny.recipe import (
    BACK,
    EMBEDDED,
    END,
    ENTRY,
    EXIT,
    SHALLOW_SHARE,
    TURN,
    Part,
    Point,
    build,
    chat,
    encoded,
    held_out_loss,
    make_tokenizer,
    save,
    stack,
    train,
)

MODULE_SHARE = 0.2
MAX_BODY = 900
PIECE = 6000  # characters of a module
MEASURED = 300  # held-out functions


def sampled(texts: list[str], functions: list[Function]) -> list[str]:
    """Return the sample of the text that the tokenizer is trained on."""
    return [*random.Random(0).sample(texts, min(400, len(texts))), *(f.prompt + f.answer for f in functions[::5])]


def documents(texts: list[str], functions: list[Function]) -> list[str]:
    """Shuffle chats and pieces of modules, MODULE_SHARE of the text from modules."""
    chats = [chat([f.prompt, f.answer]) for f in functions if len(f.answer) <= MAX_BODY]
    found = chats + [piece + END for piece in pieces(texts, sum(map(len, chats)))]
    random.Random(2).shuffle(found)
    return found


def pieces(texts: list[str], chats: int) -> list[str]:
    """Return beginnings of modules, as many as go with so many characters of chats."""
    budget, found = int(chats * MODULE_SHARE / (1 - MODULE_SHARE)), []
    for text in random.Random(1).sample(texts, len(texts)):
        found.append(text[:PIECE])
        budget -= len(found[-1]) + len(END)
        if budget < 0:
            break
    return found


def write_jsonl(path: Path, functions: list[Function]) -> None:
    """Write functions as chat records; functions of one name in one module are numbered."""
    seen: Counter[str] = Counter()
    lines = []
    for f in functions:
        seen[f.source] += 1
        name = f.source if seen[f.source] == 1 else f"{f.source}#{seen[f.source]}"
        lines.append(json.dumps({"id": name, "prompt": f.prompt, "answer": f.answer}) + "\n")
    path.write_text("".join(lines))


def main() -> None:
    """Run the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--more", action="store_true", help="go on from the weights in --out, with a fresh schedule")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    texts, trained, kept = corpus()
    figures, seconds, curve = args.out / "training.json", args.minutes * 60, list[Point]()
    past = json.loads(figures.read_text()) if args.more else {"tokens_seen": 0, "minutes": 0}
    if args.more:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
        stream = encoded(tokenizer, documents(texts, trained))
        model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
        seen = train(model, stream, EMBEDDED, Part(seconds, 0.5, EXIT, past["tokens_seen"]), curve)
    else:
        tokenizer = make_tokenizer(sampled(texts, trained), EMBEDDED, args.out)
        write_jsonl(args.out / "held_out.jsonl", kept)
        write_jsonl(args.out / "trained.jsonl", trained)
        stream = encoded(tokenizer, documents(texts, trained))
        model = build(EMBEDDED, EMBEDDED.shallow, len(tokenizer))
        seen = train(model, stream, EMBEDDED, Part(seconds * SHALLOW_SHARE, ENTRY, TURN, 0), curve)
        model = stack(model, EMBEDDED, len(tokenizer))
        seen = train(model, stream, EMBEDDED, Part(seconds * (1 - SHALLOW_SHARE), BACK, EXIT, seen), curve)
    save(model, EMBEDDED, args.out, len(tokenizer))
    chats = [[f.prompt, f.answer] for f in kept[:MEASURED]]
    loss = held_out_loss(model.eval(), tokenizer, chats, EMBEDDED.context).mean
    now = {"tokens_seen": seen, "minutes": past["minutes"] + args.minutes, "held_out_loss": loss}
    figures.write_text(json.dumps(now, indent=2) + "\n")
    print(f"{len(trained)} functions, {len(kept)} held out, {len(stream) / 1e6:.1f} M tokens in the stream; {now}")


if __name__ == "__main__":
    main()
