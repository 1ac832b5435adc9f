"""Whatever stands in a file from outside, its reader ends with a value or a ValueError of one line.

It writes nothing, takes no memory that the file does not have, and ends. `make fuzz` tries 100,000 inputs.
"""

import hashlib
import json
import os
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from data.features.served import STATES, TOKENS, LayerIds, read_tensors
from data.features.store import FeatureStore
from data.text.records import read as record
from data.text.sources import open_source
from eval.config import Selection
from eval.inputs.drafters import model_of
from eval.inputs.workloads import read_workload
from eval.report.write import read_report
from heads.common.typed import from_yaml, typed
from heads.formats import lora
from heads.formats.published import load_published
from heads.formats.store import load_head, save_head, save_tree
from inference.drafters.head import saved_trees
from inference.drafters.policy import TreeConfig
from ops.loop import requests_of
from ops.watch import Log, WatchConfig, growing
from tests import toys
from tests.data import stores
from tests.eval.test_report import full_report
from tests.eval.test_sources import NOTHING, OWN
from tests.fuzzing import CUTS, broken, cut, encoded
from tests.heads.published import eagle3_authors, publish
from train import checkpoint

ALL = 100_000  # inputs of `make fuzz`
FEW = 50  # of each reader otherwise
ROUND = 1_000
LOGS = Path(__file__).parent / "data" / "logs"
PATIENCE = 60  # seconds for one input
ROOM = 400 << 20  # bytes that the process may grow by
LONGEST = 20_000  # characters of an error
TREE = {"kind": "static", "depth": 4, "top_k": 3, "nodes": 9, "paths": [[0], [1], [0, 0]], "widths": [2, 1]}
RECORDS = [
    {"id": "a", "messages": [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]},
    {"conversations": [{"from": "human", "value": "w4"}], "category": "x"},
    {"prompt": "w5 w6", "answer": "w7"},
    {"id": "p", "token": [1, 2, 3], "category": "", "question": "w1"},
    {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "id": 3},
    {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]},
    {"request": {"input_ids": [1]}, "response": {"output_ids": [2, 3], "meta_info": {"completion_tokens": 1}}},
    {"prompt_token_ids": [1], "choices": [{"token_ids": [2]}], "tokens": [{"prompt_token_ids": [1], "token_ids": [2]}]},
    {"uid": "u", "turns": [{"content": "w1"}]},
    {"_id": "l", "context": "w1", "input": "w2", "answers": ["w3"]},
    {"id": "s", "token": [1, 2], "category": "x", "text": "w1", "system": ""},
    {
        "messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "", "tool_calls": "[]"}],
        "tools": "[]",
    },
]


class Reader(NamedTuple):
    """A file that is read, what a whole one says, how that is written, and who reads it."""

    file: Path
    whole: Any
    written: Callable[[Any], bytes]
    read: Callable[[], object]


def signed(value: Any) -> bytes:
    """Return JSON with the checksum that its reader asks for."""
    if not isinstance(value, dict):
        return encoded(value)
    value = {key: each for key, each in value.items() if key != "sha256"}
    return encoded({**value, "sha256": hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()})


def tensors(data: bytes, value: Any) -> bytes:
    """Return a safetensors file of a header and the bytes behind it."""
    header = encoded(value)
    return struct.pack("<Q", len(header)) + header + data


def with_header(file: Path, read: Callable[[], object]) -> Reader:
    """Return the reader of a safetensors file, whose header is broken."""
    data = file.read_bytes()
    size = 8 + struct.unpack("<Q", data[:8])[0]
    return Reader(file, json.loads(data[8:size]), partial(tensors, data[size:]), read)


def lines(value: Any) -> bytes:
    """Return JSON Lines."""
    return b"\n".join(map(encoded, value)) if isinstance(value, list) else encoded(value)


def head(folder: Path) -> object:
    target = toys.target()
    loaded = load_head(folder, target.embeddings, target.spec)
    tree, schedule = saved_trees(folder, {})
    return loaded, tree.label, tree.tree_depth, schedule and (schedule.label, schedule.at(2))


def tree(file: Path) -> object:
    made = typed(TreeConfig, value if isinstance(value := json.loads(file.read_bytes()), dict) else {"kind": value})
    return made.label, made.tree_depth, made.shape()


