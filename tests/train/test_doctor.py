"""The doctor on heads with one planted fault each that their files show: it finds that one, with its remedy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.train.doctoring import (
    FULL,
    IDS,
    Ward,
    asked,
    change,
    faults,
    prefixed,
    rope,
    set_to,
    turned,
    within,
    without,
)
from train.release.doctor import examine
from train.release.doctor.finding import OK, UNKNOWN, WRONG


class Fault(NamedTuple):
    """What is planted into which head, the check that finds it, and parts of what it says and of its remedy."""

    edits: dict[str, Callable[[dict[str, Any]], object]]
    check: str
    says: str
    remedy: str
    kind: str = "eagle3"
    form: str | None = "vllm"
    full: bool = False  # a head that drafts all tokens, by the target's lm_head


FAULTS = {
    "layer ids of SGLang counted as vLLM's": Fault(
        {"config": within("eagle_config", **{IDS: [2, 4, 5]})}, "layers", "[2, 4, 5], eagle_config", "to [1, 3, 4] if"
    ),
    "layer ids for vLLM alone": Fault(
        {"config": lambda c: c.update({IDS: [3, 4, 6], "eagle_config": {}})}, "layers", "is missing", "to [2, 3, 5]"
    ),
    "layer ids for SGLang alone": Fault(
        {"config": lambda c: [c.pop(IDS), c["eagle_config"].update({IDS: [2, 4, 5]})]}, "layers", "at the top level",
        f"set {IDS} to [3, 5, 6]",
    ),
    "layer ids that do not increase": Fault(
        {"config": set_to(**{IDS: [4, 2, 5]})}, "layers", "does not increase", f"set {IDS} to [2, 4, 5]"
    ),
    "layer ids that repeat": Fault(
        {"config": set_to(**{IDS: [2, 2, 5]})}, "layers", "does not increase", f"set {IDS} to [2, 5]"
    ),
    "layer ids that are no layers": Fault(
        {"config": set_to(**{IDS: [2, 4, 8]})}, "layers", "1 to 7 can be read", "from 1 to 7"
    ),
    "too many layer ids": Fault(
        {"config": lambda c: [c.update({IDS: [2, 3, 4, 5]}), c["eagle_config"].update({IDS: [1, 2, 3, 4]})]}, "layers",
        "4 ids and fc.weight joins 3", "name 3 layers",
    ),
    "a wrong count of layers": Fault(
        {"config": set_to(num_aux_hidden_states=4)}, "layers", "is 4 and there are 3", "num_aux_hidden_states to 3"
    ),
    "other layers than were trained": Fault(
        {"run": set_to(head={"name": "eagle3", "feature_layers": [0, 2, 5], "rope_theta": 1e4})}, "layers",
        "read the outputs of layers [1, 3, 4], and it was trained on [0, 2, 5]",
        f"set {IDS} to [1, 3, 6] and eagle_config.{IDS} to [0, 2, 5]",
    ),
    "another theta than was trained": Fault(
        {"run": set_to(head={"name": "eagle3", "rope_theta": 5e5, "rope_scaling": None})}, "rope",
        "the training's config.yaml theta 500000", 'set "rope_theta": 500000',
    ),
    "theta said twice": Fault(
        {"config": set_to(rope_parameters={"rope_type": "default", "rope_theta": 5e5})}, "rope",
        "rope_parameters says theta 500000", "theta 10000",
    ),
    "theta in one of two places": Fault(
        {"config": within("transformer_layer_config", rope_theta=5e5)}, "said twice", "500000", "set both"
    ),
    "another activation in one of two places": Fault(
        {"config": within("transformer_layer_config", hidden_act="gelu")}, "said twice",
        "hidden_act is silu, and within transformer_layer_config gelu", "set both",
    ),
    "key-value heads in one of two places": Fault(
        {"config": without("num_key_value_heads")}, "said twice", "num_key_value_heads is missing, and within",
        'set "num_key_value_heads": ',
    ),
    "2048 positions": Fault(
        {"config": set_to(max_position_embeddings=2048)}, "length", "the target reads 4096",
        '"max_position_embeddings": 4096',
    ),
    "no word on positions": Fault(
        {"config": lambda c: [p.pop("max_position_embeddings") for p in (c, c["transformer_layer_config"])]}, "length",
        "stands for 2048", '"max_position_embeddings": 4096',
    ),
    "d2t of ids": Fault(
        {"tensors": turned("d2t", lambda d2t: d2t + torch.arange(len(d2t)))}, "vocabulary", "ids themselves",
        "subtract torch.arange(30) from d2t",
    ),
    "d2t that goes back": Fault(
        {"tensors": turned("d2t", lambda d2t: d2t.flip(0))}, "vocabulary", "do not increase", "write d2t again"
    ),
    "d2t below the first token": Fault(
        {"tensors": turned("d2t", lambda d2t: d2t - 1)}, "vocabulary", "do not increase from 0", "write d2t again"
    ),
    "t2d of other tokens": Fault(
        {"tensors": turned("t2d", lambda t2d: ~t2d)}, "vocabulary", "t2d does not name", "write t2d again"
    ),
    "no d2t": Fault({"tensors": without("d2t", "t2d")}, "vocabulary", "there is no d2t", "add d2t, int64 (30,)"),
    "a d2t of all tokens": Fault(
        {"tensors": set_to(d2t=torch.zeros(40, dtype=torch.int64))}, "vocabulary", "all 40 tokens", "remove d2t",
        full=True,
    ),
    "no draft_vocab_size": Fault(
        {"config": without("draft_vocab_size")}, "vocabulary", "no draft_vocab_size", '"draft_vocab_size": 30'
    ),
    "no lm_head over all tokens": Fault(
        {"tensors": without("lm_head.weight")}, "lm_head", "the number of all tokens", '"draft_vocab_size": null',
        full=True,
    ),
    "no lm_head over some": Fault({"tensors": without("lm_head.weight")}, "lm_head", "is missing and 30", "format="),
    "tied embeddings": Fault(
        {"config": set_to(tie_word_embeddings=True)}, "lm_head", "true", '"tie_word_embeddings": false'
    ),
    "an lm_head in EAGLE-1": Fault(
        {"tensors": set_to(**{"lm_head.weight": torch.ones(40, 32)})}, "lm_head", "EAGLE-1 has none", "remove lm_head",
        "eagle",
    ),
    "a random embedding": Fault(
        {"tensors": set_to(**{"embed_tokens.weight": torch.randn(40, 32)})}, "embedding", "not the target's embedding",
        "remove embed_tokens.weight",
    ),
    "no dtype": Fault({"config": without("torch_dtype")}, "dtype", "no torch_dtype", '"torch_dtype": "float32"'),
    "another dtype": Fault(
        {"config": set_to(torch_dtype="bfloat16")}, "dtype", "the tensors are float32", '"torch_dtype": "float32"'
    ),
    "another chat template": Fault(
        {"reference": set_to(chat_template_sha256="f" * 64)}, "chat template", "ffffffffffff…", "--chat-template"
    ),
    "another tokenizer": Fault(
        {"reference": set_to(tokenizer_sha256="f" * 64)}, "tokenizer", "ffffffffffff…", "the tokenizer of the training"
    ),
    "another target's weights": Fault(
        {"report": within("target", fingerprint="0" * 32, name="me/other")}, "target", "weights of me/other", "target=…"
    ),
    "another target's size": Fault({"config": rope(vocab_size=50)}, "target", "vocabulary is 50", "target=…"),
    "another target's head": Fault(
        {"config": within("target", fingerprint="0" * 32)}, "target", "made for the weights", "target=…", form=None
    ),
    "a bias that vLLM drops": Fault(
        {"tensors": turned("fc.bias", lambda bias: bias + 1)}, "biases", "fc.bias is not zero", "head.bias=false",
        "eagle",
    ),
    "no bias": Fault({"tensors": without("fc.bias")}, "biases", "fc.bias is missing", "32 zeros", "eagle"),
    "a bias that nothing fills": Fault({"config": set_to(bias=True)}, "biases", "bias is true", '"bias": false'),
    "a bias of attention that nothing fills": Fault(
        {"config": set_to(attention_bias=True)}, "biases", "attention_bias is true", '"attention_bias": false'
    ),
    "a null width": Fault({"config": set_to(target_hidden_size=None)}, "keys", "is null", "remove target_hidden_size"),
    "a normed residual": Fault(
        {"config": set_to(norm_before_residual=True)}, "keys", "is true", "head.norm_before_residual=false"
    ),
    "Medusa without its biases": Fault(
        {"config": without("medusa_fc_bias")}, "keys", "missing and the blocks", '"medusa_fc_bias": true', "medusa"
    ),
    "names of a whole model": Fault(
        {"tensors": prefixed}, "tensors", "begin with model.", "take model. from the front"
    ),
    "a tensor of the trainer": Fault(
        {"tensors": set_to(**{"verifier_norm.weight": torch.ones(32)})}, "tensors", "none of the format's",
        "remove verifier_norm.weight",
    ),
    "a missing tensor": Fault({"tensors": without("norm.weight")}, "tensors", "norm.weight is missing", "(32,)"),
    "a wrong number": Fault({"config": rope(intermediate_size=64)}, "tensors", "and 2 more", "config.json"),
    "NaN": Fault(
        {"tensors": turned("fc.weight", lambda fc: fc.index_fill(0, torch.tensor(3), torch.nan))}, "values",
        "fc.weight holds 96 values", "earlier checkpoint",
    ),
    "NaN in our own form": Fault(
        {"tensors": turned("norm.weight", lambda norm: norm * torch.inf)}, "values", "32 values", "checkpoint",
        form=None,
    ),
    "zeros": Fault({"tensors": turned("lm_head.weight", lambda w: w * 0)}, "values", "all zero", "export again"),
    "an unknown class": Fault(
        {"config": set_to(architectures=["Qwen2ForCausalLMEagle3"])}, "architectures", "Qwen2", "LlamaForCausalLMEagle3"
    ),
    "one of two classes": Fault(
        {"config": set_to(architectures=["LlamaForCausalLM"])}, "architectures", "LlamaForCausalLM",
        '["LlamaForCausalLMEagle", "LlamaForCausalLM"]', "eagle",
    ),
    "no model_type": Fault(
        {"config": without("model_type")}, "architectures", "no model_type", '"model_type": "llama"'
    ),
    "layers where SGLang does not look": Fault(
        {"config": lambda c: c["dflash_config"].pop("target_layer_ids")}, "layers", "dflash_config", "target_layer_ids",
        "block", "dflash",
    ),
}  # fmt: skip


MODELOPT = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"rope_theta": None, "rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
            "theta 500000 where the target has theta 10000: right only if it was trained so",
        ),
        ({"rope_scaling": MODELOPT}, "NVIDIA modelopt adds this scaling to heads that were trained without it"),
        ({"rope_scaling": {**MODELOPT, "factor": 4.0}}, "right only if it was trained so"),
        ({"partial_rotary_factor": 0.5}, "theta 10000 over 0.5 of the width where the target has theta 10000"),
    ],
)
def test_positions_are_compared_as_they_are_used(keys: dict[str, Any], says: str, tmp_path: Path, ward: Ward) -> None:
    folder = ward.published(tmp_path / "head", "eagle3", "vllm", {})
    change(folder, config=rope(**keys))
    (found,) = [each for each in examine(asked(folder, ward.target, False)) if each.check == "rope"]
    assert found.verdict == UNKNOWN
    assert says in found.says


@pytest.mark.parametrize(("form", "verdict"), [(None, OK), ("vllm", OK), ("gguf", OK), ("sglang", WRONG)])
def test_a_name_that_some_engines_know_is_wrong_for_the_others(
    form: str | None, verdict: str, tmp_path: Path, ward: Ward
) -> None:
    folder = ward.published(tmp_path / "head", "eagle3", "vllm", {})
    change(folder, config=set_to(architectures=["Eagle3LlamaForCausalLM"]))
    (found,) = [each for each in examine(asked(folder, ward.target, False, form)) if each.check == "architectures"]
    assert found.verdict == verdict
    assert "Eagle3LlamaForCausalLM, which SGLang does not know as a head" in found.says
    assert 'set "architectures": ["LlamaForCausalLMEagle3"]' in found.remedy


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_with_its_remedy(name: str, tmp_path: Path, ward: Ward) -> None:
    fault = FAULTS[name]
    options = FULL if fault.full else {}
    folder = ward.published(tmp_path / "head", fault.kind, fault.form, options)
    change(folder, **fault.edits)
    found = [each for each in faults(folder, ward.target) if each.check == fault.check]
    assert len(found) == 1
    assert fault.says in found[0].says
    assert fault.remedy in found[0].remedy
    assert found[0].costs
    assert "\n" not in "".join(map(str, found[0]))


@pytest.mark.parametrize(
    ("kind", "form", "options", "method"),
    [
        ("block", "vllm", {"from_anchor": True, "markov_rank": 6, "confidence": True}, "dspark"),
        ("mtp", "sglang", {}, "mtp"),
    ],
)
def test_a_whole_head_with_another_kinds_name_gets_vllms_name_for_its_own(
    kind: str, form: str, options: dict[str, Any], method: str, tmp_path: Path, ward: Ward
) -> None:
    folder = ward.published(tmp_path / f"eagle-{method}", kind, form, options, steps=1)
    (fault,) = faults(folder, ward.target)
    assert fault.says.endswith(f"eagle-{method} is taken for eagle, and it is {method}")
    assert fault.remedy == f'call it NAME-{method}, and give "method": "{method}" in --speculative-config'


def test_another_checkpoint_of_the_same_model_is_no_fault_where_it_is_said(tmp_path: Path, ward: Ward) -> None:
    folder = ward.published(tmp_path / "head", "eagle3", None, {})
    change(folder, config=within("target", fingerprint="0" * 32))
    findings = {finding.check: finding for finding in examine(asked(folder, ward.target, False, sibling=True))}
    assert not [finding for finding in findings.values() if finding.verdict == WRONG]
    assert findings["target"].verdict == UNKNOWN
    assert "made for the weights of" in findings["target"].says
    assert findings["loads"].verdict == OK
