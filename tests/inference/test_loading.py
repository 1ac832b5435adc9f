"""Quantised targets: verified as any other, one with the heads of the target they were made from; and refusals."""

import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Gemma3TextConfig, MistralConfig, PreTrainedConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from heads.common.target_config import read_target_config, text_tower
from heads.formats.checkpoint import tensor_files
from heads.formats.published.export import TargetFacts, export
from heads.formats.store import QUANTISED, load_head, save_head
from inference.decode import RequestParams, autoregress, speculate
from inference.target import loading
from inference.target.checkpoint import RENAMED, check_files, stored_names
from inference.target.embeddings_only import EmbeddingsOnly
from inference.target.target import Target
from inference.verification.sample import GREEDY
from tests import assistants, toys
from tests.families import EXPERTS
from tests.inference.test_decode import Oracle
from tests.refusals import refuses

TREE = {"kind": "dynamic", "depth": 4, "top_k": 3, "nodes": 9, "paths": [], "widths": []}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("plain")
    return Target.load(assistants.save(toys.target().model, toys.tokenizer(), folder), "float32", "cpu")


# The first is the one that `make setup` installs; the others are tested where their libraries are.
@pytest.fixture(scope="module", params=["int8", "torchao_int8", "bnb_int8", "bnb_nf4"])
def quantised(request: pytest.FixtureRequest, plain: Target) -> Target:
    if request.param != "int8":
        pytest.importorskip("torchao" if request.param == "torchao_int8" else "bitsandbytes")
    return Target.load(plain.name, "float32", "cpu", quantize=request.param)


def test_linear_layers_are_quantised_and_what_heads_read_is_not(plain: Target, quantised: Target) -> None:
    token = torch.tensor([toys.prompt(0)])
    assert plain.quantized is None
    assert quantised.takes_trees
    assert quantised.spec == plain.spec, "a head of the target is one of its quantised form"
    assert torch.equal(quantised.embeddings.lm_head_weight(), plain.embeddings.lm_head_weight())
    assert torch.equal(quantised.embeddings.embed(token), plain.embeddings.embed(token))
    found, expected = (each.features(token, torch.zeros_like(token), ()).last_hidden for each in (quantised, plain))
    assert 1e-4 < float((found - expected).abs().mean()) < 0.5


def test_no_row_of_a_pass_decides_how_another_is_rounded() -> None:
    assert loading.METHODS["bnb_int8"](torch.bfloat16).llm_int8_threshold == 0


def test_speculation_equals_plain_decoding_of_the_same_weights(quantised: Target) -> None:
    drafter = toys.drafter("eagle", quantised, "dynamic")
    expected = autoregress(quantised, toys.prompt(0), RequestParams(20, GREEDY)).tokens
    assert toys.lively(expected)
    assert speculate(quantised, drafter, toys.prompt(0), RequestParams(20, GREEDY)).tokens == expected
    made = speculate(quantised, Oracle(expected, 3), toys.prompt(0), RequestParams(20, GREEDY))
    assert made.tokens == expected
    assert made.tau == 19 / 5


