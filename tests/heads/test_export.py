"""An exported head drafts, read by its engine's rules, what it drafts here; and what a format cannot say is refused."""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from heads import ENGINES, HEADS
from heads.formats.published import load_published
from heads.formats.published.export import FORMATS, check, engine_mismatch, export
from heads.modules.layers import LayerSpec
from tests import families, toys
from tests.heads import foreign
from tests.heads.exporting import SAID, TOKENS, assert_same, chain, exported, made, served, target, told
from tests.heads.stub import head as stub
from tests.refusals import refuses
from tests.serving import heads_of_ours

OWN_PLACE = {"feature_layers": [4, 1, 3]}  # the default three, in another order
LLAMA3 = {
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip
FOR = {"feature_layers": None, "draft_vocab": None, "lm_head": "shared"}


class Case(NamedTuple):
    """A head in a format, the reading of it, and tensors that it has there and not here."""

    kind: str
    options: dict[str, Any]
    form: str
    reading: Callable[..., Any]
    extra: frozenset[str] = frozenset()


def masked(head: Any) -> Any:
    """Return a block head whose masked positions hold a token's embedding."""
    if "mask" in head.state_dict():
        head.state_dict()["mask"].copy_(target().embeddings.embed(torch.tensor(7)))
    return head


SGLANG, TRTLLM = (partial(foreign.eagle3, engine=engine) for engine in ("sglang", "trtllm"))
BLOCK = {"causal": False, "feature_layers": [5, 2], "mask_token": 7}
DSPARK = {**BLOCK, "causal": True, "from_anchor": True, "markov_rank": 6, "confidence": True}
DFLASH2 = {"conv": 2, "selector_rank": 6}
WINDOWLESS = {"layers": 1, "draft_vocab": None, "bias": False}
CASES = {
    "EAGLE-3 vLLM": Case("eagle3", OWN_PLACE, "vllm", foreign.eagle3),
    "EAGLE-3 SGLang": Case("eagle3", OWN_PLACE, "sglang", SGLANG),
    "EAGLE-3 TensorRT-LLM": Case("eagle3", OWN_PLACE, "trtllm", TRTLLM),
    "EAGLE-3.1 deep TensorRT-LLM": Case(
        "eagle3", {"feature_layers": [2, 6], "layers": 2, "feature_norm": True, "norm_output": True}, "trtllm",
        partial(TRTLLM, capture=[2, 6]),
    ),
    "EAGLE-3 speculators": Case("eagle3", {**OWN_PLACE, "norm_before_residual": True}, "speculators", foreign.eagle3),
    "EAGLE-3 with one norm before fc": Case(
        "eagle3", {**OWN_PLACE, "joint_norm": True, "norm_output": True}, "speculators", foreign.eagle3
    ),
    "EAGLE-3 with one norm before fc TensorRT-LLM": Case("eagle3", {**OWN_PLACE, "joint_norm": True}, "trtllm", TRTLLM),
    "EAGLE-3 of one layer": Case("eagle3", {**LLAMA3, "feature_layers": [6]}, "vllm", foreign.eagle3),
    "EAGLE-3.1 deep": Case(
        "eagle3", {**OWN_PLACE, "layers": 3, "feature_norm": True, "norm_output": True}, "vllm", foreign.eagle3
    ),
    "EAGLE-3.1 deep SGLang": Case(
        "eagle3", {**OWN_PLACE, "layers": 3, "feature_norm": True, "norm_output": True}, "sglang", SGLANG
    ),
    "EAGLE-3 shared": Case("eagle3", FOR, "sglang", SGLANG, frozenset({"lm_head.weight"})),
    "EAGLE-3 shared and pruned": Case(
        "eagle3", {**FOR, "draft_vocab": 30}, "vllm", foreign.eagle3, frozenset({"lm_head.weight"})
    ),
    "EAGLE-3 authors": Case("eagle3", OWN_PLACE, "eagle", partial(foreign.eagle3, engine="authors")),
    "EAGLE-4": Case("eagle4", {**OWN_PLACE, "candidates": 9}, "eagle4", SGLANG),
    "EAGLE-4 without candidates": Case("eagle4", OWN_PLACE, "vllm", foreign.eagle3),
    "EAGLE-3 OpenVINO": Case("eagle3", OWN_PLACE, "openvino", partial(foreign.eagle3, engine="authors")),
    "EAGLE-3 OpenVINO whole": Case(
        "eagle3", {**OWN_PLACE, "draft_vocab": None}, "openvino", partial(foreign.eagle3, engine="authors")
    ),
    "P-EAGLE vLLM": Case("peagle", {"feature_layers": [5, 1, 3]}, "vllm", foreign.peagle),
    "P-EAGLE speculators": Case(
        "peagle", {"embedding": "own", "feature_norm": False, "joint_norm": True, "feature_layers": [5, 1, 3]},
        "speculators", foreign.peagle,
    ),
    "EAGLE-1 vLLM": Case(
        "eagle", {"layers": 2, "bias": False}, "vllm", partial(foreign.eagle, bias=False), frozenset({"fc.bias"})
    ),
    "EAGLE-1 SGLang": Case("eagle", LLAMA3, "sglang", partial(foreign.eagle, bias=True)),
    "EAGLE-1 authors": Case("eagle", {"layers": 1}, "eagle", partial(foreign.eagle, bias=True)),
    "HASS vLLM": Case("hass", WINDOWLESS, "vllm", partial(foreign.eagle, bias=False), frozenset({"fc.bias"})),
    "HASS authors": Case("hass", WINDOWLESS, "eagle", partial(foreign.eagle, bias=False)),
    "MTP vLLM": Case("mtp", {}, "vllm", foreign.mimo),
    "MTP SGLang": Case("mtp", {}, "sglang", foreign.mimo),
    "Medusa vLLM": Case("medusa", {"layers": 2}, "vllm", foreign.medusa),
    "Medusa vLLM shared": Case("medusa", {"lm_head": "shared"}, "vllm", foreign.medusa),
    "Medusa vLLM of low rank": Case("medusa", {"lm_head_rank": 8}, "vllm", foreign.medusa),
    "Medusa authors": Case("medusa", {}, "medusa", foreign.medusa_authors),
    "Medusa authors shared": Case("medusa", {"lm_head": "shared"}, "medusa", foreign.medusa_authors),
    "Hydra++": Case(
        "hydra", {"layers": 4, "tied": True, "lm_head_bias": True}, "hydra", foreign.hydra
    ),
    "Hydra": Case(
        "hydra", {"prefix": False, "layers": 3, "tied": True, "lm_head": "shared"}, "hydra", foreign.hydra,
        frozenset(f"lm_heads.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")),
    ),
    "DFlash": Case("block", BLOCK, "dflash", foreign.dflash),
    "DFlash OpenVINO": Case("block", BLOCK, "openvino", foreign.dflash),
    "DFlash causal": Case("block", {**BLOCK, "causal": True}, "sglang", foreign.dflash),
    "EAGLE-3 of llama.cpp": Case("eagle3", {**OWN_PLACE, "joint_norm": True}, "gguf", foreign.eagle3),
    "DSpark of llama.cpp": Case("block", DSPARK, "gguf", foreign.dflash),
    "DSpark": Case("block", DSPARK, "sglang", foreign.dflash),
    "DFlash2": Case("block", {**BLOCK, **DFLASH2}, "vllm", foreign.dflash),
    "Domino": Case("block", {**BLOCK, "from_anchor": True, "domino": 12}, "sglang", foreign.dflash),
    "Domino of mask slots": Case("block", {**BLOCK, "domino": 12}, "sglang", foreign.dflash),
    "DSpark pruned": Case("block", {**DSPARK, "draft_vocab": 30, "lm_head": "own"}, "vllm", foreign.dflash),
}  # fmt: skip


