"""What holds for every model-free source: parity, proposals within bounds, a clean reset, and the target's law."""

import functools
from typing import Any

import pytest
import torch

from inference.decode import Settings, speculate
from inference.protocol import Context, Drafter
from inference.verification import tree as trees
from inference.verification.rng import Generator, Rng
from inference.verification.sample import GREEDY, Sampling
from inference.verification.verify import decide
from tests import toys
from tests.enumeration import EXACT, HORIZON, VOCAB, Tables, distance, law
from tests.inference.model_free import CONF, NAMES, Recorder, accepted, decode, make, plain

TOKENS = 36
TEXT = [0, 1, 2, 0, 1, 1, 2, 0, 1, 2, 2, 0, 0, 1, 2, 0]
SOURCES: dict[str, dict[str, Any]] = {
    "prompt_lookup": {},
    "prompt_lookup_hf": {},
    "suffix": {"depth": 12},
    "suffix tree": {"depth": 12, "mode": "tree", "offset": 3.0},
    "recycling": {},
    "lookahead": {},
    "lookahead small": {"window": 1, "ngram": 3, "guesses": 2, "from_prompt": False},
}


def source(name: str) -> Any:
    return make(name.split(" ", maxsplit=1)[0], toys.target(), **SOURCES[name])


@functools.cache
def text(seed: int) -> tuple[list[int], list[int]]:
    """Return a prompt that ends as it began, so that something in it was there before, and its continuation."""
    begin = toys.prompt(seed, 9)
    prompt = begin + plain(toys.target(), begin, 12) + begin[:4]
    return prompt, plain(toys.target(), prompt, TOKENS)


def test_every_yaml_is_a_source() -> None:
    assert {file.stem for file in CONF.glob("*.yaml")} >= set(NAMES)
    for name in NAMES:
        assert (CONF / f"{name}.yaml").read_text(encoding="utf-8").startswith(f"# @package drafter.{name}\n")
        made = make(name, toys.target())
        assert isinstance(made, Drafter)
        assert made.name == name
        assert made.tree


@pytest.mark.parametrize("name", SOURCES)
def test_speculation_equals_plain_decoding(name: str) -> None:
    total, made = 0, source(name)
    for seed in (0, 1, 0):
        prompt, expected = text(seed)
        assert toys.lively(expected)
        generation = decode(toys.target(), made, prompt, TOKENS)
        assert generation.tokens == expected
        total += sum(accepted(generation))
    assert total > 0, "no draft was accepted: nothing was tested"


@pytest.mark.parametrize("room", [0, 1, 2, 5])
@pytest.mark.parametrize("name", SOURCES)
def test_nothing_lies_deeper_than_the_answer_reaches(name: str, room: int) -> None:
    drafter = source(name)
    proposal = warm(drafter, TEXT).propose(Context(TEXT, GREEDY, Generator(0, torch.device("cpu")), room))
    tree, look_ahead = proposal.tree, proposal.look_ahead
    assert int(trees.depth(tree).max()) <= room
    assert tree.token[0] == TEXT[-1]
    assert (room == 0) == (len(tree.token) == 1), "something is drafted wherever there is room"
    assert look_ahead is None or 0 < int(look_ahead.offset.max()) <= room


@pytest.mark.parametrize("name", SOURCES)
def test_a_new_request_owes_nothing_to_the_last_one(name: str) -> None:
    used = source(name)
    decode(toys.target(), used, text(0)[0], TOKENS)
    used.reset()
    again, first = Recorder(used), Recorder(source(name))
    for drafter in (again, first):
        decode(toys.target(), drafter, text(1)[0], TOKENS)
    for mine, theirs in zip(again.proposed, first.proposed, strict=True):
        torch.testing.assert_close(tuple(mine.tree), tuple(theirs.tree), rtol=0, atol=0)


@pytest.mark.parametrize("name", SOURCES)
def test_sampling_is_reproducible_and_varied(name: str) -> None:
    settings = Settings(TOKENS, Sampling(1.0, 10, 0.95), seed=5)
    first, again = (speculate(toys.target(), source(name), text(0)[0], settings) for _ in range(2))
    assert first.tokens == again.tokens
    assert toys.lively(first.tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", SOURCES)
def test_emitted_law_is_the_targets(name: str, temperature: float) -> None:
    """One pass after a text that gives every source something to draft; its proposal is made before any draw."""
    tables, sampling = Tables(3), Sampling(temperature, 0, 1.0)
    drafter = source(name)
    context = Context(TEXT, sampling, Generator(0, torch.device("cpu")), HORIZON - 1)
    drafted = warm(drafter, TEXT).propose(context).tree
    assert drafted.token.max() < VOCAB

    def program(rng: Rng) -> tuple[int, ...]:
        path, bonus, _ = decide(drafted, tables.scores(drafted, sampling), None, sampling, rng)
        return (*drafted.token[path[1:]].tolist(), bonus)

    assert distance(tables.continued(law(program), sampling), tables.target_law(sampling)) < EXACT
    assert len(drafted.token) > 1


def warm(drafter: Any, text: list[int]) -> Any:
    """Return a state that knows what it would after some passes: a text, candidates for every token, an n-gram."""
    state = drafter.start(text[:-4])
    if hasattr(state, "candidates"):
        state.candidates.update({token: [rank % VOCAB for rank in range(8)] for token in range(VOCAB)})
    if hasattr(state, "collect"):
        state.collect([0, 1, 2, 0, 1][: drafter.config.ngram])
    return state
