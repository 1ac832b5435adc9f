"""Checkpoints: their content and format on disk, asynchronous saving, resuming.

    checkpoints/step-N/rank-R-of-W.safetensors   the tensors that process R wrote, a subset of the run's named tensors
    checkpoints/step-N/index.json                which shard holds which tensor, and the SHA-256 of every shard
    checkpoints/step-N/state.json                the step, the measurements so far, the settings that identify the run

The state is weights, optimiser state and EMA as named whole tensors: `weight/…`, `state/…/KEY`, `average/…`, with the
head's own parameter names, so the number of processes and the sharding strategy may change on resume. The state is
copied at once; a thread writes the copy to a folder `.partial-…` while training continues. There each process writes a
note once its shard is on the disk, and then the main process renames the folder. The data position is the step number,
and all other randomness derives from seeds and step, so nothing else is needed to resume.

The threads of the processes communicate only through files. Collectives belong to the main thread: called from two
threads, they would run in a different order on every process.
"""

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from data.batches import Batches
from data.features.store import packed_fingerprint
from data.text.files import content_hash
from heads.base import NamedTensors
from heads.common.errors import one_line
from heads.common.files import flush, read_checked, write_checked
from heads.common.typed import Json
from heads.common.untrusted import inside, shown
from heads.formats.store import RETIRED
from heads.formats.weights import header
from train.config import TrainerConfig
from train.distributed.processes import ProcessControl
from train.distributed.strategy import counts_on, gather, local_shard, write_local_shard, write_master_shard, zero_stage
from train.optim import Ema, trained_state

FORMAT = 2
NAME = re.compile(r"step-[0-9]{8,}")
INDEX, STATE = "index.json", "state.json"
PARTIAL, DAMAGED = ".partial-", "damaged-"


