"""Examine a published head: whether it loads, drafts as its card says, and how each engine reads it.

    python ops/doctor.py run=outputs/NAME target=/my/model

The head is a folder or a Hub repository, in our own or any supported format. Nothing is written. The exit status is 1
if something is wrong.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout's root replaces ops/, whose files could shadow modules
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig
from safetensors import SafetensorError

from eval.config import Selection
from eval.inputs.workloads import read_workload, short_name
from eval.measures import metrics
from eval.measures.results import LIVE, ResultRow
from eval.report.write import row_of
from heads import HEADS
from heads.common.command import command
from heads.common.errors import one_line
from heads.common.target_config import read_target_values
from heads.common.typed import Count, typed
from heads.common.untrusted import visible
from heads.formats.hub import load_found, sibling_spec
from heads.formats.mtp_layouts import REMEDY
from heads.formats.published.export import assert_known
from heads.formats.store import CONFIG
from inference.drafters.policy import TreeConfig, check_tree
from inference.target.checkpoint import lost_module
from inference.target.target import Target
from ops.examine import (
    OWN,
    WRONG,
    Examined,
    Finding,
    load_target,
    meant_for,
    ok,
    read,
    readings,
    records,
    unknown,
    written,
    wrong,
)
from train.release.hub import decoded

BUNDLED, NAME = "tiny", "acceptance"
NOTHING = 1.05  # τ below which a head is useless


@dataclass(frozen=True)
class DoctorConfig:
    """The head (`run`), its target, and how its acceptance is measured; conf/ops/doctor.yaml explains the keys."""

    run: str
    target: str | None
    format: str | None
    sibling: bool
    measure: bool
    workload: str | None
    prompts: Count
    max_new_tokens: Count
    depth: Count
    dtype: str

    def __post_init__(self) -> None:
        if self.format is not None:
            assert_known(self.format)


def examine(config: DoctorConfig) -> list[Finding]:
    """Return the findings on a head, in order; a head that does not load has only that finding.

    Raises:
        ValueError: the head, target or workload is missing.
    """
    if (folder := Path(config.run).expanduser()).is_dir():
        with suppress(OSError, ValueError, SafetensorError):  # what is no target
            lost = lost_module(str(folder), read_target_values(str(folder), False, cached_alone=True))
            if lost is not None:
                return [wrong("MTP module", lost, "engines that are to draft by it stop, or draft nothing", REMEDY)]
    head = read(config.run)
    target, why = load_target(config.target, head, config.dtype, config.measure)
    try:
        sibling = head.format_name == OWN and config.sibling
        spec = sibling_spec(head.folder, target.spec, "is examined for") if sibling else target.spec
        loaded = load_found(head.folder, target.embeddings, spec)
    except (ValueError, OSError) as error:
        trouble, _, remedy = one_line(error).rpartition("; ")
        costs = "headstart refuses it, so that nothing can be measured"
        return [wrong("loads", trouble or remedy, costs, remedy if trouble else "export or download it again")]
    findings = [ok("loads", f"headstart loads it for {target.spec.name}"), *records(head, target, config.sibling)]
    try:
        findings += readings(head, loaded, target)
    except (TypeError, AttributeError, KeyError, ValueError) as error:  # a value of an unexpected type
        findings.append(wrong(CONFIG, one_line(error), "engines stop at it", "export or download the head again"))
    if isinstance(target, Target) and config.measure:
        findings.append(acceptance(head, target, loaded, config))
    else:
        findings.append(unknown("acceptance", why or "measure is false"))
    return [meant_for(finding, config.format) for finding in findings]


def acceptance(head: Examined, target: Target, loaded: Any, config: DoctorConfig) -> Finding:
    """Decode greedily, with the card's tree and limit where it has them, and compare τ; refuse an unread workload."""
    kind = next(name for name, class_ in HEADS.items() if type(loaded) is class_)
    workload = config.workload or head.prompts or BUNDLED
    reported = _row(head, kind, short_name(workload)) if target.takes_trees else None
    chain = TreeConfig("chain", min(config.depth, loaded.max_depth), 0, 0, [], [])
    tree = chain if reported is None else _tree(head, reported.tree) or chain
    try:
        check_tree(target, tree, kind)
        read = read_workload(workload, target, Selection(config.prompts, 0, True, "first", True))
    except ValueError as error:
        if config.workload is not None:
            raise
        return unknown(NAME, f"nothing to measure on ({error})")
    limit = head.report["settings"].get("max_new_tokens") if reported is not None else None
    most = min(limit, config.max_new_tokens) if isinstance(limit, int) and limit > 0 else config.max_new_tokens
    prompts = [prompt.token for prompt in read.prompts]
    generations = decoded(target, loaded, tree, prompts, most)
    tau = metrics.acceptance(generations).tau or 1.0  # answers of one token have no steps
    bounds = metrics.tau_interval(generations, 0, metrics.cluster_prompts(prompts)) or (tau, tau)
    here = f"τ {_shown(tau, bounds)} on {len(prompts)} prompts of {read.name}, tree {tree.label}"
    if bounds[1] < NOTHING:
        return wrong(
            NAME, f"next to nothing is accepted: {here}", "every engine loses time to it",
            "fix what is wrong above; if nothing is, train it for longer or for this target",
        )  # fmt: skip
    if reported is None or reported.tau is None:
        return unknown(NAME, f"{here}; no report.json says what it should be")
    expected = reported.tau_ci or (reported.tau, reported.tau)
    card = f"the card's {_shown(reported.tau, expected)}"
    if reported.workload != read.name or config.sibling:
        of = "that of the target that it was made for" if config.sibling else f"on {reported.workload}: give workload="
        return unknown(NAME, f"{here}; {card} is {of}")
    if bounds[1] < expected[0]:
        return wrong(
            NAME, f"{here}; {card} is more", "the card promises a speed that the head does not have here",
            "fix what is wrong above, or measure again and publish that: python eval/run.py run=…",
        )  # fmt: skip
    return ok(NAME, f"{here}; {card}")


