"""What a head accepts before it is published and after it came back: the same, or nothing is uploaded or tagged."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi

from data.text.prompts import Prompt, save_prompts
from heads import HEADS
from heads.common.resolvers import ROOT
from heads.formats.store import TargetSpec, save_head
from inference.decode import Generation, Step
from inference.target.embeddings_only import EmbeddingsOnly
from inference.target.target import Target
from tests.train.hub_server import Hub
from tests.train.publishing import REPO, config
from train.publish import publish
from train.release import hub as trial

TARGET = ROOT / "examples" / "tiny"
OPTIONS = {"heads": 2, "layers": 1, "lm_head": "shared", "lm_head_rank": None, "draft_vocab": None}


LOAD = functools.cache(Target.load)  # once for all tests


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "load", LOAD)


@pytest.fixture(scope="module")
def target() -> EmbeddingsOnly:
    return EmbeddingsOnly.load(str(TARGET), "float32", "cpu", False)


@pytest.fixture
def tiny(tmp_path: Path, target: EmbeddingsOnly) -> Path:
    """Return a run for the embedded target, whose head has weights that nothing trained."""
    torch.manual_seed(0)
    head: Any = HEADS["medusa"](HEADS["medusa"].Config(name="medusa", **OPTIONS), target.embeddings)
    spec = TargetSpec(**vars(target.spec))
    tree = {"kind": "chain", "depth": 2, "top_k": 0, "nodes": 0, "paths": [], "widths": []}
    save_head(tmp_path / "tiny" / "head", head.to(torch.bfloat16), spec, tree)
    save_prompts([Prompt(str(i), [3 + i, 5, 7, 9], "") for i in range(3)], tmp_path / "tiny" / "prompts.jsonl")
    return tmp_path / "tiny"


def scripted(monkeypatch: pytest.MonkeyPatch, *accepted: list[int], tokens: tuple[int, ...] = (1, 1, 1)) -> None:
    """Let the first head, the second, and so on accept these numbers of drafts, of every prompt."""
    script, heads = iter(zip(accepted, tokens, strict=False)), dict[Any, tuple[list[int], int]]()

    def speculate(_: Any, drafter: Any, *__: Any) -> Generation:
        drafted, token = heads[drafter] if drafter in heads else heads.setdefault(drafter, next(script))
        steps = [Step(3, count, count + 1, 0.0, 0.0, 0.0, "greedy") for count in drafted]
        return Generation(tokens=[token] * (1 + sum(each.committed for each in steps)), steps=steps)

    monkeypatch.setattr(trial, "speculate", speculate)


def said(run: Path, **changes: Any) -> str:
    lines: list[str] = []
    publish(config(run, verify_prompts=2, verify_tokens=8, **changes), HfApi(), lines.append)
    return lines[-1]


def test_the_closing_line_has_the_tau_of_what_came_back(tiny: Path, hub: Hub) -> None:
    ending = r"τ [1-3]\.\d\d over 2 prompts, greedy by chain-3, as the run's own head$"
    assert re.search(f"equal in every file and tensor; {ending}", said(tiny, format="vllm"))


def test_rounding_in_an_export_is_no_fault(tiny: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a twentieth of τ, by as many tokens in more passes."""
    own, near, far = [2] * 20, [2] * 18 + [1] * 3, [2] * 16 + [1] * 6
    scripted(monkeypatch, own, near, near)
    assert "τ 2.86 over" in said(tiny, format="vllm")
    scripted(monkeypatch, own, far)
    hub.requests.clear()
    with pytest.raises(ValueError, match=r"drafts otherwise .*, τ is 2\.73 by it, .* nothing was uploaded"):
        publish(config(tiny, format="vllm"), HfApi())
    assert hub.requests == ["HEAD /"], "asked whether the Hub answers, nothing else"


def test_a_head_that_came_back_with_another_tau_is_told(tiny: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [2, 2, 2, 2], [2, 0, 2, 2, 0])
    told = "came back drafts otherwise, other tokens came out, τ is 2.20 by it, and 3.00 by"
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        publish(config(tiny, tag="v1"), HfApi())
    assert "\n" not in str(caught.value)
    repo = hub.repos[REPO]
    assert f"{REPO} is now at {repo.head}, and was at" in str(caught.value)
    assert repo.tags == {}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"verify_prompts": 0}, "τ was not verified: verify_prompts=0"),
        ({"target": "/nowhere"}, "τ was not verified: the target cannot be loaded here (model.path=/nowhere"),
        ({"target": "Someone/Target-8B"}, "τ was not verified: Someone/Target-8B is not on this machine; give target="),
    ],
)
def test_where_tau_cannot_be_verified_it_is_said(changes: dict[str, Any], told: str, tiny: Path, hub: Hub) -> None:
    lines: list[str] = []
    publish(config(tiny, **changes), HfApi(), lines.append)
    assert told in lines[-1]


def test_a_head_of_another_target_is_one_line_before_anything_is_sent(
    tiny: Path, hub: Hub, target: EmbeddingsOnly
) -> None:
    torch.manual_seed(0)
    head: Any = HEADS["medusa"](HEADS["medusa"].Config(name="medusa", **OPTIONS), target.embeddings)
    spec = TargetSpec(**{**vars(target.spec), "fingerprint": "0" * 32})
    tree = {"kind": "chain", "depth": 2, "top_k": 0, "nodes": 0, "paths": [], "widths": []}
    save_head(tiny / "head", head, spec, tree)
    with pytest.raises(ValueError, match="made for another target"):
        publish(config(tiny), HfApi())
    assert hub.requests == ["HEAD /"], "asked whether the Hub answers, nothing else"
