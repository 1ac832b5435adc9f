"""The code that a published head carries drafts what the head drafts here: every kind, option and layout."""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads import HEADS
from heads.base import DraftHead, Features
from heads.formats.custom_generate import bundle
from heads.formats.custom_generate.reading import load
from heads.formats.layer_ids import STATES as IDS
from tests import drafting, toys
from tests.heads import exporting
from tests.heads.shipped import CHAIN, published
from tests.heads.test_export import CASES, Case, masked

KINDS = [*toys.HEAD_CONFIGS, *toys.OPTIONS]
LENGTH, MORE = 17, 3  # of the text, and rows that come later; toys look back less far than that
STEPS = 3


def close(one: Tensor, other: Tensor) -> None:
    assert torch.equal(one.isinf(), other.isinf())
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * max(1.0, float(other[other.isfinite()].abs().max())))


def drafted(head: Any, features: Features, token: Tensor, state: Any) -> tuple[Any, list[Tensor]]:
    """Return our own head's logits of a greedy chain behind new rows."""
    assert isinstance(head, DraftHead)
    state, level = drafting.extend(head, state, features, token)
    found = [drafting.logits(head, level)[0]]
    for step in range(1, STEPS):
        token, parent = found[-1].argmax()[None], torch.tensor([0])
        level = drafting.expand(head, state, level, token, parent, torch.ones(1, step, dtype=torch.bool))
        found.append(drafting.logits(head, level)[0])
    return state, found


@pytest.mark.parametrize("name", KINDS)
def test_a_head_drafts_the_same_here_and_there(name: str, tmp_path: Path) -> None:
    target = toys.target("llama")
    head: Any = toys.head(name, target)
    loaded = load(str(published(tmp_path / "head", head, target)), target.model, {})
    assert loaded.draft_tokens == CHAIN["depth"]
    token = torch.tensor([toys.prompt(7, LENGTH + MORE)])
    features = target.features(token, torch.zeros_like(token), head.feature_layers)
    assert loaded.drafts.feature_layers == head.feature_layers
    state, before = None, torch.empty(0)
    for part in (slice(0, LENGTH - 1), slice(LENGTH - 1, LENGTH + MORE - 1)):  # the drafts in between leave no trace
        rows = Features(*(each[:, part] for each in features[:4]))
        chosen = token[0, part.start + 1 : part.stop + 1]
        state, ours = drafted(head, rows, chosen, state)
        found = [loaded.drafts.commit(rows, chosen)]
        found += [loaded.drafts.draft(each.argmax()[None]) for each in ours[:-1]]
        for one, other in zip(found, ours, strict=True):
            close(one, other)
        assert not torch.equal(before, found[0])
        before = found[0]


def given(reading: Any) -> Features:
    """Return what a head is given of the text that exported heads are tried on."""
    of = exporting.target()
    token = torch.tensor([exporting.TOKENS[:-1]])
    return of.features(token, torch.zeros_like(token), reading.feature_layers)


@pytest.mark.parametrize("name", CASES)
def test_an_exported_head_drafts_the_same(name: str, tmp_path: Path) -> None:
    case: Case = CASES[name]
    head = masked(exporting.made(case.kind, **case.options))
    folder = exporting.exported(head, case.form, tmp_path / "head")
    steps = min(head.max_depth, 4)
    ours = exporting.chain(head, steps)
    drafts = load(str(folder), exporting.target().model, {}).drafts
    assert drafts.depth == head.max_depth
    features = given(drafts)
    torch.testing.assert_close(features.last[0], exporting.told().hs[-1])
    found = [drafts.commit(features, torch.tensor(exporting.TOKENS[1:]))]
    found += [drafts.draft(each.argmax()[None]) for each in ours[:-1]]
    exporting.assert_same(found, ours)


def told_otherwise(config: dict[str, Any], how: str) -> None:
    """Say in config.json what it says, as others say it."""
    inner = config["transformer_layer_config"]
    if how == "no width of a head":
        del config["head_dim"], inner["head_dim"]
    elif how == "speculators alone":
        for key in inner:
            config.pop(key, None)
        del config["eagle_config"]
    elif how == "the state that is fed back within eagle_config":
        config["eagle_config"]["return_hidden_post_norm"] = config.pop("norm_output")
    elif how == "layers by their outputs at the top":
        config[IDS] = config.pop("eagle_config")[IDS]
    elif how == "layers by their inputs within eagle_config":
        config["eagle_config"] = {"layer_ids": config.pop(IDS)}


