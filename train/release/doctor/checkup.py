"""The checks by measurement: whether the head drafts best as its files declare it, and whether its card's τ is true."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eval.config import Selection
from eval.inputs.texts import of_answer
from eval.inputs.workloads import read_workload, short_name
from eval.measures import metrics
from eval.measures.results import LIVE, Row
from eval.report.reading import row_of
from heads import HEADS
from heads.common.typed import typed
from heads.formats.layer_ids import STATES, as_states
from heads.formats.published.plan import THETA
from heads.formats.store import CONFIG
from heads.modules.rope import Rope
from inference.decode import Generation, Settings, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig, check_tree
from inference.target.target import Target
from inference.verification.sample import GREEDY
from train.release.config import CheckupConfig
from train.release.doctor import layers, positions
from train.release.doctor.examined import OWN, Against, Examined
from train.release.doctor.finding import Finding, Findings, ok, unknown, wrong
from train.release.doctor.layers import BLOCK, WITHIN
from train.release.doctor.trials import Compared, Trials

BUNDLED = "tiny"
CHECKS = ("layers, measured", "tokens, measured", "positions, measured", "rope, measured", "acceptance")
SILENT = "every engine reads as declared: acceptance stays at the lower of both, without an error"
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


def measure(head: Examined, against: Against, loaded: Any, config: CheckupConfig) -> list[Finding]:
    """Return the findings of the checks by measurement.

    Args:
        head: the head's files.
        against: its target.
        loaded: the head, as `heads.formats.hub.load_found` gives it.
        config: the amount to measure.

    Raises:
        ValueError: the workload that is given cannot be read.
    """
    target = against.whole
    assert target is not None
    drafting, outputs = loaded, layers.as_read(head)
    distinct = {*(outputs or [])}
    if distinct and len(distinct) == len(loaded.feature_layers) and distinct <= {*range(against.layers)}:
        # Our own reader accepts ids that are counted in the other way.
        drafting = type(loaded)(replace(loaded.config, feature_layers=list(outputs or [])), target.embeddings)
        drafting.load_state_dict(loaded.state_dict())
    drafting = drafting.to(device=target.device, dtype=target.dtype).eval()
    try:
        decoded, reported = _decoded(head, target, drafting, config)
    except ValueError as error:
        if config.workload is not None:
            raise
        return [unknown(f"nothing to measure on ({error})")._replace(check=name) for name in CHECKS]
    pairs = zip(decoded.prompts, decoded.generations, strict=True)
    answered = [of_answer(target, prompt, generation.tokens, decoded.settings) for prompt, generation in pairs]
    trials = Trials(target, drafting, [text for text in answered if text.generated > 1])
    by_check = {
        CHECKS[0]: _layers(head, trials),
        CHECKS[1]: _tokens(head, trials),
        CHECKS[2]: _moved(head, trials),
        CHECKS[3]: _rope(head, against, trials),
        CHECKS[4]: _acceptance(head, reported, decoded),
    }
    return [finding._replace(check=name) for name, findings in by_check.items() for finding in findings]


def _decoded(head: Examined, target: Target, drafting: Any, config: CheckupConfig) -> tuple[Measured, Row | None]:
    """Decode greedily, with the report's tree and limit where it has them."""
    kind = next(name for name, class_ in HEADS.items() if type(drafting) is class_)
    workload = config.workload or head.prompts or BUNDLED
    chain = TreeConfig("chain", min(config.depth, drafting.max_depth), 0, 0, [], [])
    reported = _row(head, kind, short_name(workload)) if target.takes_trees else None
    tree = chain if reported is None else _tree(head, reported.tree) or chain
    check_tree(target, tree, kind)
    read = read_workload(workload, target, Selection(config.prompts, 0, True, "first", True))
    limit = head.report.get("settings", {}).get("max_new_tokens") if reported is not None else None
    settings = Settings(min(limit or config.max_new_tokens, config.max_new_tokens), GREEDY)
    prompts = [prompt.token for prompt in read.prompts]
    generations = speculate(target, HeadDrafter(drafting, tree, kind), prompts, settings)
    return Measured(tree, read.name, settings, prompts, generations), reported


