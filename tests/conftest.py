"""Every test runs with shapes checked, and without a network."""

import copy
import functools
import gc
import os
import socket
from typing import Any

import pytest
import yaml
from httpx._transports import default
from huggingface_hub import constants

from tests import shapes

gc.set_threshold(100_000, 50, 100)  # a fifth of the time would go into looking for garbage among what imports made
shapes.check()  # before the first import of a module under test: it acts on imports to come
parse, parsed = yaml.load, {}


def load_once(text: Any, *unnamed: Any, **named: Any) -> Any:
    """Parse YAML, the same text once: a third of the time of composing a configuration goes into that."""
    content = text if isinstance(text, str | bytes) else text.read()
    (loader,) = (*unnamed, *named.values())
    key = content, loader.__name__  # OmegaConf makes a class of the same name for every file
    if key not in parsed:
        parsed[key] = parse(content, loader)
    return copy.deepcopy(parsed[key])


yaml.load = load_once
default.create_ssl_context = functools.cache(default.create_ssl_context)  # a tenth of a second for each client


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Leave what imports and earlier tests made out of every later `gc.collect()`, which trainings call."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what tests tokenise, also in the processes that they start, out of the user's cache."""
    os.environ["HEADSTART_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def shapes_are_checked_anew() -> None:
    """Check the first calls of each function in this test too."""
    shapes.calls.clear()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests reach this machine alone."""
    connect = socket.socket.connect
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE)  # which a missing connection sets

    def local(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"a test must not use the network: {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local)
