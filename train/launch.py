"""Start the processes that `launcher=` asks for: accelerate does it, and this command runs again inside each."""

import os
import subprocess
import sys

from train.config import LauncherConfig


def launched() -> bool:
    """Whether a launcher has started this process already."""
    return "LOCAL_RANK" in os.environ


def command(launcher: LauncherConfig, script: str, overrides: list[str]) -> list[str]:
    """Return the `accelerate launch` command line that runs `script` with these Hydra overrides."""
    words = [sys.executable, "-m", "accelerate.commands.launch"]
    words += ["--num_processes", str(launcher.num_processes * launcher.num_nodes)]
    words += ["--num_machines", str(launcher.num_nodes), "--machine_rank", str(launcher.machine_rank)]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no"]  # precision is the trainer's own setting
    if launcher.main_process_ip is not None:
        words += ["--main_process_ip", launcher.main_process_ip]
    if launcher.main_process_port is not None:
        words += ["--main_process_port", str(launcher.main_process_port)]
    if launcher.deepspeed_stage is not None:
        words += ["--use_deepspeed", "--zero_stage", str(launcher.deepspeed_stage)]
    elif launcher.num_processes * launcher.num_nodes > 1:
        # Also on CPU: `--cpu` starts one process whatever the count, and accelerate finds gloo by itself.
        words += ["--multi_gpu"]
    return [*words, script, *overrides]


def relaunch(launcher: LauncherConfig, script: str, overrides: list[str]) -> int:
    """Run the command and return its exit status."""
    return subprocess.run(command(launcher, script, overrides), check=False).returncode
