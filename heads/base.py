"""The protocol of a draft head, its records, and the notation for rows and depths that the whole project shares.

Notation
    row t     holds the target's features at position t and the token t+1 that is already sampled.
    depth d   (from 1) predicts token t+1+d from row t and the tokens t+1 … t+d.
    teacher   of (t, d) is the target's distribution at row t+d; its label is token t+1+d.
    node      a drafted token at depth d of a tree whose root is token t+1; its rotary position is t+d.
    layer i   the output of the target's decoder layer i, counted from 0, before the final norm; `last_hidden` is the
              final layer's output after the final norm, so lm_head(last_hidden) is the teacher.
    p, q      are the target's and the draft's distributions (Leviathan et al., 2023).

Shape letters: B sequences, T positions, L feature layers, D a hidden size, V a vocabulary, N tree nodes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heads.common.typed import Amount, Count, Json, LmHead, Positive, Width
from heads.shapes import Anchors, Inputs, Logits, Nodes, NodeStates, PerSequence, Rows, Sequences, States, TokenIds

NamedTensors = dict[str, Tensor]  # tensors by name, of a module, a checkpoint or a file
Tokens = list[int]  # a text's
Layers = tuple[int, ...]  # the feature layers that are read


@runtime_checkable
class HeadConfig(Protocol):
    """A head's configuration: a dataclass that names its kind, a key of `heads.HEADS`."""

    __dataclass_fields__: ClassVar[Json]

    @property
    def name(self) -> str:
        """The head's kind, a key of `heads.HEADS`."""


class Features(NamedTuple):
    """A batch of packed sequences with the target's hidden states: a head's whole input from the target.

    Documents are packed one after another; tokens of different documents never see each other. Padding is document -1.
    In training `token[t]` is token t of the sequence, and a head shifts it (`rows.next_token`). In decoding it is token
    t+1, the one that row t holds (`NewRows.token`).
    """

    token: Sequences
    hidden: Float[Tensor, "B T L D"]
    last_hidden: Rows
    document: Sequences
    path: Int[Tensor, "B T d"] | None = None  # row of the token that row t drafts at each depth; None: t + depth


class DraftVocabulary(nn.Module):
    """The draft vocabulary: the `size` tokens of `full_size` that a head drafts; the first ones until `choose`."""

    ids: Int[Tensor, "W"]

    def __init__(self, size: int, full_size: int) -> None:
        super().__init__()
        self.full_size = full_size
        self.register_buffer("ids", torch.arange(size, device="cpu"))  # where a head is outlined too

    def choose(self, counts: Int[Tensor, "V"]) -> None:
        """Choose the most frequent tokens; ties go to the lower ids."""
        order = counts.argsort(descending=True, stable=True)
        self.ids.copy_(order[: len(self.ids)].sort().values)

    def check(self, where: str) -> None:
        """Refuse ids from a file unless they are distinct tokens in ascending order; `where` is the file."""
        if (self.ids.diff() <= 0).any() or self.ids[0] < 0 or self.ids[-1] >= self.full_size:
            raise ValueError(
                f"{where}: vocab.ids are not {len(self.ids)} different tokens of the target's {self.full_size} in "
                "ascending order; save or download it again"
            )

    def index_of(self, token: TokenIds) -> TokenIds:
        """Return the tokens' indices in the draft vocabulary, -1 for the tokens outside it."""
        at = torch.searchsorted(self.ids, token).clamp_max(len(self.ids) - 1)
        return torch.where(self.ids[at] == token, at, -1)

    def scatter(self, logits: Logits) -> Float[Tensor, "*n V"]:
        """Return logits over the whole vocabulary: minus infinity outside the draft vocabulary."""
        full = logits.new_full((*logits.shape[:-1], self.full_size), float("-inf"))
        full[..., self.ids] = logits
        return full