LAYER = ("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "rope_theta", "rope_scaling", "norm_eps")
NUMBERS = toys.all_pairs({name: toys.LAYERED[name] for name in LAYER})
TAKES_THE_TARGETS = ("mtp", "hydra")  # of which the formats say no numbers


def made_for(name: str) -> Any:
    """Return a case's head, each with other numbers of its layers."""
    case = CASES[name]
    layered = "norm_eps" in toys.HEAD_CONFIGS[case.kind] and case.kind not in TAKES_THE_TARGETS
    numbers = NUMBERS[[*CASES].index(name) % len(NUMBERS)] if layered else {}
    return masked(made(case.kind, **numbers | case.options))


@pytest.mark.parametrize("name", CASES)
def test_an_engine_drafts_what_we_draft_and_it_is_read_back(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    head = made_for(name)
    folder = exported(head, case.form, tmp_path / "head")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(case.reading(folder, told(), TOKENS[1:], 4), chain(head, 4))
    with caplog.at_level(logging.WARNING):
        loaded: Any = load_published(folder, target().embeddings)
    assert caplog.text == ""
    assert loaded.max_depth == head.max_depth
    if head.has_kv_cache:
        numbers = [LayerSpec.of(each.config, target().embeddings) for each in (loaded, head)]
        assert numbers[0] == numbers[1]
    assert sorted(loaded.feature_layers) == list(loaded.feature_layers)
    order = sorted(range(len(head.feature_layers)), key=lambda i: head.feature_layers[i])
    ours, theirs = head.state_dict(), loaded.state_dict()
    if order:
        for key in ours.keys() & {"fusion.fc.weight", "fusion.joint_norm.weight"}:
            ours[key] = torch.cat([ours[key].chunk(len(order), -1)[i] for i in order], -1)
        if "mask_hidden" in ours:
            ours["mask_hidden"] = ours["mask_hidden"][order]
    ours |= {f"fusion.norms.{i}.weight": ours[f"fusion.norms.{at}.weight"] for i, at in enumerate(order) if at != i
             and f"fusion.norms.{at}.weight" in head.state_dict()}  # fmt: skip
    if "of low rank" in name:
        ours = {key: tensor for key, tensor in ours.items() if "lm_heads" not in key}
        case = case._replace(extra=frozenset(f"lm_heads.{i}.weight" for i in range(4)))
    assert theirs.keys() - ours.keys() == case.extra
    assert ours.keys() <= theirs.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16}
SCALINGS = {"linear": {"rope_type": "linear", "factor": 4.0}, "llama3": LLAMA3["rope_scaling"], "yarn": YARN,
            "yarn with all numbers": {**YARN, "attention_factor": 0.8, "beta_fast": 8.0}}  # fmt: skip
SCALED = [
    *(("EAGLE-3 vLLM", scaling) for scaling in SCALINGS),
    *((name, "yarn") for name in ("P-EAGLE vLLM", "EAGLE-1 SGLang", "MTP SGLang", "DFlash", "EAGLE-3 of llama.cpp")),
]


@pytest.mark.parametrize(("name", "scaling"), SCALED)
def test_scaled_positions_draft_as_transformers_rotates_and_are_read_back(
    name: str, scaling: str, tmp_path: Path
) -> None:
    """The reading rotates by transformers' LlamaRotaryEmbedding of the exported config.json."""
    case, positions = CASES[name], {"rope_theta": 5e5, "rope_scaling": SCALINGS[scaling]}
    head = masked(made(case.kind, **case.options | positions))
    folder = exported(head, case.form, tmp_path / "head")
    ours = chain(head, 4)
    assert_same(case.reading(folder, told(), TOKENS[1:], 4), ours)
    plain = chain(masked(made(case.kind, **case.options | {**positions, "rope_scaling": None})), 4)
    assert not torch.allclose(plain[0], ours[0], rtol=1e-3), "the scaling changes nothing here"
    loaded: Any = load_published(folder, target().embeddings)
    assert (loaded.config.rope_theta, loaded.config.rope_scaling) == tuple(positions.values())


def test_every_format_and_head_is_tried() -> None:
    tried = {(case.form, case.kind) for case in CASES.values()}
    same = {("vllm", "hass"): "eagle", ("sglang", "hass"): "eagle", ("sglang", "eagle4"): "eagle3"}
    assert tried | set(same) == {(form, kind) for form, kinds in FORMATS.items() for kind in kinds}


@pytest.mark.parametrize("kind", HEADS)
def test_heads_for_the_engines_are_made_of_their_yaml(kind: str) -> None:
    assert heads_of_ours.made(kind).config.name == kind


@pytest.mark.parametrize(
    ("kind", "options", "form", "told"),
    [
        ("eagle3", {"kv_injection": True}, "vllm", "kv_injection=true, .*head.kv_injection=false"),
        ("eagle3", {"qk_norm": True}, "sglang", "qk_norm=true"),
        ("eagle3", {"norm_before_residual": True}, "sglang", "true, which vLLM and llama.cpp alone run"),
        ("eagle3", {"feature_layers": [1, 7]}, "sglang", "last layer, 7, .*feature_layers up to 6"),
        ("eagle3", {"norm_before_residual": True}, "eagle", "norm_before_residual=true"),
        ("eagle3", {"layers": 2}, "eagle", "layers=2, .*head.layers=1"),
        ("eagle3", {"feature_norm": True}, "eagle", "feature_norm=true"),
        ("eagle3", {"norm_output": True}, "eagle", "norm_output=true"),
        ("eagle3", {"feature_layers": [1, 2, 4]}, "eagle", r"authors' code reads \[1, 3, 4\]"),
        ("eagle3", {"feature_norm": True}, "openvino", "feature_norm=true, .*head.feature_norm=false"),
        ("eagle3", {"feature_layers": [1, 2]}, "openvino", r"\[1, 2\], and OpenVINO reads three"),
        ("block", {**BLOCK, "causal": True}, "openvino", "causal=true, .*head.causal=false"),
        ("block", {**BLOCK, "markov_rank": 4}, "openvino", "markov_rank=4"),
        ("eagle", {}, "vllm", "bias of fc, .*head.bias=false"),
        ("eagle", {"lm_head": "own"}, "sglang", "lm_head=own, .*head.lm_head=shared"),
        ("mtp", {"feature_layers": [1, 3]}, "vllm", "feature_layers=.*head.feature_layers=null"),
        ("mtp", {"qk_norm": True}, "sglang", "qk_norm=true"),
        ("mtp", {"intermediate_size": 24}, "vllm", "intermediate_size 24, and vLLM takes 48; .*init=auto"),
        ("mtp", {"rope_theta": 5e5}, "vllm", "positions .*500000.*and vLLM takes"),
        ("mtp", {"head_dim": 4}, "vllm", "head_dim 4, and vLLM takes 8; .*head=eagle3, .*format=sglang"),
        ("eagle3", {"norm_output": True}, "gguf", "norm_output=true"),
        (
            "eagle3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64,
                                        "mscale": 1.0}}, "gguf", "yarn with mscale, which is not written",
        ),
        ("eagle3", {"feature_layers": [2, 5]}, "gguf", "2 feature layers, and llama.cpp reads three"),
        ("block", {**BLOCK, **DFLASH2}, "gguf", "selector_rank=6"),
        ("medusa", {"draft_vocab": 30}, "vllm", "draft_vocab=30"),
        ("medusa", {"draft_vocab": 30}, "medusa", "draft_vocab=30"),
        ("medusa", {"layers": 2}, "medusa", "layers=2, of which each is its own"),
        ("hydra", {"draft_vocab": 30}, "hydra", "draft_vocab=30"),
        ("hydra", {"layers": 3}, "hydra", "layers=3 with tied=false"),
        ("hydra", {"rope_theta": 7.0}, "hydra", "rope_theta=7.0, and the authors' code takes 10000.0"),
        ("hydra", {"intermediate_size": 24}, "hydra", "intermediate_size=24, and the authors' code takes 48"),
        ("block", {**BLOCK, "mask_token": None}, "dflash", "a mask slot that was trained"),
        ("block", BLOCK, "dflash", "a mask slot that is not the target's embedding of token 7"),
        ("eagle3", {"qk_norm": True}, "eagle", "qk_norm=true"),
        ("eagle3", {"joint_norm": True}, "eagle", "joint_norm=true"),
        ("eagle3", {"kv_injection": True}, "eagle", "kv_injection=true"),
        ("block", {**BLOCK, "qk_norm": False}, "vllm", "qk_norm=false"),
        ("block", {**BLOCK, "lm_head": "own"}, "vllm", "lm_head=own"),
        ("block", {**BLOCK, "draft_vocab": 30}, "sglang", "draft_vocab=30"),
        ("block", {**BLOCK, "confidence": True}, "vllm", "confidence=true without a Markov term"),
        ("block", {**BLOCK, "from_anchor": True}, "sglang", "from_anchor=true, and DFlash drafts from its mask slots"),
        ("block", {**BLOCK, "markov_rank": 4}, "vllm", "markov_rank with from_anchor=false"),
        ("block", {**BLOCK, "domino": 12}, "vllm", "domino=12, which SGLang alone runs"),
        ("block", {**BLOCK, "conv": 2}, "vllm", "one of conv and selector_rank, and DFlash2 has both"),
        ("block", {**BLOCK, **DFLASH2, "from_anchor": True}, "sglang", "from_anchor=true, and DFlash drafts from its"),
        ("mlp", {}, "vllm", "no engine loads a head of kind mlp; train head=eagle3"),
        ("medusa", {}, "sglang", "no form of medusa heads: they are written as vllm, medusa"),
    ],
)  # fmt: skip
def test_what_a_format_cannot_say_is_refused(
    kind: str, options: dict[str, Any], form: str, told: str, tmp_path: Path
) -> None:
    refuses(told, exported, made(kind, **options), form, tmp_path / "head")
    assert list(tmp_path.iterdir()) == []
    if form in ENGINES:  # before it is trained
        with pytest.raises(ValueError, match=f"^engine={form}: .*{told}"):
            check(made(kind, **options), form, served(), [])