def test_a_checkpoint_that_is_quantised_loads_as_it_is(
    plain: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torchao")
    made = Target.load(plain.name, "float32", "cpu", quantize="torchao_int8")
    folder = assistants.save(made.model, toys.tokenizer(), tmp_path / "quantised")
    loaded = Target.load(folder, "float32", "cpu")
    token = torch.tensor([toys.prompt(0)])
    assert loaded.quantized == "torchao"
    torch.testing.assert_close(loaded.model(token).logits, made.model(token).logits)
    assert loaded.spec.fingerprint.startswith(QUANTISED)
    save_head(tmp_path / "head", toys.head("eagle", plain), plain.spec, TREE)
    with caplog.at_level(logging.WARNING):
        load_head(tmp_path / "head", loaded.embeddings, loaded.spec)
    assert "cannot be told" in caplog.text


@pytest.mark.parametrize(("configured", "algorithm"), [(True, "FP8"), (False, "NVFP4")])
def test_a_quantisation_that_transformers_skips_is_named(
    plain: Target, tmp_path: Path, configured: bool, algorithm: str
) -> None:
    """ModelOpt describes it in config.json, or in older versions in a file of its own."""
    assistants.save(plain.model, toys.tokenizer(), tmp_path)
    described: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": algorithm}
    file = tmp_path / ("config.json" if configured else loading.MODELOPT)
    saved = json.loads(file.read_text()) | {"quantization_config": described} if configured else {}
    file.write_text(json.dumps(saved or {"quantization": described}))
    weights = tmp_path / "model.safetensors"
    weights.unlink()  # no weight is read
    with pytest.raises(ValueError, match=rf"model\.path=.* quantised as .*'{algorithm}'.*give the checkpoint") as error:
        Target.load(str(tmp_path), "float32", "cpu")
    assert "\n" not in str(error.value)
    read = loading.configuration(str(tmp_path), trust_remote_code=False)
    with pytest.raises(ValueError, match=algorithm):  # as plans ask
        loading.check_quantized(str(tmp_path), read, None)
    for older in ("load_in_8bit", "load_in_4bit"):  # of bitsandbytes, which transformers reads without a method
        read.quantization_config = {older: True}
        assert loading.check_quantized(str(tmp_path), read, None) == "by its checkpoint"


def test_weights_without_their_scales_are_not_loaded(plain: Target, tmp_path: Path) -> None:
    """Scales of the KV cache, and of modules that transformers leaves out, belong to no weight that is loaded."""
    assistants.save(plain.model, toys.tokenizer(), tmp_path)
    file, layer = tmp_path / "model.safetensors", "model.layers.1.self_attn.q_proj"
    weights = load_file(file)
    kept = {"model.layers.1.self_attn.k_proj.k_scale": torch.ones(()), "mtp.fc.weight_scale": torch.ones(())}
    save_file(weights | kept, file, metadata={"format": "pt"})
    assert Target.load(str(tmp_path), "float32", "cpu").quantized is None
    quantised = {f"{layer}.weight": weights[f"{layer}.weight"].to(torch.float8_e4m3fn)}
    save_file(weights | quantised | {f"{layer}.weight_scale": torch.ones(())}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"scales such as {layer}\.weight_scale.*give the checkpoint"):
        Target.load(str(tmp_path), "float32", "cpu")


def test_refusals_are_one_line(plain: Target, tmp_path: Path) -> None:
    def refused(words: str, path: str = plain.name, quantize: str | None = "int8") -> None:
        refuses(words, Target.load, path, "float32", "cpu", quantize=quantize)

    refused(r"model\.quantize is 'int3': choose one of none, int8, torchao_int8, bnb_int8, bnb_nf4", quantize="int3")
    gpt2 = assistants.save(toys.target("gpt2").model, toys.tokenizer(), tmp_path / "gpt2")
    refused(r"has no layer that this quantises \(GPT2LMHeadModel\)", gpt2)  # its layers are convolutions
    own = Path(assistants.save(plain.model, toys.tokenizer(), tmp_path / "own"))
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq", "bits": 4}}))
    refused(r"is quantised already \(awq\); leave model\.quantize out", str(own))
    refused(r"model\.path=.*no causal LM with tokenizer loads from there \(.*AWQ.*pip install", str(own), None)


def test_scores_that_a_target_caps_are_capped_whatever_attention_transformers_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = assistants.save(toys.target("gemma2").model, toys.tokenizer(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": None}))
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)  # as before transformers 5.24
    model, _ = loading.load(folder, torch.float32, torch.device("cpu"), False, None)
    assert model.config._attn_implementation == "eager"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assistants.save(toys.target().model, toys.tokenizer(), tmp_path / "target")
    return tmp_path / "target"


def refusal(folder: Path) -> str:
    return refuses(r"\S", Target.load, str(folder), "float32", "cpu")


def test_a_target_that_is_a_pickle_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(toys.target().model.state_dict(), folder / "pytorch_model.bin")
    assert "model.safetensors" in refusal(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", 3])
def test_an_index_leads_nowhere_else(folder: Path, name: object) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))
    assert "which is no .safetensors in its folder" in refusal(folder)
    with pytest.raises(ValueError, match="in its folder; download it again"):
        tensor_files(str(folder))


@pytest.mark.parametrize("order", [("500KB", "20KB"), ("20KB", "500KB")])
def test_of_two_saves_in_a_folder_all_readers_take_the_one_that_transformers_takes(
    folder: Path, order: tuple[str, str]
) -> None:
    """The one whole file, whichever is older: save_pretrained leaves it, and the other's index."""
    (folder / "model.safetensors").unlink()
    for seed, size in enumerate(order):
        torch.manual_seed(seed)
        config = toys.target().model.config
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size=size)
    whole = folder / "model.safetensors"
    assert {*tensor_files(str(folder)).values()} == {whole}
    target = Target.load(str(folder), "float32", "cpu")
    assert EmbeddingsOnly.load(str(folder), "float32", "cpu", False).spec == target.spec
    stored = load_file(whole)
    assert all(torch.equal(value, stored[name]) for name, value in target.model.state_dict().items() if name in stored)


