"""SpecDecodingStats counted along a text become rows, whatever the drafts reached."""

from dataclasses import replace

import pytest
import torch

from eval.inputs.workloads import Text
from eval.measures import metrics
from eval.measures.metrics import SpecDecodingStats
from eval.measures.results import TEACHER_FORCED, DrafterInfo, Measurement, Request, ResultRow, text_results
from eval.teacher_forced import Overlap, expected

SESSION = Measurement("tiny", 1.0, 1, 0, 0, conversations=[0, 1], tier=TEACHER_FORCED)


def rows(each: list[SpecDecodingStats], session: Measurement = SESSION) -> list[ResultRow]:
    return text_results(DrafterInfo("eagle", "token", "chain-4"), session, [Request(passes) for passes in each])


def test_depths_that_no_pass_came_to_are_no_depths() -> None:
    share = torch.full((3, 4), 0.5)
    short = expected(Overlap(Text([1, 2, 3, 4, 5, 6], 2, 4), share, share), 4)  # room for two drafted tokens at most
    assert len(short.by_depth) == 4
    (row,) = rows([short, short])
    assert len(row.accepted_by_depth) == len(row.conditional_by_depth) == len(row.tau_within_depth) == 2
    assert row.conditional_by_depth[0] == row.accepted_by_depth[0] == pytest.approx(short.by_depth[0] / short.steps)


def test_answers_of_one_token_have_no_passes_and_no_tau() -> None:
    share = torch.zeros(0, 4)
    none = expected(Overlap(Text([1, 2, 3], 2, 8), share, share), 4)
    (row,) = rows([none, none])
    assert (row.steps, row.tokens, row.tau, row.tau_ci, row.accepted_by_depth) == (0, 0, None, None, [])
    one = SpecDecodingStats(6.0, 3.0, 6.0, 3.0, [2.0, 1.0])
    (row,) = rows([none, one])
    assert (row.tau, row.tau_request_mean, row.accepted_by_depth) == (2.0, 2.0, [2 / 3, 1 / 3])


def test_the_turns_of_a_conversation_are_resampled_together() -> None:
    each = [SpecDecodingStats(tokens, 3.0, 6.0, 0.0, []) for tokens in (3.0, 9.0, 5.0, 6.0)]
    of_two, of_one = (replace(SESSION, conversations=groups) for groups in ([0, 0, 1, 1], [4, 4, 4, 4]))
    (row,) = rows(each, of_two)
    sums = torch.tensor([[12.0, 6.0], [11.0, 6.0]], dtype=torch.float64)
    assert row.tau_ci == metrics.bootstrap(sums, lambda total: total[:, 0] / total[:, 1], SESSION.seed)
    (row,) = rows(each, of_one)
    assert (row.tau, row.tau_ci) == (23 / 12, None)
    whole, category = rows(each, replace(SESSION, conversations=[0, 1, 2, 2], categories={"b": [2, 3]}))
    assert whole.tau_ci is not None
    assert (category.tau, category.tau_ci) == (11 / 6, None)  # both turns are of one conversation