@pytest.mark.parametrize(("engine", "kind"), [
    ("vllm", "gemma3_text"), ("vllm", "bamba"), ("llamacpp", "qwen2"), ("llamacpp", "ministral3"),
    ("sglang", "granite"), ("sglang", "nemotron_h"),
])  # fmt: skip
def test_a_target_whose_class_hands_out_no_layers_is_refused_to_heads_that_read_them(engine: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"^engine={engine}: a target of model_type {kind} .*eagle3 reads; .*null$"):
        check(made("eagle3"), engine, served(config=SAID | {"model_type": kind}), [])
    check(made("eagle3"), engine, served(config=SAID | {"model_type": "qwen3"}), [])
    check(made("mtp"), "vllm", served(config=SAID | {"model_type": kind}), [])
    check(masked(made("block", **BLOCK)), "sglang", served(config=SAID | {"model_type": "lfm2"}), [])
    with pytest.raises(ValueError, match="a target of model_type qwen2 hands out no layers there"):
        check(made("block", **BLOCK), "sglang", served(config=SAID | {"model_type": "qwen2"}), [])


@pytest.mark.parametrize("options", [DSPARK, {**DSPARK, "confidence": False}, BLOCK])
def test_a_block_heads_file_has_the_keys_that_loaders_read(options: dict[str, Any], tmp_path: Path) -> None:
    """vLLM's of the confidence head, which it drops without them; lmdeploy's and mlx-vlm's of layers and block."""
    head = masked(made("block", **options))
    exported(head, "dflash", tmp_path)
    config, has = json.loads((tmp_path / "config.json").read_text()), options.get("confidence")
    assert (config.get("enable_confidence_head"), config.get("confidence_head_with_markov")) == (has, has)
    assert ("confidence_head.proj.weight" in load_file(tmp_path / "model.safetensors")) == bool(has)
    assert config["num_target_layers"] == target().embeddings.num_layers
    assert config["dflash_config"]["block_size"] == config["block_size"] == head.size