@pytest.mark.parametrize(
    "how",
    ["no width of a head", "speculators alone", "the state that is fed back within eagle_config",
     "layers by their outputs at the top", "layers by their inputs within eagle_config"],
)  # fmt: skip
def test_a_head_of_others_is_read_as_it_is_read_here(how: str, tmp_path: Path) -> None:
    layers = [1, 3, 4] if how == "layers by their outputs at the top" else [0, 2, 5]
    head = exporting.made("eagle3", feature_layers=layers, head_dim=16, norm_output=True)
    folder = exporting.exported(head, "speculators", tmp_path / "head")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    told_otherwise(config, how)
    path.write_text(json.dumps(config))
    drafts = load(str(folder), exporting.target().model, {}).drafts
    assert drafts.feature_layers == tuple(layers)
    features = given(drafts)
    ours = exporting.chain(head, STEPS)
    found = [drafts.commit(features, torch.tensor(exporting.TOKENS[1:]))]
    found += [drafts.draft(each.argmax()[None]) for each in ours[:-1]]
    exporting.assert_same(found, ours)


def test_a_peagle_head_without_its_mask_token_is_refused(tmp_path: Path) -> None:
    folder = exporting.exported(exporting.made("eagle3", feature_layers=[1, 3, 4]), "vllm", tmp_path / "head")
    held = load_file(folder / "model.safetensors")
    save_file({**held, "mask_hidden": torch.ones(1, 96)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="mask_token_id is None, not one of the target's 40 tokens"):
        load(str(folder), exporting.target().model, {})


@pytest.mark.parametrize(("kind", "layers"), [("eagle3", (1, 3, 4)), ("block", (1, 2, 3, 4, 5))])
def test_layers_that_are_not_said_are_the_default_ones(kind: str, layers: tuple[int, ...], tmp_path: Path) -> None:
    of = exporting.target()
    head: Any = exporting.made(kind, feature_layers=None)
    assert head.feature_layers == layers
    assert load(str(published(tmp_path / "head", head, of)), of.model, {}).drafts.feature_layers == layers


@pytest.mark.parametrize(
    ("tree", "count"),
    [({"kind": "static", "depth": 0, "paths": [[0], [0, 1, 0]], "widths": []}, 3),
     ({"kind": "sampled", "depth": 0, "paths": [], "widths": [3, 2]}, 2), ({"kind": "chain", "depth": 6}, 6)],
)  # fmt: skip
def test_as_many_tokens_are_drafted_as_the_tree_is_deep(tree: dict[str, Any], count: int, tmp_path: Path) -> None:
    of = toys.target("llama")
    folder = published(tmp_path / "head", toys.head("medusa", of), of, tree)
    assert load(str(folder), of.model, {}).draft_tokens == count


def test_an_engines_count_of_drafted_tokens_is_taken(tmp_path: Path) -> None:
    head = exporting.made("eagle3", feature_layers=[1, 3, 4])
    folder = exporting.exported(head, "speculators", tmp_path / "head", draft_tokens=7)
    assert load(str(folder), exporting.target().model, {}).draft_tokens == 7


@pytest.mark.parametrize("kind", HEADS)
def test_the_code_imports_nothing_else(kind: str) -> None:
    """Every import is of a library that is there, or of a file beside it, in a form that transformers sees."""
    texts = bundle.files(kind)
    known = {*sys.stdlib_module_names, "torch", "transformers", "safetensors"}
    reached, waiting = set[str](), ["generate"]
    for name, text in texts.items():
        if name.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Import):
                    assert {alias.name.split(".")[0] for alias in node.names} <= known, name
                elif isinstance(node, ast.ImportFrom):
                    near = node.level == 1 and f"custom_generate/{node.module}.py" in texts
                    assert near or (node.level == 0 and str(node.module).split(".")[0] in known), name
    while waiting:
        reached.add(waiting.pop())
        for name in reached.copy():
            near = re.findall(r"^from \.(\w+) import", texts[f"custom_generate/{name}.py"], re.MULTILINE)
            waiting += [other for other in near if other not in reached]
    assert {f"custom_generate/{name}.py" for name in reached} == texts.keys()


def test_a_head_that_needs_another_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import omegaconf\n\n\nclass Eagle:\n    made = omegaconf.OmegaConf()\n"
    read = bundle._source
    monkeypatch.setattr(bundle, "_source", lambda name: (source, "") if name == "heads.eagle" else read(name))
    with pytest.raises(ValueError, match=r"heads\.eagle needs omegaconf, which is not wherever transformers is"):
        bundle.files("eagle")
