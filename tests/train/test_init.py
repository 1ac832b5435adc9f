"""A run that starts from a head: a published one or our own, its numbers in place of those of `head`."""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, OlmoConfig, OPTConfig, OPTForCausalLM

from data.batches import Batch, Batches, pack
from data.text.masks import Sample
from heads.formats.store import save_head
from inference.drafters.head import load_mtp
from inference.target.target import Target
from tests import families, published_mtp, toys
from tests.heads.published import eagle_authors, medusa_first, publish
from tests.inference.test_mtp import save
from tests.train import jobs
from train import start
from train.config import RunConfig
from train.start import final_gain, fit_init, init_head, resolve_init

LAYERS = "head.feature_layers=[0,1,2]"
PACKED = pack([Sample(str(i), toys.prompt(i, 6 + i), [1] * (6 + i)) for i in range(26)], 32)
BATCHES = Batches(PACKED, 4, 2, 0, 0, 1)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit on a quarter of the rows: the toys' texts come again and again."""
    monkeypatch.setattr(start, "TOKENS_PER_INPUT", (4, 16))


def run(*overrides: str) -> RunConfig:
    return jobs.configured(overrides)


def started(run: RunConfig, target: Target) -> Any:
    return init_head(run.head, run.init, target, run.base)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    _, tensors, config = eagle_authors()
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    return publish(tmp_path / "published", half, config)


def test_the_weights_and_numbers_are_the_published_ones(published: Path) -> None:
    for name in ("eagle", "hass"):  # HASS trains EAGLE's head
        head: Any = started(run(f"head={name}", f"init={published}"), toys.target())
        assert (head.config.name, head.config.length, head.config.norm_eps) == (name, None, 1e-5)
        assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
        own, theirs = head.state_dict(), load_file(published / "model.safetensors")
        assert all(torch.equal(own[name], theirs[name].float()) for name in own)


def test_a_head_of_other_weights_is_a_start_and_one_of_another_shape_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, saved = toys.target(), toys.head("medusa", toys.target())
    save_head(tmp_path / "tuned" / "head", saved, replace(target.spec, name="base", fingerprint="another"), {})
    save_head(tmp_path / "deep" / "head", saved, replace(target.spec, num_layers=9), {})
    with caplog.at_level(logging.WARNING):
        head = started(run("head=medusa", "head.heads=2", f"init={tmp_path / 'tuned'}"), target)
    assert all(torch.equal(tensor, saved.state_dict()[name]) for name, tensor in head.state_dict().items())
    assert "made for the weights of base; it is trained on for those of llama" in caplog.text
    with pytest.raises(ValueError, match="made for another target, llama: its number of layers is 9"):
        started(run("head=medusa", f"init={tmp_path / 'deep'}"), target)


def test_another_kind_of_head_is_refused_in_one_line(tmp_path: Path) -> None:
    _, tensors, config = medusa_first()
    folder = publish(tmp_path, tensors, config)
    with pytest.raises(ValueError, match=r"is a head of kind medusa, .* give head=medusa") as error:
        started(run(f"init={folder}"), toys.target())
    assert "\n" not in str(error.value)


def test_a_module_starts_as_the_targets_last_layer() -> None:
    for name, extra in (("llama", ()), ("qwen3", ("head.qk_norm=true",))):
        target = toys.target(name)
        head: Any = started(run("head=mtp", "init=last_layer", *extra), target)
        last = target.decoder_layers[-1].state_dict()
        assert all(torch.equal(value, last[key]) for key, value in head.block.state_dict().items())
        assert torch.equal(head.norm.weight, target.base.norm.weight)
        assert torch.equal(head.eh_proj.weight[:, 32:], torch.eye(32))
        assert (head.config.rope_theta, head.config.norm_eps) == (10000.0, target.config.rms_norm_eps)


