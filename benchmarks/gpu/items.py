"""What is measured on a device, in the order that gives most for a few minutes: items, their pieces and their limits.

This file imports nothing that takes time: run.py, which watches the clock, reads it.
"""

from typing import Any, NamedTuple


class Piece(NamedTuple):
    """One measurement: `call` is a function of this folder, by its module and name, with these options.

    It is ended after so many `seconds`; the first ones of a process have START more, for imports and the target.
    """

    name: str
    call: str
    seconds: float
    options: dict[str, Any]


class Item(NamedTuple):
    """Pieces that are measured within so many minutes; what is left then waits for another call."""

    title: str
    minutes: float
    pieces: tuple[Piece, ...]


def piece(name: str, call: str, seconds: float, **options: Any) -> Piece:
    """Return a piece."""
    return Piece(name, call, seconds, options)


def steps(way: str, seconds: float, cells: list[tuple[str, int]], context: int = 1024) -> tuple[Piece, ...]:
    """Return decoding steps of a kind at a batch size, each a piece."""
    return tuple(
        piece(
            f"{way}: {kind}, {size} x {context}", "decoding.step", seconds,
            kind=kind, size=size, context=context, way=way,
        )
        for kind, size in cells
    )  # fmt: skip


START = 120  # seconds
KINDS = ("plain", "tree", "chain")  # the baseline, EAGLE-3 with a tree of 60 nodes, with a chain of 4
SIZES = (1, 8, 32)  # sequences of a batch
GRID = [(kind, size) for size in SIZES for kind in KINDS]
FIRST = [("plain", 1), ("tree", 1), ("plain", 32), ("chain", 32)]  # those with a figure to reach
REST = [cell for cell in GRID if cell not in FIRST]
DEVICE_TESTS = ("tree_attention", "step", "packed", "training", "decoding")
HEADS = ("eagle3", "mtp")
ITEMS = (
    Item("Tests on the device", 2, (
        piece("versions", "machine.versions", 30),
        *(piece(f"tests/device/test_{name}.py", "checks.device_tests", 100, tests=name) for name in DEVICE_TESTS),
    )),
    Item("Decoding steps at the shape of an 8B, captured, with compiled layers and drafts, in a growing context", 5, (
        piece("the target", "decoding.make", 60), *steps("compiled", 240, FIRST),
        *(
            piece(f"profile: {kind}, {size}, compiled", "decoding.profile", 120, kind=kind, size=size, way="compiled")
            for kind, size in FIRST
        ),
        *steps("compiled", 120, REST),
    )),
    Item("Saved answers as drafts, batch 32", 1.5, tuple(
        piece(f"replay, {depth} drafted tokens", "decoding.replay", 90, depth=depth) for depth in (5, 16)
    )),
    Item("SmolLM2-135M with the shipped head, in bf16", 3, (
        piece("the model", "smollm2.make", 60), *(piece(f"batch {n}", "smollm2.decode", 60, size=n) for n in SIZES),
    )),
    Item("Training EAGLE-3 at the shape of an 8B, documents packed", 8, (
        piece("step", "training.step", 150, optimizer="adamw"),
        piece("step, answers alone trained", "training.step", 60, optimizer="adamw", answers=True),
        piece("profile", "training.profile", 60),
        piece("features given", "training.given", 60, rows=8),
        piece("features given, 4,096 tokens", "training.given", 60, rows=2),
        piece("step, compiled", "training.step", 120, optimizer="adamw", compiled=True),
        piece(
            "step, answers alone trained, compiled", "training.step", 90, optimizer="adamw", answers=True, compiled=True
        ),
        piece("features given, compiled", "training.given", 60, rows=8, compiled=True),
        piece("profile, compiled", "training.profile", 90, compiled=True),
        piece("features over the bare pass", "training.features", 60),
        piece("chunks of 512", "training.step", 60, optimizer="adamw", chunk=512),
        piece("chunks of 1,024", "training.step", 60, optimizer="adamw", chunk=1024),
        piece("chunks of 4,096", "training.step", 60, optimizer="adamw", chunk=4096),
        piece("Muon", "training.step", 60, optimizer="muon"),
    )),
    Item("The machine", 2, (
        piece("rates", "machine.rates", 30),
        piece("attention on fresh shapes", "machine.fresh_shapes", 60),
        piece("tree attention", "machine.tree_attention", 30),
    )),
    Item("Decoding steps captured, and as the operations run", 5, (
        *steps("captured", 40, GRID), *steps("eager", 40, GRID),
        piece("operations", "decoding.operations", 60),
        piece("profile, eager", "decoding.profile", 60, kind="tree", size=1, way="eager"),
        piece("profile, captured", "decoding.profile", 60, kind="tree", size=1, way="captured"),
    )),
    Item("Losslessness, and heads of the bundled target in bf16", 8, (
        piece("a head for the check", "heads.train", 75, head="eagle", steps=300),
        piece("losslessness, bfloat16", "checks.lossless", 75, dtype="bfloat16"),
        piece("losslessness, float32", "checks.lossless", 75, dtype="float32"),
        *(piece(f"training {head}", "heads.train", 120, head=head, steps=1600) for head in HEADS),
        piece("evaluation", "heads.evaluate", 150, heads=HEADS, compiled=False),
        piece("evaluation, compiled", "heads.evaluate", 200, heads=HEADS, compiled=True),
    )),
    Item("The rest: long contexts, a target of 94 M", 25, (
        *steps("captured", 60, [("plain", 1), ("tree", 1), ("chain", 32)], 8192),
        *steps("captured", 60, [("plain", 1), ("tree", 1)], 32768),
        piece("94 M: text", "heads.target", 240, part="text"),
        piece("94 M: training", "heads.target", 540, part="train"),
        piece("94 M: prompts and losses", "heads.target", 120, part="measure"),
        piece("94 M: answers", "heads.answers", 240),
        *(piece(f"94 M: training {head}", "heads.train", 180, head=head, steps=1600, large=True) for head in HEADS),
        piece("94 M: evaluation", "heads.evaluate", 200, heads=HEADS, compiled=False, large=True),
    )),
)  # fmt: skip


def named() -> dict[str, tuple[int, Piece]]:
    """Return all pieces by their names, each with its item's number."""
    return {f"{i} {each.name}": (i, each) for i, item in enumerate(ITEMS, 1) for each in item.pieces}
