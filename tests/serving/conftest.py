"""Heads trained for the engines, once for all tests."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from heads.common.resolvers import ROOT

# What is said on the command line beside the kind of head.
SAID = {"eagle": [], "eagle3": ["head.draft_vocab=1024"], "medusa": [], "mtp": []}


def command(script: str, *words: str, **environment: str) -> str:
    """Run one of our commands as a user does, and return what it prints."""
    done = subprocess.run(
        [sys.executable, script, *words], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="session")
def run_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the run of a kind of head on the embedded target with further words, trained for a minute or two."""
    root = tmp_path_factory.mktemp("runs")

    def trained(kind: str, *words: str) -> Path:
        run = root / "-".join((kind, *words)).replace("=", "-")
        if not run.exists():
            steps = ["trainer.steps=300", "trainer.eval_every=300", "eval.prompts=0"]
            command("train/run.py", f"head={kind}", *steps, f"out={run}", *words)
        return run

    return trained


@pytest.fixture(scope="session")
def run_of(run_with: Callable[..., Path]) -> Callable[[str], Path]:
    """Return the run of a kind of head as the engines of SAID read it."""
    return lambda kind: run_with(kind, *SAID[kind])
