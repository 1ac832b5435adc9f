"""A checkpoint is whole or absent, its tensors come back bit for bit, and what is to be kept is kept."""

import errno
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from heads.common.files import read_checked
from heads.common.resolvers import register_resolvers
from train import checkpoint
from train.checkpoint import Saver, TrainState, partition
from train.distributed.processes import ProcessControl
from train.optim import Ema

SHARD = "rank-00000-of-00001.safetensors"


class Few(nn.Module):
    """A module with a frozen part, trained for a step."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)
        self.b.requires_grad_(False)


def state(seed: int = 0, steps: int = 1) -> TrainState:
    module = Few(seed)
    optimizer: Any = Mock(spec_set=["optimizers", "step"])  # as MuonAndAdamW
    optimizer.optimizers = [torch.optim.AdamW([module.a.weight]), torch.optim.AdamW([module.a.bias])]
    optimizer.step = lambda: [each.step() for each in optimizer.optimizers]
    average = Ema(module, 0.9)
    for _ in range(steps):
        module.b(module.a(torch.ones(3))).sum().backward()
        optimizer.step()
        average.update(module)
    return TrainState(module, optimizer, average)


def values(of: TrainState) -> dict[str, Tensor]:
    return {name: of.read(name) for name in of.names()}


def saver(out: Path, keep: int = 2) -> Saver:
    return Saver(out, ProcessControl(Accelerator(cpu=True), 60), keep)


def written(out: Path, content: dict[str, Any] | None = None) -> Path:
    """Save step 4 and return its folder."""
    here = saver(out)
    here.save(state(), 4, content or {}, best=0)
    here.finish()
    return checkpoint.folder_of(out / "checkpoints", 4)


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_round_trip(tmp_path: Path) -> None:
    one, two, here = state(0), state(1, steps=0), saver(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    assert here.saved not in range(5)
    here.save(one, 4, {"progress": {"best_tau": 1.5}}, best=0)
    here.finish()
    path = here.newest()
    assert path is not None
    assert here.saved == 4
    assert read_checked(path / checkpoint.STATE) == {"step": 4, "progress": {"best_tau": 1.5}}
    checkpoint.restore(two, path)
    ours, theirs = values(two), values(one)
    assert list(ours) == list(theirs)
    assert len(theirs) == 4 + 2 * 3 + 2
    assert all(ours[name].equal(theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)
    weights = two.weights()
    assert weights.keys() == two.head.state_dict().keys()
    assert all(weights[f"a.{name}"].equal(theirs[f"average/a.{name}"]) for name in ("weight", "bias"))
    assert all(weights[f"b.{name}"].equal(p) for name, p in two.head.b.named_parameters())


def test_a_step_that_is_saved_again_replaces_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partials, write = [], checkpoint.write_shard
    monkeypatch.setattr(
        checkpoint, "write_shard", lambda partial, *rest: (partials.append(partial), write(partial, *rest))
    )
    monkeypatch.setattr("time.perf_counter", iter(range(100)).__next__)
    for content in ({}, {"progress": {"best_tau": 2}}):
        here = saver(tmp_path)
        here.save(state(), 4, {}, best=0)
        here.save(state(), 4, content, best=0)
        here.finish()
        assert here.seconds == 3  # each call waited from one reading of the clock to the next
        here.close()
    assert read_checked(checkpoint.folder_of(here.folder, 4) / checkpoint.STATE) == {
        "step": 4,
        "progress": {"best_tau": 2},
    }
    assert len(set(partials)) == 4, "a process of an earlier attempt may still write into its folder"


def test_a_checkpoint_has_what_it_had_when_it_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on while the disk is slow."""
    go, before, here, one = threading.Event(), checkpoint.save_file, saver(tmp_path), state()

    def late(*words: Any) -> None:
        go.wait(60)
        before(*words)

    monkeypatch.setattr(checkpoint, "save_file", late)
    then = {name: value.clone() for name, value in values(one).items()}
    here.save(one, 4, {}, best=0)
    with torch.no_grad():
        one.head.a.weight.add_(1)
    assert checkpoint.checkpoints(tmp_path / "checkpoints") == []
    go.set()
    here.finish()
    found = dict(checkpoint.tensors(tmp_path / "checkpoints" / "step-00000004"))
    assert all(found[name].equal(then[name]) for name in then)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    here = saver(tmp_path)
    for step, best in ((4, 0), (8, 8), (12, 8), (16, 8), (20, 20), (24, 20)):
        here.save(state(), step, {}, best)
    here.finish()
    assert names(tmp_path) == ["step-00000020", "step-00000024"]
    here.save(state(), 28, {}, best=20)
    here.save(state(), 32, {}, best=20)
    here.finish()
    assert names(tmp_path) == ["step-00000020", "step-00000028", "step-00000032"]


