"""Toy streams that draft varied tokens, and what their tests share."""

import functools
from dataclasses import replace
from typing import Any

import torch

from inference.decode import Generation, Settings, autoregress
from inference.drafters.contrib.streams import Streams, StreamsDrafter, frozen
from inference.drafters.policy import TreeConfig
from inference.target.target import Target
from inference.verification.sample import GREEDY
from tests import toys

TOKENS = 36
CONFIG = Streams.Config(streams=3, layers=2, rank=4, alpha=8, modules=None)
EXACT = {"gemma2": 1e-5}  # its attention takes the softmax in fp32 whatever the model's dtype
DOUBLE = torch.float64
LAYERS = [*((name, 2) for name in toys.ARCHITECTURES), ("llama", None), ("gpt2", None)]


def made(target: Target, config: Streams.Config = CONFIG) -> Streams:
    """Return streams whose weights are large enough that they draft varied tokens."""
    torch.manual_seed(3)
    streams = Streams(config, target)
    for parameter in streams.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return frozen(streams, target)


@functools.cache
def toy(name: str = "llama", dtype: torch.dtype = torch.float32, layers: int | None = 2) -> tuple[Target, Streams]:
    """Return a toy target and its streams, the same every time."""
    target = toys.target(name, dtype)
    return target, made(target, replace(CONFIG, layers=layers))


def source(tree: TreeConfig, dtype: torch.dtype = torch.float32, kind: type[StreamsDrafter] = StreamsDrafter) -> Any:
    target, streams = toy(dtype=dtype)
    return kind(StreamsDrafter.Config("nowhere", tree), target, "streams", streams)


@functools.cache
def text(seed: int, dtype: torch.dtype = torch.float32) -> tuple[list[int], int]:
    """Return a prompt with the target's greedy continuation, and the prompt's length."""
    prompt = toys.prompt(seed)
    return prompt + autoregress(toys.target(dtype=dtype), prompt, Settings(TOKENS, GREEDY)).tokens, len(prompt)


def accepted(run: Generation) -> list[int]:
    return [step.accepted for step in run.steps]
