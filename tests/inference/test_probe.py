"""What a target must prove before it is believed: families whose masks, lengths or states are their own, against HF."""

import re
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, GPTNeoConfig, MptConfig, PreTrainedConfig

from data.answers.chats import AnswerSettings
from data.answers.engine import Engine
from inference.decode import RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Baseline
from inference.drafters.policy import TreeConfig, verifiable
from inference.target import probe
from inference.target.probe import LONGEST
from inference.target.target import Target
from inference.verification.sample import GREEDY
from tests import families, masks, toys
from tests.inference import model_free
from tests.inference.test_decode import Oracle
from tests.refusals import refuses

TOKENS = 20
BARE = {"vocab_size": toys.VOCAB, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
SIZES = toys.SIZES | {"num_hidden_layers": 2}
DENSE = {key: value for key, value in SIZES.items() if key != "head_dim"}
SMALL = BARE | {"hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.4}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
SWITCH = 24
LONG = {"short_factor": [1.0] * 4, "long_factor": [4.0, 8.0, 16.0, 32.0], "original_max_position_embeddings": SWITCH}
LONGROPE: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": (
        "Phi3Config",
        DENSE | {"original_max_position_embeddings": SWITCH, "rope_scaling": {"type": "longrope", **LONG}},
    ),
    "llama": ("LlamaConfig", SIZES | {"rope_scaling": {"rope_type": "longrope", "factor": 4.0, **LONG}}),
}
LLAMA4 = SIZES | EXPERTS | {"intermediate_size_mlp": 48}
RECURRENT = "it keeps a recurrent state"
BEFORE = Version(transformers.__version__) < Version("5.24")
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama4 chunked": ("Llama4TextConfig", LLAMA4 | {"attention_chunk_size": 8}, "kind chunked_attention"),
    "mamba": ("MambaConfig", SMALL | {"state_size": 4}, "does not run mamba models"),
    "jamba": (
        "JambaConfig",
        DENSE | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4},
        "no pass over several tokens after its recurrent states",
    ),
    "qwen3-next without attention": (
        "Qwen3NextConfig",
        SIZES
        | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "layer_types": None},
        RECURRENT,
    ),
    "recurrent gemma": (
        "RecurrentGemmaConfig",
        {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
        | {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
        "cannot be rolled back|does not run this architecture",  # as its states are known, or not
    ),
    "gemma3 both ways": (
        "Gemma3TextConfig",
        SIZES | {"use_bidirectional_attention": True},
        "what follows a prefix changes the logits",
    ),
}  # fmt: skip


def gpt_neo(window: int) -> GPTNeoConfig:
    return GPTNeoConfig(
        **BARE, hidden_size=32, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]],
        window_size=window, max_position_embeddings=2 * LONGEST + 32, intermediate_size=48, initializer_range=0.4,
    )  # fmt: skip


OWN_MASKS: dict[str, PreTrainedConfig] = {
    "GPTNeoForCausalLM gives": gpt_neo(LONGEST),
    "GPTNeoForCausalLM applies window_size=80 itself": gpt_neo(LONGEST + 16),
    "MptForCausalLM gives": MptConfig(
        vocab_size=toys.VOCAB, d_model=32, n_layers=3, n_heads=4, max_seq_len=160, initializer_range=0.4
    ),
}


def made_of(config: PreTrainedConfig, name: str) -> Target:
    torch.manual_seed(1)
    return Target(AutoModelForCausalLM.from_config(config), toys.tokenizer(), name)


