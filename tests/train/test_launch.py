"""What launcher=… starts, by accelerate or as a job of SLURM, and what it refuses, in one line each."""

import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from heads.common.resolvers import ROOT
from tests.refusals import refuses
from tests.train import jobs
from train import run as runs
from train.config import RunConfig
from train.distributed import launch, processes
from train.resolve import with_processes

BATCH = """#!/bin/sh
for last; do :; done
cp "$last" "$CAUGHT"
echo Submitted batch job 77
"""


def run(*overrides: str) -> RunConfig:
    return jobs.configured(overrides)


def test_the_command_has_the_processes_and_a_free_port() -> None:
    words = launch.command(run("launcher=fsdp2", "launcher.num_processes=3").launcher, "run.py", ["name=x"])
    assert words[words.index("--num_processes") + 1] == "3"
    assert words[words.index("--main_process_port") + 1] == "0"
    assert words[-2:] == ["run.py", "name=x"]
    nodes = ["launcher=nodes2", "launcher.num_processes=3", "launcher.machine_rank=1", "launcher.main_process_ip=ten"]
    words = launch.command(run(*nodes).launcher, "run.py", [])
    told = dict(zip(words[::2], words[1::2], strict=False))
    assert [told[f"--{key}"] for key in ("num_processes", "num_machines", "machine_rank")] == ["6", "2", "1"]
    assert (told["--main_process_ip"], told["--main_process_port"]) == ("ten", "29500")
    assert "--use_deepspeed" not in launch.command(run("launcher=zero3").launcher, "run.py", [])


def test_nodes_that_do_not_know_where_to_meet_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    nodes = run("launcher=nodes2").launcher  # composes, for plan=true asks for no address
    refuses(r"^launcher\.main_process_ip is missing: set it, or MASTER_ADDR", launch.needs_processes, nodes)
    assert launch.needs_processes(run("launcher=nodes2", "launcher.main_process_ip=10.0.0.1").launcher)


