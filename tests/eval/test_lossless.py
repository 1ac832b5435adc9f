"""The gate tells rounding from defects."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.text.prompts import Prompt
from eval.gates import check
from eval.measures.losslessness import UNCHECKED, FailedChecks, Gate, gate
from inference import step
from inference.drafters.head import HeadDrafter
from inference.verification import rng
from tests import toys
from tests.eval.small import small
from tests.eval.stubs import generation

PLAIN = generation([5, 6, 7, 8], logit_gaps=[2.0, 3.0, 1e-6, 4.0])


def verdict(tokens: list[int], gaps: tuple[float, ...] = (), dtype: torch.dtype = torch.float32) -> Gate:
    return gate([PLAIN], [generation(tokens, logit_gaps=gaps)], ["p"], dtype)


@pytest.mark.parametrize("gaps", [(), (2.0, 3.0, 1e-6, 9.0)])
def test_a_near_tie_passes_whatever_follows_it(gaps: tuple[float, ...]) -> None:
    found = verdict([5, 6, 9, 1], gaps)
    assert (found.near_tie, found.failed, found.passed) == (1, 0, True)


def test_a_clear_winner_that_lost_fails_and_is_named() -> None:
    found = verdict([5, 9, 7, 8])
    assert (found.failed, found.passed) == (1, False)
    assert found.first is not None
    assert (found.first.prompt, found.first.position, found.first.plain, found.first.drafted) == ("p", 1, 6, 9)
    assert found.first.gap == 3.0
    assert str(found.first) == "prompt p, position 1: token 9 instead of token 6 (top-2 logit gap 3)"


def test_a_tie_must_be_one_in_both_runs_and_the_first_divergence() -> None:
    assert verdict([5, 6, 9, 1], gaps=(2.0, 3.0, 5.0, 1.0)).failed == 1
    assert verdict([5, 9, 9, 8]).failed == 1
    assert verdict([5, 6, 7, 8]) == Gate(1, 1, 0, 0)
    assert verdict([5, 6, 7, 8]).passed
    assert not UNCHECKED.passed


@pytest.mark.parametrize("tokens", [[5, 6], [5, 6, 7, 8, 9], []])
def test_another_length_is_never_a_tie(tokens: list[int]) -> None:
    ties = generation([5, 6, 7, 8], logit_gaps=[0.0] * 4)
    found = gate([ties], [generation(tokens, logit_gaps=[0.0] * len(tokens))], ["p"], torch.bfloat16)
    assert found.failed == 1
    assert "the end" in str(found.first)


def test_a_gap_that_was_not_recorded_excuses_nothing() -> None:
    plain = generation([5, 6])
    found = gate([plain], [generation([5, 7])], ["p"], torch.bfloat16)
    assert found.failed == 1
    assert "unknown" in str(found.first)
    odd = generation([5, 6], logit_gaps=[1.0, float("nan")])
    assert gate([odd], [generation([5, 7])], ["p"], torch.bfloat16).failed == 1


def test_coarse_numbers_are_given_more_room() -> None:
    plain, drafted = generation([5], logit_gaps=[0.1]), generation([6], logit_gaps=[0.1])
    counts = {dtype: gate([plain], [drafted], ["p"], dtype).failed for dtype in (torch.bfloat16, torch.float16)}
    assert counts == {torch.bfloat16: 0, torch.float16: 1}


def test_every_prompt_has_one_verdict_and_the_first_failure_is_kept() -> None:
    runs = [generation(tokens) for tokens in ([5, 6, 7, 8], [5, 6, 9, 8], [1, 6, 7, 8], [5, 1, 7, 8])]
    found = gate([PLAIN] * 4, runs, ["a", "b", "c", "d"], torch.float32)
    assert found.counts() == {"checked": 4, "identical": 1, "near_tie": 1, "failed": 2}
    assert found.first is not None
    assert found.first.prompt == "c"


def test_a_part_of_the_prompts_has_its_own_verdicts_and_a_lossy_rule_stays_lossy() -> None:
    runs = [generation(tokens) for tokens in ([5, 6, 7, 8], [5, 6, 9, 8], [1, 6, 7, 8])]
    found = replace(gate([PLAIN] * 3, runs, ["a", "b", "c"], torch.float32), lossy=True)
    assert found.among([2, 0]).counts() == {"checked": 2, "identical": 1, "near_tie": 0, "failed": 1}
    assert not found.among([0]).passed
    assert replace(found, lossy=False).among([0, 1]).passed


@pytest.mark.parametrize(
    ("drafter", "size", "temperature", "failed"),
    [
        ("eagle", 1, 0.0, False), ("eagle", 2, 0.0, True), ("eagle", 4, 0.0, False), ("eagle", 1, 0.5, False),
        ("mlp", 1, 0.0, False), ("mlp", 1, 1.0, True), ("mlp", 2, 1.0, True), ("mlp", 1, 0.5, False),
    ],
)  # fmt: skip
def test_a_result_fails_by_its_batch_size_or_its_temperature(
    drafter: str, size: int, temperature: float, failed: bool
) -> None:
    checks = FailedChecks(frozenset({"eagle x2"}), frozenset({("mlp", 1.0)}))
    row = {"drafter": drafter, "batch_size": size, "temperature": temperature}
    assert checks.result(row) == failed
    assert checks.result(row | {"lossless": {"failed": 1}})


def test_a_source_fails_by_any_temperature_and_by_the_sizes_that_are_asked_for() -> None:
    checks = FailedChecks(frozenset({"eagle x2"}), frozenset({("mlp", 1.0)}))
    assert [checks.drafter("eagle", sizes) for sizes in ([1], [4, 2])] == [False, True]
    assert checks.drafter("mlp", [1])


def checked(runs: Path, out: Path) -> dict[str, Gate]:
    target = toys.target()
    head: Any = toys.head("eagle", target)
    drafters: Any = {"eagle": HeadDrafter(head, toys.TREES["dynamic"], "eagle")}
    prompts = [Prompt(f"p{i}", toys.prompt(i, 12), "") for i in range(3)]
    return check(target, drafters, prompts, small(runs, out, batch_size=[1, 2]), 0.3)[0]


def test_the_baseline_is_one_more_engine_beside_the_reference(runs: Path, tmp_path: Path) -> None:
    found = checked(runs, tmp_path)
    assert list(found) == ["plain", "eagle", "plain x2", "eagle x2"]
    assert all(verdict == Gate(3, 3, 0, 0) for verdict in found.values())


def test_a_wrong_step_fails_though_the_baseline_takes_it_too(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(scores: Tensor) -> Tensor:
        return scores.topk(2).indices[..., 1]

    for module in (step, rng):
        monkeypatch.setattr(module, "argmax", second)
    assert [verdict.failed for verdict in checked(runs, tmp_path).values()] == [3] * 4
