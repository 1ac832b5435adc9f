"""Verification: the registry of rules, and which drafts each is right for.

At temperature 0 the target's distribution is one-hot and every lossless rule is the same walk along its best tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from inference.verification import device

AUTO, GREEDY_WALK, NOTHING = "auto", "greedy", "none"


@dataclass(frozen=True)
class Rule:
    """A rule, and the drafts that it is right for; one without functions walks along the target's own samples.

    Right for all drafts that do not depend on what is sampled here. Of drafts chosen without sampling each is accepted
    with its probability under p, as speculative sampling does from point masses. With coupled noise it is right for
    all, and drafter-invariant decoding (arXiv 2408.07978).
    """

    chain: bool = False  # whether it takes at most one child a node
    # Of a rule that needs drafts sampled from known probs q; without, any choice will do.
    on_device: Callable[[device.Sampled, Tensor, Tensor, bool], device.Chosen] | None = None
    bar: Callable[[Tensor], Tensor] | None = None  # of a rule that changes the target's distribution


RULES = {
    "match": Rule(),
    "point_mass": Rule(),
    "token": Rule(True, device.recursive),
    "block": Rule(True, device.traversal),
    "recursive": Rule(False, device.recursive),
    "traversal": Rule(False, device.traversal),
    "coupled": Rule(),
    "typical": Rule(bar=device.typical),
    "threshold": Rule(bar=device.threshold),
}
COUPLED = "coupled"


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
    return rule != AUTO and RULES[rule].bar is not None


def emits_samples(rule: str) -> bool:
    """Return whether a rule emits what the target samples, drafts or not: then the text is that of the baseline.

    The other lossless rules sample again where they reject: the text is another, of the same distribution.
    """
    return rule in (GREEDY_WALK, NOTHING) or (rule in RULES and RULES[rule] == Rule())


def label(rule: str) -> str:
    """Return what reports call a rule."""
    return f"{rule} (lossy)" if is_lossy(rule) else rule


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
    if entry.on_device is not None and not sampled:
        raise ValueError(
            f"rule={rule} needs drafts sampled from known probs, and these are chosen without sampling: choose "
            f"rule={AUTO}, or a chain or sampled tree"
        )
    return rule
