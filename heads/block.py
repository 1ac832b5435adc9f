"""A block-parallel head: one pass drafts all depths, from the target's features as keys and values of every layer.

DFlash (arXiv 2602.06036): the block is the chosen token t+1 and one mask slot a depth, slot d at the position of token
t+1+d, which it predicts. In every layer keys and values are those of the fused target features up to row t and those of
the block, by the same projections; features enter nowhere else. The embedding and lm_head are the target's.

`mask_token`: the slots hold the target's embedding of a token, as in DFlash, and not a vector of their own. `causal`: a
slot sees the slots before it alone (JetSpec, arXiv 2606.18394), so that the depths' distributions are coherent along a
path; else all slots see each other, as in DFlash. `from_anchor`: the chosen token's slot drafts too, and each slot
the token behind its own (DSpark, arXiv 2607.05147), so that a block has one slot less. `markov_rank` adds to a depth's
logits a term of low rank that depends on the token drafted before it, and `confidence` a prediction of each draft's
acceptance (DSpark again).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heads import rows
from heads.base import Draft, Embeddings, Features, Level, check_depths, layer_shape
from heads.common.ranges import Amount, Count, Parts, Positive, Width
from heads.modules.attention import KeyValue, attend_rows
from heads.modules.fusion import DFLASH_LAYERS, Fusion, chosen_layers
from heads.modules.kv_cache import KVCache
from heads.modules.layers import Block as Layer
from heads.modules.layers import RMSNorm
from heads.modules.rope import Rope
from heads.modules.slots import at_rows, behind, behind_roots
from heads.modules.vocab import DraftLmHead, draft_vocabulary
from heads.rows import last_valid


def _mask(token: int | None, embeddings: Embeddings) -> nn.Parameter:
    """Return a mask slot's content: a vector to train, or the target's embedding of a token; -1 is the last one."""
    if token is None:
        return nn.Parameter(torch.randn(embeddings.hidden_size) * 0.02)
    if not -embeddings.vocab_size <= token < embeddings.vocab_size:
        raise ValueError(f"head.mask_token is {token}: the target has {embeddings.vocab_size} tokens; give one of them")
    slot = nn.Parameter(torch.empty(embeddings.hidden_size), requires_grad=False)
    if not slot.is_meta:  # a meta tensor has no values
        device = embeddings.head_weight().device
        slot.data.copy_(embeddings.embed(torch.tensor(token % embeddings.vocab_size, device=device)).detach())
    return slot


class Block(nn.Module):
    """The block head. `depths` is the number of drafted tokens, and of mask slots unless the anchor drafts too."""

    @dataclass(frozen=True)
    class Config:
        """Numbers of the head; null takes the target's own, as `length` all rows, as `feature_layers` five of them."""

        name: str
        depths: Parts
        layers: Parts
        feature_layers: list[int] | None
        causal: bool
        from_anchor: bool
        markov_rank: Width | None
        confidence: bool
        mask_token: int | None
        qk_norm: bool
        length: Count | None
        num_heads: Width | None
        num_kv_heads: Width | None
        head_dim: Width | None
        intermediate_size: Width | None
        rope_theta: Positive
        rope_scaling: dict[str, Any] | None
        norm_eps: Amount
        lm_head: str
        draft_vocab: Count | None

    keeps_rows = True

    def __init__(self, config: Config, embeddings: Embeddings) -> None:
        super().__init__()
        self.config, self.max_depth = config, config.depths
        self.idle = 0 if config.from_anchor else 1  # how many slots of a block draft nothing: the anchor's or none
        self.size = config.depths + self.idle
        self._embeddings = (embeddings,)  # in a tuple, so that they are no submodule and never trained or saved
        width, shape, eps = embeddings.hidden_size, layer_shape(config, embeddings), config.norm_eps
        self.feature_layers = chosen_layers(config.feature_layers, DFLASH_LAYERS, embeddings.num_layers)
        self.fusion = Fusion(width, len(self.feature_layers), eps, normed=False)
        self.hidden_norm = RMSNorm(width, eps)
        self.mask = _mask(config.mask_token, embeddings)
        self.layers = nn.ModuleList(
            Layer(width, shape, rope=Rope.of(config), eps=eps, qk_norm=config.qk_norm) for _ in range(config.layers)
        )
        self.norm = RMSNorm(width, eps)
        self.vocab = draft_vocabulary(config.draft_vocab, embeddings.vocab_size)
        self.lm_head = DraftLmHead(embeddings, config.lm_head, self.vocab)
        size, rank = embeddings.vocab_size if self.vocab is None else len(self.vocab.ids), config.markov_rank
        self.before = None if rank is None else nn.Embedding(embeddings.vocab_size, rank)
        self.bias = None if rank is None else nn.Linear(rank, size, bias=False)
        if self.bias is not None:
            nn.init.zeros_(self.bias.weight)
        self.confidence = nn.Linear(width + (rank or 0), 1) if config.confidence else None

    @property
    def embeddings(self) -> Embeddings:
        """The target's embedding and lm_head."""
        return self._embeddings[0]

    def context(
        self, hidden: Float[Tensor, "B T L D"], position: Int[Tensor, "B T"], last: int
    ) -> tuple[KeyValue, ...]:
        """Return every layer's keys and values of the target's features."""
        fused = self.hidden_norm(self.fusion(hidden))
        layers: Any = self.layers
        return tuple(layer.self_attn.key_value(fused, position, last) for layer in layers)

    def slots(self, root: Int[Tensor, "*n"]) -> Float[Tensor, "*n S D"]:
        """Return the input states of the blocks behind these chosen tokens."""
        embedding = self.embeddings.embed(root).to(self.mask.dtype)[..., None, :]
        return torch.cat([embedding, self.mask.expand(*root.shape, self.size - 1, -1)], -2)

    def conditioned(self, state: Float[Tensor, "*n D"], token: Int[Tensor, "*n"]) -> Float[Tensor, "*n X"]:
        """Return the input of `score` for a slot once the token before it is known."""
        return state if self.before is None else torch.cat([state, self.before(token).to(state.dtype)], -1)

    def score(self, state: Float[Tensor, "*n X"], depth: int) -> Float[Tensor, "*n W"]:
        """Return the logits of slots."""
        del depth
        width = self.embeddings.hidden_size
        logits = self.lm_head(state[..., :width])
        return logits if self.bias is None else logits + self.bias(state[..., width:])

    def unroll(self, features: Features, depths: int, anchors: Int[Tensor, "B n"] | None = None) -> list[Draft]:
        """Draft a block from every anchor; all of them go through the layers side by side."""
        check_depths(depths, self.max_depth)
        slots = behind(features.document, anchors, self.size, self.config.length, causal=self.config.causal)
        position, last = rows.positions(features.document), features.token.shape[1] + self.size
        context = self.context(features.hidden, position, last)
        x = self.slots(rows.next_token(features.token).gather(1, slots.anchor)).flatten(1, 2)

        def attend(pair: KeyValue, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend_rows(query, pair, [(key, value)], slots.seen)

        for layer, pair in zip(self.layers, context, strict=True):
            x = layer(x, slots.position.flatten(1), last, lambda *qkv, pair=pair: attend(pair, *qkv))
        states = self.norm(x).unflatten(1, (-1, self.size))
        return [
            self._draft(features, states[:, :, depth - 1 + self.idle], slots.anchor, depth)
            for depth in range(1, depths + 1)
        ]

    def _draft(self, features: Features, state: Tensor, chosen: Int[Tensor, "B n"], depth: int) -> Draft:
        """Return one depth's states at the rows that they were drafted from."""
        token = rows.drafted_token(features.token, depth).gather(1, chosen)
        full = at_rows(self.conditioned(state, token), chosen, features.token.shape[1])
        return Draft(full, None, None if self.confidence is None else self.confidence(full)[..., 0])

    def extend(
        self,
        state: KVCache | None,
        features: Features,
        token: Int[Tensor, "B T"],
        count: Int[Tensor, "B"] | None = None,
    ) -> tuple[KVCache, Level]:
        """Commit verified rows, and draft the blocks behind the last ones."""
        cache = KVCache(len(token), self.config.length, token.device) if state is None else state
        new = cache.begin(token.shape[1], len(token))
        for i, pair in enumerate(self.context(features.hidden, new, cache.longest)):
            cache.append(i, *pair, new)
        cache.length[: len(token)] += token.shape[1] if count is None else count
        position, attend = behind_roots(cache, len(token), self.size, causal=self.config.causal)
        root = last_valid(token, count)
        x = self.slots(root).flatten(1, 2)
        for i, layer in enumerate(self.layers):
            x = layer(x, position, cache.longest + self.size, partial(attend, i))
        return cache, self._level(self.norm(x)[:, self.idle :], root, 1)

    def expand(
        self,
        state: KVCache,
        level: Level,
        token: Int[Tensor, "B N"],
        parent: Int[Tensor, "B N"],
        mask: Bool[Tensor, "B N M"],
        depth: int,
    ) -> Level:
        """Score the next depth from its slot; of the path only the last token matters, and only to `markov_rank`."""
        del state, parent, mask
        return self._level(level.hidden, token, depth + 1)

    def _level(self, slots: Float[Tensor, "B K D"], token: Int[Tensor, "B N"], depth: int) -> Level:
        slot = slots[:, depth - 1 : depth]
        if self.before is None:
            return Level(self.score(slot, depth).expand(-1, token.shape[1], -1), slots)
        state = self.conditioned(slot.expand(-1, token.shape[1], -1), token)
        return Level(self.score(state, depth), slots)