def store(folder: Path) -> object:
    opened = FeatureStore(folder)
    opened.check(stores.spec(), ("length", "rows", "layers"))
    return [opened.read(row) for row in range(opened.spec.rows) if opened.has(row)]


def resumed(folder: Path) -> object:
    if said := checkpoint.defect(folder, 0, 1):
        raise ValueError(said)
    return list(checkpoint.tensors(folder))


def workload(file: Path) -> object:
    return read_workload(str(file), toys.target(), Selection(8, 0, True, "all", False), lambda _: "w1")


def logged(file: Path) -> object:
    """Read a log as the watch and the adaptation do."""
    config = from_yaml(WatchConfig, "ops/watch", log="log", follow=False)
    requests = requests_of(growing(file, follow=False, poll=1.0), str(file))
    return list(requests), list(Log(file, config, None))


def shapes(file: Path) -> object:
    """Read the log of a proxy, a tracer or an agent as training does."""
    return [record(raw, index, str(file)) for index, raw in enumerate(open_source(str(file), ""))]


def logs_of(root: Path) -> dict[str, Reader]:
    """Return the reader of every shape of logs."""
    made = {}
    for file in sorted(LOGS.glob("*.jsonl")):
        copied = root / file.name
        whole = [json.loads(line) for line in file.read_text().splitlines()]
        made[file.stem] = Reader(copied, whole, lines, partial(shapes, copied))
    return made


def heads_of(root: Path) -> dict[str, Reader]:
    """Return the readers of heads, our own and others'."""
    target = toys.target()
    for name in ("config", "header"):
        save_head(root / name, toys.head("medusa", target), target.spec, TREE)
    scheduled = [{"batch_size": 1, "tree": TREE}, {"batch_size": 4, "tree": None}]
    save_tree(root / "config", TREE, scheduled)
    config = root / "config" / "config.json"
    _, held, said = eagle3_authors()
    foreign = publish(root / "foreign", held, said)
    sharded = publish(root / "sharded", held, said, "one.safetensors")
    index = sharded / "model.safetensors.index.json"
    shards = {"weight_map": dict.fromkeys(held, "one.safetensors")}
    matrices = [{"fc.weight": torch.full((4, 4), value)} for value in (0.0, 1.0)]
    adapted = [root / "adapter config", root / "adapter"]
    for folder, (name, data) in product(adapted, lora.adapter_files("me/base", *matrices, 2).items()):
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    adapter = (adapted[0] / lora.CONFIG).read_bytes()
    return {
        "adapter config": Reader(
            adapted[0] / lora.CONFIG, json.loads(adapter), encoded, partial(lora.read_adapter, adapted[0])
        ),
        "adapter": with_header(adapted[1] / lora.WEIGHTS, partial(lora.read_adapter, adapted[1])),
        "head config": Reader(config, json.loads(config.read_bytes()), encoded, partial(head, root / "config")),
        "header": with_header(root / "header" / "model.safetensors", partial(head, root / "header")),
        "published config": Reader(
            foreign / "config.json", said, encoded, partial(load_published, foreign, target.embeddings)
        ),
        "safetensors index": Reader(index, shards, encoded, partial(load_published, sharded, target.embeddings)),
    }


def vllm_states(file: Path) -> object:
    token, states = read_tensors(file, 0.0, TOKENS, STATES)
    LayerIds(2, [0], 1).check(states, 4, 8, file)
    return token.tolist(), states[:, [0]].float()


def stored_of(root: Path) -> dict[str, Reader]:
    """Return the readers of what training and extraction keep."""
    made = {}
    for name, file in (("store meta", "meta.json"), ("store entry", "index/a.json")):
        opened = FeatureStore.create(root / name, stores.spec())
        opened.write("a", [0, 1], stores.made([0, 1]))
        whole = json.loads((root / name / file).read_bytes())
        made[name] = Reader(root / name / file, whole, signed, partial(store, root / name))
    states = root / "states.safetensors"
    save_file({"token_ids": torch.arange(4), "hidden_states": torch.zeros(4, 2, 8)}, states)
    made["vllm states"] = with_header(states, partial(vllm_states, states))
    kept = root / "checkpoint" / "step-00000001"
    held = {"a": toys.head("medusa", toys.target()).state_dict()["blocks.0.0.linear.bias"]}
    checkpoint.write_shard(kept.with_name(".partial-1"), 0, 1, held)
    checkpoint.commit(kept.with_name(".partial-1"), kept, 1, ["a"], {"step": 1})
    index = kept / "index.json"
    made["checkpoint index"] = Reader(index, json.loads(index.read_bytes()), signed, partial(resumed, kept))
    return made


