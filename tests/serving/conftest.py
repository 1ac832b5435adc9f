"""Heads trained for the engines, once for all tests."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from heads.common.resolvers import ROOT

STEPS = 150  # enough for drafts that are accepted, which the tests ask for
# What is said on the command line beside the kind of head.
SAID = {
    "eagle": [], "eagle3": ["head.draft_vocab=1024"], "medusa": [], "mtp": [], "peagle": [],
    "dflash": ["head.from_anchor=false", "head.markov_rank=null", "head.causal=false"],
}  # fmt: skip
KINDS = {"dflash": "block"}  # where that has another name


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
    """Return the run of a kind of head on the embedded target with further words, trained for a minute."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "runs"  # of all workers
    root.mkdir(exist_ok=True)

    def trained(kind: str, *words: str) -> Path:
        run = root / "-".join((kind, *words)).replace("=", "-")
        with FileLock(f"{run}.lock"):
            if not run.exists():
                short = [f"trainer.steps={STEPS}", f"trainer.eval_every={STEPS}", "trainer.eval_prompts=2"]
                command("train/run.py", f"head={kind}", *short, "eval.prompts=0", f"out={run}", *words)
        return run

    return trained


@pytest.fixture(scope="session")
def run_of(run_with: Callable[..., Path]) -> Callable[[str], Path]:
    """Return the run of one of SAID."""
    return lambda name: run_with(KINDS.get(name, name), *SAID[name])
