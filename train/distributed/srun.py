"""Tasks that `srun` has started, each a process of the run: SLURM's environment in the variables that torch reads."""

import os
import re

PORTS, WINDOW = 15_000, 10_000  # below those that Linux gives away; a job's number picks one, two jobs may share a node


def take_over(num_processes: int | None, port: int | None) -> None:
    """Set torch's variables in a task of srun, where neither torchrun nor the like has, nor MASTER_ADDR the user.

    A job's script itself is no task, though it has SLURM_PROCID, and the shell of an allocation is a step of one task,
    though it has the SLURM_NTASKS of all. Where `num_processes` are wanted on a node with one task, that task starts
    them. Refuse a first task on a node without an address.
    """
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS", "1"))
    in_script = "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ
    if tasks == 1 or "SLURM_PROCID" not in os.environ or "LOCAL_RANK" in os.environ or in_script:
        return
    here = _tasks_here(tasks)
    if here == 1 and (num_processes or 1) > 1:
        return
    os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["SLURM_PROCID"], str(tasks)
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = os.environ.get("SLURM_LOCALID", "0"), str(here)
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = _first_node() if here < tasks else "127.0.0.1"
    job = int(os.environ.get("SLURM_JOB_ID", "0"))
    os.environ.setdefault("MASTER_PORT", str(port or PORTS + job % WINDOW))


def _tasks_here(tasks: int) -> int:
    """Return the number of tasks on this node: SLURM writes "4(x2),3" for nodes of 4, 4 and 3."""
    counts: list[int] = []
    listed = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "")
    for count, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(count)] * int(nodes or 1)
    number = int(os.environ.get("SLURM_NODEID", "0"))
    return counts[number] if sum(counts) == tasks else tasks // int(os.environ.get("SLURM_NNODES", "1"))


def _first_node() -> str:
    """Return the first node of a list such as "gpu[07-09,12]-ib,login", where the first task runs; refuse none."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^\[,]*)", nodes)
    address = "".join(filter(None, first.groups() if first else ())) or os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if not address:
        raise ValueError("SLURM names no node of this job: set MASTER_ADDR to the address of the first task's")
    return address