def read_of(root: Path) -> dict[str, Reader]:
    """Return the readers of reports, prompts, trees and runs."""
    run = root / "run"
    save_head(run / "head", toys.head("medusa", toys.target()), toys.target().spec, TREE)
    config = {"model": {**OWN, "shape": None, "devices": [0], "memory_gb": 1.5}, "head": {"layers": 1}}
    file, told = root / "report.json", full_report().as_dict()
    return {
        "config.yaml": Reader(run / "config.yaml", config, encoded, partial(model_of, str(run), NOTHING)),
        "report": Reader(file, told, encoded, lambda: read_report(file)),
        "workload": Reader(root / "w.jsonl", RECORDS, lines, partial(workload, root / "w.jsonl")),
        "log": Reader(
            root / "log.jsonl", [{**RECORDS[4], "accepted": [0, 1]}], lines, partial(logged, root / "log.jsonl")
        ),
        "tree": Reader(root / "tree.json", TREE, encoded, partial(tree, root / "tree.json")),
    }


NAMES = [
    "head config", "header", "published config", "safetensors index", "store meta", "store entry",
    "checkpoint index", "config.yaml", "report", "workload", "tree",
    "vllm states", "adapter config", "adapter", "log", *sorted(file.stem for file in LOGS.glob("*.jsonl")),
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def readers(root: Path) -> dict[str, Reader]:
    inner = root / "inner"
    inner.mkdir()
    return heads_of(inner) | stored_of(inner) | read_of(inner) | logs_of(inner)


def listing(root: Path) -> set[tuple[str, int]]:
    return {(str(path), path.lstat().st_size) for path in [root, *root.rglob("*")]}


@contextmanager
def ending() -> Iterator[None]:
    """Fail where the block does not end."""

    def stop(*_: object) -> None:
        raise AssertionError(f"an input takes more than {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def survives(reader: Reader, root: Path, content: bytes) -> None:
    """Check that a reader takes a file, or refuses it as it should."""
    reader.file.write_bytes(content)
    before = listing(root)
    with ending():
        try:
            reader.read()
        except ValueError as error:
            said = str(error)
            assert "\n" not in said, said
            assert len(said) < LONGEST
    assert listing(root) == before


def fuzz(reader: Reader, root: Path, count: int) -> None:
    whole = st.builds(reader.written, broken(reader.whole))
    bent = st.builds(cut, st.just(reader.written(reader.whole)), CUTS)
    both = st.builds(cut, whole, CUTS)

    content = st.one_of(whole, bent, both)
    # Not `explain`, which traces every input; and rounds, for hypothesis keeps every choice of one.
    chosen = settings(
        database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink)
    )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for begin in range(0, count, ROUND):

        @seed(begin)
        @settings(chosen, max_examples=min(ROUND, count - begin))
        @given(content)
        def tried(content: bytes) -> None:
            survives(reader, root, content)

        tried()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown
    assert grown * 1024 < ROOM


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tree"])  # which is read here
def test_a_pipe_is_not_waited_for(name: str, readers: dict[str, Reader]) -> None:
    reader, said = readers[name], list[str]()

    def read() -> None:
        try:
            reader.read()
        except ValueError as error:
            said.append(str(error))

    reader.file.unlink(missing_ok=True)
    os.mkfifo(reader.file)
    thread = Thread(target=read, daemon=True)  # one that waits for a pipe hears no signal
    thread.start()
    thread.join(PATIENCE)
    reader.file.unlink()
    assert not thread.is_alive()
    assert not any("\n" in line for line in said)


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_file_is_read_and_broken_ones_are_refused_in_one_line(
    name: str, readers: dict[str, Reader], root: Path
) -> None:
    reader = readers[name]
    reader.file.write_bytes(reader.written(reader.whole))
    reader.read()
    fuzz(reader, root, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_broken_files_are_refused_in_one_line(name: str, readers: dict[str, Reader], root: Path) -> None:
    fuzz(readers[name], root, -(-ALL // len(NAMES)))
