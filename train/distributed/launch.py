"""Start the processes of `launcher=`, by `accelerate launch` here or by submitit as a SLURM job.

The command then runs again inside each process. Environment variables tell who started this process: torchrun or a
similar launcher, `srun`, or a user on each of several nodes. SLURM's values go into the variables that torch reads, or
into the launcher's values.
"""

import ctypes
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from train.config import LauncherConfig, SlurmConfig

PORTS, WINDOW = 15_000, 10_000  # below Linux's ephemeral ports; jobs on a node differ by number
PARENT = "HEADSTART_LAUNCHER"  # environment variable: our launcher's process id
Overrides = list[str]  # of a Hydra command, KEY=VALUE


def launched() -> bool:
    """Return whether a launcher has started this process."""
    return "LOCAL_RANK" in os.environ


def is_main() -> bool:
    """Return whether this is the main process: rank 0 of a launcher, or the first task of srun."""
    return os.environ.get("RANK", os.environ["SLURM_PROCID"] if among_tasks() else "0") == "0"


def world() -> int:
    """Return the number of processes that were started together (the world size)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_node() -> int:
    """Return the number of processes on this node; the world size if the launcher does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world()))


def among_tasks() -> bool:
    """Return whether this is one of several tasks of a step of srun.

    A job's script is no task, though SLURM_PROCID is set; an allocation's shell is one, though SLURM_NTASKS counts all.
    """
    in_script = "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ
    return _tasks() > 1 and "SLURM_PROCID" in os.environ and not in_script


