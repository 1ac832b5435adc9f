"""The two tiers measure the same τ: by decoding, and along the target's own text or a log."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.inputs.workloads import Text
from eval.measures.results import LIVE, TEACHER_FORCED
from eval.report.view import flattened
from eval.run import evaluate
from eval.teacher_forced import Overlap, RankedText, rank_statistics, sampled_statistics, within_context
from tests import toys
from tests.eval.small import small
from tests.refusals import refuses

SUFFIX = {
    "depth": 8, "tokens": 6, "factor": 2.0, "offset": 1.0, "min_probability": 0.1, "memory": True,
    "memory_nodes": 1000,
}  # fmt: skip
ALL: dict[str, Any] = {
    "tier": [LIVE, TEACHER_FORCED], "hf": False,
    "drafter": {"head": {}, "suffix": SUFFIX},
}  # fmt: skip


def told(out: Path) -> dict[str, Any]:
    """Return the report of a folder."""
    return json.loads((out / "report.json").read_text())


def by_tier(report: dict[str, Any], temperature: float = 0.0) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the rows by drafter and tier."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        if row["temperature"] == temperature:
            found.setdefault(row["drafter"], {})[row["tier"]] = row
    return found


@pytest.fixture(scope="module")
def greedy(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an evaluation in all tiers."""
    out = tmp_path_factory.mktemp("tiers")
    assert evaluate(small(runs, out, **ALL, prompts=2, max_new_tokens=32)).passed
    return out


@pytest.mark.slow
def test_the_tiers_agree_token_for_token_in_exact_arithmetic(greedy: Path) -> None:
    rows = by_tier(told(greedy))
    assert {name: set(tiers) for name, tiers in rows.items()} == {
        "plain": {LIVE},
        "eagle": {LIVE, TEACHER_FORCED},
        "suffix": {LIVE},
    }
    same = ("tau", "tau_ci", "tau_request_mean", "steps", "tokens", "draft_tokens", "accepted_by_depth")
    same += ("conditional_by_depth", "accepted_per_draft_token", "tree")
    for name, tiers in rows.items():
        live = tiers.pop(LIVE)
        for other in tiers.values():
            mine, theirs = (dict(flattened({key: row[key] for key in same})) for row in (other, live))
            assert mine == pytest.approx(theirs), name
            assert other["speedup"] is None
            assert other["ladder"] is None
        assert name == "plain" or live["tau"] > 1.02, "nothing was accepted: nothing was compared"


def test_the_report_has_the_statistics_of_one_pass(greedy: Path) -> None:
    forced = told(greedy)["teacher_forced"]["eagle"]
    assert len(forced["rank"]) == len(forced["n_alpha"]) == len(forced["at_every_token"])
    assert [row[0] for row in forced["rank"]] == forced["n_alpha"]
    assert forced["at_every_token"] == sorted(forced["at_every_token"], reverse=True)
    for name in ("report.html", "report.md"):
        assert "teacher forced" in (greedy / name).read_text(encoding="utf-8")


def test_shares_by_depth_are_of_the_tokens_that_have_so_many_after_them() -> None:
    texts = [RankedText(Text([], 0, 0), rank, {}) for rank in ([[0, 0], [1, 0], [0, -1]], [[0, 2], [0, -1]])]
    found = rank_statistics(texts, 2)
    shares = [*found["rank"][0][:3], *found["rank"][1][:3], *found["n_alpha"], *found["at_every_token"]]
    assert shares == pytest.approx([4 / 5, 1 / 5, 0, 2 / 3, 0, 1 / 3, 4 / 5, 2 / 3, 4 / 5, 1 / 3])
    assert found["tokens"] == 5
    nan = float("nan")
    share, common = torch.tensor([[0.5, 0.4], [1.0, 0.0]]), torch.tensor([[0.6, 0.2], [0.4, nan]])
    more = torch.tensor([[0.9, 0.0]]), torch.tensor([[0.8, nan]])
    sampled = sampled_statistics([Overlap(Text([], 0, 0), share, common), Overlap(Text([], 0, 0), *more)])
    assert sampled == {"n_alpha": pytest.approx([0.6, 0.2]), "at_every_token": pytest.approx([0.8, 0.2])}


