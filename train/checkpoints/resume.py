"""Settings that must not change on resume, because the losses or the order of the data depend on them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from data.batches import Batches
from data.features.store import packed_fingerprint
from heads.base import HeadConfig
from train.adapt import AdaptConfig
from train.checkpoints import format
from train.checkpoints.state import TrainState, split
from train.config import TrainerConfig
from train.losses import ObjectiveConfig

STEERING = (
    "steps", "lr", "lr_width", "min_lr", "warmup", "betas", "momentum", "weight_decay", "clip", "precision",
    "micro_tokens", "spike",
)  # fmt: skip
SHOWN = 60  # characters of a value in a message


class Identity(NamedTuple):
    """What a run is known by when it goes on: `settings` may not change, `numerics` may, and are then told."""

    settings: dict[str, Any]
    numerics: dict[str, Any]

    def kept(self) -> dict[str, Any]:
        """Return them as checkpoints keep them."""
        return {"settings": self.settings, "arithmetic": self.numerics}


def settings(
    trainer: TrainerConfig, head: HeadConfig, peft: AdaptConfig, target: str, batches: Batches
) -> dict[str, Any]:
    """Return what may not change when a run goes on, by the keys that a user knows.

    Args:
        trainer: the optimisation.
        head: the head's configuration as it was built.
        peft: what of it is trained.
        target: the fingerprint of the target's weights.
        batches: the packed data.
    """
    parts = {"head": asdict(head), "peft": asdict(peft)}
    nested = {f"{part}.{key}": value for part, values in parts.items() for key, value in values.items()}
    return plain({**data_settings(trainer, batches), "target's fingerprint": target, **nested})


def data_settings(trainer: TrainerConfig, batches: Batches) -> dict[str, Any]:
    """Return what of it the data's order and the optimiser follow from."""
    return {
        "trainer.batch_tokens": trainer.batch_tokens,
        "trainer.seed": trainer.seed,
        "trainer.optimizer": trainer.optimizer,
        "trainer.ema": trainer.ema,
        "data.length": batches.packed.token.shape[1],
        "data's fingerprint": f"{packed_fingerprint(batches.packed)[:16]}-{int(batches.packed.mask.sum())}",
    }


def numerics(trainer: TrainerConfig, objective: ObjectiveConfig, strategy: str, world: int) -> dict[str, Any]:
    """Return what the losses follow from and may change: the schedule, the objective, or their last bits alone."""
    steering = {f"trainer.{key}": getattr(trainer, key) for key in STEERING}
    weighed = {f"objective.{key}": value for key, value in asdict(objective).items()}
    return plain({**steering, **weighed, "processes": world, "strategy": strategy})


def check(out: Path, now: dict[str, Any]) -> None:
    """Refuse to go on with other settings than those that the newest readable checkpoint was written with.

    Raises:
        ValueError: they differ; each is named with both values.
    """
    for path in reversed(format.found(out / "checkpoints")):
        try:
            then = format.state_of(path)["settings"]
        except (ValueError, KeyError):
            continue  # what is damaged is said where it is to be loaded
        if changed := differences(then, now):
            raise ValueError(
                f"{out}: resume=true goes on with the settings that the run began with, and here differ {changed}; "
                "give the old ones, or name=… for a new run"
            )
        return


def differences(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Return which values differ, with both of each."""
    keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    return ", ".join(f"{key} ({short(then.get(key))}, now {short(now.get(key))})" for key in keys)


def short(value: Any) -> str:
    """Return a value as a message shows it."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as they come back from JSON."""
    found: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return found


def restore(state: TrainState, path: Path) -> None:
    """Write a checkpoint's tensors into a run.

    Raises:
        KeyError: they are not those that the run has.
        RuntimeError: one has another shape.
        ValueError: one cannot be read.
    """
    names = {name for name in state.names() if not name.startswith("state/")}  # an optimiser begins without
    for name, value in format.tensors(path):
        names.discard(name)
        state.write(name, value)
    if names:
        raise KeyError(f"{path} lacks {', '.join(sorted(names))}")


def kept_weights(path: Path) -> dict[str, Tensor]:
    """Return a checkpoint's weights to evaluate and to keep: the average's if there is one.

    Raises:
        ValueError: one cannot be read.
    """
    found: dict[str, dict[str, Tensor]] = {"weight": {}, "average": {}}
    for name, value in format.tensors(path):
        kind, parameter, _ = split(name)
        if kind in found:
            found[kind][parameter] = value
    return found["weight"] | found["average"]
