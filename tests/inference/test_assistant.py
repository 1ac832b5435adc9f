"""Another model as a draft source: predicted acceptance, its cache after every step, other tokenizers, refusals."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.decode import RequestParams, autoregress, speculate
from inference.drafters.assistant import Assistant, AssistantState, Vocabulary
from inference.protocol import DraftContext, Proposal
from inference.target import probe
from inference.target.target import Target
from inference.verification.sample import GREEDY, Sampling, distribution, penalize
from tests import assistants, families, toys
from tests.inference.model_free import Recorder
from tests.oracle import by_node, paths
from tests.refusals import refuses

TOKENS = 20
T1 = Sampling(1.0, 0, 1.0)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target itself."""
    return assistants.save(toys.target().model, toys.tokenizer(), tmp_path_factory.mktemp("twin"))


@functools.cache
def text(seed: int) -> list[int]:
    """Return the target's greedy text."""
    return autoregress(toys.target(), toys.prompt(seed), RequestParams(TOKENS, GREEDY)).tokens


@pytest.mark.parametrize("tree", ["chain", "sampled"])
def test_laws_are_those_of_a_model_without_a_cache(near: str, tree: str) -> None:
    sampling = Sampling(0.9, 12, 0.95, 0.0, 1.3)
    source = assistants.assistant(near, toys.target(), tree=toys.TREES[tree], dtype="float64")
    watched = Recorder(source)
    made = speculate(toys.target(), watched, toys.prompt(0), RequestParams(TOKENS, sampling, seed=4))
    assert any(step.accepted < step.drafted for step in made.steps)
    for (context, _), (drafted, rows, *_) in zip(watched.asked[:-1], watched.proposed[:-1], strict=True):
        q = by_node(drafted, rows)
        for path in paths(drafted):
            read = context + drafted.token[path[1:]].tolist()
            logits = source.model.model(input_ids=torch.tensor([read]), use_cache=False).logits[0]
            for node, row in zip(path[:-1], range(len(context) - 1, len(read) - 1), strict=True):
                seen = torch.zeros(1, toys.VOCAB, dtype=torch.bool)
                seen[:, read[: row + 1]] = True
                expected = distribution(penalize(logits[row : row + 1], seen, sampling), sampling)
                torch.testing.assert_close(q[node], expected[0])


@pytest.mark.parametrize(("tree", "depth", "sampling"), [("chain", 4, T1), ("sampled", 3, GREEDY), ("sampled", 3, T1)])
def test_the_target_itself_is_always_accepted(clone: str, tree: str, depth: int, sampling: Sampling) -> None:
    source = assistants.assistant(clone, toys.target(), tree=toys.TREES[tree])
    made = speculate(toys.target(), source, toys.prompt(0), RequestParams(1 + 5 * (depth + 1), sampling))
    assert [step.accepted for step in made.steps] == [depth] * 5


def test_a_doubted_token_is_the_last_and_is_kept(near: str) -> None:
    level = 0.4
    source = assistants.assistant(near, toys.target(), confidence=level, tree=assistants.chain(6), dtype="float64")
    watched = Recorder(source)
    made = speculate(toys.target(), watched, toys.prompt(0), RequestParams(TOKENS, T1, seed=2))
    lengths = set()
    for step, (context, _), (tree, *_) in zip(made.steps, watched.asked, watched.proposed, strict=True):
        read = context + tree.token[1:].tolist()
        logits = source.model.model(input_ids=torch.tensor([read]), use_cache=False).logits[0]
        own = [float(logits[i - 1].softmax(-1)[read[i]]) for i in range(len(context), len(read))]
        assert all(p >= level for p in own[:-1])
        if step.drafted < min(6, TOKENS - (len(context) - len(toys.prompt(0))) - 1):
            assert own[-1] < level
        lengths.add(step.drafted)
    assert len(lengths) > 1
    greedy = speculate(toys.target(), source, toys.prompt(0), RequestParams(TOKENS, GREEDY))
    assert greedy.tokens == text(0)


