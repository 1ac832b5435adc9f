"""Whole training jobs at toy size: a target folder, a text file, and the command that trains on them."""

import copy
import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig
from transformers import AutoModelForCausalLM

from heads.common.resolvers import register_resolvers
from tests import toys
from train.config import RunConfig, run_config
from train.resolve import on_machine, resolve, resolve_placement

ROOT = Path(__file__).resolve().parents[2]
QUICK = [
    "data.length=32", "data.held_out=4", "data.max_tokens=64", "trainer.batch_tokens=256", "trainer.micro_tokens=64",
    "trainer.eval_every=8", "trainer.save_every=4", "trainer.eval_prompts=2", "trainer.eval_tokens=12",
    "trainer.precision=fp32", "model.dtype=float32", "model.device=cpu",
    "eval.prompts=2", "eval.max_new_tokens=12", "eval.repeats=1", "eval.warmup=0", "eval.hf=false",
    "eval.tier=[live]",
]  # fmt: skip


def make(folder: Path) -> list[str]:
    """Write a toy target and a text, and return the overrides that name them."""
    import torch

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(toys.ARCHITECTURES["llama"])
    model.save_pretrained(folder / "target")
    toys.tokenizer().save_pretrained(folder / "target")
    draw = random.Random(0)
    lines = [" ".join(f"w{draw.randrange(toys.VOCAB)}" for _ in range(draw.randrange(12, 40))) for _ in range(120)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    return [f"model.path={folder / 'target'}", f"data.path={folder / 'text.txt'}", *QUICK]


def with_head(overrides: Sequence[str]) -> list[str]:
    """Return overrides with head=eagle unless they name a head, or an experiment with its own."""
    named = any(word.startswith(("head=", "experiment=")) for word in overrides)
    return [*overrides] if named else [*overrides, "head=eagle"]


@functools.cache
def composed_once(*overrides: str) -> DictConfig:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("train", list(overrides))


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of a training, of head=eagle unless the overrides name another.

    Files are composed once, which takes Hydra ten times as long as setting values in what they give.
    """
    words = with_head(overrides)
    values = [word for word in words if "." in word.partition("=")[0]]
    config = copy.deepcopy(composed_once(*(word for word in words if word not in values)))
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), config)
    return config


def configured(overrides: Sequence[str]) -> RunConfig:
    """Return the typed configuration, unresolved."""
    return run_config(composed(overrides))


def resolved(overrides: Sequence[str]) -> RunConfig:
    """Return a configuration as training takes it."""
    return resolve(composed(overrides))


def placed(run: RunConfig) -> RunConfig:
    """Return a run with what `resolve` fills in by a plan, unchecked."""
    return resolve_placement(on_machine(run))


def start(overrides: list[str]) -> subprocess.Popen[str]:
    """Start a training job, of head=eagle unless the overrides name another."""
    words = [sys.executable, str(ROOT / "train" / "run.py"), *with_head(overrides)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )


def finish(job: subprocess.Popen[str]) -> str:
    """Wait for a job that must succeed; return what it printed."""
    printed, _ = job.communicate(timeout=300)
    assert job.returncode == 0, printed
    return printed


def losses(out: Path) -> dict[int, float]:
    """Return the loss of every step in metrics.jsonl."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}
