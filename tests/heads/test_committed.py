"""How far back a head looks: the same in training and decoding, and bounded however long the text."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads import rows
from heads.base import Features
from heads.common.typed import typed
from heads.formats.store import CONFIG, load_head, save_head
from heads.modules.kv_cache import SPARE
from inference.decode import Settings, autoregress, speculate
from inference.drafters.head import HeadDrafter
from inference.verification.sample import GREEDY
from tests import drafting, toys
from tests.inference.model_free import Recorder

DOUBLE = torch.float64
TREE = {"kind": "dynamic", "depth": 4, "top_k": 3, "nodes": 9, "paths": [], "widths": []}
ATTENTIVE = ["eagle", "mtp", "hass", "eagle3", "eagle3 injected", "hydra", "block", "block both ways"]


def head(name: str, length: int | None) -> Any:
    made: Any = toys.head(name, toys.target("llama", DOUBLE))
    for part in made.modules():
        if hasattr(part, "config"):
            part.config = replace(made.config, length=length)
    return made


def features(of: Any, length: int = 14) -> Features:
    target, token = toys.target("llama", DOUBLE), torch.tensor([toys.prompt(1, length)])
    return target.features(token, torch.zeros_like(token), of.feature_layers)


def part(of: Features, start: int, end: int) -> Features:
    return Features(*(each[:, start:end] for each in of[:4]))


@pytest.mark.parametrize("length", [1, 3, 6, 14])
@pytest.mark.parametrize("name", ATTENTIVE)
def test_unroll_looks_back_as_far_as_drafting(name: str, length: int) -> None:
    made, depths = head(name, length), 4
    packed = features(made)
    drafts, following = made.unroll(packed, depths), rows.next_token(packed.token)[0]
    everything = head(name, None).unroll(packed, depths)
    for t in range(9):
        state, level = drafting.extend(made, None, part(packed, 0, t + 1), following[: t + 1])
        for depth in range(1, depths + 1):
            found = made.compute_logits(drafts[depth - 1].state[0, t], depth)
            torch.testing.assert_close(found, level.logits[0, 0], rtol=1e-9, atol=1e-9)
            if depth < depths:
                token, mask = packed.token[0, t + 1 + depth][None], torch.ones(1, depth, dtype=torch.bool)
                level = drafting.expand(made, state, level, token, torch.zeros(1, dtype=torch.long), mask)
    same = torch.isclose(drafts[0].state, everything[0].state).all(-1)[0]
    # As far as all of a text is seen it makes no difference; behind, it does, and more so through further layers.
    # A block's first slot stands two positions behind the row, its last, which the first may see, five.
    reach = max(0, length - {"block": 2, "block both ways": 5}.get(name, 0))
    assert same[:reach].all()
    assert not same[reach:].any()


@pytest.mark.parametrize("name", ATTENTIVE)
def test_rows_out_of_sight_are_dropped_and_positions_go_on(name: str) -> None:
    made = head(name, 4)
    packed = features(made)
    following = rows.next_token(packed.token)[0]
    whole, expected = drafting.extend(made, None, packed, following)
    state = level = None
    for start, end in ((0, 5), (5, 6), (6, 13), (13, 14)):
        state, level = drafting.extend(made, state, part(packed, start, end), following[start:end])
        assert state.length.tolist() == [end]
        assert state.sees(torch.tensor([[end - 1]]), torch.tensor([end - 1])).sum() == min(end, 4)
    assert level is not None
    torch.testing.assert_close(level.logits, expected.logits, rtol=1e-9, atol=1e-9)
    assert whole.length.tolist() == [14]


def test_a_text_longer_than_the_head_was_built_for_is_decoded_as_ever() -> None:
    target = toys.target()
    made: Any = toys.head("eagle", target)
    assert made.config.length == 12
    prompt = toys.prompt(0, 100)
    expected = autoregress(target, prompt, Settings(60, GREEDY)).tokens
    recorder: Any = Recorder(HeadDrafter(made, toys.TREES["dynamic"], "eagle"))
    assert speculate(target, recorder, prompt, Settings(60, GREEDY)).tokens == expected
    cache = recorder.state.state
    assert int(cache.length) > 150
    assert cache.ring == 12 + SPARE
    assert all(buffer.shape[2] <= 12 + 2 * SPARE for pair in cache.layers for buffer in pair)


def test_a_length_below_one_is_refused() -> None:
    config = toys.head("eagle", toys.target()).config
    with pytest.raises(ValueError, match="length is 0: give 1 or more"):
        typed(type(config), {**asdict(config), "length": 0})


def test_a_head_that_was_saved_without_a_length_looks_at_everything(tmp_path: Path) -> None:
    target, folder = toys.target(), tmp_path / "head"
    save_head(folder, toys.head("eagle", target), target.spec, TREE)
    assert load_head(folder, target.embeddings, target.spec).config.length == 12
    content = json.loads((folder / CONFIG).read_text())
    del content["head"]["length"]
    (folder / CONFIG).write_text(json.dumps(content))
    assert load_head(folder, target.embeddings, target.spec).config.length is None
