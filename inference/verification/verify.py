"""Verification: the registry of rules, which drafts each is right for, and the verdict on a draft.

At temperature 0 the target's distribution is one-hot and every lossless rule is the same walk along its best tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from heads.modules.argmax import argmax
from inference.verification import device, rules
from inference.verification.rng import Rng
from inference.verification.rules import Chosen, Distributions, LazyDistributions
from inference.verification.sample import Sampling
from inference.verification.tree import DraftTree

AUTO, GREEDY_WALK, NOTHING = "auto", "greedy", "none"


Walk = Callable[[DraftTree, Distributions, Any, Rng], Chosen]  # tree, p, q, rng


def ignores_q(rule: Callable[[DraftTree, Distributions, Rng], Chosen]) -> Walk:
    """Return a rule that reads no q in the form of those that do."""
    return lambda tree, p, _, rng: rule(tree, p, rng)


@dataclass(frozen=True)
class Rule:
    """A rule, and the drafts that it is right for."""

    walk: Walk
    sampled: bool  # whether it needs drafts that were sampled from known probs q; without, any choice will do
    chain: bool  # whether it takes at most one child a node
    lossy: bool  # whether it changes the target's distribution
    # The same for a whole batch, of a rule that reads q; the other lossless ones are `device.walk`.
    on_device: Callable[[device.Sampled, Tensor, Tensor, bool], device.Chosen] | None = None


RULES = {
    "match": Rule(ignores_q(rules.match), False, False, False),
    "point_mass": Rule(ignores_q(rules.match), False, False, False),
    "token": Rule(rules.recursive, True, True, False, device.recursive),
    "block": Rule(rules.traversal, True, True, False, device.traversal),
    "recursive": Rule(rules.recursive, True, False, False, device.recursive),
    "traversal": Rule(rules.traversal, True, False, False, device.traversal),
    "coupled": Rule(ignores_q(rules.match), False, False, False),
    "typical": Rule(ignores_q(rules.typical), False, False, True),
    "threshold": Rule(ignores_q(rules.threshold), False, False, True),
}
COUPLED = "coupled"


class Verdict(NamedTuple):
    """The accepted nodes from the root on, the next token (not part of the tree), and the rule's label for reports."""

    path: list[int]
    token: int
    rule: str


def check_rule(rule: str, lossy: bool) -> None:
    """Refuse a rule that does not exist, and a lossy one that is not asked for as such."""
    if rule != AUTO and rule not in RULES:
        raise ValueError(f"rule is {rule!r}: choose {AUTO} or one of {', '.join(RULES)}")
    if is_lossy(rule) and not lossy:
        raise ValueError(
            f"rule={rule} changes the target's distribution: set lossy=true to allow it, or choose rule={AUTO}"
        )


def is_lossy(rule: str) -> bool:
    """Return whether a rule changes the target's distribution."""
    return rule != AUTO and RULES[rule].lossy


def emits_samples(rule: str) -> bool:
    """Return whether a rule emits what the target samples, drafts or not: then the text is that of the baseline.

    The other lossless rules sample again where they reject: the text is another, of the same distribution.
    """
    return rule in (GREEDY_WALK, NOTHING) or (rule in RULES and not RULES[rule].sampled and not RULES[rule].lossy)


def label(rule: str) -> str:
    """Return what reports call a rule."""
    return f"{rule} (lossy)" if is_lossy(rule) else rule


def decide(
    tree: DraftTree,
    logits: Float[Tensor, "N V"],
    q: Float[Tensor, "N V"] | None,
    sampling: Sampling,
    rng: Rng,
    rule: str = AUTO,
) -> Verdict:
    """Verify a draft.

    Args:
        logits: the target's at each node, the repetition penalty applied.
        q: the probs from which each node's children were sampled; None if they were chosen in any other way.
        rng: the randomness; a `CoupledRng` one for the coupled rule.
        rule: a key of `RULES`, or auto.

    Raises:
        ValueError: the rule is not right for such a draft.
    """
    if len(tree.token) == 1:
        rule, shown = "match", NOTHING
    else:
        rule = fitting(rule, is_chain(tree.parent.tolist()), q is not None, sampling.temperature == 0)
        shown = label(rule)
    entry = RULES[rule]
    if sampling.temperature > 0:
        return Verdict(*entry.walk(tree, LazyDistributions(logits, sampling), q, rng), shown)
    if entry.lossy:  # one-hot probs leave nothing to be lenient about: they judge by those at temperature 1
        path, _ = entry.walk(tree, LazyDistributions(logits, replace(sampling, temperature=1.0)), q, rng)
        return Verdict(path, int(logits[path[-1]].argmax()), shown)
    best = argmax(logits).tolist()
    return Verdict(*rules.follow(tree, lambda node, _: best[node]), NOTHING if shown == NOTHING else GREEDY_WALK)


def is_chain(parents: Sequence[int]) -> bool:
    """Return whether a tree with these parents has no siblings."""
    return list(parents) == list(range(-1, len(parents) - 1))


def fitting(rule: str, chain: bool, sampled: bool, greedy: bool) -> str:
    """Return the rule for a draft: the one that accepts most for auto (`benchmarks/rules.py` measures them).

    Raises:
        ValueError: a rule that is not right for the draft. At temperature 0 any choice of drafts will do.
    """
    if rule == AUTO and not sampled:
        return "point_mass"
    if rule == AUTO:
        return "block" if chain else "traversal"
    entry = RULES[rule]
    if entry.chain and not chain:
        raise ValueError(f"rule={rule} verifies chains, and this draft is a tree: choose rule={AUTO}, or tree=chain")
    if greedy:
        return rule
    if entry.sampled and not sampled:
        raise ValueError(
            f"rule={rule} needs drafts sampled from known probs, and these are chosen without sampling: choose "
            f"rule={AUTO}, or a chain or sampled tree"
        )
    return rule