def _row(head: Examined, kind: str, workload: str | None) -> ResultRow | None:
    """Return the report's row on this head that can be measured again: greedy, batch size 1, known tree.

    A row on `workload` is preferred.
    """
    name = str(head.trained.get("name") or kind)
    fit = [
        row
        for row in [row_of(row) for row in head.report.get("rows", [])]
        if row.drafter.split(" ")[0] in {name, kind} & HEADS.keys()
        and (row.tier, row.temperature, row.batch_size) == (LIVE, 0, 1)
        and (row.request_rate, row.category) == (None, "")
        and row.tau is not None
        and _tree(head, row.tree) is not None
    ]
    return min(fit, key=lambda row: row.workload != workload, default=None)


def _tree(head: Examined, label: str) -> TreeConfig | None:
    """Return the tree of a row's label (a schedule's first): one in the head's files, or a chain."""
    label, *_ = label.split(", ")
    for values in (head.config.get("tree"), head.run.get("tree")):
        try:
            if values and (tree := typed(TreeConfig, values)).label == label:
                return tree
        except ValueError:
            continue
    chain = re.fullmatch(r"chain-(\d+)", label)
    return TreeConfig("chain", int(chain[1]), 0, 0, [], []) if chain else None


def _shown(tau: float, interval: tuple[float, float]) -> str:
    return f"{tau:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


@command("ops/doctor")
def main(cfg: DictConfig) -> None:
    """Print the findings, and exit with 1 if something is wrong."""
    findings = examine(typed(DoctorConfig, cfg))
    print(visible(written(findings)))
    raise SystemExit(int(any(finding.verdict == WRONG for finding in findings)))


if __name__ == "__main__":
    main()
