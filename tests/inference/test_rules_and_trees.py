"""Every rule with every tree: decoded as the reference decodes, in batches of two and of one, or refused in one line.

All cases of a tree are one test, because checking shapes at a function's first calls in each test takes longer than
decoding.
"""

from itertools import product
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

BLIND = (AUTO, "match", "point_mass", "coupled", "typical", "threshold")  # they read no q: right for any draft
CHAINS = ("token", "block")
FITTING = {  # above temperature 0
    "chain": (AUTO, *RULES),
    "sampled": (*BLIND, "recursive", "traversal"),
    "independent": (*BLIND, "recursive_replacement", "traversal_replacement"),
    **dict.fromkeys(("static", "dynamic", "best_first"), BLIND),
}
LENGTHS = (2, 5)  # tokens: of the batch of two, a batch of one is left


@pytest.mark.parametrize("tree", FITTING)
def test_a_rule_decodes_what_it_is_for_and_refuses_the_rest(tree: str) -> None:
    target = toys.target("llama", DOUBLE)
    head: Any = toys.head("medusa", target)
    drafter = HeadDrafter(head, TREES[tree], "medusa")
    for rule, sampling in product((AUTO, *RULES), (GREEDY, Sampling(1.2, 0, 1.0))):
        requests = [
            (toys.prompt(i, 4 + i), Settings(length, sampling, seed=i, rule=rule, lossy=is_lossy(rule)))
            for i, length in enumerate(LENGTHS)
        ]
        ways = [
            lambda requests: [reference(target, drafter, *request) for request in requests],
            lambda requests: speculate(target, drafter, *zip(*requests, strict=True), batch_size=2),
            lambda requests: in_static_shapes(target, drafter, requests),
        ]
        if rule in FITTING[tree] or (sampling.temperature == 0 and rule not in CHAINS):
            expected, *others = ([facts(generation) for generation in way(requests)] for way in ways)
            assert others == [expected, expected], (rule, sampling)
            continue
        for way in ways:
            with pytest.raises(ValueError, match=f"^rule={rule} .*: choose rule=auto"):
                way(requests)


def in_static_shapes(target: Any, drafter: HeadDrafter, requests: list[tuple[list[int], Settings]]) -> list[Generation]:
    batch = batch_of(target, drafter, 2, requests)
    if batch.device_step is not None:
        batch.device_step.static = True
    return decoded(batch, requests)