def test_without_a_clock_there_are_rows_along_text_alone(runs: Path, tmp_path: Path) -> None:
    given = {**ALL, "tier": TEACHER_FORCED, "drafter": {"head": {}}}
    assert evaluate(small(runs, tmp_path, **given)).passed
    report = told(tmp_path)
    assert {row["tier"] for row in report["rows"]} == {TEACHER_FORCED}
    assert report["settings"]["text"] == "own"
    assert "withheld" not in (tmp_path / "report.md").read_text()


def test_recorded_answers_serve_in_place_of_the_targets_own(runs: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    chats = [{"question": f"w{i} w3 w5 w7 w9 w11", "answer": "w4 w6 w8 w4 w6 w8 w4 w6 w8 w10"} for i in range(3)]
    log.write_text("\n".join(map(json.dumps, chats)))
    given = {**ALL, "drafter": {"head": {}}, "tier": TEACHER_FORCED, "text": "recorded", "workload": str(log)}
    assert evaluate(small(runs, tmp_path, **given)).passed
    assert by_tier(told(tmp_path))["eagle"][TEACHER_FORCED]["tokens"] == 2 * 7  # 8 tokens each, cut
    assert told(tmp_path)["settings"]["text"] == "recorded"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "not checked" in page
    assert "- tok/s" not in page
    written = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "None" not in written.splitlines()[0]
    assert not re.search("Where the time goes|Peak memory", written)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tier": "dead"}, "tier is 'dead': choose live, teacher_forced"),
        ({"tier": []}, "tier is empty"),
        ({"text": "mine"}, "text is 'mine': choose own, recorded"),
        ({"tier": LIVE, "text": "recorded"}, "add teacher_forced to tier=live"),
        ({"tier": TEACHER_FORCED, "drafter": {"head": {}}, "repetition_penalty": 1.3}, "leave repetition_penalty=1"),
        ({"tier": TEACHER_FORCED, "drafter": {"suffix": SUFFIX}}, "takes drafter=head: leave out suffix"),
        ({"tier": TEACHER_FORCED, "drafter": {"head": {}}, "text": "recorded"}, "no answer to play back"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    runs: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    (tmp_path / "asked.jsonl").write_text('{"question": "w1 w2 w3"}\n')
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        evaluate(small(runs, tmp_path / "out", **{**ALL, "workload": str(tmp_path / "asked.jsonl"), **values}))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt_token_ids": [1, 2], "token_ids": []}, "record 0: it has no answer to play back"),
        ({"prompt_token_ids": [], "token_ids": [1, 2]}, "is empty: remove it"),
        ({"prompt_token_ids": [1, 2], "token_ids": [3, 40]}, "record 0: its tokens are none of the target's 40"),
    ],
)
def test_a_damaged_log_of_tokens_is_one_line(runs: Path, tmp_path: Path, line: dict[str, Any], message: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(line))
    given = {**ALL, "text": "recorded", "workload": str(log)}
    refuses(re.escape(message), evaluate, small(runs, tmp_path / "out", **given))
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
    text = Text([1] * (target.max_model_len - 4), target.max_model_len - 20, 64)
    assert within_context(text, "a", "log", target, False).limit == 20
    long = Text([i % toys.VOCAB for i in range(target.max_model_len + 6)], target.max_model_len - 20, 64)
    cut = within_context(long, "a", "log", target, True)
    assert (cut.token, cut.start, cut.limit) == (long.token[6:], target.max_model_len - 26, 26)
    assert within_context(Text(long.token, 7, 64), "a", "log", target, True).start == 1
    with pytest.raises(ValueError, match="truncate=true to keep each text's end"):
        within_context(Text(long.token, 6, 64), "a", "log", target, True)