class Both(Batches):
    """The micro-batches of two processes, one after the other."""

    def __call__(self, step: int) -> list[Batch]:
        args = (self.packed, self.sequences_per_step, self.micro_batch_size, self.seed)
        return [batch for rank in (0, 1) for batch in Batches(*args, rank, 2)(step)]


@pytest.mark.parametrize(
    ("extra", "limit"), [(("head.layer=target", "head.raw_state=true"), 1000), (("head.feature_layers=[0,1]",), 3)]
)
def test_its_projection_is_fitted_to_what_that_layer_reads(extra: tuple[str, ...], limit: int) -> None:
    """Over all documents' rows but their last ones, as plain least squares has it; processes add up their sums."""
    target = toys.target()
    asked = run("head=mtp", "init=last_layer", *extra)
    heads: list[Any] = [started(asked, target) for _ in range(2)]
    before = heads[0].eh_proj.weight.clone()
    fit_init(heads[0], "last_layer", target, BATCHES, 10 * limit)
    fit_init(heads[1], "last_layer", target, Both(PACKED, 4, 2, 0, 0, 1), 10 * limit)
    fitted = heads[0].eh_proj.weight
    assert torch.allclose(heads[1].eh_proj.weight, fitted, rtol=0, atol=1e-5)

    steps = min(limit, start.TOKENS_PER_INPUT[1] * fitted.shape[1] // (4 * 32))
    row = torch.cat([Batches(PACKED, 4, 4, 0, 0, 1).sequences(step) for step in range(steps)])
    below = target.embeddings.num_layers - 2
    inputs, wanted = [], []
    for token, document in zip(PACKED.token[row], PACKED.document[row], strict=True):
        for number in range(int(document.max()) + 1):
            own = token[document == number][None]
            given = target.features(own, torch.zeros_like(own), (*heads[0].feature_layers, below))
            state = heads[0].initial_states(given._replace(hidden=given.hidden[:, :, :-1]))[:, :-1]
            embedding = target.embeddings.embed(own[:, 1:])
            inputs.append(torch.cat([heads[0].enorm(embedding), heads[0].hnorm(state)], -1)[0])
            wanted.append(given.hidden[0, 1:, -1])

    @torch.no_grad()
    def error(weight: torch.Tensor) -> float:
        return float((torch.cat(inputs) @ weight.T - torch.cat(wanted)).square().mean())

    best = torch.linalg.lstsq(torch.cat(inputs).double(), torch.cat(wanted).double()).solution.T.float()
    assert error(best) <= error(fitted) < 1.01 * error(best) < 0.9 * error(before)


@torch.no_grad()
def state_error(head: Any, target: Target) -> float:
    """Return the squared error of a head's state to the output of the target's last layer one position on."""
    row, seen = BATCHES.sequences(0), list[torch.Tensor]()
    given = target.features(PACKED.token[row], PACKED.document[row], (*head.feature_layers, 2))
    with head.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        head.unroll(given._replace(hidden=given.hidden[:, :, :-1]), 1)
    follows = PACKED.document[row][:, 1:] == PACKED.document[row][:, :-1]
    return float((seen[0][:, :-1] - given.hidden[:, 1:, -1])[follows].square().mean())


def test_a_short_training_is_fitted_to_more_rows_than_a_tenth_of_its_own() -> None:
    """The fit overfits to fewer rows than inputs: accuracy falls to nothing in the second step."""
    target, asked = toys.target(), run("head=mtp", "init=last_layer")
    heads: list[Any] = [started(asked, target) for _ in range(3)]
    for head, steps in zip(heads, (3, 20, 40), strict=True):
        fit_init(head, "last_layer", target, BATCHES, steps)
    short, double, longer = (head.eh_proj.weight for head in heads)
    assert torch.equal(short, double)  # 4 * 64 inputs are 2 steps of 128 tokens
    assert not torch.equal(short, longer)
    # With its MLP's fit the state is nearer to the layer's output one position on.
    both, mlp = state_error(heads[2], target), heads[2].block.mlp.down_proj
    mlp.load_state_dict(target.decoder_layers[-1].mlp.down_proj.state_dict())
    assert both < 0.9 * state_error(heads[2], target)


def test_eagle3_starts_as_the_last_layer_on_what_it_has_in_place_of_that_layers_input() -> None:
    """Each least squares brings its state nearer to the layer's output one position on, of all positions alike."""
    target = toys.target()
    layer = target.decoder_layers[-1]
    asked = run("head=eagle3", LAYERS, "init=last_layer")
    head, fresh = started(asked, target), started(replace(asked, init=None), target)
    copied = state_error(head, target)
    with patch.object(target, "features", wraps=target.features) as passes:
        fit_init(head, "last_layer", target, BATCHES, 1000)
    steps = start.TOKENS_PER_INPUT[1] * head.fusion.fc.in_features // BATCHES.step_tokens  # those of the widest fit
    assert passes.call_count == 2 * steps, "a micro-batch passes once for all four fits"
    assert state_error(head, target) < 0.8 * min(copied, state_error(fresh, target))
    assert torch.equal(head.first.mlp.gate_proj.weight, layer.mlp.gate_proj.weight)
    assert torch.equal(head.norm.weight, target.base.norm.weight)
    assert not torch.equal(head.first.mlp.down_proj.weight, layer.mlp.down_proj.weight)
    # The third layer's own states are among its features, so that the last ones follow from them but for the norm.
    row = BATCHES.sequences(0)
    given = target.features(PACKED.token[row], PACKED.document[row], (0, 1, 2))
    fused = head.initial_states(given)
    assert (fused - given.last_hidden).square().mean() < 0.2 * given.last_hidden.square().mean()


def test_the_final_norms_gain_is_of_all_but_the_first_tokens_of_texts() -> None:
    """Whose states may be hundreds of times as large; nor of padding."""
    document = torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1], [0, 0, 0, 0, -1, -1, -1, -1], [-1] * 8])
    gain, raw = torch.linspace(0.5, 2.0, 5), torch.randn(3, 8, 1, 5)
    later = torch.nn.functional.pad((document[:, 1:] == document[:, :-1]) & (document[:, 1:] >= 0), (1, 0))
    last = torch.where(later[..., None], gain * raw[:, :, 0], 300 * raw[:, :, 0].square())
    features = [start.Features(document, raw, last, document)]
    torch.testing.assert_close(final_gain(features, torch.device("cpu")), gain.double())


