"""Engines of other projects, run by the Python of their own environment; the tests speak with them in JSON."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from heads.common.resolvers import ROOT

ENVIRONMENT = ROOT / ".venv-serving"
TARGET = ROOT / "examples" / "tiny"
HERE = Path(__file__).parent


def asked(
    script: str, job: dict[str, Any], newest: str | None = None, hub: dict[str, str] | None = None,
    environment: Path = ENVIRONMENT,
) -> Any:  # fmt: skip
    """Return a script's answer to a job, run by an environment's Python.

    `newest` is the engine whose newest Python files it imports, `hub` the variables by which the Hub is found.
    """
    python = environment / "bin" / "python"
    assert python.exists(), "there is no environment for the engines: make test-serving makes it"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"HF_HUB_OFFLINE": "1"} if hub is None else hub
    if newest is not None:
        variables["PYTHONPATH"] = str(ENVIRONMENT / "newest" / newest)
    done = subprocess.run(
        [python, HERE / script], input=json.dumps(job), capture_output=True, text=True, env=variables, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
