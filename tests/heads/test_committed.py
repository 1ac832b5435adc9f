"""How far back a head looks: the same in training and decoding, and bounded however long the text."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads import rows
from heads.base import Features
from heads.store import CONFIG, load_head, save_head
from inference.decode import Settings, autoregress, speculate
from inference.drafters.head import HeadDrafter
from inference.sample import GREEDY
from tests import toys

DOUBLE = torch.float64
TREE = {"kind": "dynamic", "depth": 4, "top_k": 3, "nodes": 9, "paths": [], "widths": []}
ATTENTIVE = ["eagle", "mtp"]


def head(name: str, length: int | None) -> Any:
    made: Any = toys.head(name, toys.target("llama", DOUBLE))
    made.config = replace(made.config, length=length)
    return made


def features(length: int = 14) -> Features:
    token = torch.tensor([toys.prompt(1, length)])
    return toys.target("llama", DOUBLE).features(token, torch.zeros_like(token))


def part(of: Features, start: int, end: int) -> Features:
    return Features(*(each[:, start:end] for each in of))


@pytest.mark.parametrize("length", [1, 3, 6, 14])
@pytest.mark.parametrize("name", ATTENTIVE)
def test_unroll_looks_back_as_far_as_drafting(name: str, length: int) -> None:
    made, packed, depths = head(name, length), features(), 3
    drafts, following = made.unroll(packed, depths), rows.next_token(packed.token)[0]
    everything = head(name, None).unroll(packed, depths)
    for t in range(10):
        state, level = made.extend(None, part(packed, 0, t + 1), following[: t + 1])
        for depth in range(1, depths + 1):
            torch.testing.assert_close(drafts[depth - 1].logits[0, t], level.logits[0], rtol=1e-9, atol=1e-9)
            token, mask = packed.token[0, t + 1 + depth][None], torch.ones(1, depth, dtype=torch.bool)
            level = made.expand(state, level, token, torch.zeros(1, dtype=torch.long), mask)
    same = torch.isclose(drafts[0].logits, everything[0].logits).all(-1)[0]
    # As far as all of a text is seen it makes no difference; behind, it does, and more so through further layers.
    assert same[:length].all()
    assert not same[length:].any()


@pytest.mark.parametrize("name", ATTENTIVE)
def test_rows_out_of_sight_are_dropped_and_positions_go_on(name: str) -> None:
    made, packed = head(name, 4), features()
    following = rows.next_token(packed.token)[0]
    whole, expected = made.extend(None, packed, following)
    state = level = None
    for start, end in ((0, 5), (5, 6), (6, 13), (13, 14)):
        state, level = made.extend(state, part(packed, start, end), following[start:end])
        assert {key.shape[2] for pair in state.layers for key in pair} == {min(end, 4)}
        assert state.length == end
        assert state.position().tolist() == list(range(max(0, end - 4), end))
    assert level is not None
    torch.testing.assert_close(level.logits, expected.logits, rtol=1e-9, atol=1e-9)
    assert whole.length == 14


def test_a_text_longer_than_the_head_was_built_for_is_decoded_as_ever() -> None:
    target = toys.target()
    made: Any = toys.head("eagle", target)
    assert made.config.length == 12
    prompt = toys.prompt(0, 100)
    expected = autoregress(target, prompt, Settings(60, GREEDY)).tokens
    drafter = HeadDrafter(made, toys.TREES["dynamic"], "eagle")
    assert speculate(target, drafter, prompt, Settings(60, GREEDY)).tokens == expected
    assert drafter.state.length > 150


def test_a_length_below_one_is_refused() -> None:
    config = toys.head("eagle", toys.target()).config
    with pytest.raises(ValueError, match=r"head\.length is 0: give 1 or more, or null"):
        type(toys.head("eagle", toys.target()))(replace(config, length=0), toys.target().ends)


def test_a_head_that_was_saved_without_a_length_looks_at_everything(tmp_path: Path) -> None:
    target, folder = toys.target(), tmp_path / "head"
    save_head(folder, toys.head("eagle", target), target.spec, TREE)
    assert load_head(folder, target.ends, target.spec).config.length == 12
    content = json.loads((folder / CONFIG).read_text())
    del content["head"]["length"]
    (folder / CONFIG).write_text(json.dumps(content))
    assert load_head(folder, target.ends, target.spec).config.length is None