def test_transformers_decodes_with_heads_whose_code_is_published() -> None:
    check(made("mlp"), "transformers", served(), ["a scaled embedding"])
    with pytest.raises(ValueError, match=r"^engine=transformers: no code of ours decodes there with eagle3; .*mlp"):
        check(made("eagle3"), "transformers", served(), [])


@pytest.mark.parametrize(
    ("family", "kind", "options", "form", "reading"),
    [
        ("gemma3", "eagle3", {"feature_layers": [0, 1]}, "vllm", foreign.eagle3),
        ("granite", "eagle3", {"feature_layers": [0, 1], "lm_head": "shared"}, "vllm", foreign.eagle3),
        ("gemma4", "peagle", {"feature_layers": [0, 1]}, "vllm", foreign.peagle),
        ("gemma3", "mtp", {}, "sglang", foreign.mimo),
        ("gemma2", "eagle", {"bias": False}, "sglang", partial(foreign.eagle, bias=True)),
    ],
)
def test_a_scaled_embedding_and_scaled_logits_change_no_draft_of_an_engine(
    family: str, kind: str, options: dict[str, Any], form: str, reading: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """They read the plain tables; without eps, which a scale changes, the logits are the same but for a cap."""
    of = families.target(family)
    monkeypatch.setattr("tests.heads.exporting.target", lambda: of)
    head = made(kind, norm_eps=1e-12, **options)
    folder = exported(head, form, tmp_path / "head", config=of.config.to_dict())
    theirs, ours = reading(folder, told(), TOKENS[1:], 3), chain(head, 3)
    if of.embeddings.softcap is not None:
        theirs = [of.embeddings.softcap * torch.tanh(logits / of.embeddings.softcap) for logits in theirs]
    assert_same(theirs, ours)
    assert engine_mismatch(head.config, of.embeddings.extra_ops()) is None
    assert set(of.embeddings.extra_ops()) - {"a bias of its logits"}
    block = made("block", feature_layers=[0, 1], markov_rank=4).config
    assert "with head=block" in str(engine_mismatch(block, of.embeddings.extra_ops()))


@pytest.mark.parametrize(
    ("kind", "form", "limit"),
    [
        ("eagle", "sglang", 30), ("eagle", "eagle", 30), ("mtp", "vllm", 30),
        ("medusa", "vllm", 32000), ("hydra", "hydra", 32000),
    ],
)  # fmt: skip
def test_a_limit_is_none_beyond_the_vocabulary_or_with_a_shared_lm_head(
    kind: str, form: str, limit: int, tmp_path: Path
) -> None:
    exported(made(kind, draft_vocab=limit), form, tmp_path / "limit")
    exported(made(kind, draft_vocab=None), form, tmp_path / "none")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "limit" / name).read_bytes() == (tmp_path / "none" / name).read_bytes()