def test_eagle_starts_as_the_last_layer_in_the_scale_of_the_final_norm() -> None:
    """Its prediction comes nearer to the target's last state one position on than that of a random or half-fitted head.

    The final norm's scale differs from dimension to dimension here, and the head has no norm to hold it.
    """
    model = copy.deepcopy(toys.target().model)
    scale = torch.linspace(0.5, 2.0, 32)
    with torch.no_grad():
        model.model.norm.weight.mul_(scale)
    target = Target(model, toys.tokenizer(), name="scaled")
    layer = target.decoder_layers[-1]
    asked = run("head=eagle", "head.bias=true", "init=last_layer")
    head, fresh = started(asked, target), started(replace(asked, init=None), target)
    row = BATCHES.sequences(0)
    given = target.features(PACKED.token[row], PACKED.document[row], ())
    follows = PACKED.document[row][:, 1:] == PACKED.document[row][:, :-1]

    @torch.no_grad()
    def error(of: Any) -> float:
        (draft,) = of.unroll(given, 1)
        return float((draft.feature[:, :-1] - given.last_hidden[:, 1:])[follows].square().mean())

    fit_init(head, "last_layer", target, BATCHES, 1000)
    fitted = error(head)
    assert fitted < 0.9 * error(fresh)
    other = started(asked, target)
    fit_init(other, "last_layer", target, Both(PACKED, 4, 1, 0, 0, 1), 1000)
    assert abs(error(other) - fitted) < 1e-4 * fitted, "other processes and micro-batches of the same steps"
    (own,) = head.layers
    assert torch.equal(own.mlp.gate_proj.weight, layer.mlp.gate_proj.weight)
    gains = [
        (a.weight / b.weight)
        for a, b in ((own.self_attn.o_proj, layer.self_attn.o_proj), (own.mlp.down_proj, layer.mlp.down_proj))
    ]
    for gain in gains:
        torch.testing.assert_close(gain, gains[0][:, :1].expand_as(gain), rtol=1e-4, atol=1e-5)
    assert torch.corrcoef(torch.stack([gains[0][:, 0], scale]))[0, 1] > 0.95
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(own.self_attn, name).weight.copy_(getattr(fresh.layers[0].self_attn, name).weight)
    assert fitted < error(head)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LlamaConfig(**{**toys.SIZES, "num_hidden_layers": 1}), "one has one layer"),
        (LlamaConfig(**toys.SIZES, hidden_act="gelu"), "the activation of one is gelu"),
        (OlmoConfig(**{name: value for name, value in toys.SIZES.items() if name != "head_dim"}), "is not built like"),
    ],
)
def test_a_layer_that_computes_otherwise_is_not_copied(
    config: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = Target(AutoModelForCausalLM.from_config(config).eval(), toys.tokenizer(), name="one")
    asked = run("head=eagle3", "head.feature_layers=[0]")
    with caplog.at_level(logging.WARNING):
        assert resolve_init(asked.init, asked.head, target) == (asked.head, None)
    assert said in caplog.text


def test_quantised_weights_are_not_copied() -> None:
    target = copy.copy(toys.target())
    target.quantized = "bnb_int8"
    for head in ("mtp", "eagle3"):
        asked = run(f"head={head}", *([LAYERS] if head == "eagle3" else []))
        assert resolve_init(asked.init, asked.head, target)[1] is None
        with pytest.raises(ValueError, match="the weights of llama are quantised; init=null makes a new one"):
            init_head(asked.head, "last_layer", target)


def test_a_head_that_starts_as_the_last_layer_has_that_layers_positions(caplog: pytest.LogCaptureFixture) -> None:
    target = copy.copy(toys.target())
    target.config = copy.deepcopy(target.config)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    kinds = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {**yarn, "rope_theta": 7.0},
    }
    target.config.rope_parameters, target.config.layer_types = kinds, ["full_attention", "sliding_attention"]
    config, first = resolve_init("auto", run("head=mtp").head, target)
    assert (config.rope_theta, config.rope_scaling, first) == (7.0, yarn, "last_layer")
    partial = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    for kind, said in ((partial, "rotates 0.5 of its attention heads"), (dynamic, "dynamic")):
        target.config.rope_parameters = kind
        with caplog.at_level(logging.WARNING):
            assert resolve_init("auto", run("head=mtp").head, target)[1] is None
        assert said in caplog.text