def folder_of(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints, oldest first; folders of other names, such as a user's backup, are ignored."""
    return sorted((path for path in folder.glob("step-*") if NAME.fullmatch(path.name)), key=step_of)


def note_of(partial: Path, rank: int) -> Path:
    """Return the path of the note that a process writes once its shard is on the disk."""
    return partial / f"rank-{rank:05d}.json"


def write_shard(partial: Path, rank: int, world: int, tensors: NamedTensors) -> None:
    """Write a process's tensors and then its note: the shard's tensors and checksum."""
    partial.mkdir(parents=True, exist_ok=True)
    shard = partial / f"rank-{rank:05d}-of-{world:05d}.safetensors"
    save_file(tensors, shard)
    flush(shard)
    note = {"shard": shard.name, "checksum": content_hash(shard), "tensors": list(tensors)}
    write_checked(note_of(partial, rank), note)


def commit(partial: Path, final: Path, world: int, names: list[str], content: Json) -> None:
    """Commit the shards of all processes, whose notes are in `partial`, as the checkpoint `final` by one rename.

    It replaces an earlier one of the same step. Tensors are read in the order of `names`; `content` is state.json.
    """
    notes = [read_checked(note_of(partial, rank)) for rank in range(world)]
    tensors = {name: {"shard": note["shard"]} for note in notes for name in note["tensors"]}
    shards = {note["shard"]: {"sha256": note["checksum"]} for note in notes}
    index = {"format": FORMAT, "shards": shards, "tensors": {name: tensors[name] for name in names}}
    write_checked(partial / INDEX, index)
    write_checked(partial / STATE, content)
    for rank in range(world):
        note_of(partial, rank).unlink()
    flush(partial)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    flush(final.parent)


def delete_old_checkpoints(folder: Path, keep: int, best: int) -> None:
    """Remove all checkpoints but the newest `keep` and that of step `best`."""
    for old in checkpoints(folder)[:-keep]:
        if step_of(old) != best:
            shutil.rmtree(old, ignore_errors=True)


def defect(path: Path, rank: int, world: int) -> str:
    """Return the defect of a checkpoint, empty if intact; each process checks every `world`-th shard."""
    file = path / INDEX
    try:
        index = read_checked(file)
        if index["format"] != FORMAT:
            return f"{file}: format {index['format']!r} where this version reads {FORMAT}"
        read_checked(path / STATE)
        for name, about in sorted(index["shards"].items())[rank::world]:
            if content_hash(inside(path, name)) != about["sha256"]:
                return f"{path / name}: damaged, its checksum is not that of its content"
            named = {tensor for tensor, held in index["tensors"].items() if held["shard"] == name}
            if lost := sorted(named - header(path / name).keys()):
                raise ValueError(f"{file}: damaged, it names {shown(lost[0])}, which {name} does not hold")
        if not {about["shard"] for about in index["tensors"].values()} <= index["shards"].keys():
            return f"{file}: damaged, it names a shard without a checksum"
    except (KeyError, TypeError, AttributeError) as error:
        return f"{file}: damaged ({one_line(error)})"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an intact checkpoint, on every process in the same order."""
    index = read_checked(path / INDEX)
    shards: Json = {shard: safe_open(inside(path, shard), framework="pt") for shard in index["shards"]}
    for name, about in index["tensors"].items():
        yield name, shards[about["shard"]].get_tensor(name)


@dataclass
class TrainState:
    """The state of a head, its optimiser and the EMA of its weights, under any strategy."""

    head: nn.Module
    optimizer: Any
    average: Ema

    def names(self) -> list[str]:
        """Return the names of all tensors, in the same order on every process."""
        trained = trained_state(self.head).items()
        return [
            *(f"weight/{name}" for name in self.head.state_dict()),
            *(f"state/{name}/{key}" for name, p in trained for key in sorted(self._states(p)[0])),
            *(f"average/{name}" for name in self.average.weights),
        ]

    def read(self, name: str) -> Tensor:
        """Return a copy of one tensor on the CPU; a collective call with the same name."""
        kind, rest, key = split(name)
        p = self.head.state_dict(keep_vars=True)[rest]
        if kind == "weight":
            value = gather(p, local_shard(p))
        elif kind == "average":
            value = gather(p, self.average.weights[rest])
        elif zero_stage(p) and key != "step":
            from deepspeed.utils import safe_get_full_optimizer_state

            value = safe_get_full_optimizer_state(p, key)
        else:
            value = gather(p, self._states(p)[0][key])
        return value.detach().to("cpu", copy=True).contiguous()

    @torch.no_grad()
    def write(self, name: str, value: Tensor) -> None:
        """Load one tensor; a collective call with the same name and value. Its errors are those of `restore`."""
        kind, rest, key = split(name)
        p = self.head.state_dict(keep_vars=True)[rest]
        shape = vars(p).get("ds_shape", p.shape)
        if value.ndim and value.shape != shape:
            raise RuntimeError(f"{name} is {tuple(value.shape)}, and its parameter {tuple(shape)}")
        if kind == "weight":
            write_local_shard(p, local_shard(p), value)
            if zero_stage(p) and p.requires_grad:
                write_master_shard(p, value)
        elif kind == "average":
            write_local_shard(p, self.average.weights[rest], value)
        elif not value.ndim:
            for state in self._states(p):
                state[key] = value.to(counts_on(self._optimizer(p), p), copy=True)
        elif zero_stage(p):
            write_master_shard(p, value, key)
        else:
            (state,) = self._states(p)
            state[key] = torch.empty_like(p)
            write_local_shard(p, state[key], value)

    def weights(self) -> NamedTensors:
        """Return the whole weights to evaluate and save, on the CPU: the EMA's if there is one."""
        averaged = self.average.weights
        return {
            name: self.read(f"{'average' if name in averaged else 'weight'}/{name}") for name in self.head.state_dict()
        }

    def _states(self, parameter: Tensor) -> list[Json]:
        """Return the optimiser's state dicts that hold one parameter, empty before its first step.

        Under ZeRO these are the states of all flat partitions; each has the same count of steps.
        """
        optimizer = self._optimizer(parameter)
        return list(optimizer.state.values()) if zero_stage(parameter) else [optimizer.state[parameter]]

    def _optimizer(self, parameter: Tensor) -> Any:
        plain = getattr(self.optimizer, "optimizer", self.optimizer)  # DeepSpeed wraps it
        for optimizer in getattr(plain, "optimizers", [plain]):
            if zero_stage(parameter) or any(
                parameter is p for group in optimizer.param_groups for p in group["params"]
            ):
                return optimizer
        raise KeyError("no optimiser has this parameter")


def split(name: str) -> tuple[str, str, str]:
    """Parse a tensor's name into its kind, the parameter, and the key of the optimiser's state (otherwise empty)."""
    kind, rest = name.split("/", 1)
    parameter, _, key = rest.rpartition("/") if kind == "state" else (rest, "", "")
    return kind, parameter, key


POLL = 0.05  # seconds between checks for the other processes' notes
REFUSED = OSError, SafetensorError, RuntimeError, ValueError  # errors of a failed write


class Saver:
    """The writer and reader of a run's checkpoints; all processes make the same calls."""

    def __init__(self, out: Path, control: ProcessControl, keep: int) -> None:
        self.folder, self.metrics, self.control, self.keep = out / "checkpoints", out / "metrics.jsonl", control, keep
        self.seconds = 0.0  # seconds that training waited for saves
        self.saved = -1  # last step that was saved or loaded
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1)
        self._given_up = threading.Event()

    def save(self, state: TrainState, step: int, content: Json, best: int) -> None:
        """Wait for the previous save, copy the state and start to write it; wait for this one if the last failed.

        `content` goes to state.json next to the step; the checkpoint of step `best`, with the best τ, is never deleted.
        Refuse to continue where the disk has refused twice in a row.
        """
        begin = time.perf_counter()
        failed = self._wait()
        tensors, names = partition(state, self.control.rank, self.control.world)
        partial = self.folder / self.control.broadcast(f"{PARTIAL}{step:08d}-{time.time_ns():x}")  # unique per attempt
        self._pending = self._thread.submit(self._write, partial, tensors, names, {"step": step, **content}, best)
        self.saved = step
        if failed:
            self.control.warn(f"{failed}; trying again")
            self.finish()
        self.seconds += time.perf_counter() - begin

    def finish(self) -> None:
        """Wait until the pending checkpoint is written; raise if the write failed."""
        begin = time.perf_counter()
        failed = self._wait()
        self.seconds += time.perf_counter() - begin
        if failed:
            self.saved = -1
            self.control.abort(f"{failed}; free space and resume=true")

    def close(self) -> None:
        """End the thread; a pending checkpoint is committed only if all processes have written their shards."""
        self._given_up.set()
        self._thread.shutdown()

    def newest(self) -> Path | None:
        """Return the newest good checkpoint, or None; warn of newer damaged ones, and refuse if all are damaged."""
        control = self.control
        paths = control.broadcast(checkpoints(self.folder))
        wrong: list[str] = []
        for path in reversed(paths):
            defects = self.defects(path)
            if not defects:
                if wrong:
                    control.warn(f"{'; '.join(wrong)}; resuming from {path.name}")
                    for damaged in paths[paths.index(path) + 1 :] if control.rank == 0 else ():
                        aside = damaged.with_name(DAMAGED + damaged.name)  # so that it is not the newest again
                        shutil.rmtree(aside, ignore_errors=True)
                        os.replace(damaged, aside)
                self.saved = step_of(path)
                return path
            wrong += defects
        if paths:
            control.abort(f"no checkpoint loads ({wrong[0]}); start again with overwrite=true")
        return None

    def defects(self, path: Path) -> list[str]:
        """Return the defects of a checkpoint, empty if it is intact; a collective call."""
        control = self.control
        return [text for text in control.gather(defect(path, control.rank, control.world)) if text]

    def _wait(self) -> str:
        """Wait for the pending save of all processes; return its first error, empty if it succeeded."""
        if self._pending is None:
            return ""
        pending, self._pending, failed = self._pending, None, ""
        try:
            pending.result()
        except REFUSED as error:
            failed = one_line(error)
        # The main process only reports that shards are missing, so others' errors come first.
        return next(filter(None, reversed(self.control.gather(failed))), "")

    def _write(self, partial: Path, tensors: NamedTensors, names: list[str], content: Json, best: int) -> None:
        """Write this process's tensors; on the main process wait for all shards and commit the checkpoint."""
        control = self.control
        final = folder_of(self.folder, content["step"])
        try:
            write_shard(partial, control.rank, control.world, tensors)
            if control.rank == 0:
                # Half of the time-out, so that a missing note fails before the other processes time out.
                end = time.monotonic() + control.timeout / 2
                while missing := [rank for rank in range(control.world) if not note_of(partial, rank).exists()]:
                    if self._given_up.is_set() or time.monotonic() > end:
                        raise ValueError(f"rank {', '.join(map(str, missing))} did not write its part")
                    time.sleep(POLL)
                if self.metrics.exists():
                    flush(self.metrics)
                commit(partial, final, control.world, names, content)
                delete_old_checkpoints(self.folder, self.keep, best)
        except REFUSED as error:
            if control.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise ValueError(f"{final}: the checkpoint could not be written ({one_line(error)})") from error


