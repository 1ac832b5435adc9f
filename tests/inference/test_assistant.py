"""Another model as a draft source: same tokens, predicted acceptance, its cache after every step."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.base import Level, Nodes
from inference.decode import Settings, autoregress, speculate
from inference.drafters.assistant import Length
from inference.drafters.policy import grow
from inference.protocol import Commit, Context, Drafter, DrafterState, Proposal, Verified
from inference.target.model import TargetOutput
from inference.target.target import Target
from inference.verification import tree as trees
from inference.verification.rng import Generator
from inference.verification.sample import GREEDY, Sampling, distribution, penalize
from inference.verification.tree import DraftTree
from tests import assistants, toys

TOKENS = 24
T1 = Sampling(1.0, 0, 1.0)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that agrees with the toy target often, not always."""
    model = assistants.noisy(toys.target().model, 0.02)
    return assistants.save(model, toys.tokenizer(), tmp_path_factory.mktemp("near"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target itself."""
    return assistants.save(toys.target().model, toys.tokenizer(), tmp_path_factory.mktemp("twin"))


@functools.cache
def text(seed: int) -> list[int]:
    return autoregress(toys.target(), toys.prompt(seed), Settings(TOKENS, GREEDY)).tokens


class Watched(Drafter, DrafterState):
    """A draft source with a record of what was proposed and what became of it."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.proposals = inner, []
        self.name, self.tree = inner.name, inner.tree

    def start(self, prompt: list[int]) -> "Watched":
        self.state = self.inner.start(prompt)
        return self

    def update(self, commit: Commit) -> None:
        self.state.update(commit)

    def propose(self, context: Context) -> Proposal:
        made = self.state.propose(context)
        self.proposals.append((list(context.token), made))
        return made


@pytest.mark.parametrize("tree", toys.TREES)
def test_speculation_equals_plain_decoding(near: str, tree: str) -> None:
    source = assistants.assistant(near, toys.target(), tree=toys.TREES[tree])
    drafted = accepted = 0
    for seed in range(2):  # one source for all prompts: what it keeps of the last one must not matter
        made = speculate(toys.target(), source, toys.prompt(seed), Settings(TOKENS, GREEDY))
        assert toys.lively(text(seed))
        assert made.tokens == text(seed)
        accepted += sum(step.accepted for step in made.steps)
        drafted += sum(step.drafted for step in made.steps)
    assert 0 < accepted < drafted


class Afresh:
    """The naive reference: a model that reads every path again from the first token, without a cache."""

    max_depth = 100
    vocab = None

    def __init__(self, model: Any, context: list[int]) -> None:
        self.model, self.paths = model, [context]

    def logits(self) -> Level:
        rows = [self.model(input_ids=torch.tensor([path]), use_cache=False).logits[0, -1] for path in self.paths]
        return Level(torch.stack(rows)[None], torch.zeros(1, len(rows), 0))

    def expand(self, state: Any, level: Level, nodes: Nodes) -> Level:
        self.paths = [
            [*self.paths[p], t] for p, t in zip(nodes.parent[0].tolist(), nodes.token[0].tolist(), strict=True)
        ]
        return self.logits()


@pytest.mark.parametrize("tree", toys.TREES)
def test_every_draft_is_that_of_a_model_without_a_cache(near: str, tree: str) -> None:
    config = toys.TREES[tree]
    source = assistants.assistant(near, toys.target(), tree=config, dtype="float64")
    model = source.model.model
    watched = Watched(source)
    made = speculate(toys.target(), watched, toys.prompt(1), Settings(TOKENS, GREEDY))
    accepted, whole = [], toys.prompt(1) + made.tokens
    for context, proposal in watched.proposals:
        reference = Afresh(model, context)
        room = len(whole) - len(context) - 1
        rng = Generator(0, torch.device("cpu"))
        expected = grow(reference, None, reference.logits(), config, [Context(context, GREEDY, rng, room)])[0].tree
        assert proposal.tree.token.tolist() == expected.token.tolist()
        assert proposal.tree.parent.tolist() == expected.parent.tolist()
        accepted.append(matched(expected, whole[len(context) :]))
    assert accepted == [step.accepted for step in made.steps]
    assert len(set(accepted)) > 1


def matched(tree: DraftTree, following: list[int]) -> int:
    """Return how many of the following tokens lie on a path of the tree."""
    node, below = 0, trees.children(tree)
    for count, token in enumerate(following):
        child = next((c for c in below[node] if int(tree.token[c]) == token), None)
        if child is None:
            return count
        node = child
    return len(following)


@pytest.mark.parametrize("tree", ["chain", "sampled"])
def test_laws_are_those_of_a_model_without_a_cache(near: str, tree: str) -> None:
    sampling = Sampling(0.9, 12, 0.95, 0.0, 1.3)
    source = assistants.assistant(near, toys.target(), tree=toys.TREES[tree], dtype="float64")
    watched = Watched(source)
    made = speculate(toys.target(), watched, toys.prompt(0), Settings(TOKENS, sampling, seed=4))
    assert any(step.accepted < step.drafted for step in made.steps)
    for context, (drafted, q, *_) in watched.proposals[:-1]:
        assert q is not None
        assert q.shape == (len(drafted.token), toys.VOCAB)
        for path in trees.paths(drafted):
            read = context + drafted.token[path[1:]].tolist()
            logits = source.model.model(input_ids=torch.tensor([read]), use_cache=False).logits[0]
            for node, row in zip(path[:-1], range(len(context) - 1, len(read) - 1), strict=True):
                seen = torch.zeros(1, toys.VOCAB, dtype=torch.bool)
                seen[:, read[: row + 1]] = True
                expected = distribution(penalize(logits[row : row + 1], seen, sampling), sampling)
                torch.testing.assert_close(q[node], expected[0])


@pytest.mark.parametrize("sampling", [GREEDY, T1], ids=["T0", "T1"])
@pytest.mark.parametrize("tree", ["chain", "sampled"])
def test_the_target_itself_is_always_accepted(clone: str, tree: str, sampling: Sampling) -> None:
    config = toys.TREES[tree]
    source = assistants.assistant(clone, toys.target(), tree=config)
    depth = len(config.widths) or config.depth
    for seed in range(2):
        made = speculate(toys.target(), source, toys.prompt(seed), Settings(1 + 5 * (depth + 1), sampling, seed=seed))
        assert [step.accepted for step in made.steps] == [depth] * 5


def test_only_what_is_missing_is_run(near: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = assistants.assistant(near, toys.target(), tree=assistants.chain(2))
    read: list[int] = []
    prefill = Target.prefill

    def counted(self: Target, token: Tensor, cache: Any, layers: tuple[int, ...] = ()) -> TargetOutput:
        if self is source.model:
            read.append(len(token))
        return prefill(self, token, cache, layers)

    monkeypatch.setattr(Target, "prefill", counted)
    made = speculate(toys.target(), source, toys.prompt(1), Settings(TOKENS, GREEDY))
    # After a chain accepted whole its last token was not expanded and is read beside the bonus token.
    expected = [2 if step.accepted == step.drafted else 1 for step in made.steps[:-1]]
    assert read == [len(toys.prompt(1)) + 1, *expected]
    assert {1, 2} <= set(read)


def test_heuristic_length() -> None:
    def outcome(drafted: int, accepted: int) -> Verified:
        tree = DraftTree(torch.arange(drafted + 1), torch.arange(-1, drafted))
        return Verified(tree, list(range(accepted + 1)), torch.zeros(drafted + 1, 2), None)

    length, constant = Length("heuristic", 3), Length("constant", 3)
    seen = []
    for drafted, accepted in [(3, 3), (5, 5), (7, 6), (6, 0), (0, 0)]:
        length.learn(outcome(drafted, accepted))
        constant.learn(outcome(drafted, accepted))
        seen.append(length.now)
    assert seen == [5, 7, 6, 5, 5]
    for _ in range(9):
        length.learn(outcome(2, 0))
    assert (length.now, constant.now) == (1, 3)
    assert Length("heuristic", 3).now == 3


def test_the_heuristic_begins_anew_with_every_prompt(near: str) -> None:
    source = assistants.assistant(near, toys.target(), schedule="heuristic")
    runs = [speculate(toys.target(), source, toys.prompt(1), Settings(TOKENS, GREEDY)) for _ in range(2)]
    drafted = [[step.drafted for step in made.steps] for made in runs]
    assert drafted[0] == drafted[1]
    assert len(set(drafted[0])) > 2
    assert runs[0].tokens == text(1)


def test_a_doubted_token_is_the_last_and_is_kept(near: str) -> None:
    level = 0.4
    source = assistants.assistant(near, toys.target(), confidence=level, tree=assistants.chain(6), dtype="float64")
    watched = Watched(source)
    made = speculate(toys.target(), watched, toys.prompt(0), Settings(TOKENS, T1, seed=2))
    lengths = set()
    for step, (context, (tree, *_)) in zip(made.steps, watched.proposals, strict=True):
        read = context + tree.token[1:].tolist()
        logits = source.model.model(input_ids=torch.tensor([read]), use_cache=False).logits[0]
        own = [float(logits[i - 1].softmax(-1)[read[i]]) for i in range(len(context), len(read))]
        assert all(p >= level for p in own[:-1])
        if step.drafted < min(6, TOKENS - (len(context) - len(toys.prompt(0))) - 1):
            assert own[-1] < level
        lengths.add(step.drafted)
    assert len(lengths) > 1
    greedy = speculate(toys.target(), source, toys.prompt(0), Settings(TOKENS, GREEDY))
    assert greedy.tokens == text(0)


def test_a_chain_ends_with_the_answer(clone: str) -> None:
    target, token = toys.target(), text(0)
    end = next(i for i in range(6, 20) if token.index(token[i]) == i and i % 5 not in (0, 4))
    target.eos = frozenset({token[end]})
    try:
        source = assistants.assistant(clone, target)
        made = speculate(target, source, toys.prompt(0), Settings(TOKENS, GREEDY))
    finally:
        target.eos = frozenset()
    assert made.tokens == token[: end + 1]
    assert made.steps[-1].drafted == made.steps[-1].committed < 4


def test_sampling_is_reproducible_and_varied(near: str) -> None:
    settings = Settings(TOKENS, Sampling(1.0, 10, 0.95), seed=5)
    source = assistants.assistant(near, toys.target())
    first, again = (speculate(toys.target(), source, toys.prompt(0), settings) for _ in range(2))
    assert first.tokens == again.tokens
    assert toys.lively(first.tokens)


@pytest.mark.parametrize("padded", ["target", "assistant"])
def test_lm_heads_padded_to_different_sizes(padded: str, tmp_path: Path) -> None:
    """Rows that no token has are nearly as likely as any here, so that a leak of one would be seen."""
    order = list(range(toys.VOCAB))
    smaller, larger = (
        assistants.noisy(toys.target().model, 0.02),
        assistants.reordered(toys.target().model, [*order, 3, 5]),
    )
    with torch.no_grad():
        larger.get_output_embeddings().weight[toys.VOCAB :] *= 0.98  # a tie with 3 or 5 is anybody's
    pair = (larger, smaller) if padded == "target" else (smaller, larger)
    target = Target(pair[0].eval(), toys.tokenizer(), "padded")
    path = assistants.save(pair[1], toys.tokenizer(), tmp_path / "assistant")
    plain = autoregress(target, toys.prompt(1), Settings(12, GREEDY)).tokens
    for tree in ("chain", "dynamic", "sampled"):
        source = assistants.assistant(path, target, tree=toys.TREES[tree])
        made = speculate(target, source, toys.prompt(1), Settings(12, GREEDY))
        assert made.tokens == plain
        assert sum(step.accepted for step in made.steps) > 0
        sampled = speculate(target, source, toys.prompt(1), Settings(12, T1, seed=1))
        assert sum(step.accepted for step in sampled.steps) > 0


def test_beyond_its_own_context_it_drafts_nothing(tmp_path: Path) -> None:
    model = assistants.noisy(toys.target().model, 0.0)
    model.config.max_position_embeddings = 20
    source = assistants.assistant(assistants.save(model, toys.tokenizer(), tmp_path), toys.target())
    made = speculate(toys.target(), source, toys.prompt(0), Settings(TOKENS, GREEDY))
    assert made.tokens == text(0)
    # 8 tokens at first, four drafted and a bonus a step; then 18 leave room for two, and 21 for none.
    assert [step.drafted for step in made.steps[:5]] == [4, 4, 2, 0, 0]
