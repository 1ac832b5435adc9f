"""A run as training leaves it, with a tiny head, and what its publication holds."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heads import HEADS
from heads.common.resolvers import ROOT
from heads.formats.store import TargetSpec, save_head
from tests.eval.stubs import ROW
from tests.heads.stub import TinyEnds
from train.release.config import PublishConfig

REPO = "me/tiny-medusa"
EVERYTHING = {
    "README.md", "config.json", "config.yaml", "model.safetensors", "report.html", "report.json", "report.md",
    "tokenizer_reference.json", "custom_generate/generate.py",
}  # fmt: skip
VALUES: dict[str, Any] = {
    "repo": REPO, "private": True, "license": "mit", "dry_run": False, "out": None, "format": None,
    "target": None, "gguf": None, "dtype": "bfloat16", "draft_tokens": 3, "verify_prompts": 4, "verify_tokens": 16,
    "tag": None, "base": None,
}  # fmt: skip
SETTINGS = """\
name: tiny-medusa
out: {root}/outputs/tiny-medusa
trainer: {{steps: 40, batch_tokens: 512}}
objective: {{losses: {{soft_ce: 1.0}}, depths: 2}}
"""
RECORDS = [
    {"step": 2, "loss": 3.0, "accuracy": [0.1, 0.1], "rows": 400},
    {"step": 2, "tau": 2.1, "tau_ci": [2.0, 2.2], "best": True},
    {"step": 4, "loss": 2.0, "accuracy": [0.4, 0.2], "rows": 410},
    {"step": 4, "tau": 2.3, "tau_ci": [2.1, 2.5], "best": True},
    {"step": 6, "loss": 1.5, "accuracy": [0.5, 0.3], "rows": 390},
    {"step": 6, "tau": 2.2, "tau_ci": [2.1, 2.3], "best": False},
]
ORIGIN = {
    "git_revision": "c0ffee",
    "command": f"{ROOT}/train/run.py",
    "versions": {"torch": "9"},
    "data_fingerprint": "feed",
    "data": {
        "records": {"Someone/chats:en": 100, "/elsewhere/own.jsonl": 50},
        "kept": {"Someone/chats:en": 90, "/elsewhere/own.jsonl": 50},
        "held_out": 8, "duplicates": 10, "contaminated": 7, "short": 0, "samples": 140, "tokens": 1000, "trained": 400,
    },
    "sources": [
        {"name": "Someone/chats:en", "revision": "abc123"},
        {"name": "/elsewhere/own.jsonl", "sha256": "beef", "answers": {"by": "engine", "target": {"dtype": "bf16"}}},
    ],
}  # fmt: skip


def medusa(seed: int) -> nn.Module:
    """Return a tiny head with weights of its own."""
    torch.manual_seed(seed)
    kind: Any = HEADS["medusa"]
    head: nn.Module = kind(kind.Config("medusa", 2, 1, "shared", None, None), TinyEnds()).to(torch.bfloat16)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    return head


def rows() -> list[dict[str, Any]]:
    """Return rows as a report has them: measured, behind a red gate, under a rate, without a clock, the baseline."""
    gate = {"checked": 16, "identical": 16, "near_tie": 0, "failed": 0}
    row = asdict(
        replace(
            ROW, drafter="medusa", tau=2.345, tau_ci=(2.2, 2.5), accepted_by_depth=[0.8, 0.55], speedup=1.678,
            speedup_ci=(1.5, 1.8), lossless=gate,
        )
    )  # fmt: skip
    red = {"checked": 1, "identical": 0, "near_tie": 0, "failed": 1}
    found = [row, {**row, "workload": "red", "lossless": red}, {**row, "batch_size": 4, "request_rate": 2.0}]
    found.append({**row, "tier": "teacher_forced", "tau": 9.87, "speedup": None, "workload": "my|log"})
    plain = {**row, "drafter": "plain", "tree": "root", "tau": 1.0, "tau_ci": (1.0, 1.0), "speedup": 1.0}
    return [*found, {**plain, "speedup_ci": (1.0, 1.0), "accepted_by_depth": [], "conditional_by_depth": []}]


def write_run(run: Path, spec: TargetSpec) -> Path:
    """Write a run's folder as training and its evaluation leave it."""
    save_head(run / "head", medusa(0), spec, {"kind": "chain", "depth": 2})
    (run / "config.yaml").write_text(SETTINGS.format(root=ROOT))
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    report = {"schema": 1, "target": {}, "device": {"name": "a CPU"}, "settings": {}, "rows": rows()}
    (run / "report.json").write_text(json.dumps(report))
    (run / "report.md").write_text("# Report\n")
    (run / "report.html").write_text("<p>Report</p>")
    (run / "provenance.json").write_text(json.dumps(ORIGIN))
    return run


def config(run: Path, **changes: Any) -> PublishConfig:
    """Return a configuration of the command."""
    return PublishConfig(**{"run": str(run), **VALUES, **changes})
