"""Every rule with every tree: decoded as the reference decodes, by itself and in batches, or refused in one line."""

from typing import Any

import pytest

from inference.batch import batch_of
from inference.decode import Generation, Settings, reference, speculate
from inference.drafters.head import HeadDrafter
from inference.verification.sample import GREEDY, Sampling
from inference.verification.verify import AUTO, RULES, is_lossy
from tests import toys
from tests.inference.step_graph import decoded
from tests.inference.test_step import DOUBLE, TREES, facts

SAMPLED = ("chain", "sampled", "independent")  # above temperature 0
BLIND = (AUTO, "match", "point_mass", "coupled", "typical", "threshold")  # they read no q: right for any draft
CHAINS = ("token", "block")
FITTING = {
    "chain": tuple(RULES),
    "sampled": (*BLIND, "recursive", "traversal"),
    "independent": (*BLIND, "recursive_replacement", "traversal_replacement"),
    **dict.fromkeys(("static", "dynamic", "best_first"), BLIND),
}


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(GREEDY, marks=pytest.mark.slow, id="T0"), pytest.param(Sampling(1.2, 0, 1.0), id="T1.2")],
)
@pytest.mark.parametrize("rule", [AUTO, *RULES])
@pytest.mark.parametrize(
    "tree", [pytest.param(one, marks=[] if one in SAMPLED else pytest.mark.slow) for one in FITTING]
)
def test_a_rule_decodes_what_it_is_for_and_refuses_the_rest(tree: str, rule: str, sampling: Sampling) -> None:
    target = toys.target("llama", DOUBLE)
    head: Any = toys.head("eagle", target)
    drafter = HeadDrafter(head, TREES[tree], "eagle")
    requests = [
        (toys.prompt(i, 4 + i), Settings(5, sampling, seed=i, rule=rule, lossy=is_lossy(rule))) for i in range(2)
    ]
    prompts, settings = zip(*requests, strict=True)

    def in_static_shapes() -> list[Generation]:
        batch = batch_of(target, drafter, 2, requests)
        if batch.device_step is not None:
            batch.device_step.static = True
        return decoded(batch, requests)

    ways = [
        lambda: [reference(target, drafter, *request) for request in requests],
        lambda: [speculate(target, drafter, *request) for request in requests],
        lambda: speculate(target, drafter, prompts, settings, batch_size=2),
        in_static_shapes,
    ]
    fits = rule in FITTING[tree] or (sampling.temperature == 0 and rule not in CHAINS) or rule == AUTO
    if not fits:
        for way in ways:
            with pytest.raises(ValueError, match=f"^rule={rule} .*: choose rule=auto"):
                way()
        return
    expected, *others = ([facts(generation) for generation in way()] for way in ways)
    for other in others:
        assert other == expected
