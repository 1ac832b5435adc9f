"""Heads of ours on the embedded target, exported with other weights than those that they would start with."""

import functools
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from heads import HEADS
from heads.common.resolvers import ROOT
from heads.formats.published.export import TargetFacts, export
from inference.target.embeddings_only import EmbeddingsOnly
from tests.serving.engines import TARGET


@functools.cache
def target() -> EmbeddingsOnly:
    return EmbeddingsOnly.load(str(TARGET), "float32", "cpu", False)


def made(kind: str, **options: Any) -> Any:
    """Return a head as conf/head has it but for options, with random weights; what a run would fill in is null."""
    config: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "head" / f"{kind}.yaml"))
    config.pop("training", None)
    said = {name: None if str(value).startswith("${") else value for name, value in config.items()} | options
    torch.manual_seed(0)
    head: Any = HEADS[kind](HEADS[kind].Config(**said), target().embeddings)
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, mean=float("norm" in name), std=0.05)
    if head.vocab is not None:
        head.vocab.choose(torch.randint(100, (target().embeddings.vocab_size,)))
    return head.requires_grad_(False)


def exported(head: Any, form: str, folder: Path, tokens: int = 3) -> Path:
    served = TargetFacts("tiny", target().config.to_dict(), torch.float32, tokens)
    export(head, form, served, folder)
    return folder
