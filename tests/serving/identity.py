"""A target and heads whose acceptance is known without running them: each drafts the token that it was given, again."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from heads import HEADS
from heads.formats.published.export import Served, export
from inference.target.target import Target
from tests import toys

LAYERS, VOCAB, DEPTH = 8, 64, 3
KINDS: dict[str, dict[str, Any]] = {
    "eagle": {"bias": False, "layers": 1, "length": None},
    "eagle3": {"layers": 1, "feature_layers": None, "draft_vocab": None, "length": None},
    "medusa": {"heads": DEPTH},
}


def target(folder: Path) -> Target:
    """Write a target whose last layers keep their state, so that heads read what its lm_head reads."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, initializer_range=0.15,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for layer in model.model.layers[LAYERS - 3 :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    toys.tokenizer().save_pretrained(folder)
    return Target.load(str(folder), "float32", "cpu")


@torch.no_grad()
def identity(kind: str, of: Target, folder: Path) -> Path:
    """Write a head for vLLM that hands on the last of its features, to the target's lm_head."""
    width = of.embeddings.hidden_size
    head: Any = HEADS[kind](
        HEADS[kind].Config(**{"name": kind, **toys.HEAD_CONFIGS[kind], **KINDS[kind]}), of.embeddings
    )
    for name, tensor in head.state_dict().items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "bias")) or "blocks" in name:
            tensor.zero_()
        elif name.endswith("fc.weight"):
            tensor.zero_()[:, -width:] = torch.eye(width)
        elif "lm_head" in name:
            tensor.copy_(of.embeddings.head_weight())
    config = of.config.to_dict()
    export(head, "vllm", Served("deep", config, torch.float32, DEPTH), folder)
    return folder


def expected(texts: list[list[int]], tokens: int, depth: int) -> dict[str, Any]:
    """Return what an engine counts until each answer has its tokens, by the text alone, which goes on behind them.

    A draft repeats the newest token; as many of them stand as the text itself repeats it.
    """
    drafts, accepted = 0, [0] * depth
    for text in texts:
        at = 0
        while at < tokens - 1:
            run = 0
            while run < depth and text[at + 1 + run] == text[at]:
                accepted[run] += 1
                run += 1
            drafts, at = drafts + 1, at + run + 1
    return {
        "drafts": drafts, "draft_tokens": drafts * depth, "accepted_tokens": sum(accepted),
        "accepted_tokens_per_pos": accepted,
    }  # fmt: skip