@pytest.mark.parametrize("name", ["qwen2", "glm4_moe", "deepseek_v3", "qwen3_next"])
def test_a_module_of_the_targets_kind_starts_as_its_last_layer(name: str) -> None:
    """Biases, experts, latents and gates with it, all of them trained, and as transformers computes them."""
    target = families.target(name)
    head: Any = started(run("head=mtp", "head.layer=target", "init=last_layer"), target)
    last = target.decoder_layers[-1].state_dict()
    assert {name: value.tolist() for name, value in head.block.layer.state_dict().items()} == {
        name: value.tolist() for name, value in last.items()
    }
    with torch.no_grad():
        head.eh_proj.weight[:, :32] = 0
    token = torch.tensor([toys.prompt(1, 9)])
    features = target.features(token, torch.zeros(1, 9, dtype=torch.long), ())
    (draft,) = head.unroll(features, 1)
    draft.state.sum().backward()
    assert all(parameter.grad is not None for parameter in head.parameters() if parameter.requires_grad)
    # The layer under transformers' own causal attention, on the normed states that enter it.
    x, rotary = head.hnorm(features.last_hidden), target.base.rotary_emb(features.last_hidden, torch.arange(9)[None])
    mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    out = target.decoder_layers[-1](x, attention_mask=mask, position_embeddings=rotary)
    state = out[0] if isinstance(out, tuple) else out
    torch.testing.assert_close(draft.state, head.norm(state), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", published_mtp.MODULES)
def test_a_module_starts_as_its_bases(tmp_path: Path, name: str) -> None:
    target = published_mtp.target(name, torch.float32)
    save_file(published_mtp.module(name, target), tmp_path / "model.safetensors")
    head: Any = started(run("experiment=mtp_after_finetune", f"base={tmp_path}"), target)
    assert head.config.raw_state == (name == "MiMo")
    expected = load_mtp(target, str(tmp_path)).state_dict()
    assert head.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[part]) for part, tensor in head.state_dict().items())


