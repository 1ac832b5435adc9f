"""The engine: ends of answers inside an accepted path, bookkeeping, the context's edge, bad prompts."""

from dataclasses import asdict
from typing import Any

import pytest
import torch

from inference.decode import RequestParams, autoregress, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.host import DrafterState, HostDrafter
from inference.drafters.plain import Baseline
from inference.drafters.policy import TreeConfig, check_tree, expanded, most_nodes
from inference.drafters.registry import make
from inference.protocol import DraftContext, Proposal
from inference.request import Request
from inference.verification.sample import GREEDY
from inference.verification.tree import DraftTree
from tests import toys
from tests.refusals import refuses
from tests.tokenizers import trained


class Oracle(HostDrafter, DrafterState):
    """Drafts exactly what the target will write, `depth` tokens at a time, beside one wrong sibling, or behind it."""

    name, tree = "oracle", "oracle"

    def __init__(self, text: list[int], depth: int, wrong_first: bool = False) -> None:
        self.text, self.depth, self.wrong_first = text, depth, wrong_first

    def start(self, prompt: list[int]) -> "Oracle":
        self.prompt = len(prompt)
        return self

    def propose(self, context: DraftContext) -> Proposal:
        made = len(context.token) - self.prompt
        ahead = self.text[made : made + min(self.depth, context.max_draft_depth)]
        token = [context.token[-1], *ahead]
        parent = list(range(-1, len(ahead)))
        if ahead:
            wrong = (ahead[0] + 1) % toys.VOCAB
            token, parent = [*token, wrong], [*parent, 0]
            if self.wrong_first:
                token, parent = [token[0], wrong, *ahead], [-1, 0, 0, *range(2, len(ahead) + 1)]
        return Proposal(DraftTree(torch.tensor(token), torch.tensor(parent)))


def plain(count: int = 24) -> list[int]:
    return autoregress(toys.target(), toys.prompt(0), RequestParams(count, GREEDY)).tokens


def test_oracle_commits_depth_plus_one_a_pass() -> None:
    text = plain()
    made = speculate(toys.target(), Oracle(text, 3), toys.prompt(0), RequestParams(24, GREEDY))
    assert made.tokens == text
    assert [step.accepted for step in made.steps] == [3, 3, 3, 3, 3, 2]
    assert sum(step.committed for step in made.steps) == 23
    assert made.tau == 23 / 6
    assert made.origins[:6] == ["prefill", "draft", "draft", "draft", "bonus", "draft"]
    assert made.finish_reason == "length"
    assert autoregress(toys.target(), toys.prompt(0), RequestParams(24, GREEDY)).tau == 1.0


def test_an_end_inside_an_accepted_path_ends_it_and_steps_say_which_siblings_were_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, target = plain(), toys.target()
    end = next(i for i in range(6, 20) if text.index(text[i]) == i and i % 4 != 0)
    monkeypatch.setattr(target, "eos", frozenset({text[end]}))
    made = speculate(target, Oracle(text, 3, wrong_first=True), toys.prompt(0), RequestParams(24, GREEDY))
    alone = autoregress(target, toys.prompt(0), RequestParams(24, GREEDY))
    assert made.tokens == alone.tokens == text[: end + 1]
    assert made.finish_reason == alone.finish_reason == "eos"
    assert sum(step.committed for step in made.steps) == end
    assert [len(step.ranks) for step in made.steps] == [step.accepted for step in made.steps]
    assert made.steps[0].ranks == (1, 0, 0)
    assert made.steps[-1].ranks == (1, 0, 0)[: (end - 1) % 4 + 1]  # no further than what was committed


