"""Texts from a log: what is damaged is told before anything is measured, and what is odd counts for what it is."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.inputs.workloads import Text
from eval.measures.results import TEACHER_FORCED
from eval.run import evaluate
from eval.sessions import within_context
from eval.teacher_forced import overlap, unrolled
from inference.verification.sample import Sampling
from tests import toys
from tests.eval.small import small
from tests.eval.test_tiers import ALL, told


def test_a_log_without_answers_is_told_before_anything_is_measured(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("something was decoded")

    monkeypatch.setattr("eval.run.check", refuse)
    (tmp_path / "asked.jsonl").write_text('{"question": "w1 w2 w3"}\n')
    given = {**ALL, "text": "recorded", "workload": str(tmp_path / "asked.jsonl")}
    with pytest.raises(ValueError, match="no answer to play back"):
        evaluate(small(runs, tmp_path / "out", **given))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt_token_ids": [1, 2], "token_ids": []}, "record 0: it has no answer to play back"),
        ({"prompt_token_ids": [], "token_ids": [1, 2]}, "is empty: remove it"),
        ({"prompt_token_ids": [1, 2], "token_ids": None}, "record 0 is of no known shape"),
        ({"prompt_token_ids": "w1 w2", "token_ids": [1]}, "record 0: prompt_token_ids is no list of token numbers"),
        ({"prompt_token_ids": [1, 2], "token_ids": [3, 40]}, "record 0: its tokens are none of the target's 40"),
    ],
)
def test_a_damaged_log_of_tokens_is_one_line(runs: Path, tmp_path: Path, line: dict[str, Any], message: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(line))
    given = {**ALL, "text": "recorded", "workload": str(log)}
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        evaluate(small(runs, tmp_path / "out", **given))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_of_one_token_have_a_report(runs: Path, tmp_path: Path, temperature: float) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt_token_ids": [1, 2, 3], "token_ids": [4]}')
    given = {
        **ALL,
        "drafter": {"head": {}},
        "tier": TEACHER_FORCED,
        "text": "recorded",
        "workload": str(log),
        "tree": {"kind": "chain"},
    }
    assert evaluate(small(runs, tmp_path, **given, temperature=temperature)).passed
    assert {(row["tau"], row["steps"]) for row in told(tmp_path)["rows"]} == {(None, 0)}


def test_a_text_has_no_more_room_than_the_context() -> None:
    target = toys.target()
    text = Text([1] * (target.context - 4), target.context - 20, 64)
    assert within_context(text, "a", "log", target, False).limit == 20
    long = Text([i % toys.VOCAB for i in range(target.context + 6)], target.context - 20, 64)
    cut = within_context(long, "a", "log", target, True)
    assert (cut.token, cut.start, cut.limit) == (long.token[6:], target.context - 26, 26)
    assert within_context(Text(long.token, 7, 64), "a", "log", target, True).start == 1
    with pytest.raises(ValueError, match="truncate=true to keep each text's end"):
        within_context(Text(long.token, 6, 64), "a", "log", target, True)


def test_what_the_target_never_draws_was_not_accepted() -> None:
    target, sampling = toys.target(), Sampling(1.0, 1, 1.0)  # of each law its likeliest token alone
    head = toys.head("eagle", target)
    parted = 0
    for seed in range(8):
        token = torch.tensor([toys.prompt(seed, 9)])
        features = target.features(token, torch.zeros_like(token), head.feature_layers)
        (draft,) = unrolled(head, features, 1)
        best, guess = (
            target.embeddings.logits(features.last_hidden[0, 8]).argmax(),
            head.compute_logits(draft.state[0, 7], 1).argmax(),
        )
        found = overlap(target, head, Text([*token[0].tolist(), int(guess)], 8, 12), sampling, 1)
        assert found.accept_prob.item() == float(best == guess)
        parted += bool(best != guess)
    assert parted, "head and target agree everywhere"
