"""What a published head cannot do in plain transformers is said in one line, before anything is generated."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, SynthIDTextWatermarkingConfig, T5Config

from heads.formats.custom_generate.generate import generate
from heads.formats.custom_generate.reading import load
from inference.target.target import Target
from tests import toys
from tests.heads import exporting
from tests.heads.shipped import published, shipped
from tests.heads.test_export import BLOCK, masked

PROMPT = torch.tensor([toys.prompt(1)])
PAIR = PROMPT.repeat(2, 1)
WATERMARK = SynthIDTextWatermarkingConfig(ngram_len=5, keys=[1, 2, 3])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return published(tmp_path / "head", toys.head("eagle3", toys.target()), toys.target())


def said(folder: Path | None, of: Any = None, **options: Any) -> str:
    """Return the one line of the error."""
    asked = {"inputs": PROMPT, "max_new_tokens": 4, "do_sample": False, **options}
    with pytest.raises(ValueError, match=r"\w") as caught:
        generate(of or toys.target().model, **({} if folder is None else {"head": str(folder)}), **asked)
    line = str(caught.value)
    assert "\n" not in line
    return line


def rewritten(folder: Path, **changes: Any) -> Path:
    """Change what config.json says of the head."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["head"] |= changes
    path.write_text(json.dumps(content))
    return folder


def test_a_head_of_another_model_is_refused(folder: Path) -> None:
    torch.manual_seed(9)
    other = AutoModelForCausalLM.from_config(LlamaConfig(**toys.SIZES))
    assert "made for another model, llama: its weights is not that of" in said(folder, other)
    wider = AutoModelForCausalLM.from_config(LlamaConfig(**toys.SIZES | {"hidden_size": 64}))
    assert "its hidden_size is not that of LlamaForCausalLM; load the model" in said(folder, wider)
    content = json.loads((folder / "config.json").read_text())
    content["target"]["adapter"] = "me/adapter"  # the mark is the adapter's, which generate does not know
    (folder / "config.json").write_text(json.dumps(content))
    assert load(str(folder), other, {}).draft_tokens == 4


def test_an_exported_head_of_another_model_is_refused(tmp_path: Path) -> None:
    head = exporting.made("eagle3", feature_layers=[1, 3, 4])
    folder = exporting.exported(head, "vllm", tmp_path / "head")
    wider = AutoModelForCausalLM.from_config(LlamaConfig(**toys.SIZES | {"hidden_size": 64}))
    assert "made for another model: its hidden_size is 32, but the model's is 64; load the model" in said(folder, wider)
    authors = exporting.exported(exporting.made("medusa"), "medusa", tmp_path / "medusa")
    assert "0.0.linear.weight has 32 rows, expected 64, the width of the target; choose the head's own" in said(
        authors, wider
    )


def test_what_is_no_head_is_refused(folder: Path, tmp_path: Path) -> None:
    assert f"{tmp_path}: no config.json of a draft head there" in said(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if name != "norm.weight"}, folder / "model.safetensors")
    assert "the weights do not fit their config.json: missing ['norm.weight']" in said(folder)
    save_file({"norm.weight": tensors["norm.weight"]}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    assert said(folder).startswith(f"{folder}: tensors such as norm.weight are of no published head known here: ")
    (folder / "config.json").write_text("{")
    assert f"{folder}/config.json: damaged (Expecting" in said(folder)


def test_a_kind_that_is_not_known_is_refused(folder: Path) -> None:
    assert "head.name is 'oracle' in its config.json; known heads: eagle, eagle3, hass" in said(
        rewritten(folder, name="oracle")
    )


def test_a_scaling_that_is_not_known_is_refused(folder: Path) -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert "head.rope_scaling.rope_type is 'dynamic': choose one of linear, llama3, yarn" in said(
        rewritten(folder, rope_scaling=dynamic)
    )


def test_a_head_that_was_replaced_is_read_again(folder: Path) -> None:
    model = toys.target().model
    first = load(str(folder), model, {})
    assert load(str(folder), model, {}) is first
    published(folder, toys.head("medusa", toys.target()), toys.target())
    assert type(load(str(folder), model, {}).drafts.head) is not type(first.drafts.head)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"num_beams": 2}, "beam_search does not go"),
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation does not go"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states does not go"),
        ({"past_key_values": object()}, "past_key_values does not go"),
        ({"cache": object()}, "cache does not go"),
        ({"synced_gpus": True}, "synced_gpus does not go"),
        ({"draft_tokens": 0}, "draft_tokens is 0: give 1 or more"),
        ({"inputs": PAIR, "output_scores": True}, "output_scores and output_logits are given of one"),
        ({"inputs": PAIR, "prefix_allowed_tokens_fn": lambda *_: [1]}, "prefix_allowed_tokens_fn asks"),
        ({"inputs": PAIR, "guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidanceLogitsProcessor keeps a state"),
        ({"inputs": PAIR, "watermarking_config": WATERMARK}, "SynthIDTextWatermarkLogitsProcessor keeps a state"),
        ({"inputs": PAIR, "encoder_repetition_penalty": 1.5}, "EncoderRepetitionPenaltyLogitsProcessor keeps a state"),
        ({"inputs": PAIR, "encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGramLogitsProcessor keeps a state"),
    ],
)
def test_what_is_not_decoded_speculatively_is_refused(folder: Path, options: dict[str, Any], line: str) -> None:
    assert said(folder, **options).startswith(line)


def test_other_inputs_are_refused(folder: Path) -> None:
    embedded = toys.target().embeddings.embed(PROMPT)
    assert said(folder, inputs=None, inputs_embeds=embedded).startswith("inputs_embeds does not go")


def test_models_that_cannot_be_taken_back_are_refused(folder: Path) -> None:
    config: Any = T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    assert "has an encoder, with which this head does not draft" in said(folder, _model(config))
    target: Target = toys.target()
    target.model.config.layer_types = ["linear_attention"] * 3
    try:
        assert "has layers of linear_attention, with which" in said(folder)
    finally:
        del target.model.config.layer_types


def _model(config: Any) -> Any:
    from transformers import T5ForConditionalGeneration

    return T5ForConditionalGeneration(config)


def test_a_head_that_nothing_names_is_asked_for() -> None:
    assert "give generate the argument head=FOLDER_OR_REPOSITORY" in said(None)


def test_lengths_that_differ_need_a_token_to_pad_with(tmp_path: Path) -> None:
    folder = published(tmp_path / "head", toys.head("medusa", toys.target()), toys.target())

    class Embeddings(list[Any]):
        """Ends the second sequence after one token."""

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.tensor([bool(input_ids[0, 0] == 5)])

    from transformers import StoppingCriteriaList

    batch = torch.stack([PROMPT[0].clone().index_fill(0, torch.tensor([0]), i) for i in (4, 5)])
    line = said(folder, inputs=batch, stopping_criteria=StoppingCriteriaList([Embeddings()]))
    assert line == "the sequences ended at different lengths: give generate a pad_token_id"


def test_an_older_transformers_loads_the_folder_and_only_generating_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converters load it with trust_remote_code and need no drafts: optimum-intel 2.2 has transformers 5.5."""
    folder = shipped(exporting.exported(masked(exporting.made("block", **BLOCK)), "vllm", tmp_path / "head"))
    version = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "5.5.4" if name == "transformers" else version(name))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with pytest.raises(ImportError, match=r"^transformers>=5\.17 is required .* found transformers==5\.5\.4\.$"):
        loaded.generate(inputs=PROMPT)
