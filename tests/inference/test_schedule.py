"""A schedule of trees: the text stays, and what is drafted after a pause is what a head that never paused drafts."""

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.formats.store import save_head, save_tree
from inference.batch import batch_of
from inference.decode import Generation, RequestParams, autoregress, speculate
from inference.drafters.head import HeadDrafter, load_drafter
from inference.drafters.policy import Schedule, ScheduleLine, TreeConfig, best_schedule
from inference.target.target import Target
from inference.verification.sample import GREEDY
from tests import oracle, toys
from tests.inference.test_step import WAYS, facts, reads

DOUBLE = torch.float64
CHAIN, DYNAMIC, STATIC = (toys.TREES[name] for name in ("chain", "dynamic", "static"))
# Wide enough for most of a toy's 40 tokens, so that the ranks of the accepted ones show what the head has taken in.
WIDE = [TreeConfig("dynamic", 2, 30, 36, [], []), TreeConfig("best_first", 2, 0, 34, [], [])]
SWITCHING = best_schedule([(1, WIDE[0]), (2, None), (3, WIDE[1]), (4, None)])
Taken = list[TreeConfig | None]


def drafter(name: str, target: Target, schedule: Schedule) -> HeadDrafter:
    return HeadDrafter(toys.drafter(name, target, "chain").head, CHAIN, name, schedule)


def decoded(
    target: Target, source: HeadDrafter, requests: list[tuple[list[int], RequestParams]], size: int, static: bool
) -> tuple[list[Generation], list[Taken]]:
    """Decode requests that come and go; return with each the trees of its steps."""
    batch = batch_of(target, source, size, requests)
    batch.device_step.fixed_shapes = static
    waiting, made, taken = list(enumerate(requests)), dict[int, Generation](), [Taken() for _ in requests]
    for turn in itertools.count():
        if waiting and batch.free and turn % 5 < 2:  # else the batch would be full all the time
            number, request = waiting.pop(0)
            made[number] = batch.admit(number, *request)
        tree = source.schedule.at(len(batch.running) or 1)
        for running in batch.running:
            taken[running.request_index].append(tree)
        if batch.running:
            batch.step()
            batch.release()
        elif not waiting:
            break
    return [made[number] for number in range(len(requests))], taken


@pytest.mark.parametrize(
    ("case", "static"),
    [
        ("eagle:greedy", False),
        ("medusa:penalised", True),
        ("eagle3 injected:coupled", True),
        *(pytest.param(case, static, marks=pytest.mark.slow)
          for case in ("eagle3:coupled", "mtp:greedy", "block:penalised", "hydra:coupled") for static in (False, True)),
    ],
)  # fmt: skip
def test_drafts_after_a_pause_are_those_of_a_head_that_never_paused(case: str, static: bool) -> None:
    name, way = case.split(":")
    target, (sampling, rule) = toys.target("llama", DOUBLE), WAYS[way]
    source = drafter(name, target, SWITCHING)
    requests = [
        (toys.prompt(i, 3 + 5 * i), RequestParams(5 + (17 * i) % 29, sampling, seed=i, rule=rule)) for i in range(12)
    ]
    made, taken = decoded(target, source, requests, 4, static)
    for one, request, its in zip(made, requests, taken, strict=True):
        assert facts(one) == facts(oracle.reference(target, source, *request, its))
        assert len(one.steps) == len(its)
        assert all(
            (step.drafted, step.rule) == (0, "none") for step, tree in zip(one.steps, its, strict=True) if not tree
        )
    switched = [sum(a is not b for a, b in itertools.pairwise(its)) for its in taken]
    assert max(switched) > 1
    assert sum(step.accepted for one in made for step in one.steps) > 5
    assert any(toys.lively(one.tokens) for one in made)


def test_a_paused_step_reads_once_and_moves_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.target("llama")
    source = drafter("eagle3", target, best_schedule([(1, CHAIN), (2, None)]))
    batch = batch_of(target, source, 2, [([0] * 9, RequestParams(90, GREEDY))])
    step: Any = batch.device_step
    step.fixed_shapes = True
    for slot in range(2):
        batch.admit(slot, toys.prompt(slot, 5 + slot), RequestParams(90, GREEDY))

    def addresses() -> list[int]:
        halves = (half for pair in step.draft_batch.cache.layers for half in pair)
        return [each.data_ptr() for each in (step.draft_batch.cache.length, *halves)]

    batch.step()
    before = addresses()
    with reads(monkeypatch) as noted:
        for _ in range(20):
            batch.step()
    assert noted == ["tolist"] * 20
    assert addresses() == before