def say(folder: Path, **values: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | values))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000 in its config.json, at most 2000 are made"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0 in its config.json"),
        ({"num_hidden_layers": "5"}, "num_hidden_layers"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"hidden_size": [64]}, "hidden_size"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings is 1000000000000000000000000000000"),
        ({"hidden_size": 10**5}, "parameters, and its files have"),
        ({"hidden_act": "os.system"}, "os.system"),
    ],
)
def test_a_configuration_of_which_no_target_can_be_made(folder: Path, values: dict[str, object], told: str) -> None:
    say(folder, **values)
    assert told in refusal(folder)


def test_quantised_weights_may_take_less_than_a_byte_each(folder: Path) -> None:
    config = read_target_config(str(folder), trust_remote_code=False)
    config.num_hidden_layers, config.quantization_config = 30, {}  # of 3 in fp32: half a byte each
    check_files(str(folder), config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_implementation", "org/kernel"),
        ("_attn_implementation", "flash_attention_2"),
        ("experts_implementation", {"": "org/kernel"}),
    ],
)
def test_an_attention_from_the_hub_is_code(folder: Path, key: str, value: object) -> None:
    say(folder, **{key: value})
    assert "names code to run by the key " + key in refusal(folder)
    with pytest.raises(ValueError, match="names code"):
        read_target_config(str(folder), trust_remote_code=False)


@pytest.mark.parametrize("damage", [b"", b"\x08\x00\x00", b"\xff" * 8 + b"{}"])
def test_weights_that_are_damaged_are_one_line(folder: Path, damage: bytes) -> None:
    (folder / "model.safetensors").write_bytes(damage)
    assert "no causal LM with tokenizer loads from there" in refusal(folder)


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (None, f"its files hold no {Q_PROJ}, nor 1 others"),  # which are not made up
        (lambda weight: torch.full_like(weight, torch.nan), f"{Q_PROJ} holds a value that is not finite"),
        (lambda weight: weight[:7].clone(), "its weights have other shapes than its config.json says"),
    ],
)
def test_weights_that_are_none_of_the_target_are_named(folder: Path, change: Any, told: str) -> None:
    weights = load_file(folder / "model.safetensors")
    weight = weights.pop(Q_PROJ)
    if change is None:
        del weights["model.norm.weight"]
    else:
        weights[Q_PROJ] = change(weight)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert told in refusal(folder)


def test_an_adapter_in_the_folder_is_not_loaded_unasked(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert "move the adapter out, and give it as model.adapter" in refusal(folder)


LAYERS = 6
SEES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
        "image_size": 16, "patch_size": 8}  # fmt: skip
QWEN_SEES = {"depth": LAYERS, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
             "out_hidden_size": 32, "num_position_embeddings": 16}  # fmt: skip
IMAGES = {"image_token_id": 36, "video_token_id": 37, "vision_start_token_id": 38, "vision_end_token_id": 39}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8, "full_attention_interval": 3}  # fmt: skip
FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "gemma3", "mistral3", "qwen3_5")


