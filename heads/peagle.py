"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts all depths in one forward pass.

Row t, which holds the root token t+1, drafts depth 1 as in EAGLE-3. A masked position follows for each further depth:
position d has the embedding of a mask token, learned features (`mask_hidden`) in place of the target's and rotary
position t+d-1. It attends to the verified rows up to t and the masked positions before it, and drafts depth d. No
masked position reads a drafted token, so all nodes of a depth have the same children.

Training computes all masked positions after every row, or after a step's `anchors`. The paper drops a growing share of
the deeper ones (COD sampling), which saves memory and trains deep positions less.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads import rows
from heads.base import DepthOutput, Embeddings, Features, LevelNodes, LevelOutput, NewRows, embedding_of, token_id
from heads.common.typed import LmHead, Parts
from heads.eagle3 import Eagle3, FusedConfig
from heads.modules.attention import attend_rows, pattern
from heads.modules.kv_cache import KVCache, mask_blocks_after, mask_blocks_after_roots
from heads.modules.layers import LayerInputs
from heads.shapes import Anchors, NodeStates, States, TokenIds


class PEagle(Eagle3):
    """The P-EAGLE head, which drafts `depths` tokens; it shares tensors and options with EAGLE-3.

    Its `embedding` is the target's and frozen, or starts as a copy of it and is trained.
    """

    @dataclass(frozen=True)
    class Config(FusedConfig):
        """Hyperparameters of the head and of its masked positions; no state is fed back or injected."""

        depths: Parts
        mask_token: int
        embedding: LmHead

    first_layer = ""

    def __init__(self, config: Config, embeddings: Embeddings) -> None:
        super().__init__(config, embeddings)
        width = embeddings.hidden_size
        self.max_depth, self.mask_token = config.depths, token_id(config.mask_token, embeddings)
        self.mask_hidden = nn.Parameter(torch.randn(len(self.feature_layers), width))
        self.embedding = None
        if config.embedding == "own":
            self.embedding = nn.Embedding(embeddings.vocab_size, width)
            if not self.embedding.weight.is_meta:  # a meta tensor has no values to start from
                self.embedding.weight.data.copy_(embedding_of(embeddings))

    def embed(self, token: TokenIds) -> States:
        """Return the embeddings of tokens."""
        return self.embeddings.embed(token) if self.embedding is None else self.embedding(token)

    def masked_positions(self, inputs: list[LayerInputs]) -> NodeStates:
        """Return the inputs for `compute_logits` at the masked positions."""
        token = torch.full_like(inputs[0].position, self.mask_token)
        return self.advance(token, self.fusion(self.mask_hidden[None, None]).expand(*token.shape, -1), inputs)[1]

    def unroll(self, features: Features, depths: int, anchors: Anchors = None) -> list[DepthOutput]:
        """Draft depth 1 from all rows, and further depths from the masked positions of every anchor."""
        self.check_depths(depths)
        position, length = rows.positions(features.document), self.config.length
        max_position, context = position.shape[1] + depths, []
        attn_pattern = pattern(position, length)

        def attend_true(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            context.append((key, value))
            return attend_rows(query, (key, value), [], attn_pattern)

        token, start = rows.next_token(features.token), self.initial_states(features)
        inputs = [LayerInputs(position, max_position, attend_true)] * self.num_attention_layers
        drafts = [DepthOutput(self.advance(token, start, inputs)[1])]
        if depths == 1:
            return drafts
        anchor, at, in_slots = mask_blocks_after(features.document, anchors, depths - 1, length, causal=True)
        inputs = self.by_layer(at, max_position, lambda i, q, k, v: attend_rows(q, context[i], [(k, v)], in_slots))
        states = self.masked_positions(inputs).unflatten(1, (-1, depths - 1)).unbind(2)
        return drafts + [DepthOutput(rows.scatter_rows(state, anchor, position.shape[1])) for state in states]

    def extend(self, state: KVCache | None, new: NewRows) -> tuple[KVCache, LevelOutput]:
        """Append verified rows with the target's features, and draft all depths from each root."""
        token = new.token
        cache, committed = KVCache.opened(state, self.config.length, token)
        _, pre_logits = self.append_verified(cache, self.initial_states(new.features), new, committed)
        masked, states = self.max_depth - 1, rows.last_rows(pre_logits, new.counts)
        if masked:
            position, attend = mask_blocks_after_roots(cache, len(token), masked, causal=True)
            drafted = self.masked_positions(self.by_layer(position, cache.longest + masked, attend))
            states = torch.cat([states, drafted], 1)
        return cache, self._level(states, 1, 1)

    def expand(self, state: KVCache, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Score the next depth; its logits do not depend on the tokens drafted before."""
        return self._level(level.hidden, nodes.token.shape[1], nodes.depth + 1)

    def _level(self, states: NodeStates, nodes: int, depth: int) -> LevelOutput:
        return LevelOutput(self.compute_logits(states[:, depth - 1 : depth], depth).expand(-1, nodes, -1), states)
