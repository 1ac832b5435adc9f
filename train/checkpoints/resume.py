"""Settings that must not change on resume, because the losses or the order of the data depend on them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from omegaconf import OmegaConf

from data.batches import Batches
from data.features.store import packed_fingerprint
from heads.base import HeadConfig
from heads.formats.store import RETIRED
from train.checkpoints import format
from train.checkpoints.saver import TrainState
from train.config import TrainerConfig
from train.start import AdaptConfig

STEERING = (
    "steps", "lr", "lr_width", "min_lr", "warmup", "cooldown", "betas", "momentum", "weight_decay", "clip",
    "precision", "micro_tokens", "spike",
)  # fmt: skip
VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}
SHOWN = 60  # characters of a value in a message


class Identity(NamedTuple):
    """The settings that identify a run: on resume a change in `settings` is refused, one in `numerics` reported."""

    settings: dict[str, Any]
    numerics: dict[str, Any]


def settings(
    trainer: TrainerConfig, head: HeadConfig, peft: AdaptConfig, target: str, batches: Batches
) -> dict[str, Any]:
    """Return the settings that may not change on resume, with the head's as built and the target's fingerprint."""
    sections = {"head": asdict(head), "peft": asdict(peft)}
    nested = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    return plain({**data_settings(trainer, batches), "target's fingerprint": target, **nested})


def data_settings(trainer: TrainerConfig, batches: Batches) -> dict[str, Any]:
    """Return the settings that determine the data, its order and the optimiser's state."""
    return {
        "trainer.batch_tokens": trainer.batch_tokens,
        "trainer.seed": trainer.seed,
        "trainer.optimizer": trainer.optimizer,
        "trainer.ema": trainer.ema,
        "data.length": batches.packed.token.shape[1],
        "data's fingerprint": f"{packed_fingerprint(batches.packed)[:16]}-{int(batches.packed.loss_mask.sum())}",
    }


def numerics(trainer: TrainerConfig, loss: dict[str, Any], strategy: str, world: int) -> dict[str, Any]:
    """Return settings that affect the losses but may change on resume: schedule, objective, processes, libraries."""
    steering = {f"trainer.{key}": getattr(trainer, key) for key in STEERING}
    return plain({**steering, **loss, "processes": world, "strategy": strategy, **VERSIONS})


def check(out: Path, now: dict[str, Any]) -> None:
    """Refuse other settings than those of the newest readable checkpoint, listing each with both values."""
    for path in reversed(format.checkpoints(out / "checkpoints")):
        try:
            then = format.state_of(path)["settings"]
        except (ValueError, KeyError):
            continue  # loading reports the damage
        if changed := differences(then, now):
            raise _changed(out, changed)
        return


def _changed(out: Path, changed: str) -> ValueError:
    return ValueError(
        f"{out}: resume=true goes on with the settings that the run began with, and here differ {changed}; "
        "give the old ones, or name=… for a new run"
    )


def first_init(out: Path, head: str) -> str | None:
    """Return the `init` of a run's head, from its config.yaml; refuse a head of another name.

    A head of another name may not support that `init`, and the error would name a value that nobody gave.
    """
    config = OmegaConf.load(out / "config.yaml")
    then = {"head.name": OmegaConf.select(config, "head.name", default=head)}
    if changed := differences(then, {"head.name": head}):
        raise _changed(out, changed)
    init: str | None = OmegaConf.select(config, "init")
    return init


def differences(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the changed settings, with both values, among those known to both the run and its head."""
    lost = {f"head.{key}" for key in RETIRED.get(str(now.get("head.name")), ())}
    keys = [key for key in then if then[key] != now.get(key) and key not in lost]
    return ", ".join(f"{key} ({short(then[key])}, now {short(now.get(key))})" for key in keys)


def short(value: Any) -> str:
    """Return a value as text for a message, truncated to SHOWN characters."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return values after a round trip through JSON, so that they compare with those of a checkpoint."""
    decoded: dict[str, Any] = json.loads(json.dumps(values))
    return decoded


def restore(state: TrainState, path: Path) -> None:
    """Load a checkpoint's tensors into a run's state.

    Raises:
        KeyError: the run has other tensors.
        RuntimeError: one has another shape.
        ValueError: one cannot be read.
    """
    names = {name for name in state.names() if not name.startswith("state/")}  # none before the first step
    for name, value in format.tensors(path):
        names.discard(name)
        state.write(name, value)
    if names:
        raise KeyError(f"{path} lacks {', '.join(sorted(names))}")
