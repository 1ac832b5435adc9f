"""What a report holds besides its rows: training curves, the nodes of a tree, heads compared, sample answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from data.text.prompts import Prompt
from eval import extras, live
from eval.measures.results import Measurement
from eval.report.sections import compared
from inference.decode import Generation, RequestParams, autoregress
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Baseline
from inference.drafters.policy import TreeConfig
from inference.verification.sample import GREEDY
from tests import toys
from tests.eval.stubs import generation


def test_training_curves_are_means_and_skip_what_a_killed_run_was_writing(tmp_path: Path) -> None:
    records = [{"step": i, "loss": float(i)} for i in range(1, 1001)]
    (tmp_path / "head").mkdir()
    text = "\n".join(map(json.dumps, [*records, {"step": 1000, "tau": 2.0, "tau_ci": [1.5, 2.5]}])) + '\n{"step": 10'
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    (found,) = extras.training({"eagle": tmp_path / "head", "published": tmp_path}).values()
    assert len(found["steps"]) == extras.POINTS
    assert found["steps"][0] == {"step": 5, "loss": 3.0}
    assert found["tau"] == [{"step": 1000, "tau": 2.0, "low": 1.5, "high": 2.5}]


def run(*ranks: tuple[int, ...]) -> Generation:
    """Return a run whose steps accepted the nodes of these ranks."""
    made = generation(1 + sum(len(each) + 1 for each in ranks), [(5, len(each)) for each in ranks])
    made.steps = [step._replace(ranks=each) for step, each in zip(made.steps, ranks, strict=True)]
    return made


def drafter(tree: TreeConfig) -> Any:
    """Return a head that drafts a tree."""
    return HeadDrafter(toys.head("medusa", toys.target()), tree, "medusa")


def test_the_nodes_accepted_most_often_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: [[run((0, 1), (0, 1, 0), (2,), (0,), ())]] for name in ("medusa", "suffix", "plain")}
    made["plain"] = [[generation(3, [(0, 0), (0, 0)])]]
    lookup = type("Lookup", (Baseline,), {"tree": "tree-9"})(toys.target().device)
    sources = {"medusa": drafter(toys.TREES["dynamic"]), "suffix": lookup, "plain": Baseline(toys.target().device)}
    found = extras.trees(made, sources)
    assert list(found) == ["medusa", "suffix"]
    for each in found.values():
        assert each["paths"] == [[0], [0, 1], [2], [0, 1, 0]]  # the most often accepted first
        assert each["accepted"] == [3 / 5, 2 / 5, 1 / 5, 1 / 5]
    assert found["suffix"]["label"] == "tree-9"
    assert found["medusa"]["steps"] == 5
    monkeypatch.setattr(extras, "NODES", 3)
    (cut,) = extras.trees({"suffix": made["suffix"]}, {"suffix": lookup}).values()
    assert cut["paths"] == [[0], [0, 1], [2]]


def test_drafters_are_compared_prompt_by_prompt() -> None:
    def run(accepted: int, seconds: float) -> Generation:
        return generation(1 + 4 * (accepted + 1), [(3, accepted)] * 4, seconds)

    slow = [4.0, 1.0, 2.0, 8.0]  # what makes a prompt slow for both cancels
    runs = {"eagle": [[run(1, 8 * seconds)] for seconds in slow], "mlp": [[run(2, 6 * seconds)] for seconds in slow]}
    (pair,) = live.paired(runs, ["eagle", "mlp"], Measurement("tiny", 0.0, 1, 0, seed=0))
    assert (pair["drafter"], pair["base"], pair["prompts"]) == ("mlp", "eagle", 4)
    assert pair["tau"] == pytest.approx({"difference": 1.0, "low": 1.0, "high": 1.0})
    speeds = pair["tokens_per_second"]
    assert speeds["difference"] == pytest.approx(48 / 90 - 32 / 120)
    assert 0 < speeds["low"] < speeds["difference"] < speeds["high"]
    (line,) = compared({"paired": [pair]})
    assert line.startswith("mlp against eagle, the same 4 prompts of tiny, T=0, batch size 1: τ +1.00 [+1.00, +1.00], ")
    assert "not clear of zero" not in line
    (swapped,) = live.paired(runs, ["mlp", "eagle"], Measurement("tiny", 0.0, 1, 0, seed=0))
    assert swapped["tau"]["difference"] == -1.0
    one = {name: prompts[:1] for name, prompts in runs.items()}
    assert live.paired(one, ["eagle", "mlp"], Measurement("tiny", 0.0, 1, 0, seed=0)) == []
    turns = Measurement("tiny", 0.0, 1, 0, seed=0, conversations=[7] * 4)
    assert live.paired(runs, ["eagle", "mlp"], turns) == []


PROMPT = toys.prompt(0)


def answer() -> Generation:
    """Return the target's own text as three steps would have committed it."""
    text = autoregress(toys.target(), PROMPT, RequestParams(9, GREEDY)).tokens
    assert toys.lively(text)
    run = generation(text, [(4, 2), (4, 0), (4, 3)])
    run.origins = ["prefill", "draft", "draft", "bonus", "bonus", "draft", "draft", "draft", "bonus"]
    return run


def test_answers_say_who_wrote_each_piece() -> None:
    run, target = answer(), toys.target()
    made = {name: [[run, generation(2, [(0, 0)])]] * 5 for name in ("eagle", "plain")}
    prompts = [Prompt(f"p{i}", PROMPT, "") for i in range(5)]
    found = extras.answers(made, ["eagle", "plain"], prompts, target.tokenizer)
    assert [(each["prompt"], each["drafter"]) for each in found][:3] == [
        ("p0", "eagle"),
        ("p0", "plain"),
        ("p1", "eagle"),
    ]
    assert len(found) == 2 * extras.ANSWERS
    pieces = found[0]["pieces"]
    assert [piece["source"] for piece in pieces] == run.origins
    assert [piece["step"] for piece in pieces] == [0, 1, 1, 1, 2, 3, 3, 3, 3]
    assert "".join(piece["text"] for piece in pieces) == target.tokenizer.decode(run.tokens)
