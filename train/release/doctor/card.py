"""The measured acceptance against the card's: the same head, tree and workload, greedily, by our own verifier."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.measures import metrics
from eval.measures.results import LIVE, Row
from eval.report.reading import row_of
from heads import HEADS
from heads.common.typed import typed
from inference.decode import Generation, Settings
from inference.drafters.policy import TreeConfig
from train.release.doctor.examined import OWN, Examined
from train.release.doctor.finding import Findings, ok, unknown, wrong

LABEL = re.compile(r"(?P<kind>chain|dynamic|best_first)-d?(?P<depth>\d+)(?:k(?P<top_k>\d+))?(?:n(?P<nodes>\d+))?")
NOTHING = 1.05  # tokens a pass; below that a head is of no use


@dataclass(frozen=True)
class Measured:
    """A measurement: the tree, the workload, the settings, the prompts, and a generation for each."""

    tree: TreeConfig
    workload: str
    settings: Settings
    prompts: list[list[int]]
    generations: list[Generation]


def row(head: Examined, kind: str, workload: str | None) -> Row | None:
    """Return the report's row on this head that can be measured again: greedy, one at a time, of a known tree.

    Args:
        head: the head.
        kind: which of HEADS it is.
        workload: the one to measure on, whose row comes first.
    """
    name = str(head.trained.get("name") or kind)
    rows = [row_of(candidate) for candidate in head.report.get("rows", [])]
    fit = [
        candidate
        for candidate in rows
        if candidate.drafter.split(" ")[0] in {name, kind} & HEADS.keys()
        and (candidate.tier, candidate.temperature, candidate.batch_size) == (LIVE, 0, 1)
        and (candidate.request_rate, candidate.category) == (None, "")
        and candidate.tau is not None
        and tree(head, candidate.tree) is not None
    ]
    return min(fit, key=lambda candidate: candidate.workload != workload, default=None)


def tree(head: Examined, label: str) -> TreeConfig | None:
    """Return the tree of a label: one from the head's files, or one parsed from the label."""
    for values in (head.part("tree") if head.form == OWN else {}, head.run.get("tree")):
        try:
            if values and (config := typed(TreeConfig, values)).label == label:
                return config
        except ValueError:
            continue
    parts = LABEL.fullmatch(label)
    if parts is None:
        return None
    numbers: Mapping[str, Any] = {key: int(value or 0) for key, value in parts.groupdict().items() if key != "kind"}
    try:
        return TreeConfig(kind=parts["kind"], paths=[], widths=[], **numbers)
    except ValueError:
        return None


def acceptance(head: Examined, reported: Row | None, measured: Measured) -> Findings:
    """Whether the card's interval and the measured one overlap, and whether the head is accepted at all."""
    accepted, groups = metrics.acceptance(measured.generations), metrics.clustered(measured.prompts)
    interval = metrics.tau_interval(measured.generations, 0, groups)
    if accepted.tau is None:
        yield unknown("no answer is longer than a token; give checkup.workload=FILE with other prompts")
        return
    bounds = interval or (accepted.tau, accepted.tau)
    count, label = len(measured.generations), measured.tree.label
    here = f"τ {_shown(accepted.tau, bounds)} on {count} prompts of {measured.workload}, tree {label}"
    if bounds[1] < NOTHING:
        yield wrong(
            f"next to nothing is accepted: {here}",
            "every engine loses time to it: it drafts and commits a token a pass all the same",
            "fix what is wrong above and examine it again; if nothing is, train it for longer or for this target",
        )
    if reported is None:
        why = head.trouble.get("report.json", "no report.json says what it should be")
        yield unknown(f"{here}; {why}")
        return
    assert reported.tau is not None
    card = f"the card's {_shown(reported.tau, reported.tau_ci or (reported.tau, reported.tau))}"
    if reported.workload != measured.workload:
        other = reported.workload
        yield unknown(f"{here}; {card} is on {other}: give checkup.workload=FILE with those prompts to compare")
    elif bounds[1] < (reported.tau_ci or (reported.tau,))[0]:
        yield wrong(
            f"{here}; {card} is more",
            "whoever plans by the card buys a speed that is not there; or the files are no longer those that were "
            "measured",
            "fix what is wrong above, or measure again and publish that: python eval/run.py run=…",
        )
    else:
        yield ok(f"{here}; {card}")


def _shown(tau: float, interval: tuple[float, float]) -> str:
    return f"{tau:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
