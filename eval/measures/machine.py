"""Record a measurement's environment: the machine, the versions, and the revision of the code."""

import os
import platform
import resource
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch
import transformers

from heads.common.errors import redacted_words
from heads.common.resolvers import ROOT
from heads.common.typed import Json


def device_facts(device: torch.device, dtype: torch.dtype | None) -> Json:
    """Return the facts that speed depends on: device, dtype (None if no model ran) and versions."""
    return {
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "type": device.type,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }


def cpu_name() -> str:
    """Return the processor's model, if the system reports it."""
    names = _from_linux("cpuinfo", "model name")
    return names[0] if names else platform.processor() or platform.machine()


def _from_linux(file: str, key: str) -> list[str]:
    """Return the values of a key in a file of /proc, in order; empty on other systems."""
    info = Path("/proc") / file
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return [line.split(":", 1)[1].strip() for line in lines if line.startswith(key)]


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes: on the accelerator since the last reset, or resident in this process since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resident := _from_linux("self/status", "VmHWM"):  # getrusage may include the parent process
        return int(resident[0].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def provenance() -> Json:
    """Return the provenance of a measurement: the code's revision, the command, the date."""
    return {
        **revision(),
        "command": shlex.join(["python", *redacted_words(sys.argv)]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def revision() -> Json:
    """Return the code's revision and whether files changed; without git, the content of REVISION."""
    commit, file = git("rev-parse", "HEAD"), ROOT / "REVISION"
    if commit is None and file.is_file():
        return {"revision": file.read_text(encoding="utf-8").strip() or None, "dirty": False}
    return {"revision": commit, "dirty": None if commit is None else bool(git("status", "--porcelain"))}


def git(*arguments: str) -> str | None:
    """Return git's output for the checkout, None if there is no git, no checkout or no commit."""
    if not (ROOT / ".git").exists():  # an installed package must not report a repository around it
        return None
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
