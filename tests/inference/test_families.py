"""Families of targets against transformers: greedy text, packed features, and the states behind a part of a chain."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from inference.decode import Settings, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Plain
from inference.protocol import Drafter
from inference.target.target import Target
from inference.verification.rng import Rng
from inference.verification.sample import GREEDY, Sampling, distribution
from inference.verification.tree import DraftTree
from tests import families, toys
from tests.enumeration import EXACT, distance, law, verify
from tests.families import Erring, generated
from tests.inference import model_free
from tests.inference.test_decode import Oracle

TOKENS = 16
# The rest are slow: what other tests have, and what differs from these in nothing that decoding sees.
QUICK = ("gpt_oss", "deepseek_v3", "qwen3_next", "lfm2", "granitemoehybrid")
SERVED = [name for name in families.FAMILIES if name != "llama4"]
RECURRENT = [name for name, family in families.FAMILIES.items() if family.recurrent]
SAMPLING = Sampling(1.5, 2, 1.0)  # few tokens to choose from, so that all outcomes can be run


def quick(names: list[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture
def double() -> Iterator[None]:
    with families.in_double():
        yield


@pytest.mark.parametrize("name", quick(SERVED))
def test_a_family_decodes_what_transformers_generates(name: str) -> None:
    target, settings = families.target(name), Settings(TOKENS, GREEDY)
    prompts = [toys.prompt(0, 9), toys.prompt(1, 14)]
    texts = [generated(target, prompt, TOKENS) for prompt in prompts]
    assert toys.lively(texts[0])
    made = speculate(target, Erring(texts[0]), prompts[0], settings)
    assert made.tokens == texts[0]
    assert any(0 < step.accepted < step.drafted for step in made.steps), "a part of a chain is taken back"
    assert target.takes_trees is not families.FAMILIES[name].recurrent
    if target.takes_trees:
        assert speculate(target, Oracle(texts[0], 3), prompts[0], settings).tokens == texts[0]
        both = speculate(target, Plain(target.device), prompts, settings, batch_size=2)
        assert [one.tokens for one in both] == texts
        return
    with pytest.raises(ValueError, match=rf"{name}: .*state of one path .*tree=chain"):
        speculate(target, Oracle(texts[0], 3), prompts[0], settings)
    with pytest.raises(ValueError, match=rf"{name}: .*state of one path .*batch_size=1"):
        speculate(target, Plain(target.device), prompts, settings, batch_size=2)


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


@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5", "falcon_h1"))]
)
@pytest.mark.usefixtures("double")
def test_tokens_sampled_on_recurrent_states_have_the_targets_distribution(name: str) -> None:
    target, prompt, horizon = families.target(name, torch.float64), toys.prompt(3, 6), 3
    depths = set[int]()

    @cache
    def logits(text: tuple[int, ...]) -> Tensor:
        out = target.prefill(torch.tensor([*prompt, *text]), target.cache()).logits
        assert out is not None
        return out[0, -1]

    def program(rng: Rng) -> tuple[int, ...]:
        rows, drafted = list[Tensor](), tuple[int, ...]()
        while len(drafted) < 2:
            rows.append(distribution(logits(drafted), Sampling(4.0, 3, 1.0)))
            drafted += (rng.sample(rows[-1][None])[0],)
        tree, cached = DraftTree(torch.tensor([prompt[-1], *drafted]), torch.arange(-1, 2)), target.cache()
        target.prefill(torch.tensor(prompt[:-1]), cached)
        out = target.score(tree, cached).logits
        assert out is not None
        q = torch.stack([*rows, torch.zeros_like(rows[0])])
        path, bonus = verify(tree, distribution(out[0], SAMPLING), q, rng)
        cached.keep(len(prompt) - 1, path)
        depths.add(len(path) - 1)
        emitted = [*drafted[: len(path) - 1], bonus]
        while len(emitted) < horizon:  # on the states that were left
            out = target.prefill(torch.tensor(emitted[-1:]), cached).logits
            assert out is not None
            emitted.append(rng.sample(distribution(out[0], SAMPLING))[0])
        return tuple(emitted)

    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(horizon):
        expected = {
            (*text, token): weight * float(after[token])
            for text, weight in expected.items()
            for after in [distribution(logits(text), SAMPLING)]
            for token in after.nonzero()[:, 0].tolist()
        }
    assert distance(law(program), expected) < EXACT
    assert depths == {0, 1, 2}


SOURCES: dict[str, Callable[[Target], Drafter]] = {
    **{
        name: lambda target, name=name: HeadDrafter(toys.head(name, target), toys.TREES["chain"], name)
        for name in toys.HEAD_CONFIGS
    },
    **{name: lambda target, name=name: model_free.make(name, target) for name in ("prompt_lookup", "suffix")},
}


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", RECURRENT)
def test_every_source_drafts_for_recurrent_targets(name: str, source: str) -> None:
    target, settings = families.target(name), Settings(100, GREEDY)
    drafter = SOURCES[source](target)
    for seed in range(3):
        prompt = toys.prompt(seed, 8 + seed)
        assert speculate(target, drafter, prompt, settings).tokens == generated(target, prompt, 100)


def outlying() -> Any:
    """Return a model in bf16 with some large logits and wide residuals, each product rounded in its own way."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 1024, "hidden_size": 128, "head_dim": 32, "initializer_range": 0.08}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**toys.SIZES | sizes))
    with torch.no_grad():
        model.model.embed_tokens.weight[:, :4] *= 30
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[:4] *= 30
        model.lm_head.weight[::512] *= 20
    noise = torch.Generator().manual_seed(0)

    def rounded(_module: Any, _args: Any, out: Tensor) -> Tensor:
        factor = 1 + (2 * torch.rand(out.shape, generator=noise) - 1) * 2**-8
        return (out.float() * factor).to(out.dtype)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(rounded)
    return model.to(torch.bfloat16)


def test_bf16s_rounding_leaves_a_target_its_trees_and_a_wrong_mask_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(outlying(), toys.tokenizer(), "outlying")
    assert target.takes_trees
    token = torch.tensor(toys.prompt(0, 12))
    first, second = (
        target.embeddings.logits(target.prefill(token, target.cache()).last_hidden).float() for _ in range(2)
    )
    assert (first - second).abs().max() > 0.1 * first.std(), "some logits are far off"
    mask = Target.attention_mask

    def wrong(self: Target, seen: Tensor, *where: Any) -> Any:
        return mask(self, torch.ones_like(seen).tril(seen.shape[2] - seen.shape[1]), *where)

    monkeypatch.setattr(Target, "attention_mask", wrong)
    assert not Target(outlying(), toys.tokenizer(), "outlying").takes_trees
