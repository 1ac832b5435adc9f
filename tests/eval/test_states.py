"""Sources that remember have a cold row beside the warm one."""

from eval.inputs.drafters import in_states
from inference.decode import Settings, autoregress, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.registry import make
from inference.drafters.suffix import Suffix
from inference.verification.sample import GREEDY
from tests import toys

SUFFIX = {
    "mode": "path", "depth": 16, "tokens": 8, "factor": 2.0, "offset": 0.0, "min_probability": 0.1, "memory": True,
    "memory_nodes": 10_000,
}  # fmt: skip


def suffix(memory: bool = True) -> Suffix:
    made = make("suffix", SUFFIX | {"memory": memory}, toys.target())
    assert isinstance(made, Suffix)
    return made


def test_only_what_remembers_has_a_cold_row_and_the_state_is_declared() -> None:
    head = HeadDrafter(toys.head("eagle", toys.target()), toys.TREES["chain"], "eagle")
    made = in_states({"eagle": head, "suffix": suffix(), "suffix_cold": suffix(False)}, True)
    states = {name: each.memory for name, each in made.items()}
    assert states == {"eagle": "none", "suffix": "warm", "suffix cold": "cold", "suffix_cold": "none"}
    assert list(in_states({"suffix": suffix()}, False)) == ["suffix"]


def test_a_cold_source_meets_the_same_prompt_as_if_for_the_first_time() -> None:
    target, settings = toys.target(), Settings(16, GREEDY)
    made = in_states({"suffix": suffix()}, True)
    runs = {name: [speculate(target, each, toys.prompt(0), settings) for _ in range(3)] for name, each in made.items()}
    plain = autoregress(target, toys.prompt(0), settings)
    assert toys.lively(plain.tokens)
    assert all(run.tokens == plain.tokens for each in runs.values() for run in each)
    assert runs["suffix"][2].tau > runs["suffix"][0].tau  # it has the whole answer in memory
    assert len({run.tau for run in runs["suffix cold"]}) == 1
    assert runs["suffix cold"][2].tau == runs["suffix"][0].tau
