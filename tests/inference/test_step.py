"""The device step: the reference's tokens, one read by the host, and the same work for a batch of any size."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from inference.batch import Batch, batch_of
from inference.decode import Generation, RequestParams, autoregress, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Baseline
from inference.drafters.policy import TreeConfig
from inference.protocol import Drafter
from inference.request import PhaseTimer
from inference.step import DeviceStep
from inference.target.compiled import Graphs, StageCache
from inference.target.target import Target
from inference.verification.rules import AUTO, RULES, is_lossy
from inference.verification.sample import GREEDY, Sampling
from tests import toys
from tests.inference import accelerator, step_graph
from tests.inference.step_graph import decoded
from tests.oracle import reference
from tests.train import driver
from train.loop import AcceptanceEvaluator

DOUBLE = torch.float64
COPY = 2  # what a batch of one has more or less: what is broadcast from one sequence is copied or is none
PENALISED = Sampling(0.8, 0, 0.9, repetition_penalty=1.3)
READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero", "__array__")
# Every head and tree, and every way of sampling, once.
CASES = [
    "eagle:chain:greedy:llama", "eagle3:static:coupled:mistral", "hass:dynamic:coupled:llama",
    "mtp:best_first:greedy:gpt2",
    "medusa:static:penalised:llama", "hydra:dynamic:greedy:llama", "mlp:best_first:coupled:llama",
    "eagle:deep:greedy:llama",
    "eagle3:few:coupled:llama", "mtp:scant:greedy:llama", "block:chain:penalised:qwen3",
    "eagle3 injected:dynamic:greedy:llama", "plain:chain:coupled:llama",
    "eagle3:dynamic:sampled:gpt2", "medusa:static:point_mass:llama",
    "mtp:sampled:warm:mistral", "plain:chain:sampled:llama",
    "mlp:sampled:recursive:llama",
    "eagle:sampled:match:llama", "hydra:chain:token:llama",
    "eagle:chain:sampled:llama", "hass:wide:warm:llama",
    "eagle3:sampled:traversal at T0:llama",
    "hass:chain:coupled:mixtral", "eagle:best_first:greedy:dynamic rope", "eagle:static:greedy:qwen3 moe",
]  # fmt: skip
GREEDY_TREES = ("chain", "static", "dynamic", "best_first")
STEPPED = ("medusa", "eagle3", "hydra", "mlp", "mtp", "block")  # heads on the dummy accelerator, and eagle
WARM = Sampling(1.2, 0, 1.0)
WAYS: dict[str, tuple[Sampling, str]] = {
    "sampled": (PENALISED, "auto"), "warm": (WARM, "auto"), "token": (WARM, "token"), "match": (WARM, "match"),
    "recursive": (PENALISED, "recursive"),
    "traversal at T0": (GREEDY, "traversal"), "point_mass": (PENALISED, "point_mass"),
    "greedy": (GREEDY, "auto"), "coupled": (PENALISED, "coupled"),
    "penalised": (Sampling(0.0, 0, 1.0, repetition_penalty=1.5), "auto"),
}  # fmt: skip


# Deeper than a ring spares rows, and deeper than there are nodes.
TREES = toys.TREES | {
    "deep": TreeConfig("chain", 70, 0, 0, [], []),
    "few": TreeConfig("dynamic", 6, 3, 4, [], []),
    "scant": TreeConfig("best_first", 6, 0, 5, [], []),
    "wide": TreeConfig("sampled", 0, 0, 0, [], [toys.VOCAB + 2, 1]),  # more children than there are tokens
}


def source(name: str, tree: str, target: Target) -> Drafter:
    if name == "plain":
        return Baseline(target.device)
    head: Any = toys.head(name, target)
    return HeadDrafter(head, TREES[tree], name)


def facts(generation: Generation) -> list[Any]:
    steps = [(s.drafted, s.accepted, s.committed, s.rule, s.ranks) for s in generation.steps]
    return [generation.tokens, generation.origins, generation.finish_reason, steps]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if i % 3 else []) for i, case in enumerate(CASES)]
)
def test_alone_in_batches_and_in_static_shapes_the_reference_is_met(case: str) -> None:
    name, tree, way, architecture = case.split(":")
    target = toys.target(architecture, DOUBLE)
    drafter, (sampling, rule) = source(name, tree, target), WAYS[way]
    target_eos, target.eos = target.eos, frozenset({7})
    try:
        requests = [
            (
                toys.prompt(i, 3 + 7 * i),
                RequestParams(6 + 4 * i, sampling, seed=i, rule=rule, logit_gaps=True, min_new_tokens=i),
            )
            for i in range(3)
        ]
        expected = [reference(target, drafter, *request) for request in requests]
        alone = [speculate(target, drafter, *request) for request in requests]
        prompts, settings = zip(*requests, strict=True)
        ragged = speculate(target, drafter, prompts, settings, batch_size=2)
        static = in_static_shapes(target, drafter, requests)
    finally:
        target.eos = target_eos
    for other in (alone, ragged, static):
        assert [facts(found) for found in other] == [facts(found) for found in expected]
        for found, wanted in zip(other, expected, strict=True):
            torch.testing.assert_close(
                torch.tensor(found.logit_gaps), torch.tensor(wanted.logit_gaps), rtol=1e-4, atol=1e-5
            )
    assert any(toys.lively(found.tokens) for found in expected)


def test_what_is_sampled_otherwise_shares_the_batch() -> None:
    target = toys.target("llama", DOUBLE)
    drafter = source("eagle", "dynamic", target)
    requests = [
        (toys.prompt(i, 4 + i), RequestParams(8 + 4 * i, GREEDY if i != 1 else Sampling(0.9, 0, 1.0), seed=i))
        for i in range(4)
    ]
    prompts, settings = zip(*requests, strict=True)
    found = speculate(target, drafter, prompts, settings, batch_size=2)
    for i in (0, 2, 3):
        assert facts(found[i])[0] == reference(target, drafter, *requests[i]).tokens
    assert facts(found[1]) == facts(reference(target, drafter, *requests[1]))
    assert {step.rule for step in found[1].steps} - {"none"} == {"point_mass"}


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note every read of a tensor's values by the host."""
    noted: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            noted.append(name)
            return original(self, *args, **kwargs)

        return read

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(Tensor, name, noting(name))
        yield noted


