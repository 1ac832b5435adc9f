"""MTP modules of toy targets as they are published: tensors by their names, and the formulas in plain torch.

DeepSeek-V3: arXiv 2412.19437, sections 2.1 and 2.2. GLM-4.5, MiMo, Qwen3-Next and Qwen3.5: their model cards' code.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from inference.target.target import Target
from tests import families

BEHIND = {"embedding": "enorm", "state": "hnorm", "project": "eh_proj", "final": "shared_head.norm"}
APART = {"embedding": "pre_fc_norm_embedding", "state": "pre_fc_norm_hidden", "project": "fc", "final": "norm"}
MIMO = {
    "embedding": "token_layernorm",
    "state": "hidden_layernorm",
    "project": "input_proj",
    "final": "final_layernorm",
}


class Published(NamedTuple):
    """A family in tests/families.py, its further values, its module's names, and whether norms scale by 1 + weight."""

    family: str
    more: dict[str, Any]
    outer: str
    names: dict[str, str]
    inner: str
    plus_one: bool = False


MODULES = {
    "DeepSeek-V3": Published(
        "deepseek_v3", {"n_group": 2, "topk_group": 1}, "model.layers.3.", BEHIND, "model.layers.3."
    ),
    "GLM-4.5": Published(
        "glm4_moe", {"use_qk_norm": True, "attention_bias": True}, "model.layers.3.", BEHIND, "model.layers.3."
    ),
    "MiMo": Published("qwen2", {}, "model.mtp_layers.0.", MIMO, "model.mtp_layers.0."),
    "Qwen3-Next": Published("qwen3_next", {}, "mtp.", APART, "mtp.layers.0.", plus_one=True),
    "Qwen3.5": Published("qwen3_5", {}, "mtp.", APART, "mtp.layers.0.", plus_one=True),
    "Qwen3.5 with experts": Published("qwen3_5_moe", {}, "mtp.", APART, "mtp.layers.0.", plus_one=True),
}


def target(name: str, dtype: torch.dtype) -> Target:
    """Return the toy target of a module's family."""
    return families.target.__wrapped__(MODULES[name].family, dtype, **MODULES[name].more)