@pytest.mark.parametrize("said", OWN_MASKS)
def test_trees_and_batches_that_a_target_masks_by_itself_are_refused_by_name(
    said: str, caplog: pytest.LogCaptureFixture
) -> None:
    target, settings = made_of(OWN_MASKS[said], "own"), RequestParams(TOKENS, GREEDY)
    prompt = toys.prompt(0, 30)
    text = families.generated(target, prompt, TOKENS)
    chain = HeadDrafter(toys.head("eagle", target), toys.TREES["chain"], "eagle")
    assert speculate(target, chain, prompt, settings).tokens == text
    with pytest.raises(ValueError, match=rf"own: .*\({said}.*tree=chain"):
        speculate(target, Oracle(text, 3), prompt, settings)
    with pytest.raises(ValueError, match=rf"own: .*\({said}.*batch_size=1"):
        speculate(target, Baseline(target.device), [prompt, prompt[:3]], settings, batch_size=2)
    assert verifiable(target, toys.TREES["static"]).label == "chain-4"  # as the commands that load a head do
    assert verifiable(target, TreeConfig("dynamic", 9, 2, 3, [], [])).label == "chain-3", "no deeper than the tree"
    assert re.search(rf"own: .*\({said}.* chain-4 in its place", caplog.text)
    asked = AnswerSettings(0.0, 1.0, TOKENS, True, False, 0, None, {})
    with pytest.raises(ValueError, match=rf"own: .*\({said}.*batch_size=1"):
        Engine(target, Baseline(target.device), asked, 2)


@pytest.mark.skipif(BEFORE, reason="generate reads one token alone at the switch")
@pytest.mark.parametrize("name", LONGROPE)
def test_a_text_that_crosses_longropes_switch_is_transformers(name: str) -> None:
    kind, values = LONGROPE[name]
    target, settings = made_of(getattr(transformers, kind)(**values), name), RequestParams(TOKENS, GREEDY)
    assert target.takes_trees
    prompts = [toys.prompt(seed, length) for seed, length in enumerate((12, SWITCH, SWITCH + 1))]
    expected = [families.generated(target, prompt, TOKENS) for prompt in prompts]
    assert all(map(toys.lively, expected))
    source = model_free.make("lookahead", target)  # it drafts both nodes and riders
    assert [each.tokens for each in speculate(target, source, prompts, settings, batch_size=2)] == expected
    head = toys.drafter("eagle", target, "dynamic")  # whose trees reach beyond the switch
    assert [each.tokens for each in speculate(target, head, prompts, settings, batch_size=3)] == expected
    for prompt, text in zip(prompts, expected, strict=True):
        made = speculate(target, Oracle(text, 4), prompt, settings)
        assert made.tokens == text
        assert sum(step.accepted for step in made.steps) > TOKENS / 2


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_it_does_not_run_are_refused_by_name(name: str) -> None:
    kind, values, words = REFUSED[name]
    if BEFORE and name == "jamba":
        pytest.skip("it passes several tokens behind its states, and is run")
    refuses(words, made_of, getattr(transformers, kind)(**values), name)


def accepts(target: Target) -> bool:
    """Return whether the probe lets a target verify trees and batches."""
    try:
        return probe.check(target)
    except ValueError:  # not even a chain
        return False


DTYPES = (torch.float32, torch.bfloat16)
QUICK = ("llama", "mistral", "gemma3", "gpt2")
WITH_TREES = [name for name, family in families.FAMILIES.items() if not family.recurrent and name != "llama4"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in QUICK),
        ("gemma3", torch.bfloat16),
        *(pytest.param(name, dtype, marks=pytest.mark.slow) for name in WITH_TREES for dtype in DTYPES),
    ],
)
def test_a_wrong_mask_is_refused_and_rounding_is_not(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    target = Target(AutoModelForCausalLM.from_config(families.config(name)).to(dtype), toys.tokenizer(), name)
    assert target.takes_trees
    for fault in masks.faults_of(target):
        with masks.planted(fault):
            assert not accepts(target), fault


def test_logits_whose_common_part_is_rounded_refuse_no_tree() -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(families.config("gemma3"))
    model.lm_head.weight.data.mul_(0.1).add_(4 * torch.randn(toys.SIZES["hidden_size"]))  # as in tied embeddings
    assert Target(model.bfloat16(), toys.tokenizer(), "bf16").takes_trees


@pytest.mark.parametrize("fault", masks.WINDOWS)
def test_a_window_that_is_too_long_to_run_is_shortened_and_tried(fault: str) -> None:
    values: dict[str, Any] = {**families.FAMILIES["gemma3"].values, "sliding_window": 2 * LONGEST}
    target = made_of(transformers.Gemma3TextConfig(**values), "long")
    assert target.takes_trees
    with masks.planted(fault):
        assert not accepts(target)
    assert target.config.sliding_window == 2 * LONGEST
