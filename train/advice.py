"""What to change first when a run does not fit: each change planned by itself, the largest saving first."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

from train.config import RunConfig
from train.plan import plan

PRUNED = 32000  # EAGLE-3's draft vocabulary

Change = Callable[[RunConfig], RunConfig]


class Advice(NamedTuple):
    """Overrides that make a run smaller, the bytes that they save on the fullest device, and whether it then fits."""

    overrides: str
    saves: int
    fits: bool


def advice(run: RunConfig, planned: dict[str, Any]) -> list[Advice]:
    """Return what makes the fullest device hold less, the most effective first.

    Where no single change is enough, the last entry is the changes that are, together, in that order; none where all
    of them are not.
    """
    most = planned["peak_bytes"]
    found = [(words, change, attempt(change(run))) for words, change in changes(run)]
    single = [
        (Advice(words, most - there["peak_bytes"], there["fits"]), change) for words, change, there in found if there
    ]
    single = sorted((each for each in single if each[0].saves > 0), key=lambda each: -each[0].saves)
    given = [each for each, _ in single]
    if any(each.fits for each in given):
        return given
    together, chosen, left = run, [], most
    for each, change in single:
        there = attempt(change(together))
        if there and there["peak_bytes"] < left:
            together, left = change(together), there["peak_bytes"]
            chosen.append(each.overrides)
            if there["fits"]:
                return [*given, Advice(" ".join(chosen), most - left, True)]
    return given


def attempt(run: RunConfig) -> dict[str, Any] | None:
    """Return the plan of a changed run, None where it cannot be."""
    try:
        return plan(run)
    except ValueError:
        return None


def changes(run: RunConfig) -> Iterator[tuple[str, Change]]:
    """Yield what may be changed of a run, as it is written on the command line."""
    yield from _trained(run)
    yield from _placed(run)
    known = {field.name for field in fields(run.head)}
    if "draft_vocab" in known and run.head.draft_vocab is None:
        yield f"head.draft_vocab={PRUNED}", lambda r: replace(r, head=replace(r.head, draft_vocab=PRUNED))
    if "lm_head" in known and run.head.lm_head == "own":
        yield "head.lm_head=shared", lambda r: replace(r, head=replace(r.head, lm_head="shared"))
    if run.data.length > 512:
        half = run.data.length // 2
        yield (
            f"data.length={half} trainer.micro_tokens={half}",
            lambda r: replace(r, data=replace(r.data, length=half), trainer=replace(r.trainer, micro_tokens=half)),
        )


def _trained(run: RunConfig) -> Iterator[tuple[str, Change]]:
    """Yield changes of the trainer and of the measurements."""
    length, trainer = run.data.length, run.trainer
    if trainer.micro_tokens >= 2 * length:
        words = f"trainer.micro_tokens={length}"
        yield words, lambda r: replace(r, trainer=replace(r.trainer, micro_tokens=r.data.length))
    if not trainer.recompute:
        yield "trainer.recompute=true", lambda r: replace(r, trainer=replace(r.trainer, recompute=True))
    if trainer.eval_prompts:
        yield "trainer.eval_prompts=0", lambda r: replace(r, trainer=replace(r.trainer, eval_prompts=0))
    if run.eval.prompts:
        yield "eval.prompts=0", lambda r: replace(r, eval=replace(r.eval, prompts=0))


def _placed(run: RunConfig) -> Iterator[tuple[str, Change]]:
    """Yield other strategies, placements and weights."""
    world = run.launcher.num_processes * run.launcher.num_nodes
    if world > 1 and run.launcher.strategy == "ddp":
        for name in ("zero2", "fsdp2"):
            yield f"launcher.strategy={name}", partial(_shared, name)
    if run.features.mode == "live":
        yield "features=stored trainer.eval_prompts=0", _stored
    if run.model.placement == "replicate":
        for name in ("tensor_parallel", "fsdp", "offload") if world > 1 else ("offload",):
            yield f"model.placement={name}", partial(_put, name)
    if run.model.quantize is None:
        yield "model.quantize=int8", lambda r: replace(r, model=replace(r.model, quantize="int8"))


def _shared(strategy: str, run: RunConfig) -> RunConfig:
    return replace(run, launcher=replace(run.launcher, strategy=strategy))


def _put(placement: str, run: RunConfig) -> RunConfig:
    return replace(run, model=replace(run.model, placement=placement))


def _stored(run: RunConfig) -> RunConfig:
    """Return a run that reads its features from a store and needs no layer of the target."""
    trainer = replace(run.trainer, eval_prompts=0)
    return replace(run, features=replace(run.features, mode="stored", path=run.out), trainer=trainer)
