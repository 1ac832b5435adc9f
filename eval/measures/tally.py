"""Passes counted along given texts, where no clock ran: what a row of the report says of them.

Counts may be expectations: where drafts are drawn, what a text says of a step is a probability.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from eval.measures import metrics
from eval.measures.cost_model import Step
from eval.measures.metrics import ratio
from eval.measures.results import Row


@dataclass(frozen=True)
class Tally:
    """One text's passes.

    Attributes:
        tokens: committed after the first, which no pass commits.
        steps: passes that this takes.
        drafted: nodes of all passes.
        reached: of the passes, those that accepted 1, 2, … drafted tokens or more.
        draft_s: seconds spent drafting; 0 where nothing was drafted anew.
    """

    tokens: float
    steps: float
    drafted: float
    reached: list[float]
    draft_s: float

    @property
    def accepted(self) -> float:
        """Drafted tokens that were accepted."""
        return math.fsum(self.reached)


@dataclass(frozen=True)
class Heading:
    """What all rows of a workload at a temperature share.

    Attributes:
        tier: which one counted.
        categories: the places of each category's texts.
        conversations: a number for each text, the same one for those that are resampled together.
        seed: of the intervals.
    """

    tier: str
    workload: str
    temperature: float
    categories: Mapping[str, list[int]]
    conversations: Sequence[int]
    seed: int


def tally(steps: Sequence[Step], tokens: int, draft_s: float = 0.0) -> Tally:
    """Count the passes of a text."""
    deepest = max((step.accepted for step in steps), default=0)
    reached = [float(sum(step.accepted >= depth for step in steps)) for depth in range(1, deepest + 1)]
    return Tally(float(tokens), float(len(steps)), float(sum(step.nodes for step in steps)), reached, draft_s)


def rows(name: str, tree: str, rule: str, tallies: Sequence[Tally], heading: Heading, state: str) -> list[Row]:
    """Return a source's row, and one for each category.

    Args:
        name: the source's.
        tree: the shape of its drafts.
        rule: how drafts count as accepted.
        tallies: one a text, in the workload's order.
        heading: what else the rows say.
        state: of a source that remembers.
    """
    places = {"": list(range(len(tallies))), **heading.categories}
    made = []
    for of, each in places.items():
        row = _row(name, tree, rule, [tallies[i] for i in each], heading, state, of)
        groups = [heading.conversations[i] for i in each]
        made.append(replace(row, tau_ci=tau_interval([tallies[i] for i in each], heading.seed, groups)))
    return made


def tau_interval(tallies: Sequence[Tally], seed: int, groups: metrics.Groups = None) -> metrics.Interval | None:
    """Return τ's interval under resampling of the texts, those of a group together."""
    columns = torch.tensor([[each.tokens, each.steps] for each in tallies], dtype=torch.float64)
    return metrics.bootstrap(metrics.within(columns, groups), lambda total: total[:, 0] / total[:, 1], seed)


def _row(name: str, tree: str, rule: str, tallies: Sequence[Tally], heading: Heading, state: str, category: str) -> Row:
    steps, tokens = (math.fsum(getattr(each, key) for each in tallies) for key in ("steps", "tokens"))
    drafted, accepted = (math.fsum(getattr(each, key) for each in tallies) for key in ("drafted", "accepted"))
    deepest = max((len(each.reached) for each in tallies), default=0)
    sums = [math.fsum(dict(enumerate(each.reached)).get(d, 0.0) for each in tallies) for d in range(deepest)]
    reached = [count for count in sums if count > 0]  # they fall, and no pass came deeper
    by_depth = [count / steps for count in reached]
    mine = [ratio(each.tokens, each.steps) for each in tallies]
    known = [value for value in mine if value is not None]
    tau, mean = ratio(tokens, steps), ratio(math.fsum(known), len(known))
    own = [ratio(each.accepted, each.steps) for each in tallies]
    apiece = [value for value in own if value is not None]
    return Row(
        drafter=name,
        rule=rule,
        tree=tree,
        workload=f"{heading.workload}/{category}" if category else heading.workload,
        temperature=heading.temperature,
        batch_size=1,
        steps=round(steps),
        tokens=round(tokens),
        tau=tau,
        tau_ci=None,
        tau_request_mean=mean,
        accepted_by_depth=by_depth,
        conditional_by_depth=[count / above for above, count in pairwise([steps, *reached])],
        draft_tokens=round(drafted),
        accepted_per_draft_token=ratio(accepted, drafted),
        tokens_per_second=None,
        speedup=None,
        speedup_ci=None,
        speedup_hf=None,
        overlap_headroom=None,
        seconds={"draft": math.fsum(each.draft_s for each in tallies), "verify": 0.0, "other": 0.0},
        latency_s=None,
        memory_bytes=0,
        lossless={"checked": 0, "identical": 0, "near_tie": 0, "failed": 0},
        category=category,
        prompts=len(tallies),
        state=state,
        definitions={
            "mean_acceptance_length": tau,
            "mean_acceptance_length_by_request": mean,
            "accepted_per_pass": ratio(accepted, steps),
            "accepted_per_pass_by_request": ratio(math.fsum(apiece), len(apiece)),
            "draft_acceptance_rate": ratio(accepted, drafted),
            "committed_per_verified": ratio(accepted + steps, drafted + steps),
        },
        tau_within_depth=[1 + math.fsum(by_depth[:depth]) for depth in range(1, len(by_depth) + 1)],
        by_request={"tau": found} if (found := metrics.quantiles(mine)) else {},
        tier=heading.tier,
    )
