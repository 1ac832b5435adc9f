"""Speculative streams: the target stays as it is, and a stream's law is the same in training, decoding and by hand."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.common.target_config import cache_argument
from inference.decode import Generation, Settings, speculate
from inference.drafters.contrib.streams import Drafted, Streams, StreamsDrafter, StreamsState
from inference.drafters.policy import TreeConfig, grow
from inference.protocol import Commit, Context, Proposal
from inference.target.target import Target
from inference.verification import tree as trees
from inference.verification.rng import Generator
from inference.verification.sample import GREEDY, Sampling
from inference.verification.tree import DraftTree, LookAhead
from tests import toys
from tests.inference.streaming import DOUBLE, EXACT, LAYERS, TOKENS, accepted, made, source, text, toy


@pytest.mark.parametrize("tree", toys.TREES)
def test_speculation_equals_plain_decoding(tree: str) -> None:
    drafter, total = source(toys.TREES[tree]), 0
    for seed in range(4):
        token, length = text(seed)
        run = speculate(toys.target(), drafter, toys.prompt(seed), Settings(TOKENS, GREEDY))
        assert toys.lively(token[length:])
        assert run.tokens == token[length:]
        total += sum(accepted(run))
    assert total > 0, "no draft was accepted: nothing was tested"


def test_the_target_is_untouched() -> None:
    """In passes without and with riders of another kind, before and after streams exist and run."""
    target = Target(copy.deepcopy(toys.target(dtype=DOUBLE).model), toys.tokenizer(), "own")
    prompt, tree = torch.tensor(toys.prompt(1)), DraftTree(torch.tensor(toys.prompt(2, 3)), torch.tensor([-1, 0, 0]))
    plain = LookAhead(torch.tensor([5]), torch.tensor([1]), torch.tensor([[True, False, False, True]]))

    def logits() -> list[Tensor]:
        cache, found = target.cache(), []
        found.append(target.prefill(prompt, cache).logits)
        for look_ahead in (None, plain):
            found.append(target.score(tree, cache, look_ahead).logits)
            cache.keep(len(prompt), [])
        return found

    def modules() -> list[tuple[str, type, int, int]]:
        named = target.model.named_modules()
        return [(name, type(one), len(one._forward_pre_hooks), len(one._forward_hooks)) for name, one in named]

    as_they_were, before = modules(), logits()
    drafter = StreamsDrafter(StreamsDrafter.Config("", toys.TREES["dynamic"]), target, "streams", made(target))
    speculate(target, drafter, toys.prompt(1), Settings(TOKENS, GREEDY))
    torch.testing.assert_close(logits(), before, rtol=1e-12, atol=1e-12)
    assert modules() == as_they_were
    assert {id(p) for p in drafter.streams._frozen[1].parameters()} >= {id(p) for p in target.base.parameters()}


@pytest.mark.parametrize(("name", "layers"), LAYERS)
def test_nodes_do_not_notice_their_streams(name: str, layers: int | None) -> None:
    (target, streams), near = toy(name, DOUBLE, layers), EXACT.get(name, 1e-9)
    drafter = StreamsDrafter(StreamsDrafter.Config("", toys.TREES["dynamic"]), target, "streams", streams)
    tree = DraftTree(torch.tensor(toys.prompt(9, 4)), torch.tensor([-1, 0, 0, 2]))
    look_ahead = drafter.start([1]).look_ahead(tree, 20)
    assert look_ahead is not None
    prompt = torch.tensor(toys.prompt(3, 12))
    found = []
    for ride in (None, look_ahead, look_ahead._replace(stack=None)):
        cache = target.cache()
        target.prefill(prompt, cache, layers=(0,))
        found.append(target.score(tree, cache, ride, layers=(0,)).logits)
    alone, together, unadapted = (logits[0] for logits in found if logits is not None)
    torch.testing.assert_close(together[:4], alone, rtol=near, atol=near)
    assert not torch.allclose(together[4:], unadapted[4:], atol=0.1), "the adapters did nothing: nothing was tested"


def test_rows_as_long_as_the_context_can_be_trained_on() -> None:
    """With learned positions nothing may stand behind them; those streams have no teacher, and the others stay."""
    target, streams = toy("gpt2", DOUBLE, 2)
    token, anchor = torch.tensor([toys.prompt(3, target.context)]), torch.tensor([[5, target.context - 2]])
    document = torch.zeros_like(token)
    whole, cut = (streams(token[:, :end], document[:, :end], anchor[:, :1])[0] for end in (None, 20))
    torch.testing.assert_close(whole, cut, rtol=1e-9, atol=1e-9)
    assert streams(token, document, anchor)[0].isfinite().all()


def by_hand(target: Target, streams: Streams, token: list[int]) -> Tensor:
    """Return the laws of the last token's streams, one after another, through merged weights and a plain cache."""
    first = len(target.decoder_layers) - (streams.config.layers or len(target.decoder_layers))
    base: Any = copy.deepcopy(target.base)
    out = target.base(torch.tensor([token]), use_cache=True, output_hidden_states=True)
    scale = streams.config.alpha / streams.config.rank
    for name, matrices in streams.adapters.items():
        weight = base.get_submodule(name.replace("/", ".")).weight
        weight.data += scale * matrices.up.weight @ matrices.down.weight
    cache, laws = out[cache_argument(base)], []
    for j in range(1, streams.config.streams + 1):
        hidden = out.hidden_states[first][:, -1:] + streams.embedding[j - 1]
        position = torch.tensor([[len(token) - 1 + j]])
        angles = base.rotary_emb(hidden, position)
        for layer in base.layers[first:]:
            hidden = layer(hidden, position_ids=position, position_embeddings=angles, **{cache_argument(layer): cache})
        for layer in cache.layers[:first]:  # the lower layers hold no streams
            layer.keys, layer.values = layer.keys[:, :, : len(token)], layer.values[:, :, : len(token)]
        laws.append(target.embeddings.logits(base.norm(hidden))[0, 0])
    return torch.stack(laws)


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2, None])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_law_of_a_stream_is_the_one_computed_by_hand(name: str, layers: int | None) -> None:
    target, streams = toy(name, DOUBLE, layers)
    token = toys.prompt(4, 10)
    anchor = torch.tensor([[3, 9]])
    found, _ = streams(torch.tensor([token]), torch.zeros(1, 10, dtype=torch.long), anchor)
    for i, row in enumerate(anchor[0].tolist()):
        torch.testing.assert_close(found[0, i], by_hand(target, streams, token[: row + 1]), rtol=1e-6, atol=1e-6)


