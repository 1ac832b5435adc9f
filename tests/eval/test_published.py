"""A head of another project is measured like our own, once the target and the tree are named."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from eval.config import EvalConfig, eval_config
from eval.run import evaluate, tuned
from heads.formats.hub import kind_of, load_found
from heads.formats.store import save_head
from inference.decode import Settings, autoregress, speculate
from inference.drafters.head import HeadDrafter
from inference.verification.sample import GREEDY
from tests import toys
from tests.heads.published import eagle3_authors, publish

TREE = asdict(toys.TREES["dynamic"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a toy target, prompts, a published head and one of our own."""
    folder = tmp_path_factory.mktemp("published")
    target = toys.target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    prompts = [{"id": f"p{i}", "text": " ".join(f"w{token}" for token in toys.prompt(i, 24))} for i in range(2)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    _, tensors, config = eagle3_authors()
    publish(folder / "theirs", tensors, config, "model.safetensors")
    save_head(folder / "ours" / "head", toys.head("eagle3", target), target.spec, TREE)
    return folder


def config(folder: Path, **values: Any) -> EvalConfig:
    model = {"path": str(folder / "target"), "device": "cpu"}
    small = {
        "prompts": 2,
        "max_new_tokens": 8,
        "repeats": 1,
        "warmup": 0,
        "hf": False,
        "dtype": "float32",
        "tier": "live",
    }
    given = {"run": str(folder / "theirs"), "model": model, "workload": str(folder / "prompts.jsonl"), "tree": TREE}
    return eval_config(**(given | small | {"out": str(folder / "report")} | values))


def test_a_published_head_drafts_and_the_text_stays(folder: Path) -> None:
    target, accepted = toys.target(), 0
    head: Any = load_found(folder / "theirs", target.embeddings, target.spec)
    for seed in range(3):
        prompt = toys.prompt(seed)
        plain = autoregress(target, prompt, Settings(36, GREEDY)).tokens
        made = speculate(target, HeadDrafter(head, toys.TREES["dynamic"], "theirs"), prompt, Settings(36, GREEDY))
        assert toys.lively(plain)
        assert made.tokens == plain
        accepted += sum(step.accepted for step in made.steps)
    assert accepted > 0


def test_it_stands_in_a_report_beside_our_own(folder: Path) -> None:
    theirs, ours = str(folder / "theirs"), str(folder / "ours")
    report = evaluate(config(folder, compare=[ours]))
    assert report.passed
    assert [row.drafter for row in report.rows] == ["plain", f"eagle3 {theirs}", f"eagle3 {ours}"]
    assert kind_of(folder / "theirs") == "eagle3"


def test_what_it_does_not_say_is_asked_for_in_one_line(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"theirs: a head in an engine's format brings no tree: give tree=chain"
    ) as error:
        evaluate(config(folder, tree=dict.fromkeys(TREE)))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"^model\.path is missing"):
        evaluate(config(folder, model={"path": None}))
    with pytest.raises(ValueError, match=r"theirs: tune=true writes the tree into the head"):
        tuned(config(folder, tune=True))
