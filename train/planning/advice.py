"""Overrides that make a run fit: each change is planned alone, then the mildest ones together."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from inference.target.placement import TOGETHER
from train.config import RunConfig, checked
from train.planning.plan import plan

PRUNED = 32000  # EAGLE-3's draft vocabulary

Change = Callable[[RunConfig], RunConfig]


class Advice(NamedTuple):
    """Overrides that make a run smaller, the bytes they save on the fullest device, and whether it then fits."""

    overrides: str
    saves: int
    fits: bool


def advice(run: RunConfig, planned: dict[str, Any]) -> list[Advice]:
    """Return changes that reduce the memory of the fullest device, the most effective first.

    If no single change is enough, the last entry combines several: those that leave the training's result unchanged
    come before the others. There is no such entry if all of them together are not enough.
    """
    most, single = planned["peak_bytes"], []
    for words, change in changes(run):
        changed = attempt(change(run))
        if changed is not None and changed["peak_bytes"] < most:
            single.append(Advice(words, most - changed["peak_bytes"], changed["fits"]))
    single.sort(key=lambda option: -option.saves)
    if any(option.fits for option in single):
        return single
    combined = together(run, most)
    return single if combined is None else [*single, combined]


def together(run: RunConfig, most: int) -> Advice | None:
    """Combine changes in their order, those that save memory after the ones before, until the run fits."""
    chosen: list[str] = []
    left = most
    for words, change in changes(run):
        if any(words.split("=")[0] == override.split("=")[0] for override in chosen):
            continue
        changed = attempt(change(run))
        if changed is not None and changed["peak_bytes"] < left:
            run, left = change(run), changed["peak_bytes"]
            chosen += [word for word in words.split() if word not in chosen]
            if changed["fits"]:
                return Advice(" ".join(chosen), most - left, True)
    return None


def attempt(run: RunConfig) -> dict[str, Any] | None:
    """Return the plan of a changed run, None if its settings are refused."""
    try:
        return plan(checked(run))
    except ValueError:
        return None


def changes(run: RunConfig) -> Iterator[tuple[str, Change]]:
    """Yield possible changes of a run with their overrides on the command line; the least costly come first."""
    world, length = run.launcher.num_processes * run.launcher.num_nodes, run.data.length
    if run.eval.prompts:
        yield "eval.prompts=0", lambda r: replace(r, eval=replace(r.eval, prompts=0))
    if run.trainer.micro_tokens >= 2 * length:
        yield f"trainer.micro_tokens={length}", trainer(micro_tokens=length)
    if world > 1 and run.launcher.strategy == "ddp":
        yield "launcher.strategy=zero2", strategy("zero2")
        yield "launcher.strategy=fsdp2", strategy("fsdp2")
    alone = run.model.placement == "replicate"
    if alone and world > 1:
        for kind in TOGETHER:
            apart = " eval.prompts=0" if run.eval.prompts else ""
            yield f"model.placement={kind}{apart}", together_placed(kind)
    if not run.trainer.recompute:
        yield "trainer.recompute=true", trainer(recompute=True)
    if run.features.mode == "live":
        yield "features=stored trainer.eval_prompts=0", stored
    if run.trainer.optimizer == "adamw" and run.launcher.strategy == "ddp":
        yield "trainer.optimizer=muon", trainer(optimizer="muon")
    if alone:
        yield "model.placement=offload", model(placement="offload")
    if run.model.quantize is None:
        yield "model.quantize=int8", model(quantize="int8")
    yield from _smaller(run)


def _smaller(run: RunConfig) -> Iterator[tuple[str, Change]]:
    """Yield smaller heads and shorter rows."""
    head, length = asdict(run.head), run.data.length
    if head.get("draft_vocab", PRUNED) is None:
        yield f"head.draft_vocab={PRUNED}", lambda r: replace(r, head=replace(r.head, draft_vocab=PRUNED))
    if head.get("lm_head") == "own":
        yield "head.lm_head=shared", lambda r: replace(r, head=replace(r.head, lm_head="shared"))
    if length > 512:
        half = length // 2
        yield (
            f"data.length={half} trainer.micro_tokens={half}",
            lambda r: replace(trainer(micro_tokens=half)(r), data=replace(r.data, length=half)),
        )


def trainer(**values: Any) -> Change:
    """Return a change of the trainer."""
    return lambda run: replace(run, trainer=replace(run.trainer, **values))


def model(**values: Any) -> Change:
    """Return a change of the target's placement or weights."""
    return lambda run: replace(run, model=replace(run.model, **values))


def together_placed(kind: str) -> Change:
    """Return a change to a placement that takes all processes for a forward pass, without the final evaluation."""
    return lambda run: replace(model(placement=kind)(run), eval=replace(run.eval, prompts=0))


def strategy(name: str) -> Change:
    """Return a change of the head's sharding strategy."""
    return lambda run: replace(run, launcher=replace(run.launcher, strategy=name))


def stored(run: RunConfig) -> RunConfig:
    """Return a run that reads its features from a store and needs no layer of the target."""
    return replace(
        trainer(eval_prompts=0)(run), features=replace(run.features, mode="stored", on_missing="fail", path=run.out)
    )