def test_null_processes_are_the_machines_or_those_that_were_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = run("launcher.num_processes=null").launcher
    assert with_processes(launcher, 3).num_processes == 3
    monkeypatch.setattr(os, "environ", {**os.environ, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0"})
    assert with_processes(launcher, 3).world == 8


def test_a_plan_has_the_command_of_each_of_several_nodes() -> None:
    words = ["name=a b", "plan=True"]
    nodes = run("launcher=nodes2").launcher
    each, once = str(launch.command_for_nodes(nodes, "train/run.py", words, on_cpu=False)).splitlines()
    assert each.endswith("MASTER_ADDR=ADDRESS NODE_RANK=N python train/run.py 'name=a b'")
    assert "from 0 to 1" in each
    assert once.endswith("srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 python train/run.py 'name=a b'")
    assert "gpus" not in str(launch.command_for_nodes(nodes, "train/run.py", words, on_cpu=True))
    for alone in ("launcher=ddp", "launcher=slurm"):
        assert launch.command_for_nodes(run(alone).launcher, "train/run.py", words, on_cpu=False) == ""


def test_a_job_of_slurm_is_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an sbatch that keeps the script it is given, since submitit looks for one."""
    for name in ("sbatch", "srun", "sacct"):
        (tmp_path / name).write_text(BATCH)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CAUGHT", str(tmp_path / "caught.sh"))
    monkeypatch.setenv("PYTHONPATH", "")
    asked = ["launcher.slurm.partition=gpu", "launcher.slurm.account=me", "launcher.slurm.setup=[module load cuda]"]
    folder = [f"launcher.slurm.folder={tmp_path / 'jobs'}", "+launcher.slurm.extra.constraint=h100"]
    sizes = [f"launcher.slurm.{key}" for key in ("gpus_per_node=4", "cpus_per_task=6", "mem_gb=100", "minutes=90")]
    found = run("launcher=slurm", "launcher.strategy=fsdp2", *asked, *folder, *sizes)
    assert launch.start(found.launcher, "train/run.py", ["launcher=slurm", "overwrite=true"]) == 0
    script = (tmp_path / "caught.sh").read_text()
    for option in (
        "partition=gpu", "account=me", "nodes=2", "ntasks-per-node=8", "gpus-per-node=4", "cpus-per-task=6",
        "mem=100GB", "time=90", "constraint=h100", f"signal=USR2@{launch.GRACE}",
    ):  # fmt: skip
        assert f"#SBATCH --{option}\n" in script
    assert "\nmodule load cuda\n" in script
    assert os.environ["PYTHONPATH"] == str(ROOT), "where the job finds the code"


def test_a_job_whose_time_is_over_goes_on_where_it_stopped() -> None:
    pytest.importorskip("submitit")
    task = launch.Task("train/run.py", ["launcher=slurm", "overwrite=true", "name=x"])
    then = task.checkpoint().function
    assert (then.script, then.overrides) == ("train/run.py", ["launcher=slurm", "name=x", "resume=true"])


def test_a_run_that_was_queued_has_no_result_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(launch, "submit", lambda *words: asked.append(words[2:]) or 0)
    monkeypatch.setattr(sys, "argv", ["train/run.py", "launcher=slurm", f"out={tmp_path / 'new'}"])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    runs.main()
    assert asked == [(runs.__file__, sys.argv[1:])]


@pytest.mark.parametrize(
    ("ended", "status", "said"),
    [
        (2, 2, ""),  # it has printed its error
        (1, 1, "error: process 3 ended with status 1\n"),
        (-9, 137, "error: process 3 ended with status -9\n"),
        (signal.SIGINT, 130, ""),
    ],
)
def test_the_status_is_that_of_the_first_process_that_failed(
    ended: int, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> None:
        if isinstance(ended, signal.Signals):
            raise SignalException("stopped", ended)
        raise ChildFailedError("run.py", {3: ProcessFailure(3, 1, ended, "")})

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fails)
    monkeypatch.setattr(os, "environ", {**os.environ})
    assert launch.start(run("launcher=ddp").launcher, "run.py", []) == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("late", [False, True])
def test_a_process_ends_with_its_launcher(late: bool) -> None:
    """Also where the launcher was killed before this was asked for."""
    alive, end = os.pipe()
    launcher = os.fork()
    if not launcher:
        os.environ[launch.PARENT] = str(os.getpid())
        if os.fork():
            signal.pause()
        while late and os.environ[launch.PARENT] == str(os.getppid()):
            time.sleep(0.01)
        try:
            launch.end_with_parent()
            os.write(end, b"x")
            time.sleep(60)
        finally:
            os._exit(0)
    os.close(end)
    if not late:
        assert os.read(alive, 1) == b"x"
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert select.select([alive], [], [], 20)[0], "it lives on"
    assert os.read(alive, 1) == b""
    os.close(alive)


@pytest.mark.parametrize(
    ("here", "started", "overrides", "said"),
    [
        (1, 2, ("launcher=inline",), "2 processes were started and 1 work together"),
        (2, 2, ("launcher=ddp",), "num_nodes is 8, 2 processes were started"),
        (1, 1, ("launcher=inline", "launcher.strategy=fsdp2"), "there is one"),
    ],
)
def test_other_processes_than_asked_for_are_refused(
    here: int, started: int, overrides: tuple[str, ...], said: str
) -> None:
    processes.check_world(run(*overrides, "launcher.num_processes=2").launcher, 2, 2)
    processes.check_world(run("launcher=inline").launcher, 2, 2)
    refuses(said, processes.check_world, run(*overrides).launcher, here, started)


def test_a_strategy_of_accelerates_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    found = run("model.device=cpu", "launcher=inline")
    with pytest.raises(ValueError, match="accelerate was told to use FSDP"):
        processes.accelerator_for(found.launcher, found.trainer, found.model)


def test_what_the_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("launcher=zero2", "model.device=cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match="num_processes is 8 and this machine has 2 accelerators"):
        processes.check_machine(found.launcher, found.model)
    inline = run("launcher=inline", "model.device=cuda")
    processes.check_machine(inline.launcher, inline.model)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # by the user's own launcher
    with pytest.raises(ValueError, match="num_processes is 4 and this machine has 2 accelerators"):
        processes.check_machine(inline.launcher, inline.model)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("train.distributed.processes.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"headstart\[cluster\]"):
        processes.check_machine(found.launcher, found.model)


def test_muon_is_refused_where_matrices_are_flat() -> None:
    assert run("launcher=fsdp2", "trainer.optimizer=muon")
    for stage in ("zero2", "zero3"):
        with pytest.raises(ValueError, match="choose adamw"):
            run(f"launcher={stage}", "trainer.optimizer=muon")


def test_a_multirun_inside_started_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train/run.py", "-m", "head=eagle,medusa", f"out={tmp_path / 'x'}"])
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit) as ended:
        runs.main()
    assert ended.value.code == 2
    assert "error: a multirun (-m) inside" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_job_on_this_machine_trains_with_two_processes(tmp_path: Path) -> None:
    overrides = [*jobs.make(tmp_path), "trainer.steps=4", "eval.prompts=0", f"out={tmp_path / 'out'}"]
    slurm = ["launcher=slurm", "launcher.num_nodes=1", "launcher.num_processes=2", "launcher.strategy=fsdp2"]
    local = ["launcher.slurm.cluster=local", "launcher.slurm.gpus_per_node=null"]
    jobs.finish(jobs.start([*overrides, *slurm, *local, f"launcher.slurm.folder={tmp_path / 'jobs'}"]))
    assert len(jobs.losses(tmp_path / "out")) == 4