def full(target: Target, drafter: Drafter, size: int = 2, sampling: Sampling = GREEDY) -> Batch:
    batch = batch_of(target, drafter, size, [([0] * 9, RequestParams(60, sampling))])
    batch.device_step.fixed_shapes = True
    for slot in range(size):
        batch.admit(slot, toys.prompt(slot, 5 + slot), RequestParams(60, sampling))
    return batch


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic", "best_first", "sampled"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, 0, 1.0)], ids=["T0", "T0.9"])
def test_the_host_reads_once_a_step(tree: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = full(toys.target("llama"), source("eagle3", tree, toys.target("llama")), sampling=sampling)
    batch.step()
    with reads(monkeypatch) as noted:
        for _ in range(3):
            batch.step()
    assert noted.count("tolist") == len(noted) == 3


@pytest.mark.parametrize(("head", "tree"), [("eagle", "static"), ("block both ways", "chain"), ("mtp", "large")])
def test_buffers_stay_where_they_are(head: str, tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TREES, "large", TreeConfig("best_first", 5, 0, 80, [], []))
    batch = full(toys.target("llama"), source(head, tree, toys.target("llama")))
    step: Any = batch.device_step

    def addresses() -> list[int]:
        kept = [step.target.eos_mask, *step.held_tensors()]
        return [tensor.data_ptr() for tensor in kept]

    batch.step()
    before = addresses()
    for _ in range(5):
        batch.step()
    assert addresses() == before


def test_laps_on_a_device_are_read_once_it_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may ask for the time between events of CUDA before the device has passed both."""
    now, passed = itertools.count(), [False]

    def event(enable_timing: bool) -> Any:
        made = SimpleNamespace(query=lambda: passed[0])
        made.record = lambda _: vars(made).update(at=next(now))
        made.elapsed_time = lambda other: 1e3 * (other.at - made.at)
        return made

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    timer = PhaseTimer(torch.device("cuda"))
    for ended in (None, "draft", "verify", None, "draft"):
        timer.mark(ended)
    assert timer.seconds() == {}
    passed[0] = True
    assert timer.seconds() == {"draft": 2.0, "verify": 1.0}


def outcomes(folder: Path, main: Callable[[list[str]], None], cases: list[str]) -> dict[str, Any]:
    """Return what a process of its own prints of cases, as JSON."""
    lines = driver.spawn(folder, 1, main, cases)[0].finish().splitlines()
    return {case: each for line in lines if line.startswith("{") for case, each in json.loads(line).items()}


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the operations of each case on a device that refuses reads and copies, and what it refused."""
    cases = [f"{head}:{tree}:2:greedy:llama" for head, tree in zip(STEPPED, GREEDY_TREES * 2, strict=False)]
    pairs = ("eagle:static:{}:sampled:mistral", "eagle3:sampled:{}:recursive:llama")
    cases += ["eagle:dynamic:2:coupled:mixtral", *(pair.format(size) for pair in pairs for size in (1, 32))]
    found = outcomes(tmp_path_factory.mktemp("job"), accelerator.main, cases)
    assert list(found) == ["refused", *cases]
    return found


def test_no_head_makes_the_host_wait(counts: dict[str, Any]) -> None:
    assert [case for case, found in counts.items() if isinstance(found, str)] == []


def test_the_work_does_not_depend_on_the_batch(counts: dict[str, Any]) -> None:
    pairs = [(case, case.replace(":1:", ":32:")) for case in counts if ":1:" in case]
    assert len(pairs) == 2
    for one, many in pairs:
        for name, count in counts[one].items():
            assert abs(count - counts[many][name]) <= COPY, f"{one}: {name}"


def test_the_budget_of_a_step(counts: dict[str, Any]) -> None:
    """A toy has three layers; attention counts as what it is made of where no kernel of its own is known."""
    assert counts["medusa:chain:2:greedy:llama"]["all"] <= 560
    assert counts["eagle3:static:2:greedy:llama"]["other"] <= 130


def test_a_read_would_be_seen(counts: dict[str, Any]) -> None:
    read, copy = "DataDependentOutputException", "RuntimeError"
    *syncing, mixed = counts["refused"]
    assert syncing == [read, read, copy, copy]
    assert mixed in ("FakeTensorDeviceMismatchError", "RuntimeError"), "the latter before torch 2.12"


@pytest.mark.parametrize(
    "cases",
    [
        ["eagle:dynamic:penalised:captured", "hass:dynamic:greedy:drafts", "side by side"],
        pytest.param(
            [f"{head}:{way}" for head in ("eagle", "hass", "mtp", "hydra", "mlp", "block", "plain")
             for way in ("dynamic:coupled:captured", "chain:sampled:captured", "sampled:recursive:captured",
                         "dynamic:greedy:layers", "chain:sampled:drafts")]
            + ["medusa:best_first:coupled:captured", "mtp:best_first:coupled:drafts", "plain:chain:coupled:layers",
               "by turns"],
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_graphs_of_a_steps_stages_serve_all_that_come_and_go(tmp_path: Path, cases: list[str]) -> None:
    """Captured once, a number that is baked in is wrong in other texts.

    The stages of the head compiled alone are two graphs, its draft and its new rows; in static shapes they come with
    the target's three layers. Of a form that was met before few guards are evaluated, side by
    side: another's graph would draft worse and change no text. Heads that share the target's lm_head draft by turns:
    the rows of one's vocabulary are kept for the last that asked, another's are neither read nor an error.
    """
    found = outcomes(tmp_path, step_graph.main, cases)
    counts = {"drafts": 2, "layers": 5}
    stages = {"drafts": 2, "layers": 2}  # of a head
    expected: dict[str, dict[str, Any]] = {}
    for case in cases:
        head, *_, way = case.split(":") if ":" in case else (case, "")
        count = counts.get(way, 0) - (stages.get(way, 0) if head == "plain" else 0)
        expected[case] = {"same": True, "graphs": count}
    alone = {"side by side": {"same": True, "differing": True, "guarded rarely": True}}
    alone["by turns"] = {"same": True, "differing": True}
    assert found == expected | {case: each for case, each in alone.items() if case in cases}


def test_a_form_is_met_anew_where_its_buffers_moved() -> None:
    stages, buffer = StageCache(), torch.zeros(3)
    for tensor, known in ((buffer, False), (buffer, True), (torch.zeros(3), False)):
        stages.keep([tensor])
        assert ("key" in stages.known) == known
        assert stages("key", lambda x: x + 1, 2) == 3


class Uncaptured(Graphs):
    """Graphs of a device that captures nothing: a stage that would replay runs."""

    def __call__(self, key: Any, stage: Any, *args: Any) -> Any:
        self.captured[key] = None, None
        return stage(*args)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Batch]]:
    """Return the batches that are made from now on, whose graphs are kept as on CUDA."""
    target, made = toys.target("llama", DOUBLE), list[Batch]()
    original = Batch.__init__

    def noted(self: Batch, *args: Any, **named: Any) -> None:
        made.append(self)
        original(self, *args, **named)

    def static(self: DeviceStep, *args: Any) -> None:
        step(self, *args)
        self.fixed_shapes = True

    step = DeviceStep.__init__
    monkeypatch.setattr(DeviceStep, "__init__", static)
    monkeypatch.setattr(Batch, "__init__", noted)
    monkeypatch.setattr("inference.step.Graphs", Uncaptured)
    monkeypatch.setattr(target, "captures", True)
    yield made
    target.idle.clear()


def test_single_requests_share_a_batch_for_each_drafter(made: list[Batch]) -> None:
    """Its graphs would have to be captured again: in an evaluation of single prompts at each of them."""
    target = toys.target("llama", DOUBLE)
    sources = [Baseline(target.device), source("eagle", "dynamic", target)]
    requests = [(toys.prompt(i, 3 + 8 * i), RequestParams(4 + 4 * i, GREEDY)) for i in (1, 0, 2)]
    for request in requests:
        texts = [speculate(target, drafter, *request).tokens for drafter in sources]
        assert texts == [reference(target, drafter, *request).tokens for drafter in sources]
        autoregress(target, *request)  # in the batch of the baseline, whichever object was asked for it before
    assert len(made) == len(target.idle) == 2


def test_rounds_of_a_batch_share_it_while_there_is_memory(made: list[Batch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures of every round would count in its time."""
    target = toys.target("llama", DOUBLE)
    prompts, settings = [toys.prompt(i, 3 + i) for i in range(4)], RequestParams(5, GREEDY)
    sources = [Baseline(target.device), source("eagle", "dynamic", target)]
    expected = [reference(target, sources[0], prompt, settings).tokens for prompt in prompts]
    for drafter in sources * 2:
        found = speculate(target, drafter, prompts, settings, batch_size=3)
        assert [generation.tokens for generation in found] == expected
    assert [len(target.idle), *(batch.cache.storage.size for batch in made)] == [2, 3, 3]
    speculate(target, sources[1], prompts, settings, batch_size=2)
    assert [batch.cache.storage.size for batch in target.idle.values()] == [3, 2]
    monkeypatch.setattr("inference.batch.free_memory", lambda _: sum(made[1].nbytes.values()))
    speculate(target, sources[1], prompts, settings, batch_size=2)
    assert [drafter.name for drafter in target.idle] == ["eagle"], "the oldest went, and what is left has room"
    refused = iter([ValueError("no memory")])

    def full(*_: Any) -> None:
        for error in refused:
            raise error

    monkeypatch.setattr("inference.batch.check_memory", full)
    monkeypatch.setattr("inference.batch.batch_of", lambda *args: full() or batch_of(*args))
    speculate(target, sources[0], prompts, settings, batch_size=3)
    assert [drafter.name for drafter in target.idle] == ["plain"]


def test_a_batch_is_kept_for_its_graphs_alone(made: list[Batch]) -> None:
    """Those of a rollout have none, and hold a copy of the head, as those of a measurement of τ do."""
    target, head = toys.target("llama", DOUBLE), toys.head("eagle", toys.target("llama", DOUBLE))
    with target.uncaptured():
        speculate(
            target, source("eagle", "dynamic", target), toys.prompt(1), RequestParams(9, GREEDY, keep_passes=True)
        )
    assert not target.idle
    config: Any = SimpleNamespace(seed=0, eval_prompts=2, eval_tokens=6)
    evaluator = AcceptanceEvaluator(target, [toys.prompt(i) for i in range(2)], config, TREES["dynamic"], "eagle")
    assert [evaluator.tau(head, bool) is not None for _ in range(2)] == [True, True]
    assert len(made) == 3
    assert not target.idle


def test_the_lm_heads_rows_of_a_head_stay_where_its_graphs_read_them() -> None:
    embeddings = toys.target("llama", DOUBLE).embeddings
    state, sets = torch.randn(2, embeddings.hidden_size, dtype=DOUBLE), [torch.tensor([3, 5]), torch.tensor([1, 2, 4])]
    for ids in sets:
        torch.testing.assert_close(embeddings.logits(state, ids), embeddings.logits(state)[:, ids])
    where = [embeddings._rows(ids).weight.data_ptr() for ids in sets]
    assert [embeddings._rows(ids).weight.data_ptr() for ids in reversed(sets)] == where[::-1]
    count = len(embeddings._rows_by_ids)
    sets.pop()
    del ids
    assert len(embeddings._rows_by_ids) == count - 1, "the rows of a head that is gone"


def test_a_step_that_cannot_be_captured_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Graphs):
        def capture(self, stage: Any, *args: Any) -> tuple[Any, Any]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    batch = full(toys.target("llama"), source("eagle", "chain", toys.target("llama")))
    alike = full(toys.target("llama"), source("eagle", "chain", toys.target("llama")))
    batch.device_step.graphs = Failing(torch.device("cpu"))
    for _ in range(4):
        batch.step()
        alike.step()
    texts = [[request.token_ids for request in one.running] for one in (batch, alike)]
    assert texts[0] == texts[1]
    assert [record.getMessage() for record in caplog.records] == [
        "decoding steps are not captured in CUDA graphs: operation not permitted when stream is capturing"
    ]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return what happens in captures of a device that has none: `fails` says whether one ends in an error."""
    noted = SimpleNamespace(fails=False, calls=[], pools=[], ended=[], stream=SimpleNamespace(device_index=1))

    @contextmanager
    def graph(_graph: Any, *, pool: object, stream: Any, **_: Any) -> Iterator[None]:
        noted.pools.append(pool)
        before, noted.stream = noted.stream, stream
        yield
        if noted.fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        noted.stream = before

    fakes = {"CUDAGraph": lambda: SimpleNamespace(replay=lambda: noted.calls.append("replay")), "graph": graph,
             "device": lambda _: nullcontext(), "graph_pool_handle": object, "Stream": lambda _: object(),
             "current_stream": lambda _: noted.stream,
             "set_stream": lambda stream: vars(noted).update(stream=stream)}  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *what: noted.ended.append(what), raising=False)
    return noted


def test_a_failed_capture_leaves_its_stream_and_ends_its_allocations(captures: SimpleNamespace) -> None:
    """torch leaves both as they are where the capture cannot be ended, and all that follows would fail."""
    graphs, before, captures.fails = Graphs(torch.device("cuda:1")), captures.stream, True
    assert [graphs("key", lambda: 3) for _ in range(2)] == [3, 3]
    assert not graphs.able
    assert captures.stream is before
    assert captures.ended == [(1, captures.pools[0])]


def test_a_second_call_is_captured_and_the_next_ones_replayed_until_a_buffer_moves(captures: SimpleNamespace) -> None:
    graphs, buffers = Graphs(torch.device("cuda:1")), [torch.zeros(1), torch.zeros(1)]
    for buffer in (0, 0, 1):
        graphs.keep([buffers[buffer]])
        for key in "aabb":
            graphs(key, captures.calls.append, key)
    captured = [word for key in "ab" for word in (key, key, "replay")]
    assert captures.calls == [*captured, *["replay"] * 4, *captured]
    assert [captures.pools.index(pool) for pool in captures.pools] == [0, 0, 2, 2]


BLIND = (AUTO, "match", "point_mass", "coupled", "typical", "threshold")  # they read no q: right for any draft
CHAINS = ("token", "block")
FITTING = {  # above temperature 0
    "chain": (AUTO, *RULES),
    "sampled": (*BLIND, "recursive", "traversal"),
    **dict.fromkeys(("static", "dynamic", "best_first"), BLIND),
}
LENGTHS = (2, 4)  # tokens: of the batch of two, a batch of one is left
GREEDILY = (AUTO, "traversal", "typical", *CHAINS)  # the others are the same walk at temperature 0


@pytest.mark.parametrize("tree", FITTING)
def test_a_rule_decodes_what_it_is_for_and_refuses_the_rest(tree: str) -> None:
    target = toys.target("llama", DOUBLE)
    drafter = source("medusa", tree, target)
    cases = [*itertools.product((AUTO, *RULES), [Sampling(1.2, 0, 1.0)]), *itertools.product(GREEDILY, [GREEDY])]
    for rule, sampling in cases:
        requests = [
            (toys.prompt(i, 4 + i), RequestParams(length, sampling, seed=i, rule=rule, lossy=is_lossy(rule)))
            for i, length in enumerate(LENGTHS)
        ]
        ways = [
            lambda requests: [reference(target, drafter, *request) for request in requests],
            lambda requests: speculate(target, drafter, *zip(*requests, strict=True), batch_size=2),
            lambda requests: in_static_shapes(target, drafter, requests),
        ]
        if rule in FITTING[tree] or (sampling.temperature == 0 and rule not in CHAINS):
            expected, *others = ([facts(generation) for generation in way(requests)] for way in ways)
            assert others == [expected, expected], (rule, sampling)
            continue
        for way in ways:
            with pytest.raises(ValueError, match=f"^rule={rule} .*: choose rule=auto"):
                way(requests)


def in_static_shapes(
    target: Target, drafter: Drafter, requests: list[tuple[list[int], RequestParams]]
) -> list[Generation]:
    batch = batch_of(target, drafter, min(2, len(requests)), requests)
    batch.device_step.fixed_shapes = target.takes_trees
    return decoded(batch, requests)