def test_a_target_that_rotates_a_part_or_by_layer_is_refused_where_its_positions_are_taken(tmp_path: Path) -> None:
    said = {**SAID, "rope_parameters": {**SAID["rope_parameters"], "partial_rotary_factor": 0.5}}
    with pytest.raises(ValueError, match=r"vLLM takes .*0\.5.*format=sglang"):
        exported(made("mtp"), "vllm", tmp_path, config=said)
    with pytest.raises(ValueError, match=r"partial_rotary_factor=1\.0, and the authors' code takes 0\.5"):
        exported(made("hydra"), "hydra", tmp_path, config=said)
    by_kind = {**SAID, "rope_parameters": {"full_attention": SAID["rope_parameters"]}}
    with pytest.raises(ValueError, match=r"vLLM takes the target's, which has them by kind of layer, .*format=sglang"):
        exported(made("mtp"), "vllm", tmp_path, config=by_kind)
    exported(made("mtp", head_dim=4), "sglang", tmp_path, config=said)


def test_an_mtp_module_has_the_targets_eps_where_vllm_takes_it(tmp_path: Path) -> None:
    exported(made("mtp"), "vllm", tmp_path / "unsaid", config={})
    other = {**SAID, "rms_norm_eps": 1e-3}
    with pytest.raises(ValueError, match=r"norm_eps 1e-05, and vLLM takes 0\.001"):
        exported(made("mtp"), "vllm", tmp_path / "other", config=other)
    exported(made("mtp"), "sglang", tmp_path / "other", config=other)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"format is 'onnx': choose one of vllm, sglang, .*, or null"):
        export(stub(), "onnx", served(), tmp_path)


