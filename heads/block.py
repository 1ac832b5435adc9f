"""Block-parallel heads: one pass drafts all depths, with the target's features as keys and values of every layer.

DFlash (arXiv 2602.06036): a block is the root token t+1 and one masked position for each depth; position d has the
rotary position of token t+1+d and predicts it. In every layer, keys and values are projections of the fused target
features up to row t and of the block, by the same weights; the features have no other input. The embedding and lm_head
are the target's. Options:

mask_token     masked positions hold the target's embedding of this token, as in DFlash; null trains a vector
causal         a position sees only earlier positions of its block (JetSpec, arXiv 2606.18394), so that the depths'
               distributions agree along a path; else all positions see each other, as in DFlash
from_anchor    the root token's position drafts too, and each position predicts the next token (DSpark, arXiv
               2607.05147), so a block has one position fewer
markov_rank    adds a low-rank term to the logits that depends on the token drafted before (DSpark)
confidence     predicts each draft's acceptance (DSpark)
domino         adds a term to the logits that depends on all tokens drafted before
selector_rank  adds a term that depends on the position and the token before it (z-lab's DFlash2; vllm#52816)
conv           adds convolutions to the layers (DFlash2)
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from heads.base import (
    DepthOutput,
    Embeddings,
    Features,
    HeadModule,
    LayerConfig,
    LevelNodes,
    LevelOutput,
    NewRows,
    draft_size,
    embedding_of,
    token_id,
)
from heads.common.typed import Count, Parts, Width
from heads.modules.attention import KeyValue, attend_rows
from heads.modules.fusion import DFLASH_LAYERS, Fusion, chosen_layers
from heads.modules.kv_cache import KVCache, mask_blocks_after, mask_blocks_after_roots
from heads.modules.layers import DecoderLayer, LayerInputs, LayerSpec, RMSNorm
from heads.modules.vocab import DraftLmHead, VocabularyLinear
from heads.rows import drafted_token, gather_parents, last_rows, next_token, positions, scatter_rows
from heads.shapes import Anchors, Inputs, LayerRows, Logits, Nodes, Rows, Sequences, States, TokenIds

Position = Float[Tensor, "*#n D"]  # a state of a block's position, which may serve several nodes
PositionLogits = Float[Tensor, "*#n W"]
Memory = Float[Tensor, "*n G"]  # a GRU's state


class GroupedConv(nn.Module):
    """Two causal convolutions over the positions of blocks of `size`, before and after a sublayer.

    The kernel is a learned weight for each channel plus a weight for each group of channels that is computed from the
    sublayer's input. Both convolutions start as the identity.
    """

    def __init__(self, width: int, size: int, taps: int, group: int) -> None:
        super().__init__()
        self.size = size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def forward(self, x: Rows, layer: Any, *args: Any) -> Rows:
        """Apply a sublayer between its two convolutions."""
        taps = self.base_kernel.shape[1]
        added = self.kernel_projection(x.unflatten(1, (-1, self.size))).unflatten(-1, (2, taps, -1))
        base = self.base_kernel.unflatten(-1, (added.shape[-1], -1))

        def convolve(x: Tensor, i: int) -> Tensor:
            """Return each position's sum over itself and earlier positions, weighted by its own kernel."""
            kernel = base[i] + added[..., i, :, :, None]
            groups = x.unflatten(1, (-1, self.size)).unflatten(-1, kernel.shape[-2:])
            shifted = [functional.pad(groups, (0, 0, 0, 0, tap, 0))[:, :, : self.size] for tap in range(taps)]
            return (torch.stack(shifted, -3) * kernel).sum(-3).flatten(-2).flatten(1, 2)

        return convolve(layer(convolve(x, 0), *args), 1)


