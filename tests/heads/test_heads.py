"""Test 3 of the design: `unroll` is `extend` and `expand` done for all rows at once; and Block is the HF layer."""

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from transformers import GraniteConfig, GraniteModel, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from heads import HEADS, rows
from heads.base import DraftHead, Features, LayerDims
from heads.block import Selector
from heads.common.rope import Rope, Rotary
from heads.mlp import EPS, ShiftedNorm
from heads.modules.layers import DecoderLayer, LayerInputs, LayerSpec, TargetLayer, grouped_attention
from inference.drafters.policy import Expander
from tests import drafting, toys

EVERY, DEPTHS = ["hass", "block of DSpark", *toys.PAIRS], 4


def features(length: int, layers: tuple[int, ...] = ()) -> Features:
    """Return two packed rows of a toy target in fp64: two documents in the first, padding in the second."""
    target = toys.target("llama", torch.float64)
    document = torch.zeros(2, length, dtype=torch.long)
    document[0, 6:] = 1
    document[1, -3:] = -1
    token = torch.tensor([toys.prompt(1, length), toys.prompt(2, length)])
    return target.features(token, document, layers)


@pytest.mark.filterwarnings("error")
def test_a_norm_with_a_shift_is_taken_in_its_weights_dtype() -> None:
    """As under autocast, which gives it bf16: torch warns of two dtypes, and rounds."""
    norm, x = ShiftedNorm(32), torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    torch.testing.assert_close(norm(x).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("protocol", [DraftHead, Expander])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_has_what_its_protocol_asks_for_as_python_3_12_looks_for_it(name: str, protocol: type) -> None:
    """Without `__getattr__`, by which a module has its submodules."""
    members = {*protocol.__annotations__, *vars(protocol)}
    for member in (member for member in members if not member.startswith("_")):
        inspect.getattr_static(toys.head(name, toys.target("llama", torch.float64)), member)


@pytest.mark.parametrize("name", EVERY)
def test_unroll_equals_literal_drafting(name: str) -> None:
    """Every row and depth: of one packed row down its text, of the other down paths through any of its rows.

    Every third state has its rows at once, the others one more than the last, behind what that one drafted.
    """
    head: DraftHead = toys.head(name, toys.target("llama", torch.float64))
    packed, compared = features(9, head.feature_layers), 0
    random = torch.randint(9, (9, DEPTHS), generator=torch.Generator().manual_seed(4))
    text = (1 + torch.arange(9)[:, None] + torch.arange(DEPTHS)).clamp_max(8)
    paths = torch.stack([text, torch.cat([text[:, :1], random[:, 1:]], 1)])
    drafts, state = [head.unroll(given, DEPTHS) for given in (packed, packed._replace(path=paths))], None
    for b, t in [(b, t) for b in range(2) for t in range(8) if packed.document[b, t] == packed.document[b, t + 1]]:
        first = int((packed.document[b] == packed.document[b, t]).nonzero()[0])
        new = first if (t - first) % 3 == 0 else t
        given = Features(*(part[b : b + 1, new : t + 1] for part in packed[:4]))
        state, level = drafting.extend(head, None if new == first else state, given, packed.token[b, new + 1 : t + 2])
        for depth in range(1, DEPTHS + 1):
            if depth > 1:
                token, mask = packed.token[b, paths[b, t, depth - 1]][None], torch.ones(1, depth - 1, dtype=torch.bool)
                level = drafting.expand(head, state, level, token, torch.zeros(1, dtype=torch.long), mask)
            found = head.compute_logits(drafts[b][depth - 1].state[b, t], depth)
            torch.testing.assert_close(found, level.logits[0, 0], rtol=1e-9, atol=1e-9)
            compared += 1
    assert compared == 14 * DEPTHS


@pytest.mark.parametrize("name", [*HEADS, *toys.OPTIONS])
def test_unrolling_anchors_alone_gives_them_the_states_and_gradients_of_all_rows(name: str) -> None:
    head: Any = toys.head(name, toys.target("llama", torch.float64)).requires_grad_(True).train()
    packed, depths = features(14, head.feature_layers), 4
    anchors = torch.tensor([[0, 3, 4, 5, 8, 9, 12], [1, 2, 3, 6, 7, 9, 10]])  # of a whole row, and the end of another
    whole, some = (head.unroll(packed, depths, which) for which in (None, anchors))
    losses = []
    for drafts in (whole, some):
        fields = [rows.gather_rows(x, anchors) for draft in drafts for x in draft if x is not None]
        weight = torch.randn(*fields[0].shape[:2], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        scores = [head.compute_logits(rows.gather_rows(draft.state, anchors), d) for d, draft in enumerate(drafts, 1)]
        losses.append(sum((x.square().reshape(*weight.shape, -1).mean(-1) * weight).sum() for x in (*fields, *scores)))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=1e-10)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    gradients = [torch.autograd.grad(loss, trained, allow_unused=True) for loss in losses]
    for parameter, one, other in zip(trained, *gradients, strict=True):
        assert (one is None) == (other is None), parameter.shape
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", [*HEADS, *toys.OPTIONS])
def test_tree_nodes_see_their_ancestors_alone(name: str) -> None:
    """A node's law in a tree equals its law in the chain of its path."""
    head: DraftHead = toys.head(name, toys.target("llama", torch.float64))
    packed = Features(*(part[:1, :6] for part in features(9, head.feature_layers)[:4]))
    state, root = drafting.extend(head, None, packed, rows.next_token(packed.token)[0])
    eye = torch.eye(2, dtype=torch.bool)
    first = drafting.expand(head, state, root, torch.tensor([3, 5]), torch.tensor([0, 0]), eye)
    both = drafting.expand(
        head, state, first, torch.tensor([7, 8]), torch.tensor([1, 0]), torch.cat([eye[torch.tensor([1, 0])], eye], 1)
    )
    one = torch.ones(1, 1, dtype=torch.bool)
    zero = torch.zeros(1, dtype=torch.long)
    chain = drafting.expand(head, state, root, torch.tensor([5]), zero, one)
    chain = drafting.expand(head, state, chain, torch.tensor([7]), zero, torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(both.logits[0, 0], chain.logits[0, 0], rtol=1e-9, atol=1e-9)


def drafted(head: Any) -> list[torch.Tensor]:
    """Return a head's first two levels, a confidence in training."""
    packed = features(9, head.feature_layers)
    given = Features(*(part[1:, :6] for part in packed[:4]))
    state, level = drafting.extend(head, None, given, packed.token[1, 1:7])
    again = drafting.expand(
        head, state, level, torch.tensor([3]), torch.zeros(1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool)
    )
    confidence = head.unroll(packed, DEPTHS)[0].confidence
    return [*(drafting.logits(head, each) for each in (level, again)), *([] if confidence is None else [confidence])]


@pytest.mark.parametrize("kind", toys.VALUES)
def test_every_option_changes_what_is_drafted(kind: str) -> None:
    """Turned over in some head of the pairs. An option that is new has its values there, or is named here."""
    target, rest = toys.target("llama", torch.float64), dict(toys.VALUES[kind])
    assert {"name", *rest} == {field.name for field in dataclasses.fields(HEADS[kind].Config)}
    rest = {name: values for name, values in rest.items() if len(values) == 2}
    for base in [options for one, options in toys.PAIRS.values() if one == kind]:
        if not rest:
            break
        before = drafted(toys.head_of(kind, base, target))
        for name, (first, second) in list(rest.items()):
            turned = base | {name: second if base[name] == first else first}
            if toys.allowed(kind, turned):
                after = drafted(toys.head_of(kind, turned, target))
                if len(after) != len(before) or any(map(lambda a, b: not torch.equal(a, b), before, after)):
                    del rest[name]
    assert not rest, "they change nothing"


LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 8.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "scaling",
    [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3, YARN, {**YARN, "beta_fast": 8.0, "truncate": False},
     {**YARN, "attention_factor": 0.8}, {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}],
)  # fmt: skip
def test_block_is_the_llama_layer(scaling: dict[str, Any] | None) -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        attn_implementation="eager", rope_theta=500.0, num_hidden_layers=1,
    )  # fmt: skip
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0, **(scaling or {})}
    torch.manual_seed(0)
    theirs = LlamaDecoderLayer(config, 0).double()
    rope = Rope(500.0, scaling)
    ours = DecoderLayer(LayerSpec(32, LayerDims(4, 2, 8, 48), rope, config.rms_norm_eps)).double()
    ours.load_state_dict(theirs.state_dict())
    x, position = torch.randn(2, 9, 32, dtype=torch.float64), 20 * torch.arange(9).expand(2, 9)
    seen = torch.ones(2, 9, 9, dtype=torch.bool).tril()
    found = ours(x, LayerInputs(position, 180, lambda q, k, v: grouped_attention(q, k, v, seen[:, None])))
    additive = torch.zeros(2, 1, 9, 9, dtype=torch.float64).masked_fill(~seen[:, None], -1e300)
    rotary = LlamaRotaryEmbedding(config)(x, position)
    expected = theirs(x, attention_mask=additive, position_ids=position, position_embeddings=rotary)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_layer_of_the_targets_kind_is_the_targets_with_its_own_scale_of_attention() -> None:
    config = GraniteConfig(**toys.SIZES, attention_multiplier=0.9, residual_multiplier=0.5)
    torch.manual_seed(0)
    model = GraniteModel(config).double().eval()
    ours, token = TargetLayer(config).double(), torch.tensor([toys.prompt(1, 9)])
    ours.layer.load_state_dict(model.layers[-1].state_dict())
    x = [torch.randn(1, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))]
    model.layers[-1].register_forward_pre_hook(lambda _, given: (x[0], *given[1:]))
    model.layers[-1].register_forward_hook(lambda _, __, out: x.append(out[0] if isinstance(out, tuple) else out))
    model(token, use_cache=False)
    seen = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    given = LayerInputs(torch.arange(9)[None], 9, lambda q, k, v: grouped_attention(q, k, v, seen[:, None]))
    torch.testing.assert_close(ours(x[0], given), x[1], rtol=1e-6, atol=1e-6)


