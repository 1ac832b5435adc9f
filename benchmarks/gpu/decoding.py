"""Decoding at the shape of an 8B, random bf16 weights: what a step costs, and what speedup an acceptance length gives.

    python benchmarks/gpu/decoding.py --out OUT [--minutes 9] [--batches 1 4 …] [--contexts 1024 8192 …] [--toy]

A cell is a batch and a context, measured compiled: a plain step, and a step that drafts with a head of random weights.
The first cell has also passes of other sizes and a second head, and is measured eager too. `generate` is HF's, in the
same process on the same model. A cell that fails says so in its row and stops nothing.

Each cell is kept in OUT/decoding.json. With --minutes none but the first is begun after so many; the same
command again, at the same commit on the same device, goes on where the last one stopped.
"""

import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property, partial
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import torch
from transformers import CompileConfig

from benchmarks.gpu.common import Asked, arguments, bandwidth, earlier, random_target, record, seconds, weight_bytes
from benchmarks.gpu.decoding_tables import figures, tables
from benchmarks.gpu.sequences import TOY_TREE, TREE, Parts, Sequences, compile_anew, random_head, release
from heads.common.errors import one_line
from inference.decode import Settings, autoregress
from inference.target.target import Target
from inference.verification.sample import GREEDY

HEADS = ("eagle3", "eagle")  # the first one is in every cell
NODES = (8, 16, 32, 64, 128)  # of a pass, its root among them
TOY_NODES = (8, 16)
BATCHES, CONTEXTS = (1, 4, 16, 32), (1024, 8192, 32768)
TOY_BATCHES, TOY_CONTEXTS = (1, 2), (64, 128)


@dataclass(frozen=True)
class Bench:
    """The target, and how often things are measured."""

    asked: Asked
    target: Target
    repeats: int

    @cached_property
    def heads(self) -> dict[str, Any]:
        """Heads of random weights."""
        return {name: random_head(name, self.target) for name in HEADS}


def cell(bench: Bench, size: int, context: int, *, quick: bool, whole: bool) -> dict[str, Any]:
    """Measure a batch at a context.

    Args:
        bench: the target.
        size: sequences.
        context: committed rows of each.
        quick: whether the passes are compiled.
        whole: whether passes of all sizes are measured, and all heads.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    target, toy = bench.target, bench.asked.toy
    if quick:
        compile_anew(target, bench.asked)
    sequences = Sequences(target, size, context)
    found: dict[str, Any] = {"batch": size, "context": context, "compiled": quick, "heads": {}, "nodes": {}}
    found["plain"] = told(sequences.measure(sequences.plain(), bench.repeats))
    for name in HEADS if whole else HEADS[:1]:
        drafters = sequences.drafted(bench.heads[name], TOY_TREE if toy else TREE)
        found["heads"][name] = told(sequences.measure(drafters, bench.repeats))
    for nodes in (TOY_NODES if toy else NODES) if whole else ():
        found["nodes"][str(nodes)] = told(sequences.measure(sequences.planted(nodes), bench.repeats))
    return found


def told(parts: Parts) -> dict[str, float]:
    """Return a step's parts by name."""
    return {**parts._asdict(), "step": parts.step}


