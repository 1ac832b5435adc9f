"""The chi-square test: its cells, its sample size, and that it rejects as often as it says."""

import pytest
import torch

from eval.measures import losslessness
from eval.measures.losslessness import Cells, ChiSquareTest, cells, p_value, samples_for, samples_needed, statistic


@pytest.mark.parametrize(
    ("freedom", "value", "alpha"),
    [(1, 3.841, 0.05), (10, 18.307, 0.05), (10, 29.588, 0.001), (26, 54.052, 0.001)],  # any table of the distribution
)
def test_p_values_are_those_of_the_tables(freedom: int, value: float, alpha: float) -> None:
    assert p_value(value, freedom) == pytest.approx(alpha, rel=1e-3)


@pytest.mark.parametrize(("tv", "draws"), [(0.01, 118_000), (0.02, 30_000), (0.05, 4_700)])
def test_the_sample_size_is_the_published_one_at_26_degrees(tv: float, draws: int) -> None:
    assert samples_needed(26, tv, 1e-3) == pytest.approx(draws, rel=0.02)


def test_cells_hold_the_likely_tokens_and_the_rest() -> None:
    made = cells(torch.tensor([0.01, 0.5, 0.3, 0.01, 0.18]))
    assert made.token == [1, 2, 4]
    assert made.expected == pytest.approx([0.5, 0.3, 0.18, 0.02])
    assert made.count([1, 1, 2, 0, 3]) == [2, 1, 0, 2]


def test_a_rest_too_rare_joins_the_rarest_cell() -> None:
    made = cells(torch.tensor([0.005, 0.6, 0.395]))
    assert made.token == [1]
    assert made.expected == pytest.approx([0.6, 0.4])
    assert made.freedom == 1
    assert cells(torch.tensor([0.0, 1.0])).freedom == 0


def test_thin_cells_raise_the_draws() -> None:
    assert samples_for([Cells([0], [0.5, 0.5]), Cells([0], [0.999, 0.001])], 0.5, 1e-3) == 5000


def test_prefixes_share_the_draws_that_all_their_cells_together_need() -> None:
    one, other = Cells([0, 1], [0.5, 0.3, 0.2]), Cells(list(range(9)), [0.1] * 10)
    wanted = samples_needed(2 + 9, 0.05, 1e-3)
    assert 2 * samples_for([one, other], 0.05, 1e-3) - wanted in (0, 1)


@pytest.mark.parametrize("off", [0.0, 0.1])
def test_it_rejects_as_often_as_it_says(off: float) -> None:
    true = torch.tensor([0.5, 0.3, 0.2])
    drawn_from = true + off * torch.tensor([-1.0, 0.5, 0.5])  # total variation `off`
    of, alpha, trials = cells(true), 0.02, 400
    count = samples_needed(of.freedom, 0.1, alpha)
    generator = torch.Generator().manual_seed(0)
    rejected = 0
    for _ in range(trials):
        drawn = torch.multinomial(drawn_from, count, replacement=True, generator=generator).tolist()
        rejected += p_value(statistic(of, drawn), of.freedom) < alpha
    share, spread = rejected / trials, 4 * (0.25 / trials) ** 0.5
    assert share < alpha + spread / 2 if off == 0 else share > losslessness.POWER - spread


def test_a_control_that_is_not_caught_is_no_proof() -> None:
    good = ChiSquareTest(1000, 2, 7, 6.0, 0.5, 0.02, 0.9, 1e-3, 0.0)
    assert good.passed
    assert not ChiSquareTest(1000, 2, 7, 6.0, 0.5, 0.02, 0.9, 1e-3, 0.4).passed
    assert not ChiSquareTest(1000, 2, 7, 60.0, 1e-9, 0.02, 0.9, 1e-3, 0.0).passed
    assert str(good) == "chi-square p 0.5 of 1000 draws (power 0.9 at TV 0.02), broken control caught (p 0)"