class LevelOutput(NamedTuple):
    """A head's output for one level of B draft trees: the logits of each node's children, and the head's states.

    The logits are over the head's own vocabulary of W tokens. `hidden` is each node's state (D is the head's own
    width); a block head keeps the states of all its positions in it. `root` holds keys and values "B G 1 E" of each
    layer for the root if the root's row is not committed; deeper levels hold none.
    """

    logits: Float[Tensor, "B N W"]
    hidden: NodeStates
    root: tuple[Tensor, ...] = ()

    def map(self, function: Callable[..., Tensor], *others: "LevelOutput") -> "LevelOutput":
        """Apply a function to this level's tensors and the matching tensors of other levels."""
        levels = self, *others
        logits, hidden = (function(*(level[i] for level in levels)) for i in range(2))
        return LevelOutput(logits, hidden, tuple(map(function, *(level.root for level in levels))))


class DepthOutput(NamedTuple):
    """The output of `unroll` at one depth, for the rows B T, or some rows N: the inputs of `compute_logits`.

    `feature` is the head's prediction of the target's feature, `confidence` the logit of a draft's acceptance; None if
    the head predicts none. `base_state` gives the logits before a correction by the drafted tokens; None without one.
    """

    state: Float[Tensor, "*rows X"]
    feature: Float[Tensor, "*rows D"] | None = None
    confidence: Float[Tensor, "*rows"] | None = None
    base_state: Float[Tensor, "*rows Y"] | None = None


class NewRows(NamedTuple):
    """T verified rows of B sequences, which continue each sequence's committed rows."""

    features: Features
    token: Sequences  # token t+1 of row t; the last one is the root of the next tree
    counts: PerSequence | None = None  # rows of each sequence, at least one; None for T, as in a first call


class LevelNodes(NamedTuple):
    """The N new nodes of one depth of B trees; `mask` is true where a new node attends to one of the M drafted nodes.

    The M nodes are in order of expansion, new ones last. A node attends to itself, its drafted ancestors and the root.
    """

    token: Nodes
    parent: Nodes  # each node's parent, an index into the level before
    mask: Bool[Tensor, "B N M"]
    depth: int


class LayerDims(NamedTuple):
    """The dimensions of the target's decoder layer: the defaults of a head's configuration."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int


@runtime_checkable
class Embeddings(Protocol):
    """The target's embedding and lm_head, which heads read and never train."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    layer_dims: LayerDims
    config: Any  # the target's (text) configuration, as transformers has it

    def embed(self, token: TokenIds) -> States:
        """Return the target's input embeddings of `token`."""

    def logits(self, hidden: States, ids: Int[Tensor, "*#n W"] | None = None) -> Logits:
        """Return the target's logits of final-normed states; with `ids` of these tokens only, or of each state's."""

    def lm_head_weight(self) -> Float[Tensor, "V D"]:
        """Return the weight of the lm_head; a head may start its own lm_head from it."""


