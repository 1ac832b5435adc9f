"""The tasks of srun as processes of a run, by the environment that SLURM gives them."""

import os
from typing import Any

import pytest
from omegaconf import OmegaConf

from train.distributed import launch

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TASK = {
    "SLURM_NTASKS": "11", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_NNODES": "3",
    "SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_JOB_ID": "70012", "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gpu[07-09,12]", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
}  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that no launcher has set, restored afterwards."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")})
    for name in TORCH:
        os.environ.pop(name, None)


def taken_over(environment: dict[str, str], num_processes: int | None = None, accelerators: int = 1) -> dict[str, str]:
    """Return torch's variables in a task."""
    os.environ.update(environment)
    launcher_in_task(num_processes, accelerators)
    return {name: os.environ[name] for name in TORCH if name in os.environ}


def launcher_in_task(num_processes: int | None, accelerators: int) -> Any:
    """Return the launcher's values after a task has taken over."""
    given = {"num_processes": num_processes, "num_nodes": 1, "machine_rank": 0, "slurm": None}
    launcher = OmegaConf.create(given | {"main_process_ip": None, "main_process_port": None})
    launch.apply_launch_environment(launcher, accelerators)
    return launcher


def test_a_task_is_a_process_and_the_first_node_the_meeting_place() -> None:
    assert taken_over(TASK) == {
        "RANK": "9", "WORLD_SIZE": "11", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(launch.PORTS + 12),
    }  # fmt: skip


@pytest.mark.parametrize(("nodes", "address"), [("a1,b2", "a1"), ("gpu[3,7-9]-ib,x", "gpu3-ib"), ("", "10.0.0.7")])
def test_the_first_node_of_a_list(nodes: str, address: str) -> None:
    assert taken_over(TASK | {"SLURM_JOB_NODELIST": nodes})["MASTER_ADDR"] == address


@pytest.mark.parametrize(
    ("given", "local", "address", "port"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "3(x2),5", "SLURM_STEP_NODELIST": "cpu[3-5]"}, "5", "cpu3", "25012"),
        ({"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "7"}, "3", "10.0.0.9", "7"),
        ({"SLURM_TASKS_PER_NODE": "11", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}, "11", "127.0.0.1", "25012"),
    ],
)
def test_the_step_and_the_user_say_more_than_the_job(
    given: dict[str, str], local: str, address: str, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PORTS", 25_000)
    found = taken_over(TASK | given)
    assert (found["LOCAL_WORLD_SIZE"], found["MASTER_ADDR"], found["MASTER_PORT"]) == (local, address, port)


def test_a_node_that_is_not_named_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"^SLURM names no node of this job: set MASTER_ADDR"):
        taken_over(TASK | {"SLURM_JOB_NODELIST": "", "SLURM_LAUNCH_NODE_IPADDR": ""})


@pytest.mark.parametrize(
    ("change", "num_processes"),
    [
        ({"SLURM_NTASKS": "1"}, None),
        ({"SLURM_STEP_ID": None}, None),  # in the job's own script
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),  # in the shell that salloc gives
        ({"SLURM_PROCID": None}, None),
        ({"LOCAL_RANK": "0"}, None),
        ({"SLURM_TASKS_PER_NODE": "1(x11)"}, 8),  # which start eight processes each
    ],
)
def test_what_is_left_to_another_launcher(change: dict[str, str | None], num_processes: int | None) -> None:
    task: dict[str, str | None] = TASK | change
    given = {key: value for key, value in task.items() if value is not None}
    assert "WORLD_SIZE" not in taken_over(given, num_processes)


@pytest.mark.parametrize("num_processes", [None, 8])
@pytest.mark.parametrize("by_it", [False, True])
def test_a_task_alone_on_a_node_of_several_accelerators_starts_a_process_for_each(
    num_processes: int | None, by_it: bool
) -> None:
    os.environ.update(TASK | {"SLURM_TASKS_PER_NODE": "1(x11)"})
    if by_it:  # as one of these processes, which read the same configuration again
        os.environ.update({launch.PARENT: "1", "LOCAL_RANK": "3"})
    launcher = launcher_in_task(num_processes, 8)
    assert (launcher.num_nodes, launcher.machine_rank) == (11, 9)
    assert (launcher.main_process_ip, launcher.main_process_port) == ("gpu07", launch.PORTS + 12)
    assert "RANK" not in os.environ


def test_a_task_alone_on_a_node_of_one_accelerator_is_a_process() -> None:
    assert taken_over(TASK | {"SLURM_TASKS_PER_NODE": "1(x11)"})["LOCAL_WORLD_SIZE"] == "1"


def test_the_first_task_alone_is_the_main_process() -> None:
    os.environ.update(TASK)
    assert not launch.is_main()
    os.environ["SLURM_PROCID"] = "0"
    assert launch.is_main()


def test_a_node_is_told_where_to_meet_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("NODE_RANK", "1")
    launcher = OmegaConf.create({"num_nodes": 2, "machine_rank": 0, "main_process_ip": None})
    launch.apply_launch_environment(launcher, 1)
    assert (launcher.machine_rank, launcher.main_process_ip) == ("1", "node0")
    monkeypatch.delenv("NODE_RANK")
    launcher = OmegaConf.create({"num_nodes": 3, "machine_rank": 2, "main_process_ip": None})
    launch.apply_launch_environment(launcher, 1)
    assert launcher.machine_rank == 2