class Watched(StreamsDrafter):
    """Notes what each pass proposed and what became of it."""

    seen: list[tuple[int, Proposal, Context, Commit]]

    def start(self, prompt: list[int]) -> StreamsState:
        return WatchedState(self)


class WatchedState(StreamsState):
    def __init__(self, drafter: Watched) -> None:
        super().__init__(drafter)
        self.seen = drafter.seen

    def propose(self, context: Context) -> Proposal:
        self.proposed = super().propose(context), context._replace(token=list(context.token))
        return self.proposed[0]

    def update(self, commit: Commit) -> None:
        if commit.verified is not None:
            self.seen.append((len(self.proposed[1].token) - 1, *self.proposed, commit))
        super().update(commit)


def watched(target: Target, streams: Streams, seed: int) -> tuple[Watched, Generation]:
    drafter = Watched(StreamsDrafter.Config("", toys.TREES["dynamic"]), target, "streams", streams)
    drafter.seen = []
    return drafter, speculate(target, drafter, toys.prompt(seed), Settings(TOKENS, GREEDY))


@pytest.mark.parametrize(("name", "layers"), LAYERS)
def test_the_law_in_training_is_the_law_in_decoding(name: str, layers: int | None) -> None:
    """Every accepted node's streams, in the pass that verified it, against one pass over the finished text."""
    (target, streams), near = toy(name, DOUBLE, layers), EXACT.get(name, 1e-9) * 10
    drafter, run = watched(target, streams, 0)
    token = torch.tensor([toys.prompt(0) + run.tokens])
    # A second document in front: training packs rows, decoding does not.
    packed = torch.cat([torch.tensor([toys.prompt(7, 9)]), token], 1)
    document = torch.cat([torch.zeros(1, 9, dtype=torch.long), torch.ones_like(token)], 1)
    anchor = torch.arange(packed.shape[1])[None]
    with torch.no_grad():
        laws, teacher = streams(packed, document, anchor)
        own = target.embeddings.logits(target.features(packed, document, ()).last_hidden)
    compared = 0
    for root, proposal, _, commit in drafter.seen:
        verified, look_ahead = commit.verified, proposal.look_ahead
        if verified is None or verified.look_ahead is None or look_ahead is None:
            continue
        size = len(proposal.tree.token)
        for depth, node in enumerate(verified.path):
            mine = (look_ahead.seen[:, :size] == trees.ancestors(proposal.tree)[node]).all(-1)  # they see what it sees
            expected = laws[0, 9 + root + depth][: int(mine.sum())]
            torch.testing.assert_close(verified.look_ahead[mine], expected, rtol=near, atol=near)
            compared += int(mine.sum())
    assert compared > 60
    for depth in (1, 2, 3):
        torch.testing.assert_close(teacher[0, :-depth, depth - 1], own[0, depth:], rtol=near, atol=near)


