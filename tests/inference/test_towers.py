"""Vision checkpoints: the text tower loads as a causal LM, under its names on disk and ours, and drafts and exports."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, Gemma3TextConfig, MistralConfig, PreTrainedConfig

from heads.common.target_config import text_tower
from heads.formats.published.export import Served, export
from heads.formats.store import load_head, save_head
from inference.decode import Settings, speculate
from inference.drafters.head import HeadDrafter
from inference.target import loading
from inference.target.checkpoint import RENAMED, stored_names
from inference.target.embeddings_only import EmbeddingsOnly
from inference.target.target import Target
from inference.verification.sample import GREEDY
from tests import toys
from tests.families import EXPERTS

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
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
def test_the_text_tower_alone_gives_the_checkpoints_logits(family: str, folder: Any) -> None:
    path = folder(family)
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
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "gemma3", "mistral3"])
def test_a_head_drafts_for_the_tower_and_is_exported_for_the_class_that_serves_it(
    family: str, folder: Any, tmp_path: Path
) -> None:
    path = folder(family)
    target = Target.load(str(path), "float32", "cpu")
    assert target.takes_trees
    assert target.packing is not None or family == "gemma3"
    if family != "gemma3":  # whose embedding computes with a buffer
        assert EmbeddingsOnly.load(str(path), "float32", "cpu", False).spec == target.spec
    whole: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    head = toys.head("eagle3", target)
    prompt, settings = toys.prompt(2), Settings(40, GREEDY)
    plain = whole.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :].tolist()
    assert len({*plain}) > 4, "the text does not vary"
    (generation,) = speculate(target, HeadDrafter(head, toys.TREES["dynamic"], "eagle3"), [prompt], settings)
    assert generation.tokens == plain

    save_head(tmp_path / "head", head, target.spec, {})
    load_head(tmp_path / "head", target.embeddings, target.spec)
    export(head, "vllm", Served("me/toy", target.config.to_dict(), torch.float32, 3), tmp_path / "vllm")
    written = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["architectures"] == [type(whole).__name__]


@pytest.mark.slow
def test_a_head_drafts_chains_for_a_recurrent_tower(folder: Any) -> None:
    path = folder("qwen3_5")
    target = Target.load(str(path), "float32", "cpu")
    whole: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    prompt, settings = toys.prompt(2), Settings(40, GREEDY)
    plain = whole.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :].tolist()
    assert len({*plain}) > 4, "the text does not vary"
    drafter = HeadDrafter(toys.head("eagle3", target), toys.TREES["chain"], "eagle3")
    (generation,) = speculate(target, drafter, [prompt], settings)
    assert generation.tokens == plain