class ConvDecoderLayer(DecoderLayer):
    """A decoder layer over blocks of `size` positions, with convolutions around attention and MLP."""

    def __init__(self, spec: LayerSpec, *, size: int, taps: int, group: int) -> None:
        super().__init__(spec)
        self.attention_conv, self.mlp_conv = (GroupedConv(spec.width, size, taps, group) for _ in range(2))

    def forward(self, x: Rows, inputs: LayerInputs) -> Rows:
        """Apply the layer with the caller's attention pattern."""
        x = x + self.attention_conv(self.input_layernorm(x), self.self_attn, inputs)
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)


class Selector(nn.Module):
    """A score of each candidate token c after token p: <A[p] * P(h), B[c]>, added to the candidate's logit.

    Candidates are the position's `top_k` tokens by logits. All other tokens, which the authors do not draft, keep their
    order below the last candidate, so that their logits are trained too.
    """

    def __init__(self, width: int, rank: int, top_k: int, size: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor = nn.Embedding(size, rank)
        self.projection = nn.Linear(width, rank, bias=False)
        self.successor = nn.Embedding(size, rank)
        for embedding in (self.predecessor, self.successor):
            nn.init.normal_(embedding.weight, std=0.02)

    def context(self, hidden: Position, token: TokenIds) -> Inputs:
        """Return A[p] * P(h) of a position's state h and the token p before it."""
        return self.predecessor(token).to(hidden.dtype) * self.projection(hidden)

    def forward(self, logits: PositionLogits, context: Inputs) -> Logits:
        """Return the selector's logits."""
        best = logits.topk(min(self.top_k, logits.shape[-1]), -1)
        scores = best.values + (self.successor(best.indices) * context[..., None, :]).sum(-1)
        below = logits - best.values[..., -1:] + scores.amin(-1, keepdim=True)
        return below.scatter(-1, best.indices.expand_as(scores), scores)


class Domino(nn.Module):
    """Domino (arXiv 2605.29707): a GRU over a block's tokens; its state corrects a position's logits.

    The GRU's state and the position's state give a low-rank term. Depth 1 keeps the block's logits, as in the authors'
    published heads: its position attends to the only token before it.
    """

    def __init__(self, width: int, inner: int, rank: int, size: int) -> None:
        super().__init__()
        self.inner = inner
        self.gru = nn.GRUCell(width, inner, bias=False)
        self.down = nn.Linear(width + inner, rank, bias=False)
        self.up = VocabularyLinear(rank, size, bias=False)

    def advance(self, embedding: States, memory: Memory | None) -> Memory:
        """Return the GRU's state after one more token; `memory` is the state before, None for the first token."""
        flat = embedding.to(self.gru.weight_ih.dtype).flatten(0, -2)
        new = self.gru(flat, None if memory is None else memory.flatten(0, -2))
        return new.unflatten(0, embedding.shape[:-1])

    def forward(self, logits: PositionLogits, hidden: Position, memory: Memory, depth: int) -> PositionLogits:
        """Return the corrected logits, given the GRU's states."""
        if depth == 1:
            return logits
        state = torch.cat([hidden.expand(*memory.shape[:-1], -1), memory], -1)
        return logits + self.up(functional.silu(self.down(state)))


class Block(HeadModule):
    """The block head; `depths` is the number of drafted tokens."""

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Hyperparameters of the head; `feature_layers` null takes five layers."""

        depths: Parts
        layers: Parts
        feature_layers: list[int] | None
        causal: bool
        from_anchor: bool
        markov_rank: Width | None
        domino: Width | None
        domino_rank: Width
        selector_rank: Width | None
        selector_top_k: Count
        conv: Count | None
        conv_group: Width
        confidence: bool
        mask_token: int | None
        qk_norm: bool

        def __post_init__(self) -> None:
            terms = [name for name in ("markov_rank", "domino", "selector_rank") if getattr(self, name) is not None]
            if len(terms) > 1:
                raise ValueError(f"head.{terms[0]} and head.{terms[1]} correct the same logits: give one of them")
            if self.selector_rank is not None and self.draft_vocab is not None:
                raise ValueError("head.selector_rank selects among the whole vocabulary: give head.draft_vocab=null")

    has_kv_cache = True

    def __init__(self, config: Config, embeddings: Embeddings) -> None:
        super().__init__(config, embeddings)
        self.max_depth = config.depths
        self.idle = 0 if config.from_anchor else 1  # positions that draft nothing: the anchor's, or none
        self.size = config.depths + self.idle
        spec = LayerSpec.of(config, embeddings)
        width, eps = spec.width, spec.eps
        self.feature_layers = chosen_layers(config.feature_layers, DFLASH_LAYERS, embeddings.num_layers)
        self.fusion = Fusion(width, len(self.feature_layers), eps, normed=False)
        self.hidden_norm = RMSNorm(width, eps)
        token = None if config.mask_token is None else token_id(config.mask_token, embeddings)
        start = torch.randn(width) * 0.02 if token is None else torch.empty(width)
        self.mask = nn.Parameter(start, requires_grad=token is None)
        if token is not None and not start.is_meta:  # a meta tensor has no values
            self.mask.data.copy_(embedding_of(embeddings, torch.tensor(token)))
        self.layers = nn.ModuleList(
            DecoderLayer(spec)
            if config.conv is None
            else ConvDecoderLayer(spec, size=self.size, taps=config.conv, group=config.conv_group)
            for _ in range(config.layers)
        )
        self.norm = RMSNorm(width, eps)
        self.lm_head = DraftLmHead(embeddings, config.lm_head, self.vocab)
        size, rank = draft_size(self), config.markov_rank
        self.before = None if rank is None else nn.Embedding(embeddings.vocab_size, rank)
        self.bias = None if rank is None else VocabularyLinear(rank, size, bias=False)
        if self.bias is not None:
            nn.init.zeros_(self.bias.weight)
        inner, edges = config.domino, config.selector_rank
        self.domino = None if inner is None else Domino(width, inner, config.domino_rank, size)
        self.selector = None if edges is None else Selector(width, edges, config.selector_top_k, size)
        self.confidence = nn.Linear(width + (rank or 0), 1) if config.confidence else None

    def context(self, hidden: LayerRows, position: Sequences, max_position: int) -> tuple[KeyValue, ...]:
        """Return every layer's keys and values from the target's features."""
        fused = self.hidden_norm(self.fusion(hidden))
        layers: Any = self.layers
        return tuple(layer.self_attn.key_value(fused, position, max_position) for layer in layers)

    def block_inputs(self, root: TokenIds) -> Float[Tensor, "*n S D"]:
        """Return the input embeddings of the blocks of these root tokens."""
        embedding = self.embeddings.embed(root).to(self.mask.dtype)[..., None, :]
        return torch.cat([embedding, self.mask.expand(*root.shape, self.size - 1, -1)], -2)

    def correction_input(self, hidden: Position, token: TokenIds) -> Inputs | None:
        """Return the context from which the previous token corrects the logits; None without a correction."""
        if self.before is not None:
            return self.before(token).to(hidden.dtype)
        return None if self.selector is None else self.selector.context(hidden, token)

    def corrected(self, hidden: Position, context: Inputs | None, depth: int) -> Logits:
        """Return the corrected logits of positions; one position may serve several nodes."""
        logits = self.lm_head(hidden)
        if context is None:
            return logits
        if self.domino is not None:
            return self.domino(logits, hidden, context, depth)
        if self.selector is not None:
            return self.selector(logits, context)
        assert self.bias is not None
        return logits + self.bias(context)

    def compute_logits(self, state: Inputs, depth: int) -> Logits:
        """Return a depth's logits; states without a context for the correction give uncorrected logits."""
        width = self.embeddings.hidden_size
        context = state[..., width:] if state.shape[-1] > width else None
        return self.corrected(state[..., :width], context, depth)

    def unroll(self, features: Features, depths: int, anchors: Anchors = None) -> list[DepthOutput]:
        """Draft a block from every anchor, all blocks in one pass."""
        self.check_depths(depths)
        config, length = self.config, features.token.shape[1]
        anchor, at, seen = mask_blocks_after(features.document, anchors, self.size, config.length, causal=config.causal)
        position, max_position = positions(features.document), length + self.size
        context = self.context(features.hidden, position, max_position)
        x = self.block_inputs(next_token(features.token).gather(1, anchor)).flatten(1, 2)
        for layer, pair in zip(self.layers, context, strict=True):
            attend = partial(lambda pair, q, k, v: attend_rows(q, pair, [(k, v)], seen), pair)
            x = layer(x, LayerInputs(at, max_position, attend))
        states, drafts = self.norm(x).unflatten(1, (-1, self.size))[:, :, self.idle :], []
        memory = None
        for depth, state in enumerate(states.unbind(2), 1):
            token = drafted_token(features.token, depth, features.path).gather(1, anchor)
            before = self.correction_input(state, token)
            if self.domino is not None:
                before = memory = self.domino.advance(self.embeddings.embed(token), memory)
            full = state if before is None else torch.cat([state, before.to(state.dtype)], -1)
            full = scatter_rows(full, anchor, length)
            scorer = self.confidence
            confidence = None if scorer is None else scorer(full[..., : scorer.in_features])[..., 0]
            base = None if before is None else full[..., : state.shape[-1]]
            drafts.append(DepthOutput(full, None, confidence, base))
        return drafts

    def extend(self, state: KVCache | None, new: NewRows) -> tuple[KVCache, LevelOutput]:
        """Append verified rows, and draft a block from each sequence's root."""
        token = new.token
        cache, committed = KVCache.opened(state, self.config.length, token)
        for i, pair in enumerate(self.context(new.features.hidden, committed, cache.longest)):
            cache.append(i, *pair, committed)
        cache.commit(new)
        position, attend = mask_blocks_after_roots(cache, len(token), self.size, causal=self.config.causal)
        root = last_rows(token, new.counts)
        x = self.block_inputs(root).flatten(1, 2)
        for i, layer in enumerate(self.layers):
            x = layer(x, LayerInputs(position, cache.longest + self.size, partial(attend, i)))
        states = self.norm(x)[:, self.idle :]
        if self.domino is not None:  # hidden: the states of all positions, then the GRU's state after the root token
            memory = self.domino.advance(self.embeddings.embed(root), None)
            states = torch.cat([states.flatten(1)[:, None], memory.to(states.dtype)], -1)
        return cache, self._level(states, root, 1)

    def expand(self, state: KVCache, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Score the next depth; the logits depend on the last token of the path, with `domino` on all of it."""
        hidden = level.hidden
        if self.domino is not None:
            hidden, inner = gather_parents(hidden, nodes.parent), self.domino.inner
            memory = self.domino.advance(self.embeddings.embed(nodes.token), hidden[..., -inner:])
            hidden = torch.cat([hidden[..., :-inner], memory.to(hidden.dtype)], -1)
        return self._level(hidden, nodes.token, nodes.depth + 1)

    def _level(self, block_hidden: Rows, token: Nodes, depth: int) -> LevelOutput:
        if self.domino is not None:  # all nodes share the position's state; each node has its own GRU state
            width = self.embeddings.hidden_size
            hidden = block_hidden[:, :1, (depth - 1) * width : depth * width]
            return LevelOutput(self.corrected(hidden, block_hidden[..., -self.domino.inner :], depth), block_hidden)
        hidden = block_hidden[:, depth - 1 : depth]
        logits = self.corrected(hidden, self.correction_input(hidden, token), depth)
        return LevelOutput(logits.expand(-1, token.shape[1], -1), block_hidden)
