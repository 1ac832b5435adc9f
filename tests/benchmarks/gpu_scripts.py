"""A script of benchmarks/gpu at toy size, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from heads.common.resolvers import ROOT


def toy(name: str, out: Path, *words: str) -> dict[str, Any]:
    """Run a script and return its record."""
    command = [sys.executable, f"benchmarks/gpu/{name}.py", "--toy", "--device", "cpu", "--out", str(out), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    assert found["toy"]
    return found