def test_medusa_starts_as_the_targets_own_next_token() -> None:
    """Zero-initialised blocks add SiLU(b) alone; with b = 0 every head's law is the target's."""
    target = toys.target()
    config = {**toys.HEAD_CONFIGS["medusa"], "name": "medusa", "heads": 2, "lm_head": "shared"}
    head = HEADS["medusa"](HEADS["medusa"].Config(**config), target.embeddings)
    for block in head.blocks:
        torch.nn.init.zeros_(block[0].linear.bias)
    last = torch.randn(3, 32)
    torch.testing.assert_close(head.compute_logits(head.blocks[1](last), 2), target.embeddings.logits(last))
    assert sum(p.numel() for p in head.parameters()) == 2 * (32 * 32 + 32)


def test_far_positions_are_told_apart_in_bf16() -> None:
    """Its own numbers stand eight apart there: angles are worked out in wide ones, and their cosines rounded."""
    rotary, x = Rotary(8, Rope(500.0, None)), torch.ones(1, 1, 9, 8)
    position = torch.arange(1027, 1036)[None]
    exact = rotary(x.double(), position, 1036)
    torch.testing.assert_close(rotary(x.bfloat16(), position, 1036).double(), exact, rtol=0, atol=0.02)


def test_a_selector_keeps_other_tokens_in_order_below_all_candidates() -> None:
    """Also where the token before turns the candidates' order."""
    torch.manual_seed(0)
    selector = Selector(4, 2, 3, 8)
    torch.nn.init.normal_(selector.successor.weight, std=5.0)
    logits = torch.randn(64, 8)
    scores = selector(logits, torch.randn(64, 2))
    best = logits.topk(3).indices
    turned = scores.gather(-1, best).argmin(-1) != 2
    assert turned.any()
    others = torch.ones_like(logits, dtype=torch.bool).scatter(-1, best, False)
    below = scores[others].unflatten(0, (64, 5))
    assert (below.amax(-1) < scores.gather(-1, best).amin(-1)).all()
    assert below.argsort(-1).equal(logits[others].unflatten(0, (64, 5)).argsort(-1))


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("block", {"markov_rank": 4, "domino": 4}, "head.markov_rank and head.domino correct the same logits"),
        ("block", {"domino": 4, "selector_rank": 4}, "head.domino and head.selector_rank correct the same logits"),
        ("block", {"selector_rank": 4, "draft_vocab": 30}, "head.selector_rank selects among the whole vocabulary"),
        ("eagle3", {"feature_norm": True, "joint_norm": True}, "give one norm before fc"),
        ("mtp", {"raw_state": True, "feature_layers": [1]}, "head.raw_state=true reads only the target's last layer"),
    ],
)
def test_options_that_exclude_each_other_are_refused(kind: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        toys.head_of(kind, toys.HEAD_CONFIGS[kind] | options, toys.target())


def test_sizes_at_and_beyond_their_limit_are_taken() -> None:
    target, token = toys.target(), torch.tensor([3])
    convolved: Any = toys.head_of("block", toys.HEAD_CONFIGS["block"] | {"conv": 5}, target)
    assert convolved.size == 5
    ranked: Any = toys.head_of("medusa", toys.HEAD_CONFIGS["medusa"] | {"lm_head": "own", "lm_head_rank": 99}, target)
    assert ranked.lm_heads[0].weight.shape[1] == target.embeddings.hidden_size
    masked: Any = toys.head_of("peagle", toys.HEAD_CONFIGS["peagle"] | {"mask_token": -3}, target)
    assert masked.mask_token == toys.VOCAB - 3
    selector = Selector(4, 2, 99, 8)
    assert selector(torch.randn(1, 8), selector.context(torch.randn(1, 4), token)).isfinite().all()
