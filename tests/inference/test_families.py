"""Families of targets against transformers: greedy text, packed features, and the states behind a part of a chain."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inference.batch import batch_of
from inference.decode import RequestParams, speculate
from inference.drafters.plain import Baseline
from inference.verification.sample import GREEDY
from inference.verification.tree import DraftTree
from tests import families, toys
from tests.families import Erring, generated
from tests.inference.test_decode import Oracle

TOKENS = 16
# The rest are slow: what other tests have, and what differs from these in nothing that decoding sees.
QUICK = ("gpt_oss", "deepseek_v3", "qwen3_next", "lfm2", "granitemoehybrid")
SERVED = [name for name in families.FAMILIES if name != "llama4"]
RECURRENT = [name for name, family in families.FAMILIES.items() if family.recurrent]


def quick(names: list[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture
def double() -> Iterator[None]:
    with families.in_double():
        yield


@pytest.mark.parametrize("name", quick(SERVED))
def test_a_family_decodes_what_transformers_generates(name: str) -> None:
    target, settings = families.target(name), RequestParams(TOKENS, GREEDY)
    prompts = [toys.prompt(0, 9), toys.prompt(1, 14)]
    texts = [generated(target, prompt, TOKENS) for prompt in prompts]
    assert toys.lively(texts[0])
    made = speculate(target, Erring(texts[0]), prompts[0], settings)
    assert made.tokens == texts[0]
    assert any(0 < step.accepted < step.drafted for step in made.steps), "a part of a chain is taken back"
    assert target.takes_trees is not families.FAMILIES[name].recurrent
    if target.takes_trees:
        assert speculate(target, Oracle(texts[0], 3), prompts[0], settings).tokens == texts[0]
        both = speculate(target, Baseline(target.device), prompts, settings, batch_size=2)
        assert [one.tokens for one in both] == texts
        return
    with pytest.raises(ValueError, match=rf"{name}: .*state of one path .*tree=chain"):
        speculate(target, Oracle(texts[0], 3), prompts[0], settings)
    with pytest.raises(ValueError, match=rf"{name}: .*state of one path .*batch_size=1"):
        speculate(target, Baseline(target.device), prompts, settings, batch_size=2)
    batch = batch_of(target, Baseline(target.device), 1)
    batch.admit(0, prompts[0], settings)
    for _ in range(2):  # a dry run commits nothing
        assert batch.device_step.dry_run(batch.running)[0] == texts[0][1:2]


@pytest.mark.parametrize("name", quick(SERVED))
@pytest.mark.usefixtures("double")
def test_packed_features_are_each_documents_alone(name: str) -> None:
    target = families.target(name, torch.float64)
    token = torch.tensor([toys.prompt(2, 20), toys.prompt(3, 20)])
    document = torch.tensor([[0] * 5 + [1] * 12 + [2] * 3, [0] * 16 + [-1] * 4])
    packed = target.features(token, document, (0, 2))
    for row, number in ((0, 0), (0, 1), (0, 2), (1, 0)):
        here = document[row] == number
        alone = token[row, here][None]
        out = target.run(alone, torch.arange(alone.shape[1])[None], None, None, (0, 2))
        torch.testing.assert_close(packed.hidden[row, here], out.hidden[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(packed.last_hidden[row, here], out.last_hidden[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", quick(RECURRENT))
@pytest.mark.usefixtures("double")
def test_a_state_behind_any_part_of_a_chain_is_a_fresh_prefills(name: str) -> None:
    target = families.target(name, torch.float64)
    token = torch.tensor(toys.prompt(3, 20))
    for accepted in range(1, 5):
        cache, text = target.cache(), token[: 9 + accepted]
        target.prefill(token[:9], cache)
        out = target.score(DraftTree(token[9:13], torch.arange(-1, 3)), cache)
        assert out.logits is not None
        cache.keep(9, list(range(accepted)))
        following = target.prefill(token[15:17], cache).logits
        fresh = target.prefill(torch.cat([text, token[15:17]]), target.cache()).logits
        torch.testing.assert_close(following, fresh, rtol=0, atol=1e-10)
        torch.testing.assert_close(
            out.logits[0, accepted - 1 : accepted], target.prefill(text, target.cache()).logits[0], rtol=0, atol=1e-10
        )