def partition(state: TrainState, rank: int, world: int) -> tuple[NamedTensors, list[str]]:
    """Return the tensors that a process writes, copied, and the names of all.

    The processes take turns. Every process reads every tensor, since gathering a sharded tensor is a collective call.
    """
    tensors = {}
    names = state.names()
    for index, name in enumerate(names):
        value = state.read(name)
        if index % world == rank:
            tensors[name] = value
    return tensors, names


STEERING = (
    "steps", "lr", "lr_width", "min_lr", "warmup", "cooldown", "betas", "momentum", "weight_decay", "clip",
    "precision", "micro_tokens", "spike",
)  # fmt: skip
VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}
SHOWN = 60  # maximum characters of a value in a message


def settings(trainer: TrainerConfig, sections: Json, target: str, batches: Batches) -> Json:
    """Return the settings that must not change on resume.

    They determine the data, its order and the optimiser's state. `sections` holds the configurations of the trained
    modules, and `target` is the target's fingerprint.
    """
    return plain({
        **{f"trainer.{key}": getattr(trainer, key) for key in ("batch_tokens", "seed", "optimizer", "ema")},
        "data.length": batches.packed.token.shape[1],
        "data's fingerprint": f"{packed_fingerprint(batches.packed)[:16]}-{int(batches.packed.loss_mask.sum())}",
        "target's fingerprint": target,
        **{f"{name}.{key}": value for name, section in sections.items() for key, value in asdict(section).items()},
    })  # fmt: skip