@pytest.mark.parametrize("lacking", [0, 1])
def test_no_answer_ends_before_min_new_tokens_as_in_transformers(lacking: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that comes after k tokens ends the answer at a minimum of k, and has no probability at one of k + 1."""
    text, target, prompt = plain(), toys.target(), toys.prompt(0)
    end = next(i for i in range(6, 20) if text.index(text[i]) == i and i % 4 != 0)
    generate: Any = target.model.generate
    least = {"min_new_tokens": end + lacking, "eos_token_id": text[end], "pad_token_id": text[end]}
    token = torch.tensor([prompt])
    made = generate(token, attention_mask=torch.ones_like(token), max_new_tokens=24, do_sample=False, **least)
    expected = made[0, len(prompt) :].tolist()
    assert (expected == text[: end + 1]) is (lacking == 0)
    settings = RequestParams(24, GREEDY, min_new_tokens=end + lacking)
    monkeypatch.setattr(target, "eos", frozenset({text[end]}))
    assert autoregress(target, prompt, settings).tokens == expected
    assert speculate(target, Oracle(expected, 3), prompt, settings).tokens == expected


def test_a_stop_string_whose_characters_take_several_tokens_each(monkeypatch: pytest.MonkeyPatch) -> None:
    target, stop = toys.target(), "ぁ人間終😀ぁ"
    monkeypatch.setattr(target, "tokenizer", trained("bytes"))
    request = Request(target, [1, 2], RequestParams(90, GREEDY, stop=("z", stop)), target.cache())
    tokens = target.tokenizer(stop, add_special_tokens=False)["input_ids"]
    assert len(tokens) > len(stop) + 8
    request.emit([*tokens, 3], ["bonus"] * (len(tokens) + 1), [])
    assert request.generation.finish_reason == "stop"
    assert request.generation.tokens == tokens


def test_the_context_is_filled_and_not_passed() -> None:
    target = toys.target()
    prompt = toys.prompt(0, target.max_model_len - 9)
    text = autoregress(target, prompt, RequestParams(100, GREEDY)).tokens
    made = speculate(target, Oracle(text, 5), prompt, RequestParams(100, GREEDY))
    assert len(prompt) + len(text) == target.max_model_len
    assert made.tokens == text


@pytest.mark.parametrize("prompts", [torch.tensor([[1, 2]]), [(1, 2)], "w1 w2", ["w1"], [[1], 2], [1.5]])
def test_prompts_that_are_no_lists_of_tokens_are_named(prompts: Any) -> None:
    target = toys.target()
    with pytest.raises(ValueError, match=r"^prompts is a \w+: give a list of token ids, or a list of such lists"):
        speculate(target, Baseline(target.device), prompts, RequestParams(4, GREEDY))


FOUR = RequestParams(4, GREEDY)


def refused(words: str, prompts: Any, settings: Any, drafter: Any = None, **options: Any) -> None:
    target = toys.target()
    refuses(words, speculate, target, drafter or Baseline(target.device), prompts, settings, **options)


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ([], FOUR, "the prompt is empty: give at least one token; of several prompts, at least one prompt"),
        ([], [FOUR], "params is a list, but the prompt is one"),
        ([[]], FOUR, "the prompt is empty"),
        ([[1, 2], [3]], [FOUR], "there are 1 params for 2 prompts: give one for all, or one each"),
        ([[1, 2]], [FOUR, FOUR], "there are 2 params for 1 prompts"),
        ([1, 2], [FOUR], "params is a list, but the prompt is one"),
        ([[1], [1] * 160], FOUR, "the prompt has 160 tokens but llama reads at most 160: shorten it"),
        ([1] * 160, FOUR, "the prompt has 160 tokens"),
        ([1, 40], FOUR, "the prompt holds token 40 but those of llama go from 0 to 39"),
        ([[1], [2, -1]], FOUR, "the prompt holds token -1"),
    ],
)
def test_prompts_and_settings(prompts: Any, settings: Any, words: str) -> None:
    refused(words, prompts, settings)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min_new_tokens": 5}, "min_new_tokens is 5: give 0 to max_new_tokens, which is 4"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0: give 1 or more"),
        ({"stop": "END"}, "give a tuple of strings, none of them empty"),
        ({"stop": ("END", "")}, "give a tuple of strings, none of them empty"),
    ],
)
def test_settings(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RequestParams(**{"max_new_tokens": 4, "sampling": GREEDY, **values})


def test_a_tree_that_the_context_cannot_hold_is_refused_in_a_batch_too() -> None:
    refused("batch_size is 0: give 1 or more", [1, 2], FOUR, batch_size=0)
    head = toys.drafter("eagle", toys.target(), "dynamic").head
    wide = HeadDrafter(head, TreeConfig("sampled", 0, 0, 0, [], [13, 13]), "eagle")
    refused("eagle: a tree of 183 nodes is larger than the context of llama, 160 tokens", [1, 2], FOUR, wide)
    refused("a tree of 183 nodes", [[1, 2], [3]], FOUR, wide, batch_size=2)


@pytest.mark.parametrize("name", toys.TREES)
def test_no_tree_is_larger_than_its_policy_says(name: str) -> None:
    target = toys.target()
    made = speculate(target, toys.drafter("eagle", target, name), toys.prompt(0), RequestParams(12, GREEDY))
    assert max(step.drafted for step in made.steps) == most_nodes(toys.TREES[name]) - 1


def test_a_policys_trees_are_counted_without_growing_one() -> None:
    with pytest.raises(ValueError, match="a tree of 16257 nodes is larger"):
        check_tree(toys.target(), TreeConfig("sampled", 0, 0, 0, [], [127, 127]), "head")
    check_tree(toys.target(), TreeConfig("chain", 159, 0, 0, [], []), "head")  # of 160 nodes, as many as it reads
    kinds = ("dynamic", "best_first", "sampled")
    assert [expanded(TreeConfig(kind, 3, 2, 7, [], [3, 2])) for kind in kinds] == [6, 21, 10]
    with pytest.raises(ValueError, match="widths makes more than 16384 nodes"):
        TreeConfig("sampled", 0, 0, 0, [], [1000, 1000, 1000])
    options = {
        **{"model": "nowhere", "match": "same", "dtype": None, "device": None, "trust_remote_code": False},
        **{"confidence": 0.0, "tree": asdict(TreeConfig("chain", 160, 0, 0, [], []))},
    }
    with pytest.raises(ValueError, match=r"drafter\.assistant: tree chain-160: a tree of 161 nodes"):
        make("assistant", options, toys.target())
