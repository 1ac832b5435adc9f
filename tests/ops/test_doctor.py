"""The doctor on heads with one planted fault each that their files show: it finds that one, with its remedy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ops.doctor import examine
from ops.examine.finding import OK, UNKNOWN, WRONG
from tests.ops.doctoring import FULL, IDS, Ward, asked, change, faults, prefixed, rope, set_to, turned, within, without


class Fault(NamedTuple):
    """What is planted into which head, the check that finds it, and parts of what it says and of its remedy."""

    edits: dict[str, Callable[[dict[str, Any]], object]]
    check: str
    says: str
    remedy: str
    kind: str = "eagle3"
    form: str | None = "vllm"
    full: bool = False  # a head that drafts all tokens, by the target's lm_head


OUTPUTS = f"eagle_config.{IDS}"
FAULTS = {
    "layer ids of SGLang counted as vLLM's": Fault(
        {"config": within("eagle_config", **{IDS: [2, 4, 5]})}, OUTPUTS, "[2, 4, 5]", "to [1, 3, 4]"
    ),
    "layer ids for vLLM": Fault(
        {"config": lambda c: c.update({IDS: [3, 4, 6], "eagle_config": {}})}, OUTPUTS, "[1, 3, 4]", "to [2, 3, 5]"
    ),
    "layer ids for SGLang": Fault(
        {"config": lambda c: [c.pop(IDS), c["eagle_config"].update({IDS: [2, 3, 5]})]}, IDS, "[2, 4, 5]",
        f'set "{IDS}" to [3, 4, 6]',
    ),
    "layer ids that are no layers": Fault(
        {"config": lambda c: [c.update({IDS: [2, 4, 9]}), c.pop("eagle_config")]}, "loads", "from 0 to 7",
        "download it again",
    ),
    "other layers than were trained, to vLLM": Fault(
        {"run": set_to(head={"name": "eagle3", "feature_layers": [0, 2, 5], "rope_theta": 1e4})}, IDS, "[2, 4, 5]",
        f'set "{IDS}" to [1, 3, 6]',
    ),
    "other layers than were trained, to SGLang": Fault(
        {"run": set_to(head={"name": "eagle3", "feature_layers": [0, 2, 5], "rope_theta": 1e4})}, OUTPUTS, "[1, 3, 4]",
        f'set "{OUTPUTS}" to [0, 2, 5]',
    ),
    "another theta than was trained": Fault(
        {"run": set_to(head={"name": "eagle3", "rope_theta": 5e5, "rope_scaling": None})}, "rope",
        "the training's config.yaml theta 500000", 'set "rope_theta": 500000',
    ),
    "positions over half of the width": Fault(
        {"config": rope(partial_rotary_factor=0.5)}, "loads", "0.5", "it would draft something else"
    ),
    "theta said twice": Fault(
        {"config": set_to(rope_parameters={"rope_type": "default", "rope_theta": 5e5})}, "rope",
        "rope_parameters says theta 500000", "theta 10000",
    ),
    "theta in one of two places": Fault(
        {"config": within("transformer_layer_config", rope_theta=5e5)}, "transformer_layer_config.rope_theta", "500000",
        "set both",
    ),
    "2048 positions": Fault(
        {"config": rope(max_position_embeddings=2048)}, "max_position_embeddings", "2048",
        'set "max_position_embeddings" to 4096',
    ),
    "no word on positions": Fault(
        {"config": lambda c: [p.pop("max_position_embeddings") for p in (c, c["transformer_layer_config"])]},
        "max_position_embeddings", "2048", "to 4096",
    ),
    "d2t of ids": Fault(
        {"tensors": turned("d2t", lambda d2t: d2t + torch.arange(len(d2t)))}, "loads",
        "d2t does not name 30 different tokens of the target's 40", "download it again",
    ),
    "no d2t": Fault({"tensors": without("d2t", "t2d")}, "loads", "the tensor d2t is missing", "download it again"),
    "no draft_vocab_size": Fault({"config": without("draft_vocab_size")}, "draft_vocab_size", "missing", "to 30"),
    "no lm_head over all tokens": Fault(
        {"tensors": without("lm_head.weight")}, "draft_vocab_size", "40", 'set "draft_vocab_size" to null', full=True
    ),
    "no lm_head over some": Fault({"tensors": without("lm_head.weight")}, "loads", "missing lm_head.weight", "again"),
    "tied embeddings": Fault(
        {"config": set_to(tie_word_embeddings=True)}, "tie_word_embeddings", "true",
        'set "tie_word_embeddings" to false',
    ),
    "an lm_head in EAGLE-1": Fault(
        {"tensors": set_to(**{"lm_head.weight": torch.ones(40, 32)})}, "lm_head.weight", "there", "remove it", "eagle"
    ),
    "a random embedding": Fault(
        {"tensors": set_to(**{"embed_tokens.weight": torch.randn(40, 32)})}, "embed_tokens.weight",
        "another than the target's", "remove it",
    ),
    "no dtype": Fault({"config": without("torch_dtype")}, "torch_dtype", "missing", 'to "float32"'),
    "another dtype": Fault({"config": set_to(torch_dtype="bfloat16")}, "torch_dtype", "bfloat16", 'to "float32"'),
    "another chat template": Fault(
        {"reference": set_to(chat_template_sha256="f" * 64)}, "chat template", "f" * 64, "--chat-template"
    ),
    "another tokenizer": Fault({"reference": set_to(tokenizer_sha256="f" * 64)}, "tokenizer", "f" * 64, "training's"),
    "another target's weights": Fault(
        {"report": within("target", fingerprint="0" * 32)}, "target", f"made for the weights {'0' * 32}", "target=…"
    ),
    "another target's size": Fault(
        {"tensors": turned("fc.weight", lambda fc: fc[:16])}, "loads", "expected 32, the width", "model.path"
    ),
    "another target's head": Fault(
        {"config": within("target", fingerprint="0" * 32)}, "loads", "0" * 32, "sibling=true", form=None
    ),
    "a bias that vLLM drops": Fault(
        {"tensors": turned("fc.bias", lambda bias: bias + 1)}, "fc.bias", "not zero", "head.bias=false", "eagle"
    ),
    "no bias": Fault({"tensors": without("fc.bias")}, "fc.bias", "missing", "32 zeros", "eagle"),
    "a bias that nothing fills": Fault({"config": set_to(bias=True)}, "bias", "true", 'set "bias" to false'),
    "a bias of attention that nothing fills": Fault(
        {"config": set_to(attention_bias=True)}, "attention_bias", "true", 'set "attention_bias" to false'
    ),
    "a normed residual": Fault(
        {"config": set_to(norm_before_residual=True)}, "norm_before_residual", "true", "head.norm_before_residual=false"
    ),
    "SpecForge's norm of the output": Fault(
        {"config": lambda c: [c.update(norm_output=True), c.pop("speculators_model_type")]}, "norm_output", "true",
        'set "norm_output" to false',
    ),
    "Medusa without its biases": Fault(
        {"config": without("medusa_fc_bias")}, "medusa_fc_bias", "false", 'set "medusa_fc_bias" to true', "medusa"
    ),
    "names of a whole model": Fault({"tensors": prefixed}, "model.*", "there", "take model. from the front"),
    "a missing tensor": Fault({"tensors": without("norm.weight")}, "loads", "missing norm.weight", "again"),
    "no Markov head": Fault(
        {"config": set_to(markov_rank=6)}, "loads", "markov_w1.weight is missing", "download it", "block", "dflash"
    ),
    "NaN": Fault(
        {"tensors": turned("fc.weight", lambda fc: fc.index_fill(0, torch.tensor(3), torch.nan))}, "loads",
        "fc.weight holds values that are not finite", "download it again",
    ),
    "an unknown class": Fault(
        {"config": set_to(architectures=["Qwen2ForCausalLMEagle3"])}, "architectures", "Qwen2", "LlamaForCausalLMEagle3"
    ),
    "one of two classes": Fault(
        {"config": set_to(architectures=["LlamaForCausalLM"])}, "architectures", "LlamaForCausalLM",
        '["LlamaForCausalLMEagle", "LlamaForCausalLM"]', "eagle",
    ),
    "no model_type": Fault({"config": without("model_type")}, "model_type", "missing", 'set "model_type" to "llama"'),
    "layers where SGLang does not look": Fault(
        {"config": lambda c: c.update(dflash_config={"mask_token_id": 7}, aux_hidden_state_layer_ids=[2, 4, 6])},
        "dflash_config.target_layer_ids", "missing", "to [1, 3, 5]", "block", "dflash",
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


def test_another_checkpoint_of_the_same_model_is_no_fault_where_it_is_said(tmp_path: Path, ward: Ward) -> None:
    folder = ward.published(tmp_path / "head", "eagle3", None, {})
    change(folder, config=within("target", fingerprint="0" * 32))
    findings = {finding.check: finding for finding in examine(asked(folder, ward.target, False, sibling=True))}
    assert not [finding for finding in findings.values() if finding.verdict == WRONG]
    assert findings["target"].verdict == UNKNOWN
    assert findings["loads"].verdict == OK