def test_every_tree_and_its_acceptance_follow_from_the_finished_text() -> None:
    """The streams of the row that ended a step make the next tree, whatever was accepted in between."""
    (target, streams), config, total = toy(dtype=DOUBLE), toys.TREES["dynamic"], 0
    for seed in range(5):
        token, length = text(seed, DOUBLE)
        drafter, run = watched(target, streams, seed)
        assert run.tokens == token[length:]
        with torch.no_grad():
            document = torch.zeros(1, len(token), dtype=torch.long)
            laws = streams(torch.tensor([token]), document, torch.arange(len(token))[None])[0][0]
        proposed = {root: proposal.tree for root, proposal, _, _ in drafter.seen}
        counts, root, end = [0], length + 1, len(token)  # the first step drafts nothing
        while root < end - 1:
            room = end - root - 2
            drafted = Drafted(laws[root - 1][: max(room, 1)])
            context = Context(token[: root + 1], GREEDY, Generator(0, target.device), room)
            tree = grow(drafted, None, drafted.level(1, 1), config, [context])[0].tree
            assert root not in proposed or all(a.equal(b) for a, b in zip(tree, proposed[root], strict=True))
            node, count, below = 0, 0, trees.children(tree)
            while True:
                wanted = [c for c in below[node] if int(tree.token[c]) == token[root + count + 1]]
                if not wanted:
                    break
                node, count = wanted[0], count + 1
            counts.append(count)
            root += count + 1
        assert counts == accepted(run)
        total += sum(counts)
    assert total > 0, "no draft was accepted: nothing was tested"


def test_a_drafter_begins_each_sequence_anew() -> None:
    target, drafter = toys.target(), source(toys.TREES["dynamic"])
    first, other, again = (
        speculate(target, drafter, toys.prompt(seed), Settings(TOKENS, GREEDY)) for seed in (0, 1, 0)
    )
    assert accepted(first) == accepted(again)
    assert first.steps[0].drafted == other.steps[0].drafted == again.steps[0].drafted == 0
    assert all(step.drafted > 0 for step in first.steps[1:-3])


def test_nothing_lies_deeper_than_can_be_committed() -> None:
    target, streams = toy()
    drafter, run = watched(target, streams, 2)
    assert len(run.tokens) == TOKENS
    for _, proposal, context, _ in drafter.seen:
        assert int(trees.depth(proposal.tree).max()) <= context.room
        assert proposal.look_ahead is None or int(proposal.look_ahead.offset.max()) < max(context.room, 1)
    assert {proposal.look_ahead is None for _, proposal, context, _ in drafter.seen if context.room < 2} <= {True}
    filled = toys.prompt(0, target.context - 5)
    assert len(speculate(target, drafter, filled, Settings(TOKENS, GREEDY)).tokens) == 5


def test_streams_that_no_tree_would_read_do_not_ride() -> None:
    drafter = source(TreeConfig("chain", 2, 0, 0, [], [])).start([1])
    look_ahead = drafter.look_ahead(trees.root(1, torch.device("cpu")), 9)
    assert look_ahead.offset.tolist() == [1, 2]
    assert look_ahead.seen.tolist() == [[True, True, False], [True, True, True]]
    tree = DraftTree(torch.tensor([1, 2]), torch.tensor([-1, 0]))
    assert drafter.look_ahead(tree, 3).offset.tolist() == [1, 2, 2]  # (1, 2) would draft at depth 4
    assert drafter.look_ahead(tree, 3).seen[2].tolist() == [True, True, False, False, True]


@pytest.mark.parametrize("tree", toys.TREES)
def test_sampling_is_reproducible_and_varied(tree: str) -> None:
    target, settings = toys.target(), Settings(TOKENS, Sampling(1.0, 10, 0.95), seed=5)
    drafter = source(toys.TREES[tree])
    first, again = (speculate(target, drafter, toys.prompt(0), settings) for _ in range(2))
    assert first.tokens == again.tokens
    assert toys.lively(first.tokens)
    other = speculate(target, drafter, toys.prompt(0), replace(settings, seed=6))
    assert other.tokens != first.tokens
