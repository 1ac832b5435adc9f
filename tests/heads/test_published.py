"""Heads of other projects: read back bit for bit, and whatever has no place is refused by name."""

import copy
import json
import logging
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, LlamaConfig

from heads.common.rope import Rope, positions_of
from heads.formats.published import FORMATS, eagle3, format_of, is_published, load_published
from heads.formats.published.plan import PublishedHead, is_targets_embedding
from heads.formats.store import load_head, save_head
from inference.target.embeddings import TargetEmbeddings
from tests import toys
from tests.heads.published import (
    CASES,
    Tensors,
    dflash,
    dflash2,
    domino,
    drafts,
    dspark,
    eagle3_authors,
    eagle3_sglang,
    eagle_authors,
    embedding,
    hydra_plain,
    hydra_prefix,
    medusa_first,
    mimo,
    mlp_speculator,
    mlp_tied,
    peagle,
    publish,
    refusal,
    refused,
)  # fmt: skip
from tests.heads.stub import TinyEnds
from tests.refusals import refuses
from train.convert import convert, find_pickle


@pytest.mark.parametrize("case", CASES)
def test_a_head_under_foreign_names_drafts_the_same_bits(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form, make, _ = CASES[case]
    assert {form for form, _, _ in CASES.values()} == set(FORMATS)
    head, tensors, config = make()
    folder = publish(tmp_path / "theirs", tensors, config)
    assert is_published(folder)
    assert format_of(folder) == form
    with caplog.at_level(logging.WARNING):
        loaded: Any = load_published(folder, toys.target().embeddings)
    assert caplog.text == "" or case in ("Medusa 1", "P-EAGLE"), "what a right config says is no warning"
    loaded.requires_grad_(False)  # a small product takes another kernel where it has a gradient
    theirs = loaded.state_dict()  # a confidence too, which no draft shows
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in head.state_dict().items() if name in theirs)
    expected = drafts(head)
    assert not torch.equal(expected[0][0], expected[2][0])
    for one, other in zip(expected, drafts(loaded), strict=True):
        assert torch.equal(one, other)
    spec = toys.target().spec
    save_head(tmp_path / "ours", loaded, spec, {})
    assert not is_published(tmp_path / "ours")
    again = drafts(load_head(tmp_path / "ours", toys.target().embeddings, spec).requires_grad_(False))
    assert all(torch.equal(one, other) for one, other in zip(expected, again, strict=True))


@pytest.mark.parametrize("make", [eagle3_authors, dspark, partial(domino, draft_vocab=30, lm_head="own")])
def test_a_vocabulary_in_any_order_drafts_the_same_tokens(make: Callable[[], Any], tmp_path: Path) -> None:
    head, tensors, config = make()
    ids = head.vocab.ids
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    of_tokens = {name: tensor[order] for name, tensor in tensors.items() if len(tensor) == len(ids)}
    offsets = {"d2t": ids[order] - torch.arange(len(ids))}
    theirs: Any = load_published(publish(tmp_path, tensors | of_tokens | offsets, config), toys.target().embeddings)
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name])


@pytest.mark.parametrize("case", {form: case for case, (form, _, _) in CASES.items()}.values())
def test_a_missing_a_foreign_and_a_wrong_tensor_are_named(case: str, tmp_path: Path) -> None:
    _, make, short = CASES[case]
    _, tensors, config = make()
    name = next(name for name in tensors if name.endswith(short))
    without = {key: tensor for key, tensor in tensors.items() if key != name}
    assert re.search(rf"missing.*{re.escape(short)}|{re.escape(short)}.*missing", refused(tmp_path, without, config))
    assert "unknown ['extra.weight']" in refused(tmp_path, {**tensors, "extra.weight": torch.ones(2)}, config)
    wide = {**tensors, name: torch.cat([tensors[name], tensors[name]])}
    message = refused(tmp_path, wide, config)
    assert re.search(r"\(\d+,.* expected \(\d+,|has \d+ rows, expected \d+|missing", message)
    assert short in message
    endless = {**tensors, name: torch.full_like(tensors[name], torch.nan)}
    assert f"{short} holds values that are not finite" in refused(tmp_path, endless, config)


def test_another_targets_embedding_and_width_are_refused(tmp_path: Path) -> None:
    _, tensors, config = eagle_authors()
    tensors["embed_tokens.weight"] = torch.zeros(41, 32)
    assert "embed_tokens.weight is (41, 32), expected (40, 32)" in refused(tmp_path / "a", tensors, config)
    with pytest.raises(ValueError, match=r"fc\.weight has 32 rows, expected 4, the width of the target"):
        load_published(publish(tmp_path / "b", tensors, config), TinyEnds())


