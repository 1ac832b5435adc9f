"""Checks by measurement: whether the head drafts best as its files declare it, and whether its card's τ is true."""

from collections.abc import Mapping

from heads.formats.layer_ids import STATES, as_states
from heads.formats.published.decoder import THETA
from heads.formats.store import CONFIG
from heads.modules.rope import Rope
from train.release.doctor import positions
from train.release.doctor.against import Against
from train.release.doctor.examined import OWN, Examined
from train.release.doctor.finding import Findings, ok, unknown, wrong
from train.release.doctor.layers import BLOCK, WITHIN
from train.release.doctor.trials import Compared, Trials

SILENT = "every engine reads as declared: acceptance stays at the lower of both, without an error"


def layers(head: Examined, trials: Trials) -> Findings:
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


def tokens(_head: Examined, trials: Trials) -> Findings:
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


def moved(_head: Examined, trials: Trials) -> Findings:
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


def rope(head: Examined, against: Against, trials: Trials) -> Findings:
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