def numerics(trainer: TrainerConfig, loss: Json, strategy: str, world: int) -> Json:
    """Return settings that affect the losses but may change on resume: schedule, objective, processes, libraries."""
    steering = {f"trainer.{key}": getattr(trainer, key) for key in STEERING}
    return plain({**steering, **loss, "processes": world, "strategy": strategy, **VERSIONS})


def check(out: Path, now: Json) -> None:
    """Refuse settings that differ from those of the newest readable checkpoint."""
    for path in reversed(checkpoints(out / "checkpoints")):
        try:
            then = read_checked(path / STATE)["settings"]
        except (ValueError, KeyError, OSError):
            continue  # loading the checkpoint reports the damage
        refuse_changed(out, then, now)
        return


def refuse_changed(out: Path, then: Json, now: Json) -> None:
    """Refuse settings that differ from those at the run's start; list both values of each."""
    if changed := differences(then, now):
        raise ValueError(
            f"{out}: resume=true needs the settings that the run began with; changed are {changed}; "
            "give the old ones, or name=… for a new run"
        )


def first_init(out: Path, head: str) -> str | None:
    """Return the `init` of a run's head, from its config.yaml; refuse a head of another name.

    A head of another name may not support that `init`, and the error would name a value that no user gave.
    """
    config = OmegaConf.load(out / "config.yaml")
    refuse_changed(out, {"head.name": OmegaConf.select(config, "head.name", default=head)}, {"head.name": head})
    return OmegaConf.select(config, "init")


def differences(then: Json, now: Json) -> str:
    """Return the changed settings with both values; settings that only `now` has are ignored."""
    lost = {f"head.{key}" for key in RETIRED.get(str(now.get("head.name")), ())}

    def short(value: Any) -> str:
        text = json.dumps(value)
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"

    return ", ".join(
        f"{key} ({short(before)}, now {short(now.get(key))})"
        for key, before in then.items()
        if before != now.get(key) and key not in lost
    )


def plain(values: Json) -> Json:
    """Return values after a round trip through JSON, for comparison with a checkpoint's values."""
    return json.loads(json.dumps(values))


def restore(state: TrainState, path: Path) -> None:
    """Load a checkpoint's tensors into a run's state; a KeyError or RuntimeError is of other tensors or shapes."""
    names = {name for name in state.names() if not name.startswith("state/")}  # a new optimiser has no state yet
    for name, value in tensors(path):
        names.discard(name)
        state.write(name, value)
    if names:
        raise KeyError(f"{path} lacks {', '.join(sorted(names))}")
