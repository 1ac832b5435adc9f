"""What holds for every model-free source: proposals within bounds, a clean reset, and the target's law."""

import functools
import re
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from heads.common.typed import build, typed
from inference.decode import RequestParams, speculate
from inference.drafters.contrib.layer_skip import EarlyExit, LayerSkip
from inference.drafters.head import MtpDrafter
from inference.drafters.host import DrafterState, HostDrafter
from inference.drafters.hybrid import Hybrid, HybridBatch, Record
from inference.protocol import CommittedTokens, DraftContext, Drafter, DraftInputs, Proposal
from inference.target.model import TargetOutput
from inference.verification import tree as trees
from inference.verification.rng import RequestRng
from inference.verification.sample import GREEDY, Sampling
from inference.verification.tree import DraftTree, agreed
from tests import toys
from tests.enumeration import EXACT, HORIZON, VOCAB, Tables, distance, law, verify_on_device
from tests.inference.model_free import CONF, NAMES, Recorder, decode, make, plain

TOKENS = 36
DRAWS = RequestRng(0, 0, coupled=False)
TEXT = [0, 1, 2, 0, 1, 1, 2, 0, 1, 2, 2, 0, 0, 1, 2, 0]
DRAFTERS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {},
    "prompt_lookup_hf": {},
    "suffix": {"depth": 12},
    "recycling": {},
    "lookahead": {},
    "lookahead small": {"window": 1, "ngram": 3, "guesses": 2, "from_prompt": False},
}


def source(name: str) -> Any:
    return make(name.split(" ", maxsplit=1)[0], toys.target(), **DRAFTERS[name])


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
        assert (made.name, bool(made.tree)) == (name, True)
    for name, kind, label in (("early_exit", EarlyExit, "chain-4"), ("mtp", MtpDrafter, "chain-3")):
        values: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
        assert typed(kind.Config, values).tree.label == label
    skips: Any = OmegaConf.to_container(OmegaConf.load(CONF / "layer_skip.yaml"))
    assert typed(LayerSkip.Config, skips | {"skips": "x"}).depth is None