def module(name: str, like: Target) -> dict[str, Tensor]:
    """Return a module with random weights; experts are apart, and stacked in Qwen3.5."""
    published, width = MODULES[name], like.embeddings.hidden_size
    generator = torch.Generator().manual_seed(7)
    shapes = {published.inner + part: tensor.shape for part, tensor in like.decoder_layers[-1].state_dict().items()}
    shapes |= {f"{published.outer}{part}.weight": torch.Size([width]) for part in published.names.values()}
    shapes[f"{published.outer}{published.names['project']}.weight"] = torch.Size([width, 2 * width])
    made = {part: 0.3 * torch.randn(shape, generator=generator).to(like.dtype) for part, shape in shapes.items()}
    made = {part: tensor + (not published.plus_one) * ("norm" in part) for part, tensor in made.items()}
    return made if name == "Qwen3.5 with experts" else apart(made)


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write stacked experts one by one."""
    made = {}
    for part, tensor in tensors.items():
        stem, _, kind = part.rpartition(".")
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for i, expert in enumerate(tensor if stem.endswith(".experts") else ()):
            pieces = zip(names, expert.chunk(len(names)), strict=True)
            made |= {f"{stem}.{i}.{one}.weight": piece.clone() for one, piece in pieces}
        made |= {} if stem.endswith(".experts") else {part: tensor}
    return made


class Formulas:
    """A module's forward pass over one text, tensor by tensor."""

    def __init__(self, name: str, like: Target, tensors: dict[str, Tensor]) -> None:
        self.published, self.config, self.embed = MODULES[name], like.config, like.embeddings.embed
        self.tensors = tensors

    def weight(self, part: str) -> Tensor:
        return self.tensors[f"{self.published.inner}{part}"]

    def has(self, part: str) -> bool:
        return f"{self.published.inner}{part}" in self.tensors

    def linear(self, part: str, x: Tensor) -> Tensor:
        y = x @ self.weight(f"{part}.weight").T
        return y + self.weight(f"{part}.bias") if self.has(f"{part}.bias") else y

    def norm(self, x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
        eps = self.config.rms_norm_eps if eps is None else eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + self.published.plus_one)

    def outer(self, part: str) -> Tensor:
        return self.tensors[f"{self.published.outer}{self.published.names[part]}.weight"]

    def entered(self, token: Tensor, state: Tensor) -> Tensor:
        """Return the layer's input: the next token's embedding and the state, which comes first in MiMo."""
        both = [self.norm(self.embed(token), self.outer("embedding")), self.norm(state, self.outer("state"))]
        both = both[::-1] if self.published.names is MIMO else both
        return torch.cat(both, -1) @ self.outer("project").T

    def states(self, x: Tensor) -> Tensor:
        """Return the module's states of a text whose inputs have entered, the layer's and the final norm's."""
        x = x + self.attention(self.norm(x, self.weight("input_layernorm.weight")))
        x = x + self.mlp(self.norm(x, self.weight("post_attention_layernorm.weight")))
        return self.norm(x, self.outer("final"))

    def rotated(self, x: Tensor, size: int, pairs: bool = False) -> Tensor:
        """Rotate the first `size` values of every head by their row's angles; pairs are neighbours or half apart."""
        theta = self.config.rope_parameters["rope_theta"]
        angle = torch.arange(len(x))[:, None, None] * theta ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
        first, second = (x[..., 0:size:2], x[..., 1:size:2]) if pairs else x[..., :size].chunk(2, -1)
        turned = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
        return torch.cat([*turned, x[..., size:]], -1)

    def attention(self, x: Tensor) -> Tensor:
        rows, heads, gate = len(x), self.config.num_attention_heads, None
        if self.has("self_attn.kv_a_proj_with_mqa.weight"):
            q, k, v = self.latent(x)
        else:
            groups = self.config.num_key_value_heads
            k, v = (self.linear(f"self_attn.{part}_proj", x).view(rows, groups, -1) for part in "kv")
            q = self.linear("self_attn.q_proj", x).view(rows, heads, -1)
            if q.shape[-1] > k.shape[-1]:  # Qwen3-Next's query has a gate behind each head
                q, gate = q.chunk(2, -1)
            if self.has("self_attn.q_norm.weight"):
                q, k = (self.norm(y, self.weight(f"self_attn.{part}_norm.weight")) for y, part in ((q, "q"), (k, "k")))
            size = int(k.shape[-1] * self.config.rope_parameters.get("partial_rotary_factor", 1.0))
            q, k = self.rotated(q, size), self.rotated(k, size)
            k, v = (y.repeat_interleave(heads // groups, 1) for y in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
        shut = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        out = torch.einsum("hts,shd->thd", scores.masked_fill(shut, -torch.inf).softmax(-1), v)
        out = out if gate is None else out * gate.sigmoid()
        return self.linear("self_attn.o_proj", out.reshape(rows, -1))

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of multi-head latent attention, whose norms have an epsilon of their own."""
        c, rows, heads = self.config, len(x), self.config.num_attention_heads
        turning, plain = c.qk_rope_head_dim, c.qk_nope_head_dim
        low = self.norm(self.linear("self_attn.q_a_proj", x), self.weight("self_attn.q_a_layernorm.weight"), 1e-6)
        q = self.linear("self_attn.q_b_proj", low).view(rows, heads, plain + turning)
        low, shared = self.linear("self_attn.kv_a_proj_with_mqa", x).split([c.kv_lora_rank, turning], -1)
        low = self.norm(low, self.weight("self_attn.kv_a_layernorm.weight"), 1e-6)
        k, v = self.linear("self_attn.kv_b_proj", low).view(rows, heads, -1).split([plain, c.v_head_dim], -1)
        q = torch.cat([q[..., :plain], self.rotated(q[..., plain:], turning, pairs=True)], -1)
        shared = self.rotated(shared[:, None], turning, pairs=True).expand(-1, heads, -1)
        return q, torch.cat([k, shared], -1), v

    def gated(self, part: str, x: Tensor) -> Tensor:
        return self.linear(
            f"{part}.down_proj", silu(self.linear(f"{part}.gate_proj", x)) * self.linear(f"{part}.up_proj", x)
        )

    def mlp(self, x: Tensor) -> Tensor:
        if not self.has("mlp.gate.weight"):
            return self.gated("mlp", x)
        routed = torch.stack([self.experts(row) for row in x])
        if self.has("mlp.shared_experts.up_proj.weight"):
            return routed + self.gated("mlp.shared_experts", x)
        return routed + self.linear("mlp.shared_expert_gate", x).sigmoid() * self.gated("mlp.shared_expert", x)

    def experts(self, row: Tensor) -> Tensor:
        """Return the chosen experts' sum for one row, by weights that are normed over them."""
        c, scores, factor = self.config, self.linear("mlp.gate", row), 1.0
        chance, best = scores.softmax(-1), scores
        if self.has("mlp.gate.e_score_correction_bias"):
            chance, factor = scores.sigmoid(), c.routed_scaling_factor
            best = (chance + self.weight("mlp.gate.e_score_correction_bias")).view(c.n_group, -1)
            groups = best.topk(2).values.sum(-1).topk(c.topk_group).indices.tolist()
            best[[group for group in range(c.n_group) if group not in groups]] = -torch.inf
        chosen = best.flatten().topk(c.num_experts_per_tok).indices.tolist()
        total = sum(chance[i] for i in chosen)
        return sum(factor * chance[i] / total * self.expert(i, row) for i in chosen)

    def expert(self, i: int, row: Tensor) -> Tensor:
        if not self.has("mlp.experts.gate_up_proj"):
            return self.gated(f"mlp.experts.{i}", row)
        gate, up = (self.weight("mlp.experts.gate_up_proj")[i] @ row).chunk(2)
        return self.weight("mlp.experts.down_proj")[i] @ (silu(gate) * up)