def generate(bench: Bench) -> dict[str, Any]:
    """Measure tokens a second of the baseline here and in HF generate, the prefill of a short prompt included."""
    target, asked = bench.target, bench.asked
    length, tokens = (16, 8) if asked.toy else (64, 128)
    prompt = torch.randint(target.embeddings.vocab_size, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    config = CompileConfig(backend="eager", mode="default") if asked.toy else CompileConfig()
    if asked.device.type == "cpu":
        config._compile_all_devices = True  # else it compiles on accelerators alone
    static = {"cache_implementation": "static"}

    def ours() -> int:
        return len(autoregress(target, prompt, Settings(tokens, GREEDY)).tokens)

    def theirs(**how: Any) -> int:
        call: Any = target.model.generate
        given = torch.tensor([prompt], device=target.device)
        out = call(given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False, pad_token_id=0,
                   **how)  # fmt: skip
        return out.shape[1] - length

    ways: dict[str, Callable[[], int]] = {
        "HF, dynamic cache": theirs,
        "HF, static cache": partial(theirs, **static, disable_compile=True),
        "HF, static cache, compiled": partial(theirs, **static, compile_config=config),
        "here, eager": ours,
        "here, compiled": ours,  # the last: what is compiled stays so until it is released
    }
    found: dict[str, Any] = {"prompt": length, "tokens": tokens, "rates": {}}
    for name, call in ways.items():
        if name == "here, compiled":
            compile_anew(target, asked)
        made = call()
        if made != tokens:
            raise RuntimeError(f"{name} wrote {made} of {tokens} tokens")
        found["rates"][name] = tokens / seconds(call, target.device, 3, 1)
        vars(target.model).pop("_compiled_call", None)
    return found


def limits(bench: Bench) -> dict[str, Any]:
    """Measure what the device can do, and count what a step must read."""
    config: Any = bench.target.config
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * bench.target.embeddings.layer.head_dim
    return {
        "bandwidth": bandwidth(bench.asked),
        "weight_bytes": weight_bytes(bench.target),
        "row_bytes": row * bench.target.dtype.itemsize,
        "tree": (TOY_TREE if bench.asked.toy else TREE).label,
    }


def measured(bench: Bench, call: Callable[[Bench], dict[str, Any]]) -> dict[str, Any]:
    """Return what a call measures, or in a word why it failed; all that it took is given back."""
    try:
        return call(bench)
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except (RuntimeError, ValueError) as error:  # what compilers raise; the other cells may run all the same
        traceback.print_exc()
        said = one_line(error)
        return {"failed": "out of memory" if "out of memory" in said else said[:80]}
    finally:
        release(bench.target)


def tasks(batches: list[int], contexts: list[int]) -> dict[str, Callable[[Bench], dict[str, Any]]]:
    """Return what is measured, by name, what matters most first."""
    first = {"batch": batches[0], "context": contexts[0]}
    found: dict[str, Callable[[Bench], dict[str, Any]]] = {
        _named(**first): partial(cell, size=batches[0], context=contexts[0], quick=True, whole=True),
        f"{_named(**first)}, eager": partial(cell, size=batches[0], context=contexts[0], quick=False, whole=True),
        "generate": generate,
    }
    for batch in batches:
        for context in contexts:
            found.setdefault(
                _named(batch, context), partial(cell, size=batch, context=context, quick=True, whole=False)
            )
    return found


def _named(batch: int, context: int) -> str:
    return f"{batch} x {context}"


def main() -> None:
    """Measure and write the record."""
    asked, read = arguments(
        "Decoding at the shape of an 8B.",
        minutes={"type": float, "default": float("inf"), "help": "none but the first cell is begun after so many"},
        batches={"type": int, "nargs": "+", "default": None},
        contexts={"type": int, "nargs": "+", "default": None},
    )
    begin = time.monotonic()
    batches = sorted(read.batches or (TOY_BATCHES if asked.toy else BATCHES))
    contexts = sorted(read.contexts or (TOY_CONTEXTS if asked.toy else CONTEXTS))
    wanted, numbers = tasks(batches, contexts), earlier(asked, "decoding")
    bench = Bench(asked, random_target(asked), 3 if asked.toy else 20)
    numbers.setdefault("limits", limits(bench))
    if not {"nodes", "failed"} & numbers.get(next(iter(wanted)), {}).keys():
        numbers.pop(next(iter(wanted)), None)  # it was not the first cell then, and lacks what only that one has

    def keep() -> None:
        record(asked, "decoding", numbers, tables(numbers, list(wanted)), figures(numbers, list(wanted)))

    left = [name for name in wanted if name not in numbers]
    for name in left:
        if name != left[0] and time.monotonic() - begin > 60 * read.minutes:
            break
        print(f"{name} …", flush=True)
        numbers[name] = measured(bench, wanted[name])
        with redirect_stdout(StringIO()):  # what stops this run takes none of it away; tables are read at the end
            keep()
    keep()
    if missing := sum(name not in numbers for name in wanted):
        print(f"{missing} of {len(wanted)} are not measured yet: the same command again goes on")


if __name__ == "__main__":
    main()