@runtime_checkable
class DraftHead(Protocol):
    """The protocol of a draft head, which is also an nn.Module; `config` is its typed configuration.

    `vocab` is the draft vocabulary of its logits, None for the target's own. `has_kv_cache` says that the state is a
    `heads.modules.kv_cache.KVCache`, which a caller may pass; other heads choose their own state.
    """

    config: Any
    feature_layers: Layers
    max_depth: int
    has_kv_cache: bool
    if TYPE_CHECKING:  # from Python 3.12 on an isinstance test does not see attributes that are modules
        vocab: DraftVocabulary | None

    @property
    def embeddings(self) -> Embeddings:
        """The target's embedding and lm_head."""

    def unroll(self, features: Features, depths: int, anchors: Anchors = None) -> list[DepthOutput]:
        """Training: draft depths 1 … `depths` from all rows at once, as `extend` and `expand` would step by step.

        A row's drafted tokens come from `features.path`, or without it from the sequence (`rows.drafted_token`).
        `anchors` are the rows to draft from, in order, None for all; the output for other rows is undefined.
        """

    def compute_logits(self, state: Inputs, depth: int) -> Logits:
        """Return the logits of a depth's states, over the head's own vocabulary."""

    def extend(self, state: Any, new: NewRows) -> tuple[Any, LevelOutput]:
        """Decoding: append verified rows of B sequences and score the roots' children, as SGLang's draft_extend does.

        `state` is an earlier call's, and is changed in place; None or an empty cache for new sequences. It is returned
        with the roots' level: N = 1, the logits of depth 1.
        """

    def expand(self, state: Any, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Decoding: score one more tree level of B sequences, all nodes at once, as in EAGLE-2's expansion.

        The state of the committed rows does not change; `level` is the previous level, at first the roots'.
        """


@dataclass(frozen=True)
class LayerConfig:
    """Hyperparameters of a head with decoder layers; null means the target's value, for `length` all rows."""

    name: str
    length: Count | None
    num_heads: Width | None
    num_kv_heads: Width | None
    head_dim: Width | None
    intermediate_size: Width | None
    rope_theta: Positive
    rope_scaling: Json | None
    norm_eps: Amount
    lm_head: LmHead
    draft_vocab: Count | None


@dataclass(frozen=True)
class CandidateConfig(LayerConfig):
    """Hyperparameters of a head with one lm_head, which scores all tokens where `candidates` is null."""

    candidates: Count | None
    candidate_rank: Width


class HeadModule(nn.Module):
    """A head's module, with its configuration and the target's embeddings.

    By default it reads only the target's last hidden states, and has no KV cache.
    """

    feature_layers: Layers = ()
    has_kv_cache = False
    first_layer = ""  # the decoder layer that can start as the target's last layer, if there is one
    max_depth: int

    def __init__(self, config: Any, embeddings: Embeddings) -> None:
        super().__init__()
        self.config = config
        self._embeddings = (embeddings,)  # in a tuple: a submodule would be trained and saved
        size, full_size = config.draft_vocab, embeddings.vocab_size
        self.vocab = None if size is None or size >= full_size else DraftVocabulary(size, full_size)

    @property
    def embeddings(self) -> Embeddings:
        """The target's embedding and lm_head."""
        return self._embeddings[0]

    def check_depths(self, depths: int) -> None:
        """Refuse other depths for a head with one module per depth: a module without a gradient stops a run."""
        if depths != self.max_depth:
            raise ValueError(
                f"objective.depths is {depths} but the head drafts {self.max_depth} depths: make them equal"
            )


def layer_dims_of(config: Any) -> LayerDims:
    """Return the dimensions of a decoder layer from a model's (text) configuration; refuse layers without attention."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ValueError(
            f"headstart does not run {config.model_type} models (they have no attention, whose entries count a cache's "
            "tokens): choose another target"
        )
    return LayerDims(
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size,
    )


def resolve_layer_dims(config: Any, embeddings: Embeddings) -> LayerDims:
    """Return a head's layer dimensions, the target's where its configuration is null; refuse odd or uneven ones."""
    dims = LayerDims(*(getattr(config, name) or getattr(embeddings.layer_dims, name) for name in LayerDims._fields))
    if dims.num_heads % dims.num_kv_heads:
        raise ValueError(
            f"head.num_heads is {dims.num_heads} and head.num_kv_heads {dims.num_kv_heads}, where null takes the "
            "target's own: give num_heads as a multiple of num_kv_heads"
        )
    if dims.head_dim % 2:
        raise ValueError(f"head.head_dim is {dims.head_dim}: give an even number, since rotary positions turn pairs")
    return dims


def draft_size(head: Any) -> int:
    """Return the number of tokens that a head's logits are over."""
    return head.embeddings.vocab_size if head.vocab is None else len(head.vocab.ids)


def parameter_count(head: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(p.numel() for p in head.parameters() if p.requires_grad)


def frozen_count(head: nn.Module) -> int:
    """Return the number of frozen parameters."""
    return sum(p.numel() for p in head.parameters() if not p.requires_grad)


def token_id(token: int, embeddings: Embeddings) -> int:
    """Return the id of a head's masked token, which is counted from the vocabulary's end where it is negative."""
    size = embeddings.vocab_size
    if not -size <= token < size:
        raise ValueError(f"head.mask_token is {token}: the target has {size} tokens; give one of them")
    return token % size


def embedding_of(embeddings: Embeddings, token: TokenIds | None = None) -> States:
    """Return the target's embeddings of `token`, or without it the whole embedding table."""
    chosen = torch.arange(embeddings.vocab_size) if token is None else token
    return embeddings.embed(chosen.to(embeddings.lm_head_weight().device)).detach()


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; a copy to a GPU is asynchronous."""
    if device.type == "cpu" or x.device.type != "cpu":
        return x.to(device)
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)