def test_a_request_that_comes_and_goes_at_the_border_starts_no_text_again() -> None:
    source = drafter("eagle", toys.target("llama", DOUBLE), best_schedule([(1, CHAIN), (9, None)]))
    drafts = source.batch(12)
    resumed = [drafts.needs_prefill(running) for running in (8, 9, 8, 9, 8, 7, 8, 9, 6)]
    assert resumed == [False, False, False, False, False, True, False, False, True]
    drafts = HeadDrafter(source.head, CHAIN, "", Schedule([*source.schedule.lines, ScheduleLine(16, CHAIN)])).batch(20)
    assert [drafts.needs_prefill(running) for running in (13, 13, 16)] == [False, False, True]


def test_a_head_that_never_drafts_decodes_as_the_baseline_does() -> None:
    target = toys.target("llama", DOUBLE)
    source = drafter("eagle", target, best_schedule([(4, None)]))
    assert (source.tree, source.schedule.lines) == ("none", [ScheduleLine(1, None)])
    request = toys.prompt(1, 9), RequestParams(20, GREEDY)
    assert facts(speculate(target, source, *request))[:1] == facts(autoregress(target, *request))[:1]


def test_best_trees_by_size_make_a_schedule() -> None:
    made = best_schedule([(2, DYNAMIC), (8, CHAIN), (16, CHAIN), (32, None)])
    assert made.lines == [ScheduleLine(1, DYNAMIC), ScheduleLine(8, CHAIN), ScheduleLine(32, None)]
    assert [made.at(running) for running in (1, 7, 8, 31, 32, 99)] == [DYNAMIC, DYNAMIC, CHAIN, CHAIN, None, None]
    assert made.label == "dynamic-d4k3n9, chain-4 from 8, none from 32"
    assert made.trees == [DYNAMIC, CHAIN]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = toys.target()
    save_head(tmp_path / "head", toys.head("eagle", target), target.spec, asdict(DYNAMIC))
    return tmp_path / "head"


def test_a_saved_schedule_is_drafted_by_unless_a_tree_is_given(folder: Path) -> None:
    target = toys.target()
    assert load_drafter(folder, {}, target, "eagle").schedule.lines == [ScheduleLine(1, DYNAMIC)]
    schedule = best_schedule([(1, DYNAMIC), (4, STATIC), (9, None)])
    save_tree(folder, asdict(DYNAMIC), asdict(schedule)["lines"])
    loaded = load_drafter(folder, {"kind": None}, target, "eagle")
    assert (loaded.schedule, loaded.policy) == (schedule, DYNAMIC)
    given = load_drafter(folder, {"kind": "chain", "depth": 2}, target, "eagle")
    assert (given.tree, given.schedule.lines[1:]) == ("chain-2", [])
    deep = best_schedule([(1, DYNAMIC), (4, TreeConfig("chain", target.max_model_len, 0, 0, [], []))])
    save_tree(folder, asdict(DYNAMIC), asdict(deep)["lines"])
    with pytest.raises(ValueError, match="tree chain-160: a tree of 161 nodes is larger"):
        load_drafter(folder, {}, target, "eagle")
    save_tree(folder, asdict(CHAIN))
    assert load_drafter(folder, {}, target, "eagle").tree == "chain-4"
    assert "schedule" not in json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("often", r"schedule.lines is 'often', expected a list"),
        ([3], r"schedule.lines\[0\] is 3, expected a mapping"),
        ([], r"schedule has the batch sizes \[\]: give them in ascending order, from 1 on"),
        ([{"batch_size": 2, "tree": None}], r"batch sizes \[2\]"),
        ([{"batch_size": size, "tree": None} for size in (1, 4, 2)], r"batch sizes \[1, 4, 2\]"),
        ([{"batch_size": 1, "tree": {"kind": "bush"}}], r"schedule.lines\[0\].tree.depth, .* are missing"),
        ([{"batch_size": 0, "tree": None}], r"schedule.lines\[0\].batch_size is 0: give 1 or more"),
        ([{"batch_size": 1, "tree": asdict(CHAIN) | {"depth": 0}}], "tree.depth is 0"),
    ],
)
def test_a_bad_schedule_is_refused_in_a_line(folder: Path, lines: Any, named: str) -> None:
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**content, "schedule": lines}), encoding="utf-8")
    with pytest.raises(ValueError, match=named) as error:
        load_drafter(folder, {}, toys.target(), "eagle")
    assert str(error.value).startswith(str(folder))


def test_a_schedule_drafts_chains_where_the_target_takes_no_trees(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = toys.target()
    save_tree(folder, asdict(CHAIN), asdict(best_schedule([(1, CHAIN), (2, DYNAMIC)]))["lines"])
    monkeypatch.setattr(target, "takes_trees", False)
    schedule = load_drafter(folder, {}, target, "eagle").schedule
    assert [tree.kind for tree in schedule.trees] == ["chain", "chain"]