def test_a_module_starts_as_the_checkpoints_own(tmp_path: Path) -> None:
    path = save(tmp_path / "base", "behind")
    target = Target.load(str(path), "float64", "cpu")
    head: Any = started(run("head=mtp", "init=checkpoint", f"model.path={path}"), target)
    theirs = load_mtp(target, str(path))
    features = target.features(torch.tensor([toys.prompt(1, 9)]), torch.zeros(1, 9, dtype=torch.long), ())
    for ours, own in zip(head.double().unroll(features, 3), theirs.unroll(features, 3), strict=True):
        torch.testing.assert_close(ours.state, own.state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("qwen3", ("head=mtp", "init=last_layer"), r"self_attn\.k_norm\.weight.*head\.qk_norm=true"),
        ("llama", ("head=eagle3", LAYERS, "head.qk_norm=true", "init=last_layer"), "init=null makes a new one"),
        ("gpt2", ("head=mtp", "init=last_layer"), "is not built like the head's .*perhaps head.layer=target"),
        ("gpt2", ("head=mtp", "head.layer=target", "init=null"), "cannot run by itself .it has no rotary positions"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(name: str, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        started(run(*overrides), toys.target(name))


@pytest.mark.parametrize(
    ("name", "overrides", "first"),
    [
        ("llama", ("head=mtp",), "last_layer"),
        ("qwen3", ("head=mtp",), None),
        ("llama", ("head=mtp", "head.intermediate_size=20"), None),
        ("llama", ("head=mtp", "init=null"), None),
        ("llama", ("head=eagle",), "last_layer"),
        ("llama", ("head=hass",), "last_layer"),
        ("llama", ("head=eagle3", LAYERS, "head.layers=2"), None),
        ("llama", ("head=eagle3", LAYERS, "head.kv_injection=true"), None),
        ("llama", ("head=hydra",), None),
    ],
)
def test_what_a_head_starts_from_by_itself(
    name: str, overrides: tuple[str, ...], first: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """And one that starts with random weights, for the target's last layer is another, says so."""
    target = toys.target(name)
    asked = run(*overrides)
    config, init = resolve_init(asked.init, asked.head, target)
    found = replace(asked, head=config, init=init)
    assert found.init == first
    assert ("starts with random weights" in caplog.text) == (
        first is None and "head=hydra" not in overrides and "init=null" not in overrides
    )
    if asked.init == "auto" and "head=mtp" in overrides:  # by the target's numbers engines make it
        assert config.norm_eps == getattr(target.config, "rms_norm_eps", asked.head.norm_eps)
    started(found, target)


def test_a_target_whose_embedding_is_narrower_than_its_layers_gets_no_head() -> None:
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = OPTConfig(**sizes, vocab_size=toys.VOCAB, ffn_dim=48, max_position_embeddings=160, bos_token_id=None)
    target = Target(OPTForCausalLM(config), toys.tokenizer(), "opt")
    with pytest.raises(ValueError, match="OPTForCausalLM: its layers are 32 wide but its embedding and lm_head 16"):
        started(run("head=eagle"), target)