@pytest.mark.parametrize("room", [0, 1, 2, 5])
@pytest.mark.parametrize("name", DRAFTERS)
def test_nothing_lies_deeper_than_the_answer_reaches(name: str, room: int) -> None:
    drafter = source(name)
    proposal = warm(drafter, TEXT).propose(DraftContext(TEXT, GREEDY, DRAWS, room))
    tree, look_ahead = proposal.tree, proposal.look_ahead
    assert int(trees.layout(tree, 0)[0].max()) <= room
    assert tree.token[0] == TEXT[-1]
    assert (room == 0) == (len(tree.token) == 1), "something is drafted wherever there is room"
    assert look_ahead is None or 0 < int(look_ahead.offset.max()) <= room


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_new_request_owes_nothing_to_the_last_one(name: str) -> None:
    used = source(name)
    decode(toys.target(), used, text(0)[0], TOKENS)
    used.reset()
    again, first = Recorder(used), Recorder(source(name))
    for drafter in (again, first):
        decode(toys.target(), drafter, text(1)[0], TOKENS)
    for mine, theirs in zip(again.proposed, first.proposed, strict=True):
        torch.testing.assert_close(tuple(mine.tree), tuple(theirs.tree), rtol=0, atol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_emitted_law_is_the_targets(name: str, temperature: float) -> None:
    """One pass after a text that gives every source something to draft; its proposal is made before any draw."""
    tables, sampling = Tables(3), Sampling(temperature, 0, 1.0)
    drafter = source(name)
    context = DraftContext(TEXT, sampling, DRAWS, HORIZON - 1)
    drafted = warm(drafter, TEXT).propose(context).tree
    assert drafted.token.max() < VOCAB

    def program(rng: Any) -> tuple[int, ...]:
        path, bonus = verify_on_device(drafted, tables.scores(drafted, sampling), None, sampling, rng)
        return (*drafted.token[path[1:]].tolist(), bonus)

    assert distance(tables.continued(law(program), sampling), tables.target_law(sampling)) < EXACT
    assert len(drafted.token) > 1


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("prompt_lookup", {"ngram_min": 0}, "ngram_min is 0: give 1 or more"),
        ("prompt_lookup", {"ngram_min": 4}, "ngram_max is 3: give at least ngram_min, 4"),
        ("prompt_lookup", {"tokens": 0}, "tokens is 0: give 1 or more"),
        ("prompt_lookup", {"match": "best"}, "match is 'best': choose first, last"),
        ("suffix", {"depth": 1}, "depth is 1: give 2 or more"),
        ("suffix", {"tokens": 0}, "tokens is 0: give 1 or more"),
        ("suffix", {"factor": -1.0}, "factor is -1.0: give 0 or more"),
        ("suffix", {"memory_nodes": 0}, "memory_nodes is 0: give 1 or more"),
        ("suffix", {"min_probability": 1.5}, "min_probability is 1.5: give 1 or less"),
        ("recycling", {"paths": []}, "tree.paths is []: a static tree needs it, at least 1"),
        ("recycling", {"paths": [[0], [1, 0]]}, "tree.paths holds [1, 0] without its parent [1]: add it"),
        ("recycling", {"paths": [[0], [8]]}, "paths: a rank runs from 0 to candidates - 1, 7"),
        ("lookahead", {"window": 0}, "window is 0: give 1 or more"),
        ("lookahead", {"ngram": 2}, "ngram is 2: give 3 or more"),
        ("lookahead", {"guesses": 0}, "guesses is 0: give 1 or more"),
    ],
)
def test_a_bad_value_is_named(name: str, value: dict[str, Any], named: str) -> None:
    whole = named if named.startswith("tree.") else f"drafter.{name}.{named}"
    with pytest.raises(ValueError, match=f"^{re.escape(whole)}$"):
        make(name, toys.target(), **value)


def warm(drafter: Any, text: list[int]) -> Any:
    """Return a state that knows what it would after some passes: a text, candidates for every token, an n-gram."""
    state = drafter.start(text[:-4])
    if hasattr(state, "candidates"):
        state.candidates.update({token: [rank % VOCAB for rank in range(8)] for token in range(VOCAB)})
    if hasattr(state, "collect"):
        state.collect([0, 1, 2, 0, 1][: drafter.config.ngram])
    return state


class Fixed(HostDrafter, DrafterState):
    """A source that always drafts the same chain and promises the same."""

    def __init__(self, chain: list[int], score: float, name: str) -> None:
        self.chain, self.score, self.name, self.tree = chain, score, name, name
        self.calls: list[str] = []

    def start(self, prompt: list[int]) -> "Fixed":
        self.calls.append("start")
        return self

    def reset(self) -> None:
        self.calls.append("forget")

    def update(self, commit: CommittedTokens) -> None:
        self.calls.append("update")

    def propose(self, context: DraftContext) -> Proposal:
        self.calls.append("propose")
        token = torch.tensor([context.token[-1], *self.chain])
        return Proposal(DraftTree(token, torch.arange(-1, len(self.chain))), expected=self.score)


def hybrid(head: Fixed, lookup: Fixed, expected: float = 2.0, weight: float = 0.5) -> Hybrid:
    return Hybrid(Hybrid.Config(expected, weight, {}), head, lookup, "hybrid")


def begun(source: Hybrid) -> HybridBatch:
    """Return the drafting of one sequence."""
    batch = source.batch(1)
    batch.start_sequence(0, [1, 0], TargetOutput(torch.zeros(1, 1, 0, 1), torch.zeros(1, 1, 1), None))
    return batch