def test_an_embedding_that_is_not_the_targets_is_not_dropped_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, tensors, config = eagle3_authors()
    tensors["embed_tokens.weight"] = embedding().bfloat16()
    load_published(publish(tmp_path / "a", tensors, config), toys.target().embeddings)
    assert "embedding" not in caplog.text
    tensors["embed_tokens.weight"] = embedding().roll(1, 0)
    load_published(publish(tmp_path / "b", tensors, config), toys.target().embeddings)
    assert "embed_tokens.weight is not the target's embedding" in caplog.text
    scaled: Any = toys.target("gemma3").embeddings
    assert is_targets_embedding(scaled.embedding.weight, scaled)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (eagle_authors, {"num_key_value_heads": 4, "num_hidden_layers": 32, "vocab_size": 41}),
        (eagle3_authors, {"draft_vocab_size": 7, "num_key_value_heads": 7, "intermediate_size": 5}),
        (medusa_first, {"medusa_num_heads": 9, "medusa_num_layers": 3}),
        (hydra_prefix, {"hydra_num_heads": 2}),
        (mlp_speculator, {"n_predict": 9, "inner_dim": 7}),
        (mlp_tied, {"tie_weights": False}),
        (dflash, {"num_hidden_layers": 5}),
    ],
)
def test_wrong_counts_in_a_config_change_nothing(
    make: Callable[[], Any], wrong: dict[str, Any], tmp_path: Path
) -> None:
    head, tensors, config = make()
    loaded = load_published(publish(tmp_path, tensors, {**config, **wrong}), toys.target().embeddings)
    assert all(torch.equal(one, other) for one, other in zip(drafts(head), drafts(loaded), strict=True))


@pytest.mark.parametrize(
    ("make", "key", "said", "lost"),
    [
        (dspark, "markov_rank", 6, "markov_head"),
        (dspark, "enable_confidence_head", True, "confidence_head"),
        (domino, "projector_type", "domino", "(prefix_gru|embed_proj)"),
        (dflash2, "selector_rank", 6, "candidate_selector"),
        (dflash2, "conv_kernel_size", 2, r"layers\.\d\.(attention|mlp)_conv"),
        (dspark, "draft_vocab_size", 30, "d2t|t2d"),
        (eagle3_sglang, "fc_norm", True, "fc_norm"),
    ],
)
def test_a_part_that_a_config_names_and_the_files_lack(
    make: Callable[[], Any], key: str, said: Any, lost: str, tmp_path: Path
) -> None:
    _, tensors, config = make()
    left = {name: tensor for name, tensor in tensors.items() if not re.match(lost, name)}
    told = refused(tmp_path, left, config | {key: said})
    assert re.search(rf"the tensor .* is missing, and config.json gives {key}; download it again", told)


BY_KIND = {"full_attention": {"rope_type": "default", "rope_theta": 5e5},
           "sliding_attention": {"rope_type": "default", "rope_theta": 7.0}}  # fmt: skip
WINDOW = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}


LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("said", "rope"),
    [
        ({}, None),
        ({"rope_theta": 5e5}, Rope(5e5)),
        ({"rope_theta": 7.0, "rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, Rope(5e5)),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rope(5e5)),
        ({"rope_parameters": {"rope_theta": 7.0}, "rope_scaling": {"type": "default", "rope_theta": 5e5}}, Rope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 8.0}}, Rope(5e5, LINEAR)),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, **LINEAR}}, Rope(5e5, LINEAR)),
        ({"rope_parameters": BY_KIND}, Rope(5e5)),
        ({"rope_parameters": BY_KIND, "layer_types": ["full_attention"] * 2}, Rope(5e5)),
        ({"rope_parameters": BY_KIND, **WINDOW}, Rope(7.0)),
    ],
)
def test_the_base_is_the_one_that_transformers_reads(said: dict[str, Any], rope: Rope | None) -> None:
    assert positions_of(said) == rope
    if rope and "layer_types" not in said and said.get("rope_parameters") is not BY_KIND:
        assert LlamaConfig(**copy.deepcopy(said)).rope_parameters["rope_theta"] == rope.theta