def apply_launch_environment(launcher: Any, accelerators: int) -> None:
    """Write the launch environment into the launcher's values or torch's variables, keeping given values.

    A task of srun becomes a process. It becomes its node's launcher if it is the node's only task and the node has
    several processes, by default one for each of the `accelerators`. For nodes that a user starts one by one, NODE_RANK
    is the node's rank and MASTER_ADDR the address of the first. Refuse several nodes without that address.
    """
    variable = os.environ.get
    if among_tasks() and (not launched() or PARENT in os.environ):
        tasks, counts, number = _tasks(), [], int(variable("SLURM_NODEID", "0"))
        listed = variable("SLURM_STEP_TASKS_PER_NODE") or variable("SLURM_TASKS_PER_NODE", "")
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):  # "4(x2),3" for nodes of 4, 4 and 3
            counts += [int(count)] * int(times or 1)
        if sum(counts) != tasks:
            nodes = int(variable("SLURM_NNODES", "1"))
            counts = [tasks // nodes] * nodes
        port = int(variable("MASTER_PORT") or launcher.main_process_port or 0)
        port = port or PORTS + int(variable("SLURM_JOB_ID", "0")) % WINDOW
        address = variable("MASTER_ADDR") or (_first_node() if counts[number] < tasks else "127.0.0.1")
        if max(counts) == 1 and (launcher.num_processes or accelerators) > 1 and launcher.slurm is None:
            if launcher.num_nodes == 1:
                launcher.num_nodes = tasks
            launcher.machine_rank = int(os.environ["SLURM_PROCID"])
            launcher.main_process_ip = address
            launcher.main_process_port = port
        elif not launched():
            os.environ |= {
                "RANK": os.environ["SLURM_PROCID"],
                "WORLD_SIZE": str(tasks),
                "LOCAL_RANK": variable("SLURM_LOCALID", "0"),
                "LOCAL_WORLD_SIZE": str(counts[number]),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            }
    if launcher.num_nodes == 1 or launcher.main_process_ip is not None or "MASTER_ADDR" not in os.environ or launched():
        return
    launcher.machine_rank = variable("NODE_RANK", launcher.machine_rank)
    launcher.main_process_ip = os.environ["MASTER_ADDR"]


def _tasks() -> int:
    return int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS", "1"))


def _first_node() -> str:
    """Return the first node, on which task 0 runs, of a list such as "gpu[07-09,12]-ib,login"."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^\[,]*)", nodes)
    address = "".join(filter(None, first.groups() if first else ())) or os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if not address:
        raise ValueError("SLURM names no node of this job: set MASTER_ADDR to the address of the first task's")
    return address


IMPORTS = Path(__file__).resolve().parents[__name__.count(".")]  # folder from which our packages are imported
REPORTED = 2  # exit status of a process that has printed its error (heads/common/errors.py)
AFTER = 5  # seconds that other processes wait for the main one to print its error and exit
GRACE = 90  # seconds before a job's time limit at which SLURM signals it
PR_SET_PDEATHSIG = 1  # prctl(2)
HANDLED = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT  # signals that torch's launcher forwards


def check_mode() -> None:
    """In a launched process, refuse a multirun, which every process would repeat, and exit with the launcher."""
    if not launched():
        return
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ValueError(
            "a multirun (-m) inside processes that are started already: run `python train/run.py -m launcher=ddp …` "
            "itself, and each of its runs starts its own processes"
        )
    end_with_parent()


def needs_processes(launcher: LauncherConfig) -> bool:
    """Return whether the launcher's processes are still to be started; refuse several nodes without an address."""
    if launched() or (launcher.slurm is None and launcher.world == 1):
        return False
    if launcher.num_nodes > 1 and launcher.main_process_ip is None and launcher.slurm is None:
        raise ValueError(
            "launcher.main_process_ip is missing: set it, or MASTER_ADDR, to the address of node 0 on every node"
        )
    return True


def is_queued(launcher: LauncherConfig) -> bool:
    """Return whether this command only queues the run, without waiting for it."""
    return not launched() and launcher.slurm is not None and launcher.slurm.cluster != "local"


def end_with_parent() -> None:
    """Make Linux send this process a SIGTERM when its launcher dies, since a killed launcher cannot forward a signal.

    Without a launcher do nothing, since the shell may exit first. If the launcher is already dead, exit.
    """
    if sys.platform == "linux" and ("TORCHELASTIC_RUN_ID" in os.environ or PARENT in os.environ):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
            raise SystemExit(128 + signal.SIGTERM)


def user_overrides() -> Overrides:
    """Return this run's overrides verbatim; its processes resolve interpolations themselves."""
    given: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return [*map(str, given)]


def key_of(override: str) -> str:
    """Return the key of an override."""
    return override.lstrip("+~").partition("=")[0]


@contextmanager
def main_first() -> Iterator[None]:
    """Delay errors on other processes, so that the main one prints its error before the launcher stops all."""
    try:
        yield
    except (ValueError, OSError):
        if not is_main():
            time.sleep(AFTER)
        raise


def command(launcher: LauncherConfig, script: str, overrides: Overrides) -> list[str]:
    """Return the arguments of `accelerate launch` that run `script` with these Hydra overrides."""
    arguments = ["--num_processes", str(launcher.world)]
    arguments += ["--num_machines", str(launcher.num_nodes), "--machine_rank", str(launcher.machine_rank)]
    arguments += ["--mixed_precision", "no", "--dynamo_backend", "no"]  # precision is the trainer's own setting
    port = launcher.main_process_port
    if launcher.main_process_ip is not None:
        arguments += ["--main_process_ip", launcher.main_process_ip]
    elif port is None:
        port = 0  # any free port, so that two runs on a machine do not clash
    if port is not None:
        arguments += ["--main_process_port", str(port)]
    # On CPUs too: `--cpu` would start one process whatever the count, and accelerate selects gloo itself. The strategy
    # is not accelerate's either (train/distributed/strategy.py).
    return [*arguments, "--multi_gpu", script, *overrides]


def command_for_nodes(launcher: LauncherConfig, script: str, overrides: Overrides, *, on_cpu: bool) -> str:
    """Return the command for each of several nodes, one per line; empty if one command starts all processes."""
    if launcher.num_nodes == 1 or launcher.slurm is not None or launched() or among_tasks():
        return ""
    command_line = shlex.join(["python", script, *(override for override in overrides if key_of(override) != "plan")])
    nodes = launcher.num_nodes
    devices = "" if on_cpu else f"--gpus-per-node={launcher.local} "
    return (
        f"on each node, with NODE_RANK=N, from 0 to {nodes - 1}, and the address of node 0: MASTER_ADDR=ADDRESS "
        f"NODE_RANK=N {command_line}\nor once, under SLURM: srun --nodes={nodes} --ntasks-per-node={launcher.local} "
        f"{devices}{command_line}\n"
    )


def start(launcher: LauncherConfig, script: str, overrides: Overrides) -> int:
    """Start the processes; return the first failed one's exit status, or 0; with SLURM 0 once they are queued."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(IMPORTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    if launcher.slurm is not None:
        return submit(launcher, launcher.slurm, script, overrides)
    from accelerate.commands import launch as accelerate
    from torch.distributed.elastic.agent.server import api as agent
    from torch.distributed.elastic.multiprocessing import api as elastic
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ[PARENT] = str(os.getpid())
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # a collective that waits for a lost process fails
    for module in (agent, elastic):
        module.logger.setLevel(logging.CRITICAL)  # the error is printed below
    before = {number: signal.getsignal(number) for number in HANDLED}
    try:
        accelerate.launch_command(accelerate.launch_command_parser().parse_args(command(launcher, script, overrides)))
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode != REPORTED:
            sys.stderr.write(f"error: process {rank} ended with status {first.exitcode}\n")
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except elastic.SignalException as error:  # the processes have received the signal
        return 128 + error.sigval.value
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def submit(launcher: LauncherConfig, slurm: SlurmConfig, script: str, overrides: Overrides) -> int:
    """Submit all processes as one job, print its id and folder, wait where it is local; refuse without SLURM."""
    try:
        import submitit
    except ImportError:
        raise ValueError("launcher=slurm needs submitit: pip install 'headstart[cluster]'") from None
    parameters = {
        "nodes": launcher.num_nodes,
        "tasks_per_node": launcher.num_processes,
        "timeout_min": slurm.minutes,
        "gpus_per_node": slurm.gpus_per_node,
        "cpus_per_task": slurm.cpus_per_task,
        "mem_gb": slurm.mem_gb,
        "slurm_partition": slurm.partition,
        "slurm_account": slurm.account,
        "slurm_setup": slurm.setup,
        "slurm_signal_delay_s": GRACE,
        "slurm_additional_parameters": slurm.extra,
    }
    try:
        executor = submitit.AutoExecutor(Path(slurm.folder).absolute() / "%j", cluster=slurm.cluster)
        executor.update_parameters(name="headstart", **{key: value for key, value in parameters.items() if value})
        job = executor.submit(Task(script, overrides))
    except (RuntimeError, TypeError, submitit.core.utils.FailedJobError) as error:
        raise ValueError(f"launcher.slurm: no job could be made ({error}); run this where sbatch is") from None
    sys.stdout.write(f"job {job.job_id}: what it prints is in {job.paths.stdout.parent}\n")
    return 0 if is_queued(launcher) else max(job.results())


@dataclass
class Task:
    """A process of a SLURM job: it runs this command again, with its rank in the environment.

    `GRACE` seconds before its limit SLURM signals the job: it writes a checkpoint, and submitit queues it again.
    """

    script: str
    overrides: Overrides
    job: Any = None  # the command's process, once it runs

    def __call__(self) -> int:
        """Run the command."""
        import submitit

        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM signals every process; only this one handles it
        self.job = subprocess.Popen([sys.executable, self.script, *self.overrides])
        signal.signal(signal.SIGUSR2, ignored)
        status = self.job.wait()
        if status:
            raise RuntimeError(f"{self.script} ended with status {status}")
        return status

    def checkpoint(self, *_: Any) -> Any:
        """Stop the command and return the submission that resumes the run."""
        import submitit

        if self.job is not None:
            self.job.terminate()
            self.job.wait()
        others = [word for word in self.overrides if key_of(word) not in ("resume", "overwrite")]
        return submitit.helpers.DelayedSubmission(Task(self.script, [*others, "resume=true"]))