def draft(batch: HybridBatch) -> DraftTree:
    """Return what is drafted for it."""
    batch.begin([DraftContext([0], GREEDY, DRAWS, 9)], 0)
    tree = batch.draft_trees(
        DraftInputs(torch.zeros(1, 1, dtype=torch.long), GREEDY), torch.tensor([9]), 0, allow_host_sync=True
    ).tree
    return DraftTree(tree.token[0], tree.parent[0])


def settle(batch: HybridBatch, following: list[int]) -> None:
    """Draft, verify against the text that follows, and report."""
    path = list(range(agreed(draft(batch), following) + 1))
    batch.update(0, following[: len(path)], path, None)


@pytest.mark.parametrize(("score", "drafts"), [(2.5, "lookup"), (2.0, "head"), (0.0, "head")])
def test_the_higher_expectation_drafts_and_an_idle_head_costs_nothing(score: float, drafts: str) -> None:
    head, lookup = Fixed([1], 0.0, "head"), Fixed([2, 3], score, "lookup")
    tree = draft(begun(hybrid(head, lookup)))
    assert tree.token.tolist() == [0, *(lookup if drafts == "lookup" else head).chain]
    assert head.calls == ["start", "update", *(["propose"] if drafts == "head" else [])]


def test_the_heads_record_follows_what_was_accepted_of_it() -> None:
    source = hybrid(Fixed([1, 2, 3, 4], 0.0, "head"), Fixed([9], 0.5, "lookup"))
    batch = begun(source)
    settle(batch, [1, 2, 3, 4, 5])
    assert source.record.accepted == 3.0  # half of 2, half of 4
    settle(batch, [1, 7])
    assert source.record.accepted == 2.0
    settle(batch, [7])
    assert source.record.accepted == 1.0
    source.reset()
    assert source.record == Record(2.0)


def test_a_lookup_that_promises_too_much_is_believed_less() -> None:
    head, lookup = Fixed([5], 0.0, "head"), Fixed([5, 6, 7, 8], 4.0, "lookup")
    source = hybrid(head, lookup, expected=1.5)
    batch, chosen = begun(source), []
    for _ in range(6):
        settle(batch, [5, 0])  # one of the four promised comes true
        chosen.append(batch.proposals[0] is not None)
    assert chosen[0]
    assert not chosen[-1]
    # It drafts no more, but what it would have been worth goes on to count: it may win back its trust.
    for _ in range(4):
        settle(batch, [5, 6, 7, 8])
    before = source.record.lookup_accepted / source.record.lookup_expected
    settle(batch, [0])
    assert source.record.lookup_accepted / source.record.lookup_expected < before


def test_both_sources_see_every_commit_and_both_forget() -> None:
    head, lookup = Fixed([1], 0.0, "head"), Fixed([2], 3.0, "lookup")
    source = hybrid(head, lookup)
    settle(begun(source), [2, 4])
    source.reset()
    assert head.calls == ["start", "update", "update", "forget"]
    assert lookup.calls == ["start", "update", "propose", "update", "forget"]


def test_lookups_and_sampled_drafts_are_verified_in_one_pass_each_by_its_rule() -> None:
    target = toys.target()
    head, lookup = toys.drafter("eagle", target, "chain"), make("suffix", target)
    source = Hybrid(Hybrid.Config(0.3, 0.3, {}), head, lookup, "hybrid")
    prompts = [toys.prompt(seed) * 3 for seed in range(3)]
    made = speculate(target, source, prompts, RequestParams(60, Sampling(0.8, 0, 1.0)), batch_size=3)
    assert {step.rule for one in made for step in one.steps} >= {"block", "point_mass"}


@pytest.mark.parametrize(
    ("expected", "weight", "named"),
    [(2.0, 0.0, "drafter.hybrid.weight is 0.0"), (2.0, 1.5, "drafter.hybrid.weight"), (-1.0, 0.5, "hybrid.expected")],
)
def test_bad_values(expected: float, weight: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        build(Hybrid.Config, {"expected": expected, "weight": weight, "lookup": {}}, "drafter.hybrid")