def test_a_head_that_looks_back_less_far_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        exported(made("eagle3", length=160, feature_layers=None), "vllm", tmp_path)
        assert caplog.text == ""
        exported(made("eagle3", length=12, feature_layers=None), "vllm", tmp_path)
    assert "the head was trained to look back 12 tokens" in caplog.text


def test_the_hybrid_says_what_each_engine_asks_for(tmp_path: Path) -> None:
    folder = exported(made("eagle3", **OWN_PLACE, **LLAMA3), "vllm", tmp_path, draft_tokens=5, dtype=torch.bfloat16)
    decoder = {
        "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "vocab_size": 40, "max_position_embeddings": 160, **LLAMA3,
    }  # fmt: skip
    way = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    assert json.loads((folder / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "torch_dtype": "bfloat16", **decoder,
        "draft_vocab_size": 30, "tie_word_embeddings": False, "norm_before_residual": False, "norm_before_fc": False,
        "num_aux_hidden_states": 3, "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {
            "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "norm_before_fc": False,
        },
        "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "transformer_layer_config": {"model_type": "llama", **decoder},
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [way],
            "verifier": {"name_or_path": "me/deep", "architectures": ["LlamaForCausalLM"]},
        },
    }  # fmt: skip


def test_a_value_that_only_the_exported_dtype_cannot_hold_is_found(tmp_path: Path) -> None:
    head = made("eagle3", feature_layers=[1, 3, 4])
    head.fusion.fc.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"fc\.weight holds values that are not finite; no export in torch\.float16"):
        exported(head, "vllm", tmp_path / "head", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_a_block_whose_slots_hold_a_token_stays_one_that_engines_serve(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        **toys.HEAD_CONFIGS["block"],
        "name": "block",
        "causal": False,
        "mask_token": -1,
        "length": None,
    }
    head: Any = HEADS["block"](HEADS["block"].Config(**config), target().embeddings)
    optimizer = torch.optim.SGD([each for each in head.parameters() if each.requires_grad], 1.0)
    token = torch.tensor([TOKENS[:-1]])
    features = target().features(token, torch.zeros_like(token), head.feature_layers)
    sum(draft.state.square().mean() for draft in head.unroll(features, 4)).backward()
    optimizer.step()
    folder = exported(head.requires_grad_(False), "dflash", tmp_path)
    assert json.loads((folder / "config.json").read_text())["dflash_config"]["mask_token_id"] == toys.VOCAB - 1
    again: Any = load_published(folder, target().embeddings)
    assert torch.equal(again.mask, head.mask)
    assert not again.mask.requires_grad
    config["mask_token"] = toys.VOCAB
    with pytest.raises(ValueError, match=r"head\.mask_token is 40: the target has 40 tokens"):
        HEADS["block"](HEADS["block"].Config(**config), target().embeddings)


def test_a_mask_slot_that_training_has_rounded_is_still_its_token(tmp_path: Path) -> None:
    head = made("block", causal=False, feature_layers=[5, 2], mask_token=-1)
    row = target().embeddings.embed(torch.tensor(toys.VOCAB - 1)).detach()
    head.mask.data.copy_(row.bfloat16())
    assert not torch.equal(head.mask, row)
    folder = exported(head, "dflash", tmp_path)
    assert json.loads((folder / "config.json").read_text())["dflash_config"]["mask_token_id"] == toys.VOCAB - 1