def _layers(head: Examined, trials: Trials) -> Findings:
    """Whether neighbouring layers accept more than the declared ones."""
    declared, tried = list(trials.head.feature_layers), list(trials.layers())
    for by, compared in tried:
        if compared.better:
            shifted = [i + by for i in declared]
            yield wrong(f"the layers {by:+d} accept more: {compared.shares()}", SILENT, _layer_keys(head, shifted))
            return
    normed = trials.before_norm()
    if normed is not None and normed.better:
        yield wrong(
            f"the last state before the final norm accepts more: {normed.shares()}",
            f"engines hand out the state behind the final norm; {SILENT}",
            "train on the state behind the norm, as headstart does",
        )
    elif not tried and normed is None:
        yield unknown("no layers beside its own to compare with")
    else:
        others = {f"layers {by:+d}": compared for by, compared in tried}
        others |= {} if normed is None else {"no norm": normed}
        if all(compared.worse for _, compared in tried):
            yield ok(_best(trials, others))
        else:
            yield unknown(f"the layers beside give too much the same to tell: {_best(trials, others)}")


def _layer_keys(head: Examined, outputs: list[int]) -> str:
    if head.form == "eagle3":
        return f"set {STATES} to {as_states(outputs)} and {WITHIN} to {outputs} in {CONFIG}"
    return f"set {BLOCK if head.form == 'dflash' else 'head.feature_layers'} to {outputs} in {CONFIG}"


def _best(trials: Trials, others: Mapping[str, Compared]) -> str:
    fraction = float(trials.declared.float().mean())
    beside = "; ".join(f"{name}: {compared.other / max(compared.drafts, 1):.0%}" for name, compared in others.items())
    return f"as declared {fraction:.0%} of {len(trials.declared)} drafts right" + (f"; {beside}" if beside else "")


def _tokens(_head: Examined, trials: Trials) -> Findings:
    """Whether the row's own token accepts more than the next one."""
    compared = trials.token_before()
    if compared.better:
        yield wrong(
            f"the token of the feature's own row accepts more: {compared.shares()}",
            f"engines give it the token behind the feature's; {SILENT}",
            "shift the tokens by one in its trainer (row t holds feature t and token t+1) and train again",
        )
    else:
        yield ok(_best(trials, {"token before": compared}))


def _moved(_head: Examined, trials: Trials) -> Findings:
    """Whether drafted rows at other positions accept more."""
    tried = list(trials.positions())
    better = [pair for pair in tried if pair[1].better]
    if better:
        name, compared = max(better, key=lambda pair: pair[1].other)
        yield wrong(
            f"drafted rows {name} accept more: {compared.shares()}",
            f"engines put a row that is drafted d deep at its own position and d - 1; {SILENT}",
            "correct the positions of drafted rows in its trainer (row t at depth d at t + d - 1) and train again",
        )
    else:
        yield ok(_best(trials, dict(tried)) if tried else "it has no positions")


def _rope(head: Examined, against: Against, trials: Trials) -> Findings:
    """Whether the target's rotary positions, or the usual ones, accept more than the declared ones."""
    declared = positions.effective(head)
    if declared is None or head.form == OWN:
        yield ok("none" if declared is None else "as it was trained")
        return
    others = {"rope_theta": Rope(THETA, None), **positions.ropes(head.layer), "the target": against.rope}
    tried: list[tuple[Rope, Compared]] = []
    for other in others.values():
        seen = [declared, *(rope for rope, _ in tried)]
        if other is not None and positions.supported(other) and other not in seen:
            tried.append((other, trials.turned(other)))
    better = [(other, compared) for other, compared in tried if compared.better]
    if better:
        other, compared = max(better, key=lambda pair: pair[1].other)
        yield wrong(
            f"{positions.shown(other)} accepts more than {positions.shown(declared)}: {compared.shares()}",
            f"it was trained by other angles than {CONFIG} says; {SILENT}",
            f"set {positions.remedy(other)} in {CONFIG}",
        )
    elif all(compared.worse for _, compared in tried):
        yield ok(_best(trials, {positions.shown(other): compared for other, compared in tried}))
    else:
        rope_shown = positions.shown(declared)
        yield unknown(f"{rope_shown} and the target's differ too little here to tell which it was trained by")


def _row(head: Examined, kind: str, workload: str | None) -> Row | None:
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
        and _tree(head, candidate.tree) is not None
    ]
    return min(fit, key=lambda candidate: candidate.workload != workload, default=None)


def _tree(head: Examined, label: str) -> TreeConfig | None:
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


def _acceptance(head: Examined, reported: Row | None, measured: Measured) -> Findings:
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