@pytest.mark.parametrize(
    ("file", "damage"),
    [("index.json", "flip"), ("index.json", "lost"), ("state.json", "cut"), (SHARD, "flip"), (SHARD, "gone")],
)
def test_a_damaged_one_is_named_and_the_one_before_taken(
    tmp_path: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    here = saver(tmp_path, keep=3)
    for step in (4, 8, 12):
        here.save(state(), step, {}, best=0)
    here.finish()
    (tmp_path / "checkpoints" / "step-00000012" / "state.json").write_text("{")
    broken = tmp_path / "checkpoints" / "step-00000008" / file
    content = bytearray(broken.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 4
    broken.write_bytes(content[: -7 if damage == "cut" else None])
    if damage == "lost":  # it names a tensor that its shard does not hold, and its checksum is right
        checkpoint.write_checked(broken, checkpoint.read_checked(broken) | {"tensors": {"lost": {"shard": SHARD}}})
    if damage == "gone":
        broken.unlink()
    again = saver(tmp_path)
    path = again.newest()
    assert path is not None
    assert path.name == "step-00000004"
    assert again.saved == 4
    (record,) = caplog.records
    assert str(broken) in record.getMessage()
    assert "step-00000012" in record.getMessage()
    assert record.getMessage().endswith("resuming from step-00000004")
    assert names(tmp_path) == ["damaged-step-00000008", "damaged-step-00000012", "step-00000004"], (
        "it would pass for the newest one"
    )


def test_none_and_none_good(tmp_path: Path) -> None:
    assert saver(tmp_path).newest() is None
    (written(tmp_path) / "state.json").write_text("{")
    with pytest.raises(ValueError, match="overwrite=true"):
        saver(tmp_path).newest()


def test_a_full_disk_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here, before = saver(tmp_path, keep=1), checkpoint.save_file
    here.save(state(), 4, {}, best=0)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    here.finish()
    monkeypatch.setattr(checkpoint, "save_file", full)
    here.save(state(), 8, {}, best=0)
    with pytest.raises(ValueError, match=r"step-00000012: .*No space left.*free space and resume=true"):
        here.save(state(), 12, {}, best=0)
    assert here.saved not in range(13), "the step is still to be saved"
    assert "step-00000008" in caplog.text
    assert names(tmp_path) == ["step-00000004"]
    monkeypatch.setattr(checkpoint, "save_file", before)
    here.save(state(), 12, {}, best=0)
    here.finish()
    assert names(tmp_path) == ["step-00000012"]


def test_each_tensor_is_one_process_s() -> None:
    one = state()
    shares = [partition(one, rank, 3)[0] for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(one.names())
    assert partition(one, 0, 3)[1] == one.names()


def test_shards_of_several_processes_become_one_checkpoint(tmp_path: Path) -> None:
    one, partial, final = state(), tmp_path / ".partial-1", tmp_path / "step-00000001"
    for rank in range(3):
        checkpoint.write_shard(partial, rank, 3, partition(one, rank, 3)[0])
    checkpoint.commit(partial, final, 3, one.names(), {"step": 1})
    assert not partial.exists()
    assert len(list(final.iterdir())) == 3 + 2
    assert [checkpoint.defect(final, rank, 2) for rank in range(2)] == ["", ""]
    (final / "rank-00001-of-00003.safetensors").write_bytes(b"x")
    assert ["damaged" in checkpoint.defect(final, rank, 3) for rank in range(3)] == [False, True, False]


def test_another_heads_tensors_are_refused(tmp_path: Path) -> None:
    path, other = written(tmp_path), state()
    other.head.c = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(KeyError, match=r"lacks weight/c\.bias"):
        checkpoint.restore(other, path)
    index = json.loads((path / "index.json").read_text())
    assert set(index["tensors"]) == set(state().names())


def test_a_setting_that_the_run_did_not_know_is_no_change() -> None:
    now = {"head.name": "mtp", "head.length": 512, "data.length": 512}
    then = {"head.name": "mtp", "data.length": 512}
    assert checkpoint.differences(then, now) == ""
    assert checkpoint.differences(then | {"head.length": 64}, now) == "head.length (64, now 512)"
    assert checkpoint.differences(now, then) == "head.length (512, now null)"
    now = {"head.name": "peagle", "head.depths": 6}
    assert checkpoint.differences(now | {"head.kv_injection": False, "head.norm_output": True}, now) == "", "retired"


def test_settings_are_compared_with_the_newest_checkpoint_that_can_be_read(tmp_path: Path) -> None:
    checkpoint.check(tmp_path, {"trainer.seed": 1})
    here = saver(tmp_path, keep=3)
    for step, seed in ((4, 1), (8, 2), (12, 3)):
        here.save(state(), step, {"settings": {"trainer.seed": seed}}, best=0)
    here.finish()
    (checkpoint.folder_of(here.folder, 12) / checkpoint.STATE).write_text("{")
    checkpoint.check(tmp_path, {"trainer.seed": 2})
    with pytest.raises(ValueError, match=r"changed are trainer\.seed \(2, now 1\); give the old ones"):
        checkpoint.check(tmp_path, {"trainer.seed": 1})


class Pair:
    """Two processes as two threads: what one gathers is the other's too."""

    def __init__(self) -> None:
        self.items: list[Any] = [None, None]
        self.barrier = threading.Barrier(2, timeout=60)

    def saver(self, out: Path, rank: int) -> Saver:
        def gather(item: Any) -> list[Any]:
            self.items[rank] = item
            self.barrier.wait()
            items = list(self.items)
            self.barrier.wait()
            return items

        def refuse(text: str) -> None:
            raise ValueError(text)

        control: Any = SimpleNamespace(rank=rank, world=2, timeout=6, gather=gather, abort=refuse)
        control.broadcast = lambda item: gather(item)[0]
        return Saver(out, control, 2)

    def run(self, out: Path, do: Callable[[Saver], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as threads:
            done = [threads.submit(lambda rank=rank: do(self.saver(out, rank))) for rank in range(2)]
        return [each.exception() or each.result() for each in done]


def saved(here: Saver) -> None:
    here.save(state(), 4, {}, best=0)
    here.finish()


def test_two_processes_write_one_checkpoint_and_each_checks_its_part(tmp_path: Path) -> None:
    assert Pair().run(tmp_path, saved) == [None, None]
    (path,) = (tmp_path / "checkpoints").iterdir()
    assert Pair().run(tmp_path, Saver.newest) == [path, path]
    checked: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "defect", lambda _, rank, world: checked.append((rank, world)) or f"by {rank}")
        assert Pair().run(tmp_path, lambda here: here.defects(path)) == [["by 0", "by 1"]] * 2
    assert sorted(checked) == [(0, 2), (1, 2)]


def test_what_one_process_could_not_write_all_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint.save_file

    def full(tensors: dict[str, Tensor], path: Path) -> None:
        write(tensors, path)
        if "rank-00001" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    removed: list[Path] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: removed.append(path))
    one, two = Pair().run(tmp_path, saved)
    for error in (one, two):
        assert "could not be written ([Errno 28] No space left on device)" in str(error)
    assert len(removed) == 1


def test_another_head_is_named_and_not_a_start_that_nobody_gave(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("init: last_layer\nhead:\n  name: mtp\n")
    assert checkpoint.first_init(tmp_path, "mtp") == "last_layer"
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("init: random\n")
    assert checkpoint.first_init(tmp_path / "old", "mtp") == "random"
    with pytest.raises(ValueError, match=r'changed are head\.name \("mtp", now "medusa"\); give the old ones'):
        checkpoint.first_init(tmp_path, "medusa")


def test_other_libraries_are_a_change_that_is_said_and_a_checkpoint_that_names_none_had_the_same() -> None:
    register_resolvers()
    config: Any = Mock(spec_set=checkpoint.STEERING, **dict.fromkeys(checkpoint.STEERING, 1))
    now = checkpoint.numerics(config, {}, "ddp", 1)
    assert (
        checkpoint.differences({key: value for key, value in now.items() if key not in checkpoint.VERSIONS}, now) == ""
    )
    assert checkpoint.differences(now | {"torch": "2.11.0"}, now) == f'torch ("2.11.0", now "{torch.__version__}")'
