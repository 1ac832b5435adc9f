"""Features from a vLLM server: the live ones, in the order of seed and step, whatever the server does."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.batches import Batches, Packed
from data.features.served import LayerIds, ServedFeatures, VllmServers, pieces
from data.features.source import LiveFeatures
from data.features.store import FeatureRequest
from inference.target.embeddings import final_norm
from inference.target.target import Target
from tests import toys
from tests.data import asking, stores
from tests.data.chat_server import MODEL, honest, raw, reset, status
from tests.data.states_server import StatesServer, changed, late, none, torn, unanswered
from tests.data.test_stored import LAYERS, batches, config, same, steps
from tests.refusals import refuses

IDS = [1, 3]  # what leaves the first layer of three, and the last one; the last is a feature layer too


@pytest.fixture
def target() -> Target:
    return toys.target()


@pytest.fixture
def packed() -> Packed:
    return stores.packed()


@pytest.fixture
def server(target: Target, tmp_path: Path) -> Iterator[StatesServer]:
    with StatesServer(target, tmp_path / "states", IDS) as running:
        yield running


def servers(
    *running: StatesServer, ids: Any = IDS, folder: Path | None = None, of: tuple[int, ...] = LAYERS, **changed: Any
) -> VllmServers:
    """Return the servers for training, which wait little between retries."""
    values = {"concurrency": 4, "timeout": 5.0, "retries": 3, "backoff": 0.001, **changed}
    urls = [each.url for each in running]
    where = config(mode="engine", path=None, url=urls, vllm=str(folder or running[0].folder))
    layers = LayerIds.of(ids, of, 3)
    return VllmServers(replace(where, endpoint=asking.config(**values)), layers, 32)


def checked(packed: Packed, target: Target, found: VllmServers) -> VllmServers:
    found.check(next(pieces(packed, 0)), final_norm(target.base, 3), target.embeddings)
    return found


def served(
    packed: Packed, target: Target, *running: StatesServer, of: Batches | None = None,
    layers: tuple[int, ...] = LAYERS, **changed: Any,
) -> ServedFeatures:  # fmt: skip
    found = checked(packed, target, servers(*running, of=layers, **changed))
    form, norm = FeatureRequest(layers, torch.float32), final_norm(target.base, 3)
    return ServedFeatures(found, of or batches(packed), form, norm, torch.device("cpu"), 3)


def test_served_features_are_the_live_ones_and_no_file_stays(
    packed: Packed, target: Target, server: StatesServer
) -> None:
    layers = LAYERS[:1]
    source = served(packed, target, server, layers=layers)
    same(steps(source, 4), steps(LiveFeatures(target, batches(packed), layers), 4), 1e-5)
    assert source.close() == "features: 16 sequences served"
    assert server.leftovers() == []


def test_answers_in_another_order_are_put_where_they_belong(
    packed: Packed, target: Target, server: StatesServer
) -> None:
    source = served(packed, target, server)
    server.writes = [late(0.2), late(0.1), *[late(0.0)] * 5] * 3
    same(steps(source, 2), steps(LiveFeatures(target, batches(packed), LAYERS), 2), 1e-5)
    assert source.stall > 0.1
    source.close()


@pytest.mark.parametrize("fault", [status(503), raw(b"nonsense"), unanswered])
def test_a_request_that_fails_is_sent_again(packed: Packed, target: Target, server: StatesServer, fault: Any) -> None:
    source = served(packed, target, server, timeout=0.5)
    server.script = [fault, honest, fault, fault]
    server.writes = [none, torn, late(2.0)]  # a file that is not written whole in time is asked for again too
    same(steps(source, 2), steps(LiveFeatures(target, batches(packed), LAYERS), 2), 1e-5)
    source.close()
    assert server.leftovers() == [], "not even the file of a request that was given up"


def test_a_server_that_is_gone_stops_the_run_in_one_line(packed: Packed, target: Target, server: StatesServer) -> None:
    source = served(packed, target, server, retries=1)
    server.always = reset
    begin = time.monotonic()
    refuses(f"{server.url}: unreachable .*resume=true continues", steps, source, 3)
    source.close()
    assert time.monotonic() - begin < 30


def test_the_next_server_is_asked_where_one_fails(
    packed: Packed, target: Target, server: StatesServer, tmp_path: Path
) -> None:
    with StatesServer(target, server.folder, IDS) as other:
        source = served(packed, target, server, other, retries=1)
        same(steps(source, 2), steps(LiveFeatures(target, batches(packed), LAYERS), 2), 1e-5)
        assert min(len(server.bodies), len(other.bodies)) > 1
        server.always = reset
        same([m.read() for m in source(2)], steps(LiveFeatures(target, batches(packed), LAYERS), 3)[-2:], 1e-5)
        source.close()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (changed(hidden_states=lambda x: x[:, :1]), r"sequence \d+ from position \d+ on: hidden states of shape"),
        (changed(hidden_states=lambda x: x[1:]), "hidden states of shape .*check features.vllm_layers"),
        (changed(hidden_states=lambda x: x.to(torch.float8_e4m3fn)), "in torch.float8_e4m3fn, not .* in 16 or 32 bits"),
        (changed(token_ids=lambda x: x + 1), "those of other tokens; start vLLM as docs"),
    ],
)
def test_states_of_something_else_stop_the_run_in_one_line(
    packed: Packed, target: Target, server: StatesServer, write: Any, message: str
) -> None:
    source = served(packed, target, server)
    server.always_writes = write
    line = refuses(message, steps, source, 1)
    assert server.url in line
    source.close()
    with pytest.raises(ValueError, match=message):
        checked(packed, target, servers(server))


def refuse(packed: Packed, target: Target, found: VllmServers, message: str) -> None:
    refuses(message, checked, packed, target, found)


def test_a_server_is_checked_before_training(
    packed: Packed, target: Target, server: StatesServer, tmp_path: Path
) -> None:
    refuse(packed, target, servers(server, model="another"), f"{server.url} serves {MODEL}, not another")
    with StatesServer(toys.target("gpt2"), server.folder, IDS) as running:  # another target of the same sizes
        refuse(
            packed, target, servers(server, running), f"{running.url}: .* predicts another next token than this target"
        )
    (tmp_path / "elsewhere").mkdir()
    refuse(packed, target, servers(server, folder=tmp_path / "elsewhere"), "which is not there; start vLLM as docs")
    with pytest.raises(ValueError, match=r"features.vllm_layers is \[1, 2\], without \[3\]"):
        servers(server, ids=[1, 2])
    refuse(packed, target, servers(server, ids=[3, 1]), f"{MODEL} predicts another next token than this target")
    server.always = status(400, "too long")
    refuse(packed, target, servers(server), f"{server.url}: http_400 .too long.; start vLLM as docs")
    server.always = honest
    server.named = lambda _: {}
    refuse(packed, target, servers(server), "names no file of hidden states; start vLLM")
    server.named = lambda _: {"hidden_states_path": "/etc/.."}
    refuse(packed, target, servers(server), "no file of that folder")
    server.models = {"data": [{"id": MODEL, "max_model_len": 16}]}
    refuse(packed, target, servers(server), "takes 16 tokens, and a document of 16 with its next token is longer")
    server.shutdown()
    server.server_close()
    refuse(packed, target, servers(server, retries=1), f"{server.url}/models: unreachable .*correct features.url=")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "stored"}, "features.path is missing: features=stored needs the store's folder"),
        ({"url": []}, "features=engine needs features.url"),
        ({"path": "store"}, "features=engine reads no store: leave features.path"),
        ({"vllm": None}, "features=engine needs .*features.vllm"),
        ({"url": ["localhost:8000"]}, "features.url=localhost:8000: give a URL such as"),
    ],
)
def test_settings_that_cannot_work_are_named(values: dict[str, Any], message: str) -> None:
    whole = {"mode": "engine", "path": None, "url": ["http://localhost:1/v1"], "vllm": "x"}
    with pytest.raises(ValueError, match=message):
        config(**{**whole, **values})
