"""The check by measurement: whether the head is accepted as much as its card says."""

import re
from collections.abc import Mapping
from typing import Any

from eval.config import Selection
from eval.inputs.workloads import read_workload, short_name
from eval.measures import metrics
from eval.measures.results import LIVE, Row
from eval.report.reading import row_of
from heads import HEADS
from heads.common.progress import progress
from heads.common.typed import typed
from inference.decode import Settings, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig, check_tree
from inference.target.target import Target
from inference.verification.sample import GREEDY
from train.release.config import CheckupConfig
from train.release.doctor.examined import OWN, Examined
from train.release.doctor.finding import Findings, ok, unknown, wrong

BUNDLED = "tiny"
LABEL = re.compile(r"(?P<kind>chain|dynamic|best_first)-d?(?P<depth>\d+)(?:k(?P<top_k>\d+))?(?:n(?P<nodes>\d+))?")
NOTHING = 1.05  # tokens a pass; below that a head is of no use


def acceptance(head: Examined, target: Target, loaded: Any, sibling: bool, config: CheckupConfig) -> Findings:
    """Decode greedily, with the tree and limit of the card where it has them, and compare τ with the card's.

    Args:
        head: its files.
        target: with its layers.
        loaded: the head as `load_found` gives it.
        sibling: whether the target is another checkpoint than the card's.
        config: what to decode.

    Raises:
        ValueError: the workload that is given cannot be read.
    """
    drafting = loaded.to(device=target.device, dtype=target.dtype).eval()
    kind = next(name for name, class_ in HEADS.items() if type(drafting) is class_)
    workload = config.workload or head.prompts or BUNDLED
    reported = _row(head, kind, short_name(workload)) if target.takes_trees else None
    chain = TreeConfig("chain", min(config.depth, drafting.max_depth), 0, 0, [], [])
    tree = chain if reported is None else _tree(head, reported.tree) or chain
    try:
        check_tree(target, tree, kind)
        read = read_workload(workload, target, Selection(config.prompts, 0, True, "first", True))
    except ValueError as error:
        if config.workload is not None:
            raise
        yield unknown(f"nothing to measure on ({error})")
        return
    limit = head.report.get("settings", {}).get("max_new_tokens") if reported is not None else None
    settings = Settings(min(limit or config.max_new_tokens, config.max_new_tokens), GREEDY)
    prompts = [prompt.token for prompt in read.prompts]
    drafter = HeadDrafter(drafting, tree, kind)
    generations = [speculate(target, drafter, prompt, settings) for prompt in progress(prompts, "decoding")]
    tau = metrics.acceptance(generations).tau
    if tau is None:
        yield unknown("no answer is longer than a token; give checkup.workload=FILE with other prompts")
        return
    bounds = metrics.tau_interval(generations, 0, metrics.clustered(prompts)) or (tau, tau)
    here = f"τ {_shown(tau, bounds)} on {len(prompts)} prompts of {read.name}, tree {tree.label}"
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
    if reported.workload != read.name:
        other = reported.workload
        yield unknown(f"{here}; {card} is on {other}: give checkup.workload=FILE with those prompts to compare")
    elif sibling:
        yield unknown(f"{here}; {card} is that of the target that it was made for")
    elif bounds[1] < (reported.tau_ci or (reported.tau,))[0]:
        yield wrong(
            f"{here}; {card} is more",
            "whoever plans by the card buys a speed that is not there; or the files are no longer those that were "
            "measured",
            "fix what is wrong above, or measure again and publish that: python eval/run.py run=…",
        )
    else:
        yield ok(f"{here}; {card}")


def _row(head: Examined, kind: str, workload: str | None) -> Row | None:
    """Return the report's row on this head that can be measured again: greedy, one at a time, of a known tree.

    One on the workload comes first.
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
        and _tree(head, candidate.tree) is not None
    ]
    return min(fit, key=lambda candidate: candidate.workload != workload, default=None)


def _tree(head: Examined, label: str) -> TreeConfig | None:
    """Return the tree of a label, of a schedule's the first: one from the head's files, or one parsed from it."""
    label, *_ = label.split(", ")
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


def _shown(tau: float, interval: tuple[float, float]) -> str:
    return f"{tau:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
