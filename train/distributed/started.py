"""Who started this process: torchrun or the like, `srun`, or a user on each of several nodes, by the environment.

What SLURM says goes into the variables that torch reads, or into the launcher's values.
"""

import os
import re
from typing import Any

from heads.common.untrusted import shown

PORTS, WINDOW = 15_000, 10_000  # below those that Linux gives away; a job's number picks one, two jobs may share a node
PARENT = "HEADSTART_LAUNCHER"  # environment variable: the process id of our launcher (train/distributed/launch.py)


def launched() -> bool:
    """Whether a launcher has started this process already."""
    return "LOCAL_RANK" in os.environ


def is_main() -> bool:
    """Whether this process is the first, by its launcher, or the first task of srun."""
    return os.environ.get("RANK", os.environ["SLURM_PROCID"] if among_tasks() else "0") == "0"


def world() -> int:
    """Return how many processes were started together with this one, and itself."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_node() -> int:
    """Return how many of them are on this node; all, where the launcher does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world()))


def among_tasks() -> bool:
    """Whether this is one of several tasks of a step of srun.

    A job's script itself is no task, though it has SLURM_PROCID, and the shell of an allocation is a step of one task,
    though it has the SLURM_NTASKS of all.
    """
    in_script = "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ
    return _tasks() > 1 and "SLURM_PROCID" in os.environ and not in_script


def take_over(launcher: Any, accelerators: int) -> None:
    """Write who started this process into a launcher's values or into torch's variables; what is given there stays.

    A task of srun becomes a process, or the launcher of its node where it is alone on a node for several processes:
    without a number of them for each of the `accelerators`. Of several nodes that a user has started one by one,
    NODE_RANK says which this is and MASTER_ADDR where they meet. Refuse a first task on a node without an address, and
    a NODE_RANK that is no number.
    """
    if among_tasks() and (not launched() or PARENT in os.environ):
        _take_over_task(launcher, accelerators)
    if launcher.num_nodes == 1 or launcher.main_process_ip is not None or "MASTER_ADDR" not in os.environ or launched():
        return
    rank = os.environ.get("NODE_RANK", str(launcher.machine_rank))
    if not rank.isdigit():
        raise ValueError(f"NODE_RANK is {shown(rank)}: give the number of this node, from 0")
    launcher.machine_rank, launcher.main_process_ip = int(rank), os.environ["MASTER_ADDR"]


def _take_over_task(launcher: Any, accelerators: int) -> None:
    """Set torch's variables, or in a node's launcher, and the processes that it starts, the nodes and their meeting."""
    tasks = _tasks()
    counts, number = _tasks_of_nodes(tasks), int(os.environ.get("SLURM_NODEID", "0"))
    port = int(os.environ.get("MASTER_PORT") or launcher.main_process_port or 0)
    port = port or PORTS + int(os.environ.get("SLURM_JOB_ID", "0")) % WINDOW
    address = os.environ.get("MASTER_ADDR")
    if max(counts) == 1 and (launcher.num_processes or accelerators) > 1 and launcher.slurm is None:
        if launcher.num_nodes == 1:
            launcher.num_nodes = tasks
        launcher.machine_rank, launcher.main_process_ip = int(os.environ["SLURM_PROCID"]), address or _first_node()
        launcher.main_process_port = port
        return
    if launched():
        return
    os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["SLURM_PROCID"], str(tasks)
    os.environ["LOCAL_RANK"] = os.environ.get("SLURM_LOCALID", "0")
    os.environ["LOCAL_WORLD_SIZE"] = str(counts[number])
    os.environ["MASTER_ADDR"] = address or (_first_node() if counts[number] < tasks else "127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)


def _tasks() -> int:
    """Return the number of tasks of this step."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS", "1"))


def _tasks_of_nodes(tasks: int) -> list[int]:
    """Return the number of tasks on each node: SLURM writes "4(x2),3" for nodes of 4, 4 and 3."""
    counts: list[int] = []
    listed = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "")
    for count, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(count)] * int(nodes or 1)
    nodes = int(os.environ.get("SLURM_NNODES", "1"))
    return counts if sum(counts) == tasks else [tasks // nodes] * nodes


def _first_node() -> str:
    """Return the first node of a list such as "gpu[07-09,12]-ib,login", where the first task runs; refuse none."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^\[,]*)", nodes)
    address = "".join(filter(None, first.groups() if first else ())) or os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if not address:
        raise ValueError("SLURM names no node of this job: set MASTER_ADDR to the address of the first task's")
    return address
