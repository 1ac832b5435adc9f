"""vLLM on this CPU serves a target with a head of ours as its own MTP module: the same text, accepting what we accept.

A toy of each family, wide enough for vLLM's kernels; the head knows half of the texts, where most of it is accepted.
Of Qwen3-Next and DeepSeek-V3 only that they load and draft is tested: vLLM's kernels for CPUs run the one in bf16
alone, and write another text of the other than transformers does, with no draft at all.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from heads.formats.store import save_head
from heads.mtp import Mtp
from inference.decode import RequestParams, Step, speculate
from inference.drafters.head import MtpDrafter
from inference.protocol import Drafter
from inference.target.target import Target
from inference.verification.sample import GREEDY
from tests import families, toys
from tests.serving.conftest import command
from tests.serving.engines import asked
from tests.serving.test_llama import chain
from train.start import from_target

pytestmark = pytest.mark.serving
WIDE = toys.SIZES | {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.2}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
EXPERTS |= {"topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
DENSE = {key: value for key, value in WIDE.items() if key != "head_dim"}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 32}
LATENT |= {"num_key_value_heads": 4}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
QWEN35 = {"head_dim": 256, "tie_word_embeddings": False}  # Qwen3.5 rotates a quarter of a head, by three axes
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "MiMoForCausalLM": ("Qwen2Config", DENSE),
    "Glm4MoeForCausalLM": ("Glm4MoeConfig", WIDE | EXPERTS),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", DENSE | EXPERTS | LATENT),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", WIDE | DELTA),
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", WIDE | DELTA | QWEN35),
    "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeTextConfig", WIDE | DELTA | QWEN35),
    "Qwen3ForCausalLM": ("Qwen3Config", WIDE),  # which has no module of its own: see test_served.py
}
DEPTHS = {"MiMoForCausalLM": 2, "Glm4MoeForCausalLM": 1}  # for GLM vLLM feeds back what its class has not normed
UNLIKE: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": {"block_size": 16},
    "Qwen3NextForCausalLM": {"dtype": "bfloat16", "block_size": None, "enable_prefix_caching": False},
}
TOKENS, PROMPTS = 48, [toys.prompt(seed, 24) for seed in range(8)]


def target_of(folder: Path, architecture: str) -> Target:
    kind, values = KINDS[architecture]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values))
    model.save_pretrained(folder)
    toys.tokenizer().save_pretrained(folder)
    router = {"topk_method": "noaux_tc"} if architecture.startswith("Deepseek") else {}  # as published ones say
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture], **router}
    (folder / "config.json").write_text(json.dumps(config))
    return Target.load(str(folder), "float32", "cpu")


def head_of(target: Target, architecture: str) -> Any:
    """Return a head that starts as the target's last layer."""
    options = {"layer": "target", "raw_state": architecture == "MiMoForCausalLM"}
    return from_target(Mtp.Config(name="mtp", **toys.HEAD_CONFIGS["mtp"] | options), "last_layer", target, "")


def train(head: Any, target: Target, texts: list[list[int]], depths: int) -> None:
    """Teach a head what follows in these texts."""
    optimizer, token = torch.optim.Adam(head.parameters(), 2e-3), torch.tensor(texts)
    rows = target.features(token, torch.zeros_like(token), head.feature_layers)
    for _ in range(60):
        optimizer.zero_grad()
        for depth, draft in enumerate(head.unroll(rows, depths), 1):
            logits = head.compute_logits(draft.state[:, : -1 - depth], depth)
            functional.cross_entropy(logits.flatten(0, 1), token[:, 1 + depth :].flatten()).backward(retain_graph=True)
        optimizer.step()


def stitched(root: Path, head: Any, target: Target) -> Path:
    run, out = root / "run", root / "out"
    save_head(run / "head", head, target.spec, {"kind": "chain", "depth": 1})
    command("train/publish.py", f"run={run}", "repo=me/x", "format=checkpoint", "dry_run=true", f"out={out}")
    return out


def served(folder: Path, depth: int, **engine: Any) -> dict[str, Any]:
    """Return what vLLM writes with its module."""
    job = {"target": str(folder), "prompts": PROMPTS, "tokens": TOKENS, "engine": engine}
    answer: dict[str, Any] = asked(
        "serve_vllm.py", job | {"speculative": {"method": "mtp", "num_speculative_tokens": depth}}
    )
    return answer


def passes(
    target: Target, drafter: Drafter, prompts: list[list[int]], answers: list[list[int]], depth: int
) -> list[Step]:
    """Return our passes until each answer is whole, with all that they accept."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        made = speculate(target, drafter, prompt, RequestParams(len(answer) + depth + 1, GREEDY))
        assert made.tokens[: len(answer)] == answer
        written = 1  # by the prefill
        for step in made.steps:
            if written < len(answer):
                found.append(step)
                written += step.committed
    return found


@pytest.mark.parametrize(("architecture", "depth"), DEPTHS.items())
def test_vllm_drafts_with_the_head_as_the_targets_own_module(tmp_path: Path, architecture: str, depth: int) -> None:
    target = target_of(tmp_path / "target", architecture)
    plain = [families.generated(target, prompt, TOKENS) for prompt in PROMPTS]  # which is vLLM's own too
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)]
    head = head_of(target, architecture)
    train(head, target, texts[:4], depth)
    out = stitched(tmp_path, head, target)
    answer = served(out, depth)
    assert answer["tokens"] == plain
    again = Target.load(str(out), "float32", "cpu")
    drafter = MtpDrafter(MtpDrafter.Config(None, chain(depth)), again, "mtp")
    steps = passes(again, drafter, PROMPTS, plain, depth)
    ours = [sum(step.accepted > position for step in steps) for position in range(depth)]
    theirs = answer["accepted_tokens_per_pos"]
    print(f"{architecture}: vLLM accepts {theirs} of {answer['drafts']} drafts, we {ours} of {len(steps)}")
    assert 0.2 < ours[0] / len(steps) < 0.9
    assert answer["drafts"] == pytest.approx(len(steps), rel=0.02)
    assert theirs == pytest.approx(ours, abs=0.02 * len(steps))


@pytest.mark.parametrize(("architecture", "engine"), UNLIKE.items())
def test_vllm_loads_what_its_kernels_for_cpus_run_otherwise(
    tmp_path: Path, architecture: str, engine: dict[str, Any]
) -> None:
    target = target_of(tmp_path / "target", architecture)
    out = stitched(tmp_path, head_of(target, architecture), target)
    assert served(out, 1, **engine)["drafts"] > 0