def test_a_chain_ends_with_the_answer(clone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, token = toys.target(), text(0)
    end = next(i for i in range(6, 20) if token.index(token[i]) == i and i % 5 not in (0, 4))
    monkeypatch.setattr(target, "eos", frozenset({token[end]}))
    source = assistants.assistant(clone, target)
    made = speculate(target, source, toys.prompt(0), RequestParams(TOKENS, GREEDY))
    assert made.tokens == token[: end + 1]
    assert made.steps[-1].drafted == made.steps[-1].committed < 4


@pytest.mark.parametrize("padded", ["target", "assistant"])
def test_lm_heads_padded_to_different_sizes(padded: str, tmp_path: Path) -> None:
    """Rows that no token has are nearly as likely as any here, so that a leak of one would be seen."""
    smaller = assistants.noisy(toys.target().model, 0.02)
    larger = assistants.reordered(toys.target().model, [*range(toys.VOCAB), 3, 5])
    with torch.no_grad():
        larger.get_output_embeddings().weight[toys.VOCAB :] *= 0.98  # a tie with 3 or 5 is anybody's
    pair = (larger, smaller) if padded == "target" else (smaller, larger)
    target = Target(pair[0].eval(), toys.tokenizer(), "padded")
    path = assistants.save(pair[1], toys.tokenizer(), tmp_path / "assistant")
    plain = autoregress(target, toys.prompt(1), RequestParams(12, GREEDY)).tokens
    for tree, sampling in (("chain", GREEDY), ("sampled", GREEDY), ("sampled", T1)):
        source = assistants.assistant(path, target, tree=toys.TREES[tree])
        made = speculate(target, source, toys.prompt(1), RequestParams(12, sampling, seed=1))
        assert made.tokens == plain or sampling is T1
        assert sum(step.accepted for step in made.steps) > 0


def test_beyond_its_own_context_it_drafts_nothing(tmp_path: Path) -> None:
    model = assistants.noisy(toys.target().model, 0.0)
    model.config.max_position_embeddings = 20
    source = assistants.assistant(assistants.save(model, toys.tokenizer(), tmp_path), toys.target())
    made = speculate(toys.target(), source, toys.prompt(0), RequestParams(TOKENS, GREEDY))
    assert made.tokens == text(0)
    # 8 tokens at first, four drafted and a bonus a step; then 18 leave room for two, and 21 for none.
    assert [step.drafted for step in made.steps[:5]] == [4, 4, 2, 0, 0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"match": "slem"}, "drafter.assistant.match is 'slem': choose same, tli"),
        ({"confidence": 1.5}, "drafter.assistant.confidence is 1.5"),
        ({"tree": toys.TREES["dynamic"], "confidence": 0.3}, "drafter.assistant.tree.kind is 'dynamic'.*confidence=0"),
        ({"device": "elsewhere"}, "drafter.assistant.model=.* model.device is 'elsewhere'"),
        ({"dtype": "int3"}, "drafter.assistant.*int3"),
        ({"model": "/nonesuch"}, "drafter.assistant.model=/nonesuch"),
    ],
)
def test_a_bad_value_is_named_in_one_line(clone: str, changes: dict[str, Any], named: str) -> None:
    refuses(named, assistants.assistant, changes.pop("model", clone), toys.target(), **changes)


def test_another_tokenizer_is_named_with_the_ways_out(tmp_path: Path) -> None:
    path = assistants.save(toys.target().model, words([*range(7), 8, 7, *range(9, toys.VOCAB)]), tmp_path)
    with pytest.raises(ValueError, match="has another tokenizer than"):
        assistants.assistant(path, toys.target())


@pytest.mark.gpu
@pytest.mark.parametrize("match", ["same", "tli"])
def test_an_assistant_on_another_device_drafts_the_same(clone: str, match: str) -> None:
    target, settings = Target.load(clone, "float32", "cuda"), RequestParams(12, GREEDY)
    drafted = []
    for device in ("cpu", "cuda"):
        source = assistants.assistant(clone, target, match=match, device=device)
        made = speculate(target, source, toys.prompt(0), settings)
        assert made.tokens == autoregress(target, toys.prompt(0), settings).tokens
        drafted.append([step.accepted for step in made.steps])
    assert drafted[0] == drafted[1]
    assert sum(drafted[0]) > 0


