"""The device that the tests of this folder run on: CUDA's, or the one that HEADSTART_TEST_DEVICE names."""

import copy
import os
from collections.abc import Callable

import pytest
import torch

from inference.target.target import Target
from tests import toys

On = Callable[[str, torch.dtype], Target]


@pytest.fixture(scope="session")
def device() -> torch.device:
    wanted = torch.device(os.environ.get("HEADSTART_TEST_DEVICE", "cuda"))
    if wanted.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    return wanted


@pytest.fixture(scope="session")
def target_on(device: torch.device) -> On:
    """Return how a toy target is put on the device, in a dtype."""
    made: dict[tuple[str, torch.dtype], Target] = {}

    def on(name: str, dtype: torch.dtype) -> Target:
        if (name, dtype) not in made:
            cpu = toys.target(name)
            made[name, dtype] = Target(copy.deepcopy(cpu.model).to(device, dtype), cpu.tokenizer, name)
        return made[name, dtype]

    return on
