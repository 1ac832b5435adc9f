"""Evaluations of a toy run that take a moment."""

from pathlib import Path
from typing import Any

from eval.config import EvalConfig, eval_config

SIZE = {"prompts": 2, "max_new_tokens": 8, "repeats": 1, "warmup": 0, "gate_tv": 0.3}


def small(runs: Path, out: Path, **values: Any) -> EvalConfig:
    """Return an evaluation of the EAGLE run that takes a moment."""
    given = {"run": str(runs / "eagle"), "out": str(out), "dtype": "float32"}
    return eval_config(**(given | SIZE | values))
