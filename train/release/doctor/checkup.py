"""The checks by measurement: whether the head drafts best as its files declare it, and whether its card's τ is true."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eval.config import Selection
from eval.inputs.texts import of_answer
from eval.inputs.workloads import read_workload, short_name
from eval.measures import metrics
from eval.measures.results import LIVE, Row
from eval.report.reading import row_of
from heads import HEADS
from heads.common.progress import progress
from heads.common.rope import Rope, Rotary
from heads.common.typed import typed
from heads.formats.published.plan import PLAIN
from heads.formats.store import CONFIG
from inference.decode import Generation, Settings, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig, check_tree
from inference.target.target import Target
from inference.verification.sample import GREEDY
from train.release.config import CheckupConfig
from train.release.doctor import layers, positions
from train.release.doctor.examined import OWN, Against, Examined
from train.release.doctor.finding import Finding, Findings, ok, unknown, wrong
from train.release.doctor.trials import MOVES, Compared, Trials, rotated

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
    again: Callable[[], list[Generation]]  # decodes the prompts once more, with the head as it then is


def measure(head: Examined, against: Against, loaded: Any, config: CheckupConfig) -> list[Finding]:
    """Return the findings of the checks by measurement; `loaded` is the head as `load_found` gives it.

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
    by_layers = _layers(head, trials) if trials.head.feature_layers else _norm(trials)
    rope = _rope(head, against, drafting, decoded)
    tried = zip(CHECKS, (by_layers, _tokens(trials), _moved(trials), rope), strict=False)
    findings = [finding._replace(check=check) for check, finding in tried]
    drafted = _acceptance(head, reported, decoded, against.sibling)
    return findings + [finding._replace(check=CHECKS[-1]) for finding in drafted]


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

    def decode() -> list[Generation]:
        drafter = HeadDrafter(drafting, tree, kind)
        return [speculate(target, drafter, prompt, settings) for prompt in progress(prompts, "decoding")]

    return Measured(tree, read.name, settings, prompts, decode(), decode), reported


def _tau(generations: Sequence[Generation], prompts: Sequence[list[int]]) -> tuple[float, tuple[float, float]] | None:
    """Return τ and its interval, None where no answer is longer than a token."""
    tau = metrics.acceptance(generations).tau
    interval = metrics.tau_interval(generations, 0, metrics.clustered(prompts))
    return None if tau is None else (tau, interval or (tau, tau))


def _concluded(trials: Trials, ways: Mapping[str, tuple[Compared, Finding]], unsure: str | None = None) -> Finding:
    """Return the fault of the best way of drafting that is clearly better than the declared one, else the shares.

    Where `unsure` says what cannot be told, all is right only if every other way is clearly worse.
    """
    tried = {name: compared for name, (compared, _) in ways.items()}
    if better := [name for name, compared in tried.items() if compared.better]:
        return ways[max(better, key=lambda name: tried[name].other)][1]
    shares = f"as declared {float(trials.declared.float().mean()):.0%} of {len(trials.declared)} drafts right"
    shares += "".join(f"; {name}: {compared.other / max(compared.drafts, 1):.0%}" for name, compared in tried.items())
    if unsure is None or all(compared.worse for compared in tried.values()):
        return ok(shares)
    return unknown(f"{unsure}: {shares}")


def _layers(head: Examined, trials: Trials) -> Finding:
    """Whether neighbouring layers accept more than the declared ones."""
    ways = {}
    for by in (-1, 1):
        shifted = [i + by for i in trials.head.feature_layers]
        if {*shifted} <= {*trials.layers_read}:
            compared = trials.from_layers(shifted)
            says = f"the layers {by:+d} accept more: {compared.shares()}"
            ways[f"layers {by:+d}"] = compared, wrong(says, SILENT, f"{layers.set_to(head, shifted)} in {CONFIG}")
    if not ways:
        return unknown("no layers beside its own to compare with")
    return _concluded(trials, ways, "the layers beside give too much the same to tell")


def _norm(trials: Trials) -> Finding:
    """Whether the last state before the final norm accepts more than the one behind it."""
    compared = trials.before_norm()
    fault = wrong(
        f"the last state before the final norm accepts more: {compared.shares()}",
        f"engines hand out the state behind the final norm; {SILENT}",
        "train on the state behind the norm, as headstart does",
    )
    return _concluded(trials, {"no norm": (compared, fault)})


def _tokens(trials: Trials) -> Finding:
    """Whether the row's own token accepts more than the next one."""
    compared = trials.token_before()
    fault = wrong(
        f"the token of the feature's own row accepts more: {compared.shares()}",
        f"engines give it the token behind the feature's; {SILENT}",
        "shift the tokens by one in its trainer (row t holds feature t and token t+1) and train again",
    )
    return _concluded(trials, {"token before": (compared, fault)})


def _moved(trials: Trials) -> Finding:
    """Whether drafted rows at other positions accept more."""
    ways = {}
    for name, move in MOVES.items() if trials.attentions else ():
        compared = trials.moved(move)
        fault = wrong(
            f"drafted rows {name} accept more: {compared.shares()}",
            f"engines put a row that is drafted d deep at its own position and d - 1; {SILENT}",
            "correct the positions of drafted rows in its trainer (row t at depth d at t + d - 1) and train again",
        )
        ways[name] = compared, fault
    return _concluded(trials, ways) if ways else ok("it has no positions")


def _rope(head: Examined, against: Against, drafting: Any, measured: Measured) -> Finding:
    """Compare τ at the declared rotary positions with τ at the target's, at unscaled and at the usual ones."""
    declared, mine = positions.effective(head), _tau(measured.generations, measured.prompts)
    if declared is None or mine is None or head.form == OWN:
        return ok("as it was trained" if head.form == OWN else "none" if declared is None else "no drafts to compare")

    def tau_at(rope: Rope) -> tuple[float, tuple[float, float]] | None:
        with rotated(drafting, lambda attention: Rotary(attention.shape.head_dim, rope)):
            return _tau(measured.again(), measured.prompts)

    others = {positions.shown(rope): rope for rope in (against.rope, Rope(declared.theta), PLAIN) if rope is not None}
    taus = {positions.shown(declared): mine}
    for name, rope in others.items():
        if name not in taus and not rope.unsupported:
            taus[name] = tau_at(rope) or mine
    says = "; ".join(f"τ {_shown(*tau)} at {name}" for name, tau in taus.items())
    best = max(taus, key=lambda name: taus[name][0])
    if taus[best][1][0] > mine[1][1]:
        costs = f"it was trained by other angles than {CONFIG} says; {SILENT}"
        more = f"{best} accepts more than {positions.shown(declared)}: {says}"
        return wrong(more, costs, f"set {positions.remedy(others[best])} in {CONFIG}")
    if all(tau is mine or tau[1][1] < mine[1][0] for tau in taus.values()):
        return ok(says)
    return unknown(f"they differ too little here to tell by which it was trained: {says}")


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


def _acceptance(head: Examined, reported: Row | None, measured: Measured, sibling: bool) -> Findings:
    """Whether the card's interval and the measured one overlap, and whether the head is accepted at all."""
    tau = _tau(measured.generations, measured.prompts)
    if tau is None:
        yield unknown("no answer is longer than a token; give checkup.workload=FILE with other prompts")
        return
    bounds, count, label = tau[1], len(measured.generations), measured.tree.label
    here = f"τ {_shown(*tau)} on {count} prompts of {measured.workload}, tree {label}"
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


def _shown(tau: float, interval: tuple[float, float]) -> str:
    return f"{tau:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
