"""Shared by commands about many runs: starting other commands as processes, configurations, output."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from heads.common.command import quoted
from heads.common.errors import ERROR_FILE
from heads.common.resolvers import ROOT
from heads.common.typed import Json
from train.config import RunConfig
from train.distributed.launch import Overrides

REFUSED = FAILED, _ = (1, 2)  # exit statuses of failed and refused commands; others come from signals


def run_command(script: str, overrides: Overrides) -> None:
    """Run a script with these overrides, and pass signals on; a SystemExit has its status and line of error."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as error_file:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / script), *overrides], env={**os.environ, ERROR_FILE: error_file.name}
        )
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
        if status:
            line = error_file.read()
            raise SystemExit(status if status > 0 else 128 - status) from (ValueError(line) if line else None)


def split_config(cfg: DictConfig) -> tuple[DictConfig, DictConfig]:
    """Split a composed configuration into the keys of conf/train.yaml and the others."""
    training = {field.name for field in fields(RunConfig)}
    return OmegaConf.masked_copy(cfg, [*training]), OmegaConf.masked_copy(
        cfg, [str(k) for k in cfg if k not in training]
    )


def overrides_of(values: Json, prefix: str = "") -> Overrides:
    """Return nested values as overrides."""
    overrides = []
    for key, value in values.items():
        if isinstance(value, dict):
            overrides += overrides_of(value, f"{prefix}{key}.")
        else:
            overrides.append(f"{prefix}{key}={_literal(value)}")
    return overrides


def _literal(value: Any) -> str:
    """Return a value in Hydra's override grammar."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_literal, value))}]"
    return quoted(value) if isinstance(value, str | Path) else json.dumps(value)
