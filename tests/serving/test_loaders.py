"""The newest engines' own classes load what we export, filling all tensors but those that are the target's.

vLLM leaves a tensor that a file lacks as memory happened to be, and SGLang passes over names that it does not know,
both without a word: each script fills all with NaN first and names what stayed so.
"""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from eval.report.write import serving_config
from heads.formats.published import mimo
from tests.serving.engines import TARGET, asked
from tests.serving.heads_of_ours import exported, made

pytestmark = pytest.mark.serving
EMBEDDING = "model.embed_tokens.weight"
PRUNED = {"draft_vocab": 700}
PLAIN = {"feature_norm": False, "norm_output": False}
DFLASH = {"from_anchor": False, "markov_rank": None}
DSPARK = {"from_anchor": True, "markov_rank": 16, "confidence": True}
AS_TARGET = {"norm_eps": 1e-6}
DFLASH2 = {"from_anchor": False, "markov_rank": None, "conv": 2, "selector_rank": 16}
DOMINO = {"from_anchor": True, "markov_rank": None, "domino": 64, "domino_rank": 16}
# kind, options, vLLM's method and class, SGLang's class, "" where it has none
HEADS: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "eagle": ("eagle", {}, "eagle", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
    "eagle deep": ("eagle", {"layers": 2}, "eagle", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
    "hass": ("hass", {}, "eagle", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
    "eagle3": ("eagle3", PLAIN, "eagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"),
    "eagle3 pruned": ("eagle3", PLAIN | PRUNED, "eagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"),
    "eagle3.1": ("eagle3", PRUNED, "eagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"),
    "eagle3 deep": ("eagle3", {"layers": 3}, "eagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"),
    "eagle3 of two": (
        "eagle3", {"feature_layers": [3, 9]}, "eagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"
    ),
    "eagle3 shared": ("eagle3", {"lm_head": "shared"}, "eagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"),
    "eagle3 of speculators": (
        "eagle3", {"feature_norm": False, "joint_norm": True}, "eagle3", "Eagle3LlamaForCausalLM",
        "LlamaForCausalLMEagle3",
    ),
    "peagle": ("peagle", {}, "eagle3", "Eagle3LlamaForCausalLM", ""),
    "peagle with its embedding": (
        "peagle", {"embedding": "own"} | PRUNED, "eagle3", "Eagle3LlamaForCausalLM", ""
    ),
    "mtp": ("mtp", AS_TARGET, "mtp", "MiMoMTP", "MiMoMTP"),
    "mtp with norms": ("mtp", AS_TARGET | {"qk_norm": True}, "mtp", "MiMoMTP", ""),
    "dflash causal": ("block", DFLASH, "dflash", "DFlashQwen3ForCausalLM", "DFlashDraftModel"),
    "dflash": ("block", DFLASH | {"causal": False}, "dflash", "DFlashQwen3ForCausalLM", "DFlashDraftModel"),
    "dspark": ("block", DSPARK, "dspark", "Qwen3DSparkForCausalLM", "Qwen3DSparkModel"),
    "dflash2": ("block", DFLASH2, "dflash", "DFlash2Qwen3ForCausalLM", "DFlash2DraftModel"),
    "domino": ("block", DOMINO, "", "", "DFlashDraftModel"),
}  # fmt: skip
OF_VLLM = [name for name in HEADS if HEADS[name][3]]
OF_SGLANG = [name for name in HEADS if HEADS[name][4]]
CLASSES = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}  # of speculators
OF_SPECULATORS = [name for name in HEADS if HEADS[name][0] in CLASSES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    return {
        name: exported(made(kind, **options), "vllm" if method else "sglang", root / name.replace(" ", "-"))
        for name, (kind, options, method, *_) in HEADS.items()
    }


@pytest.fixture(scope="module")
def vllm(folders: dict[str, Path]) -> dict[str, Any]:
    job = []
    for name in OF_VLLM:
        kind, options, method, *_ = HEADS[name]
        overrides = mimo.overrides(options) if kind == "mtp" else {}  # by these keys vLLM makes an MTP module
        job.append({"folder": str(folders[name]), "method": method, "tokens": 5, "overrides": overrides})
    answer = asked("load_vllm.py", {"target": str(TARGET), "heads": job}, newest="vllm")
    assert answer["version"] == "0.33.0"
    return dict(zip(OF_VLLM, answer["heads"], strict=True))


@pytest.fixture(scope="module")
def sglang(folders: dict[str, Path]) -> dict[str, Any]:
    job = {"target": str(TARGET), "heads": [str(folders[name]) for name in OF_SGLANG]}
    answer = asked("load_sglang.py", job, newest="sglang")
    assert answer["version"] == "0.5.23"
    return dict(zip(OF_SGLANG, answer["heads"], strict=True))


@pytest.fixture(scope="module")
def speculators(folders: dict[str, Path]) -> dict[str, Any]:
    job = {"target": str(TARGET), "heads": [str(folders[name]) for name in OF_SPECULATORS]}
    answer = asked("load_speculators.py", job)
    assert answer["version"] == "0.9.0"
    return dict(zip(OF_SPECULATORS, answer["heads"], strict=True))


def drafted(folder: Path) -> list[int] | None:
    """Return the tokens that a head drafts, None where it drafts all."""
    known = load_file(folder / "model.safetensors").get("t2d")
    return None if known is None else known.nonzero()[:, 0].tolist()


def sight(name: str) -> dict[str, list[bool]]:
    """Return what an engine says of a block's layers: whether a slot sees the slots before it alone."""
    kind, options, *_ = HEADS[name]
    return {"causal": [options.get("causal", True)] * 2} if kind == "block" else {}


@pytest.mark.parametrize("name", OF_VLLM)
def test_vllm_fills_every_tensor_but_the_targets(name: str, vllm: dict[str, Any]) -> None:
    kind, options, _, expected, _ = HEADS[name]
    own = {"block": {EMBEDDING, "lm_head.weight", "model.mask_embedding"}, "mtp": {EMBEDDING, "lm_head.weight"}}.get(
        kind, {EMBEDDING}
    )
    if options.get("embedding") == "own":
        own = set()
    assert vllm[name] == {"class": expected, "unfilled": sorted(own)} | sight(name)


@pytest.mark.parametrize("name", OF_SGLANG)
def test_sglang_fills_every_tensor_but_the_targets(name: str, sglang: dict[str, Any], folders: dict[str, Path]) -> None:
    kind, *_, expected = HEADS[name]
    own = {"eagle3": [EMBEDDING], "block": []}.get(kind, ["lm_head.weight", EMBEDDING])
    assert sglang[name] == {"class": expected, "unfilled": own, "drafted": drafted(folders[name])} | sight(name)


@pytest.mark.parametrize("name", OF_SPECULATORS)
def test_speculators_fills_every_tensor(name: str, speculators: dict[str, Any], folders: dict[str, Path]) -> None:
    assert speculators[name] == {"class": CLASSES[HEADS[name][0]], "unfilled": [], "drafted": drafted(folders[name])}


def test_vllm_takes_a_schedule_as_it_was_measured(folders: dict[str, Path]) -> None:
    said = serving_config({1: 3, 16: 1, 32: 0})
    job = {"folder": str(folders["eagle3"]), "method": "eagle3", "tokens": said["num_speculative_tokens"]}
    job["schedule"] = said["num_speculative_tokens_per_batch_size"]
    (found,) = asked("load_vllm.py", {"target": str(TARGET), "heads": [job]}, newest="vllm")["heads"]
    assert found.get("drafted", [found])[1:] == [3] * 15 + [1] * 16 + [0] * 33
