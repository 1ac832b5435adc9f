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
NOTHING = 1.05  # tokens a pass, below which a head is of no use


@dataclass(frozen=True)
class Measured:
    """What was decoded: by which tree, on which workload and how, the prompts, and a generation for each."""

    tree: TreeConfig
    workload: str
    settings: Settings
    prompts: list[list[int]]
    made: list[Generation]


def row(head: Examined, kind: str, workload: str | None) -> Row | None:
    """Return the report's row on this head that can be measured again: greedy, one at a time, of a known tree.

    Args:
        head: the head.
        kind: which of HEADS it is.
        workload: the one that there is to measure on, whose row comes first.
    """
    name = str(head.trained.get("name") or kind)
    rows = [row_of(each) for each in head.report.get("rows", [])]
    fit = [
        each
        for each in rows
        if each.drafter.split(" ")[0] in {name, kind} & HEADS.keys()
        and (each.tier, each.temperature, each.batch_size, each.request_rate, each.category) == (LIVE, 0, 1, None, "")
        and each.tau is not None
        and tree(head, each.tree) is not None
    ]
    return min(fit, key=lambda each: each.workload != workload, default=None)


def tree(head: Examined, label: str) -> TreeConfig | None:
    """Return the tree that a report calls so: one that the head's files say, or one that the name says."""
    for said in (head.part("tree") if head.form == OWN else {}, head.run.get("tree")):
        try:
            if said and (found := typed(TreeConfig, said)).label == label:
                return found
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


def acceptance(head: Examined, said: Row | None, measured: Measured) -> Findings:
    """Whether the card's interval and the measured one overlap, and whether the head is accepted at all."""
    found, groups = metrics.acceptance(measured.made), metrics.clustered(measured.prompts)
    interval = metrics.tau_interval(measured.made, 0, groups)
    if found.tau is None:
        yield unknown("no answer is longer than a token; give checkup.workload=FILE with other prompts")
        return
    spread = interval or (found.tau, found.tau)
    count, label = len(measured.made), measured.tree.label
    here = f"τ {_shown(found.tau, spread)} on {count} prompts of {measured.workload}, tree {label}"
    if spread[1] < NOTHING:
        yield wrong(
            f"next to nothing is accepted: {here}",
            "every engine loses time to it: it drafts and commits a token a pass all the same",
            "mend what is wrong above and examine it again; if nothing is, train it for longer or for this target",
        )
    if said is None:
        why = head.trouble.get("report.json", "no report.json says what it should be")
        yield unknown(f"{here}; {why}")
        return
    assert said.tau is not None
    card = f"the card's {_shown(said.tau, said.tau_ci or (said.tau, said.tau))}"
    if said.workload != measured.workload:
        yield unknown(f"{here}; {card} is on {said.workload}: give checkup.workload=FILE with those prompts to compare")
    elif spread[1] < (said.tau_ci or (said.tau,))[0]:
        yield wrong(
            f"{here}; {card} is more",
            "whoever plans by the card buys a speed that is not there; or the files are no longer those that were "
            "measured",
            "mend what is wrong above, or measure again and publish that: python eval/run.py run=…",
        )
    else:
        yield ok(f"{here}; {card}")


def _shown(tau: float, interval: tuple[float, float]) -> str:
    return f"{tau:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