def checkpoint(family: str) -> PreTrainedConfig:
    """Return the configuration of a toy that reads images: as many layers of vision as of text."""
    sizes: Any = toys.SIZES | {"num_hidden_layers": LAYERS}
    if family == "gemma3":
        text: Any = Gemma3TextConfig(**sizes, sliding_window=6, query_pre_attn_scalar=8, sliding_window_pattern=2)
        more: Any = {"mm_tokens_per_image": 4, "image_token_index": 39, "boi_token_index": 37, "eoi_token_index": 38}
        more["tie_word_embeddings"] = False  # else it repeats one token
        return transformers.Gemma3Config(text_config=text.to_dict(), vision_config=SEES, **more)
    if family == "mistral3":
        text = MistralConfig(**sizes, sliding_window=None)
        sees = {"model_type": "pixtral", "head_dim": 8, **SEES}
        return transformers.Mistral3Config(
            text_config=text.to_dict(), vision_config=sees, image_token_index=39, tie_word_embeddings=False
        )
    if family.startswith("qwen3_vl"):
        text = {**sizes, **EXPERTS, "rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}}
        sees = QWEN_SEES | {"deepstack_visual_indexes": [0]}
        kind = transformers.Qwen3VLMoeConfig if family == "qwen3_vl_moe" else transformers.Qwen3VLConfig
        return kind(text_config=text, vision_config=sees, **IMAGES)
    rope = ROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
    return transformers.Qwen3_5Config(
        text_config={**sizes, **LINEAR, "rope_parameters": rope}, vision_config=QWEN_SEES, **IMAGES
    )


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a family to the folder of its toy."""

    @functools.cache
    def make(family: str) -> Path:
        path, config = tmp_path_factory.mktemp(family), checkpoint(family)
        torch.manual_seed(1)
        AutoModelForImageTextToText.from_config(config).save_pretrained(path)
        toys.tokenizer().save_pretrained(path)
        return path

    return make


def test_a_towers_configuration_and_names_are_those_of_a_model_by_itself() -> None:
    config = checkpoint("qwen3_vl")
    config.architectures, config.dtype = ["Qwen3VLForConditionalGeneration"], torch.bfloat16
    text = text_tower(config)
    assert isinstance(text, transformers.Qwen3Config)
    assert (text.num_hidden_layers, text.dtype) == (LAYERS, torch.bfloat16)
    assert (text.architectures, text.tie_word_embeddings) == (config.architectures, config.tie_word_embeddings)
    for above in ("model.language_model.layers.0.x", "language_model.model.layers.0.x", "language_model.lm_head.x"):
        name = named(above)
        assert name in ("model.layers.0.x", "lm_head.x")


def named(stored: str) -> str:
    """Return what the text tower calls a tensor of the checkpoint."""
    return functools.reduce(lambda name, rule: re.sub(*rule, name), RENAMED.items(), stored)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_tower_alone_gives_the_checkpoints_logits(family: str, tower: Any) -> None:
    path = tower(family)
    whole: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    text, _ = loading.load(str(path), torch.float32, torch.device("cpu"), False, None)
    token = torch.randint(0, 36, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(text(token).logits, whole(input_ids=token).logits)
    assert text.config.architectures == whole.config.architectures
    names = [name for name, _ in text.named_parameters()]
    assert not [name for name in names if "vision" in name or "visual" in name]
    with safe_open(path / "model.safetensors", "pt") as opened:
        stored = list(opened.keys())
    found = stored_names(text, stored)
    on_disk = [found[name] for name in names]
    assert set(on_disk) <= set(stored)
    assert [named(name) for name in on_disk] == names


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_drafts_for_the_tower_and_is_exported_for_the_class_that_serves_it(
    family: str, tower: Any, tmp_path: Path
) -> None:
    """A recurrent one (of Qwen3.5) verifies chains."""
    path, recurrent = tower(family), family == "qwen3_5"
    target = Target.load(str(path), "float32", "cpu")
    assert target.takes_trees is not recurrent
    assert target.packing is not None or recurrent or family == "gemma3"
    if family != "gemma3":  # whose embedding computes with a buffer
        assert EmbeddingsOnly.load(str(path), "float32", "cpu", False).spec == target.spec
    whole: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    drafter = toys.drafter("eagle3", target, "chain" if recurrent else "dynamic")
    prompt, settings = toys.prompt(2), RequestParams(40, GREEDY)
    plain = whole.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :].tolist()
    assert len({*plain}) > 4, "the text does not vary"
    assert speculate(target, drafter, prompt, settings).tokens == plain
    save_head(tmp_path / "head", drafter.head, target.spec, {})
    load_head(tmp_path / "head", target.embeddings, target.spec)
    if not recurrent:
        export(
            drafter.head, "vllm", TargetFacts("me/toy", target.config.to_dict(), torch.float32, 3), tmp_path / "vllm"
        )
        written = json.loads((tmp_path / "vllm" / "config.json").read_text())
        assert written["speculators_config"]["verifier"]["architectures"] == [type(whole).__name__]