def test_an_assistant_with_recurrent_layers_is_refused_and_one_that_takes_no_tree_drafts_chains(
    tmp_path: Path, clone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = assistants.save(families.target("lfm2").model, toys.tokenizer(), tmp_path)
    with pytest.raises(ValueError, match=r"drafter\.assistant\.model=.* state of one path .*choose another one$"):
        assistants.assistant(path, toys.target())
    monkeypatch.setattr(probe, "check", lambda _: False)
    with pytest.raises(ValueError, match=r"drafter.assistant.tree.kind is 'sampled'.*tree.kind=chain"):
        assistants.assistant(clone, toys.target(), tree=toys.TREES["sampled"])
    assert assistants.assistant(clone, toys.target()).model.takes_trees is False


SHUFFLED = torch.randperm(toys.VOCAB, generator=torch.Generator().manual_seed(0)).tolist()


def words(order: list[int]) -> Any:
    """Return a tokenizer whose token i is the toy target's token order[i]."""
    return assistants.words([f"w{i}" for i in order])


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that often agrees and lacks a fifth of the words."""
    model = assistants.reordered(assistants.noisy(toys.target().model, 0.02), SHUFFLED[:32])
    return assistants.save(model, words(SHUFFLED[:32]), tmp_path_factory.mktemp("near"))


def tli(path: str) -> Assistant:
    """Return an assistant with another tokenizer, which shares tokens with the target (TLI)."""
    return assistants.assistant(path, toys.target(), match="tli")


def test_every_draft_by_shared_tokens_is_that_of_a_model_without_a_cache(
    smaller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words map one to one, so that the naive reference needs no text."""
    drafter, target = tli(smaller), toys.target()
    model = drafter.model.model  # type is known by kind
    number = {word: i for i, word in enumerate(SHUFFLED[:32])}
    checked, propose = [], AssistantState.propose

    def compared(state: Any, context: DraftContext) -> Proposal:
        made = propose(state, context)
        read = [number.get(t, -1) for t in context.token]
        # Words that the assistant lacks: the first word replaces unknown ones in the prompt, TLI leaves later ones out.
        prompt, new = read[: len(toys.prompt(1))], read[len(toys.prompt(1)) :]
        read = [max(t, 0) for t in prompt] + [t for t in new if t >= 0]
        expected = []
        for _ in range(min(4, context.max_draft_depth)):
            logits = model(input_ids=torch.tensor([read + expected]), use_cache=False).logits[0, -1]
            expected.append(int(logits.argmax()))
        assert made.tree.token.tolist() == [context.token[-1], *(SHUFFLED[t] for t in expected)]
        checked.append(len(expected))
        return made

    monkeypatch.setattr(AssistantState, "propose", compared)
    made = speculate(target, drafter, toys.prompt(1), RequestParams(TOKENS, GREEDY))
    assert [step.drafted for step in made.steps] == checked
    assert len({step.accepted for step in made.steps}) > 1


def test_what_the_assistant_lacks_is_spelled_with_its_longest_tokens() -> None:
    vocabulary = Vocabulary.__new__(Vocabulary)
    vocabulary.shared, vocabulary.texts = {7: 9}, {5: "abc", 6: "abd"}
    vocabulary.ids = {"a": 1, "ab": 2, "c": 3, "b": 4, "bc": 8}
    assert vocabulary.translate([5, 7, 5]) == [2, 3, 9, 2, 3]
    assert vocabulary.translate([6, 7, 8]) == [9], "what it cannot read it goes on without"


@torch.inference_mode()
def test_a_text_is_revised_anywhere(clone: str) -> None:
    source = assistants.assistant(clone, toys.target(), dtype="float64")
    model, state = source.model, source.start([1])
    texts = [[3, 1, 4, 1, 5], [3, 1, 4, 1, 5], [3, 1, 9, 2], [3, 1], [7], [7, 3, 1, 4], [7, 3, 1, 4, 9, 9]]
    for seen in texts:
        logits, fresh = state.read(seen), model.prefill(torch.tensor(seen), model.cache()).logits
        torch.testing.assert_close(logits, fresh[0])
        state.branch(torch.tensor([8]), [-1])