LEVEL = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("nested", [False, True])
def test_specforges_norm_output_is_the_norm_before_the_lm_head(
    nested: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head, tensors, config = eagle3_authors()
    modelopt = {"eagle_config": {"return_hidden_post_norm": True, "next_layer_regular": True}}
    said = {**config, "norm_output": True, **(modelopt if nested else {})}
    with caplog.at_level(logging.WARNING):
        loaded = load_published(publish(tmp_path, tensors, said), toys.target().embeddings)
    assert ("SpecForge's norm before the lm_head" in caplog.text) is not nested
    assert ("trains with a second norm of the state" in caplog.text) is nested
    *_, expected = drafts(head)
    *_, found = drafts(loaded)
    assert torch.equal(expected, found) is not nested


@pytest.mark.parametrize(
    ("make", "change", "named"),
    [
        (eagle_authors, {"rope_scaling": {"type": "dynamic", "factor": 8.0}}, "rope_scaling of type dynamic"),
        (eagle_authors, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor'"),
        (eagle_authors, {"rope_scaling": LEVEL}, "high_freq_factor is not above"),
        (eagle_authors, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "no number factor above 0"),
        (eagle_authors, {"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": None}, "transformers does not read"),
        (eagle_authors, {"rope_parameters": {"rope_type": "ntk"}, "rope_scaling": None}, "rope_scaling of type ntk"),
        (eagle_authors, {"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        (eagle_authors, {"partial_rotary_factor": "half"}, "transformers does not read"),
        (eagle_authors, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        (dflash, {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
        (eagle_authors, {"hidden_act": "gelu"}, "hidden_act=gelu"),
        (eagle3_authors, {"layer_types": ["sliding_attention"]}, "sliding window"),
        (eagle3_authors, {"logit_scale": 0.5}, "logit_scale"),
        (eagle3_authors, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        (eagle3_authors, {"parallel_drafting": True}, "P-EAGLE"),
        (eagle3_authors, {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "embedding among its layers"),
        (eagle3_authors, {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "feature_layers"),
        (eagle3_authors, {"eagle_config": "none"}, "config.json or a tensor"),
        (hydra_plain, {"grounded_heads": False}, "grounded_heads"),
        (hydra_prefix, {"hidden_state_offset": 1}, "hidden_state_offset"),
        (dspark, {"markov_head_type": "rnn"}, "markov_head_type"),
        (dflash, {"dflash_config": {"target_layer_ids": [0, 2]}}, "mask_token_id"),
        (dflash, {"block_size": None}, "block_size"),
        (dflash, {"dflash_config": {"use_swa": True}}, "use_swa=True"),
        (dflash, {"dflash_config": {"mask_token_id": 40, "target_layer_ids": [0, 2]}}, "mask_token_id is 40"),
        (dflash, {"dflash_config": {"mask_token_id": 7}}, "does not join the default five"),
        (domino, {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]}}, "pure_draft_prefix_len=None"),
        (dflash2, {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]}}, "does not say selector_top_k"),
        (peagle, {"ptd_token_id": 40}, "mask_token_id is 40"),
        (eagle_authors, {"head_dim": 5}, "q_proj.weight has 32 rows, k_proj 16: no heads of 5"),
        (eagle_authors, {"head_dim": 32}, "no heads of 32"),
        (dflash, {"output_multiplier": 2.0}, "output_multiplier=2.0"),
        (dflash, {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ],
)
def test_what_our_head_cannot_do_is_refused_by_name(
    make: Callable[[], Any], change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    _, tensors, config = make()
    assert named in refused(tmp_path, tensors, {**config, **change})


@pytest.mark.parametrize(
    ("make", "name", "tensor", "named"),
    [
        (eagle_authors, "layers.0.self_attn.q_proj.bias", torch.zeros(32), "q_proj.bias (attention_bias, qkv_bias)"),
        (eagle_authors, "layers.0.self_attn.q_proj.weight", torch.zeros(34, 32), "34 rows, k_proj 16: no heads of 8"),
        (eagle_authors, "layers.0.self_attn.k_proj.weight", torch.zeros(24, 32), "k_proj 24: no heads of 8"),
        (eagle3_sglang, "layers.1.hidden_norm.weight", torch.zeros(32), "differ, and which of them is meant"),
        (mimo, "model.mtp_layers.0.self_attn.k_proj.bias", torch.ones(16), "k_proj.bias (attention_bias, qkv_bias)"),
        (mimo, "model.mtp_layers.1.input_proj.weight", torch.zeros(32, 64), "several MTP modules"),
    ],
)
def test_tensors_that_our_head_has_no_place_for_are_refused_by_name(
    make: Callable[[], Any], name: str, tensor: torch.Tensor, named: str, tmp_path: Path
) -> None:
    _, tensors, config = make()
    assert named in refused(tmp_path, tensors | {name: tensor}, config)


def test_the_prefix_layer_is_the_targets_where_its_config_is_silent(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    sizes = toys.SIZES | {"rms_norm_eps": 1e-3, "rope_parameters": {**scaling, "rope_theta": 5e5}}
    embeddings = TargetEmbeddings(AutoModelForCausalLM.from_config(LlamaConfig(**sizes)))
    _, tensors, config = hydra_prefix()
    tensors.pop("prefix_embeding_layer.embed_tokens.weight")  # another toy's
    silent = {key: value for key, value in config.items() if key != "rms_norm_eps"}
    loaded: Any = load_published(publish(tmp_path / "a", tensors, silent), embeddings)
    assert (loaded.config.norm_eps, loaded.config.rope_theta, loaded.config.rope_scaling) == (1e-3, 5e5, scaling)
    said: Any = load_published(publish(tmp_path / "b", tensors, {**config, "rope_theta": 7.0}), embeddings)
    assert (said.config.norm_eps, said.config.rope_theta, said.config.rope_scaling) == (1e-5, 7.0, None)


def test_blocks_that_are_no_copies_stay_apart(tmp_path: Path) -> None:
    _, tensors, config = hydra_prefix()
    tensors["hydra_mlp.2.7.linear.bias"] = tensors["hydra_mlp.2.7.linear.bias"] + 1
    loaded: Any = load_published(publish(tmp_path, tensors, config), toys.target().embeddings)
    assert (loaded.config.tied, len(loaded.branches[2].blocks)) == (False, 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: {**t, "d2t": t["d2t"] + torch.arange(30)}, "d2t"),  # the ids themselves, as others store them
        (lambda t: {**t, "d2t": torch.zeros_like(t["d2t"])}, "d2t and t2d do not name the same tokens"),
        (lambda t: {**t, "d2t": torch.full_like(t["d2t"], -1)}, "does not name 30 different tokens"),
        (lambda t: {**t, "d2t": torch.full_like(t["d2t"], 11)}, "does not name 30 different tokens of the target's 40"),
        (lambda t: {**t, "d2t": t["d2t"][:0]}, "d2t does not name 0 different tokens"),
        (lambda t: {**t, "t2d": t["t2d"][:-1]}, "d2t and t2d"),
    ],
)
def test_d2t_is_an_offset(change: Callable[[Tensors], Tensors], named: str, tmp_path: Path) -> None:
    head, tensors, config = eagle3_authors()
    ids = head.state_dict()["vocab.ids"]
    assert not torch.equal(ids, torch.arange(30))
    loaded = load_published(publish(tmp_path / "right", tensors, config), toys.target().embeddings)
    assert torch.equal(loaded.state_dict()["vocab.ids"], ids)
    assert named in refused(tmp_path / "wrong", change(tensors), config)


class Deep(TinyEnds):
    """A target of DeepSeek's depth, of which configs of both conventions are published under one key."""

    num_layers = 61


@pytest.mark.parametrize(
    ("states", "outputs", "layers", "warned"),
    [
        (None, None, None, False),
        ([2, 30, 58], None, [1, 29, 57], False),
        ([1, 29, 57], None, [1, 29, 57], True),
        (None, [1, 29, 57], [1, 29, 57], False),
        (None, [2, 30, 58], [1, 29, 57], True),
        ([5, 9, 60], None, [4, 8, 59], False),
        (None, [5, 9, 60], [5, 9, 60], False),
        ([5, 9, 60], [4, 8, 59], [4, 8, 59], False),
        ([2, 30, 58], [2, 30, 58], [1, 29, 57], False),
        ([5, 9, 60], [5, 9, 60], "count differently", False),
        ([5, 9, 60], [1, 2, 3], "not the same layers", False),
    ],
)
def test_layers_are_counted_as_we_do(
    states: list[int] | None, outputs: list[int] | None, layers: Any, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    source = PublishedHead(Path("head"), {key: states, "eagle_config": {key: outputs}}, {})
    if isinstance(layers, str):
        with pytest.raises(ValueError, match=layers):
            eagle3.feature_layers(source, 3, Deep())
        return
    with caplog.at_level(logging.WARNING):
        assert eagle3.feature_layers(source, 3, Deep()) == layers
    assert ("other convention" in caplog.text) == warned
    other = PublishedHead(Path("head"), {"eagle_config": {"layer_ids": [5, 9, 60]}}, {})
    assert eagle3.feature_layers(other, 3, Deep()) == [4, 8, 59]


def test_a_pickle_is_refused_and_its_conversion_is_read_in_its_dtype(tmp_path: Path) -> None:
    _, tensors, config = eagle3_authors()
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    for file in ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt"):
        folder = publish(tmp_path / file, half, config, file)
        assert f"{file}: a pickle, which can hold code and is not read" in refusal(folder)
        assert f"python train/convert.py pickle={folder / file} out=FOLDER" in refusal(folder)
    out = convert(find_pickle(str(folder)), tmp_path / "ours")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    loaded = load_published(out, toys.target().embeddings)
    assert {tensor.dtype for tensor in loaded.parameters()} == {torch.float16}
    assert all(tensor.device.type == "cpu" for tensor in loaded.state_dict().values())
    with pytest.raises(ValueError, match="is there already; name another folder"):
        convert(folder / file, out)
    with pytest.raises(ValueError, match=r"no such file, nor a folder or repository with one of pytorch_model\.bin"):
        find_pickle(str(tmp_path))


def test_shards_are_joined_by_their_index_and_lie_beside_it(tmp_path: Path) -> None:
    head, tensors, config = eagle_authors()
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        publish(tmp_path, {name: tensors[name] for name in files if files[name] == file}, config, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert is_published(tmp_path)
    loaded = load_published(tmp_path, toys.target().embeddings)
    assert all(torch.equal(one, other) for one, other in zip(drafts(head), drafts(loaded), strict=True))
    index.write_text(json.dumps({"weight_map": {**files, "fc.bias": "../elsewhere.safetensors"}}))
    assert "which is no .safetensors in its folder" in refusal(tmp_path)
    index.write_text("{}")
    assert "damaged" in refusal(tmp_path)
    (tmp_path / "link.safetensors").symlink_to(tmp_path.parent / "elsewhere.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "link.safetensors")}))
    assert "link.safetensors: a link out of its folder" in refusal(tmp_path)
    index.write_text(json.dumps({"weight_map": {**files, "fc.bias": 3}}))
    assert "which is no .safetensors in its folder" in refusal(tmp_path)


class Innocent:
    """What runs code when an ordinary unpickler reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def unconverted(pickle: Path) -> str:
    """Return what the conversion says, which leaves nothing behind."""
    before = sorted(pickle.parent.parent.rglob("*"))
    line = refuses(r"\S", convert, pickle, pickle.parent.parent / "out")
    assert sorted(pickle.parent.parent.rglob("*")) == before
    return line


def test_a_pickle_with_code_in_it_is_not_converted_and_does_not_run(tmp_path: Path) -> None:
    folder, trace = tmp_path / "head", tmp_path / "it ran"
    _, tensors, config = eagle_authors()
    publish(folder, {**tensors, "fc.extra": Innocent(trace)}, config, "pytorch_model.bin")
    assert "a pickle" in refusal(folder)
    assert re.search(
        r"pytorch_model\.bin: damaged, or holds more than tensors", unconverted(folder / "pytorch_model.bin")
    )
    assert not trace.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert trace.exists()  # it is real code


def test_the_hubs_cache_may_link_into_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    _, tensors, config = eagle_authors()
    publish(tmp_path / "hub" / "blobs", tensors, config, "f00d.safetensors")
    folder = publish(tmp_path / "hub" / "snapshots" / "1", {}, config, "unused.safetensors")
    (folder / "a.safetensors").symlink_to("../../blobs/f00d.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors")})
    )
    assert load_published(folder, toys.target().embeddings).state_dict()


def test_a_config_that_claims_what_the_file_lacks_takes_no_memory(tmp_path: Path) -> None:
    _, tensors, config = dflash()
    refused = refusal(publish(tmp_path, tensors, {**config, "block_size": 10**9}))
    assert "head.depths is 999999999: give 256 or less" in refused


def test_a_whole_model_is_no_head(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.self_attn.q_proj.weight": torch.zeros(2, 2) for i in range(9)}
    message = refusal(publish(tmp_path, tensors, {"architectures": ["LlamaForCausalLM"]}))
    assert "of no published head known here: dflash, peagle, eagle4, eagle3, eagle, medusa, hydra, mlp" in message
