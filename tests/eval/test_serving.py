"""What vLLM reads of a measurement: the tokens to draft by batch size."""

from dataclasses import replace

import pytest

from eval.measures.serving import config_of, lengths, prices, ranges, rates, schedule_of, step_seconds
from tests.eval.stubs import ROW

MARGINAL = [0.7, 0.45, 0.3, 0.2, 0.12]
CHAIN = replace(
    ROW, drafter="eagle3", tree="chain-5", temperature=0.0, batch_size=1, steps=100, tau=2.77,
    accepted_by_depth=MARGINAL, conditional_by_depth=[0.7, 0.643, 0.667, 0.667, 0.6], category="",
)  # fmt: skip


@pytest.mark.parametrize(
    ("tree", "drafted"),
    [("chain-8", 8), ("served, depth 7", 7), ("served", 5), ("chain-3", 5)],
)
def test_positions_that_nothing_reached_were_drafted_all_the_same(tree: str, drafted: int) -> None:
    row, unreached = replace(CHAIN, tree=tree), [0.0] * (drafted - 5)
    assert rates(row) == MARGINAL + unreached
    plain = {b: replace(ROW, batch_size=b, tokens_per_second=b / 2.0) for b in (1, 16)}  # a step: 2 seconds
    fast = replace(row, tokens_per_second=2.77 / 6.0)  # a pass: 6
    assert prices(plain, {1: fast})[1][1].draft == pytest.approx(4 / drafted)


def server(batch: int, k: int, memory: float, compute: float, draft: float) -> float:
    """Return a pass's seconds: reading the weights, or computing what is over, and k drafted tokens."""
    return max(memory, compute * batch * (k + 1)) + k * (draft + 0.02 * compute * batch)


@pytest.mark.parametrize(
    ("memory", "compute", "draft"), [(8.0, 0.05, 0.4), (8.0, 0.4, 0.4), (2.0, 1.0, 0.1), (6.0, 0.1, 2.0)]
)
def test_a_simulated_servers_schedule_is_within_two_percent_of_the_best(
    memory: float, compute: float, draft: float
) -> None:
    """Of the server with a draft, its passes of five tokens are all that is known, and of the baseline its steps."""
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    tau = 1 + sum(MARGINAL)
    plain = {b: replace(ROW, batch_size=b, tokens_per_second=b / server(b, 0, memory, compute, draft)) for b in sizes}
    drafted = {
        b: replace(CHAIN, batch_size=b, tau=tau, tokens_per_second=b * tau / server(b, 5, memory, compute, draft))
        for b in sizes
    }
    times, passes = prices(plain, drafted)
    schedule = lengths(times, MARGINAL, passes)
    assert (schedule[0][0], schedule[-1][1]) == (1, 16)  # of 32 a pass is wider than the last measured step but one
    chosen = {start: k for start, _, k in schedule}
    for batch in sizes[:5]:
        k = chosen[max(start for start in chosen if start <= batch)]
        speeds = [(1 + sum(MARGINAL[:n])) / server(batch, n, memory, compute, draft) for n in range(6)]
        assert speeds[k] >= 0.98 * max(speeds), (batch, k)


def test_a_pass_that_takes_less_than_as_many_sequences_is_priced_as_it_was_measured() -> None:
    """Plain steps grow with the batch; a pass of five drafted tokens takes 1.2 of a step, so all of them pay."""
    sizes = [1, 2, 4, 8, 16, 32]
    plain = {b: replace(ROW, batch_size=b, tokens_per_second=1.0) for b in sizes}  # a step of b sequences: b seconds
    drafted = {b: replace(CHAIN, batch_size=b, tau=2.77, tokens_per_second=2.77 / 1.2) for b in sizes}
    times, passes = prices(plain, drafted)
    assert passes[1].wider == pytest.approx(0.2 / 5)
    assert lengths(times, MARGINAL, passes) == [(1, 2, 5)]


def test_ranges_begin_at_one_and_meet() -> None:
    assert ranges({4: 3, 8: 3, 16: 1, 32: 0, 64: 0}) == [(1, 15, 3), (16, 31, 1), (32, 64, 0)]
    assert config_of([(1, 15, 3), (16, 64, 0)]) == {
        "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 15, 3], [16, 64, 0]],
    }  # fmt: skip
    assert config_of([(1, 64, 0)])["num_speculative_tokens"] == 1, "of 0 vLLM takes none"


def test_a_step_between_measured_sizes_is_between_their_times() -> None:
    times = {1: 2.0, 4: 2.0, 8: 4.0, 16: 8.0}
    assert [step_seconds(times, size) for size in (1, 3, 6, 7, 8, 12, 16)] == [2.0, 2.0, 3.0, 3.5, 4.0, 6.0, 8.0]
    knee = {1: 2.0, 4: 2.0, 8: 2.4, 16: 4.8, 32: 9.6}  # 0.3 a sequence from 6.7 on
    assert [step_seconds(knee, size) for size in (5, 7)] == pytest.approx([2.0, 2.1])


def test_a_report_has_a_schedule_where_it_has_one_chain_in_batches() -> None:
    baseline = replace(
        ROW, drafter="plain", rule="none", tree="none", temperature=0.0, batch_size=1, tokens_per_second=10.0
    )
    chain = replace(CHAIN, tokens_per_second=20.0, rule="greedy")
    further = [
        replace(
            row, batch_size=size, tokens_per_second=30.0, accepted_by_depth=[0.5] * 5, conditional_by_depth=[1.0] * 5
        )
        for row in (baseline, chain)
        for size in (24, 2, 12)
    ]
    rows = [*further, baseline, chain]
    written = schedule_of(rows)
    assert written is not None
    along_text = replace(chain, tier="teacher_forced", accepted_by_depth=[0.9] * 5, tokens_per_second=None)
    assert schedule_of([*rows, along_text]) == written
    assert schedule_of([baseline, chain]) is None, "of one batch size"
    assert schedule_of([*rows, replace(chain, tree="chain-3")]) is None
    others = {
        "tree": "dynamic-d4k3n8", "tier": "teacher_forced", "request_rate": 2.0, "lossless": {"failed": 1},
        "temperature": 0.5, "category": "maths", "report": "one",
    }  # fmt: skip
    for key, value in others.items():
        changed = [row if row.drafter == "plain" else replace(row, **{key: value}) for row in rows]
        assert schedule_of(changed) is None, key
    for drafter, served in (("mlp", False), ("hydra runs/a", False), ("suffix", True)):
        named = [row if row.drafter == "plain" else replace(row, drafter=drafter) for row in rows]
        assert (schedule_of(named) is not None) == served, drafter
