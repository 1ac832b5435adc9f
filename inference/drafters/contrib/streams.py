"""Speculative streams (Bhendawade et al., arXiv 2402.11131) next to a frozen target: the module, and the drafter.

Behind a node of a pass stand its streams, one position further each. Where the top `layers` decoder layers begin,
stream j takes on the node's hidden state plus a learned embedding of j. In these layers low-rank adapters (LoRA, arXiv
2106.09685) act only on the streams' rows, and the target's final norm and lm_head give stream j's probs of the token
j + 1 positions after the node's. The paper tunes the target with its streams; here no row of the target's own changes.

Every node of a tree is verified with its streams behind it as look-ahead tokens, so the pass that accepts a node has
drafted what may follow its bonus token already. Streams know nothing of each other's tokens, as Medusa's heads do not,
so a tree grows from the product of their probs. The prefill takes no look-ahead tokens: the first step drafts nothing
and only brings the streams of its root along.

Shape letters: B rows of a batch, T positions, A anchors, the rows that have streams, G streams of each, R = A G.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from heads import rows
from heads.base import LevelNodes, LevelOutput
from heads.common.files import last_good
from heads.common.ranges import Count
from heads.common.typed import typed
from heads.formats import store
from heads.formats.store import TargetSpec
from inference.drafters.host import DrafterState, HostDrafter
from inference.drafters.policy import TreeConfig, grow
from inference.protocol import CommittedTokens, Context, Proposal
from inference.target.target import Target
from inference.verification import tree as trees
from inference.verification.tree import DraftTree, LookAhead

KIND = "streams"  # what a run's folder calls them
ADAPTER = "streams"


class Streams(nn.Module):
    """The streams of one target: their embeddings and adapters, which are all that is trained and saved.

    They run in a second decoder stack that shares every weight with the target's own, which no adapter ever touches.

    Raises:
        ValueError: the configuration does not fit the target.
    """

    @dataclass(frozen=True)
    class Config:
        """How many streams, through how many of the top layers, and their adapters' rank, scale and linear layers."""

        streams: Count
        layers: Count | None  # None: all
        rank: Count
        alpha: Count  # the adapters' output is scaled by alpha / rank
        modules: list[str] | None  # names of linear layers inside a decoder layer, as q_proj; None: all

    def __init__(self, config: Config, target: Target) -> None:
        super().__init__()
        self.config = config
        target.check_masks("so no stream can ride along")
        count = len(target.decoder_layers)
        first = count - (count if config.layers is None else config.layers)
        if first < 0:
            raise ValueError(f"streams.layers is {config.layers}: {target.name} has {count} layers, give at most that")
        self.embedding = nn.Parameter(
            0.02 * torch.randn(config.streams, target.embeddings.hidden_size, device=target.device)
        )
        from peft import LoraConfig, inject_adapter_in_model

        shared: dict[int, Any] = {id(tensor): tensor for tensor in (*target.base.parameters(), *target.base.buffers())}
        stack: nn.Module = copy.deepcopy(target.base, shared)  # whose parameters and buffers are the very same tensors
        names = _linears(target, first, config.modules)
        transposed = isinstance(stack.get_submodule(names[0]), Conv1D)
        lora = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=names, fan_in_fan_out=transposed)
        inject_adapter_in_model(lora, stack, ADAPTER)  # adapters start as no change
        adapted: dict[str, Any] = {name: stack.get_submodule(name) for name in names}
        for adapter in adapted.values():
            vars(adapter)["forward"] = partial(self._adapted, adapter)
        for layer in range(first):
            below = stack.get_submodule(_name_of(target, layer))
            vars(below)["forward"] = partial(self._below, below.forward)
        stack.get_submodule(_name_of(target, first)).register_forward_pre_hook(self._enter)
        matrices = {
            name.replace(".", "/"): nn.ModuleDict({"down": adapter.lora_A[ADAPTER], "up": adapter.lora_B[ADAPTER]})
            for name, adapter in adapted.items()
        }
        self.adapters = nn.ModuleDict(matrices).float()
        self._frozen = (target, stack)  # in a tuple, so that they are no submodules and never trained or saved
        self._first = 0  # of the rows in a pass that are streams'
        self._riding: tuple[Tensor, Tensor] | None = None

    def stack(self, source: Int[Tensor, "B R"], stream: Int[Tensor, "R"]) -> Callable[..., Any]:
        """Return a decoder stack whose last R rows are the streams (counted from 1) of the rows `source`."""

        def run(**inputs: Any) -> Any:
            self._first = inputs["input_ids"].shape[1] - source.shape[1]
            self._riding = source, stream
            return self._frozen[1](**inputs)

        return run

    def forward(
        self, token: Int[Tensor, "B T"], document: Int[Tensor, "B T"], anchor: Int[Tensor, "B A"]
    ) -> tuple[Float[Tensor, "B A G V"], Float[Tensor, "B A G V"]]:
        """Run packed rows and the streams of the rows `anchor` in one pass.

        Returns:
            The logits of the streams, and those of their teachers: by the legend of rows and depths, stream d of row t
            is depth d, so its teacher is the target's distribution at row t+d. No gradient reaches the teachers.
        """
        target, streams, width = self._frozen[0], self.config.streams, token.shape[1]
        position, attn_mask, source, stream = layout_of(document, anchor, streams)
        # A stream behind the context has no teacher, and learned positions end there.
        position = position.clamp_max(target.context - 1)
        tokens = torch.cat([token, token.gather(1, source)], 1)
        states = target.run(tokens, position, attn_mask, None, stack=self.stack(source, stream)).last_hidden
        draft = target.embeddings.logits(states[:, width:]).unflatten(1, (-1, streams))
        with torch.no_grad():
            last = states[:, :width].detach()
            batch = torch.arange(len(token), device=token.device)[:, None]
            teachers = torch.stack([rows.teacher(last, depth)[batch, anchor] for depth in range(1, streams + 1)], 2)
            teacher = target.embeddings.logits(teachers)
        return draft, teacher

    def _below(self, forward: Callable[..., Any], hidden: Tensor, *args: Any, **inputs: Any) -> Any:
        """Run a layer below the streams' first, in which and in whose cache they have no rows."""
        assert self._riding is not None
        cut = partial(_cut, base=self._first, look_ahead=self._riding[0].shape[1])
        return forward(cut(hidden), *map(cut, args), **{name: cut(value) for name, value in inputs.items()})

    def _enter(self, _layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Let the streams begin: their rows take on the states of their sources, and their embeddings."""
        assert self._riding is not None
        source, stream = self._riding
        hidden = args[0]
        begun = hidden.gather(1, source[:, :, None].expand(-1, -1, hidden.shape[2]))
        begun = begun + self.embedding[stream - 1].to(hidden.dtype)
        return (torch.cat([hidden[:, : self._first], begun], 1), *args[1:])

    def _adapted(self, layer: Any, x: Tensor) -> Tensor:
        """Return what peft's LoRA layer makes of the rows "B T D", its adapter acting only on the streams'.

        peft's own way to adapt a sequence's last tokens (activated LoRA) builds and gathers a mask in every layer,
        which costs a small target several times its own pass.
        """
        if x.ndim != 3:
            raise ValueError("streams.modules: some do not read rows one by one (of experts?), name attention's alone")
        result: Tensor = layer.base_layer(x)
        down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
        added = up(down(x[:, self._first :].to(down.weight.dtype)))
        result[:, self._first :].add_(added.to(result.dtype), alpha=layer.scaling[ADAPTER])
        return result


def layout_of(
    document: Int[Tensor, "B T"], anchor: Int[Tensor, "B A"], streams: int
) -> tuple[Int[Tensor, "B M"], Bool[Tensor, "B M M"], Int[Tensor, "B R"], Int[Tensor, "R"]]:
    """Lay out the streams of the rows `anchor` behind packed rows.

    A stream sees what its anchor sees, and its anchor's streams up to itself, as it does in a verification pass.

    Returns:
        The position of each of the M = T + R rows, which rows each attends to, and each stream's anchor and number.
    """
    batch, width = document.shape
    count = anchor.shape[1]
    source = anchor.repeat_interleave(streams, 1)
    stream = torch.arange(1, streams + 1, device=document.device).repeat(count)
    own_position, visible = rows.positions(document), rows.visible(document)
    position = torch.cat([own_position, own_position.gather(1, source) + stream], 1)
    prefix = visible.gather(1, source[:, :, None].expand(-1, -1, width))
    above = torch.cat([visible, visible.new_zeros(batch, width, count * streams)], 2)
    below = torch.cat([prefix, earlier_streams(count, streams, document.device).expand(batch, -1, -1)], 2)
    return position, torch.cat([above, below], 1), source, stream


def earlier_streams(count: int, streams: int, device: torch.device) -> Bool[Tensor, "R R"]:
    """Return which streams each stream sees among those of `count` rows: its own row's, up to itself."""
    one = torch.ones(streams, streams, dtype=torch.bool, device=device).tril()
    return torch.block_diag(*[one] * count).bool()


def save_streams(folder: Path, config: Streams.Config, weights: dict[str, Tensor], spec: TargetSpec) -> None:
    """Write the folder of streams with their `state_dict` whole, or leave the last one as it was; make its parents.

    Raises:
        ValueError: a weight is not finite.
        OSError: the disk is full or the folder cannot be written.
    """
    store.write_folder(folder, {KIND: asdict(config), "target": asdict(spec)}, weights)


def load_streams(run: Path, target: Target) -> Streams:
    """Load a run's streams, or those of a folder, to decode with; refuse missing, damaged and another target's."""
    folder = run / KIND if last_good(run / KIND).is_dir() else run
    content = store.read_folder(folder, KIND, (KIND, "target"))
    store.assert_same_target(folder, typed(TargetSpec, content["target"]), target.spec)
    try:
        config = typed(Streams.Config, content[KIND], KIND)
    except ValueError as error:
        raise ValueError(f"{folder}/{store.CONFIG}: {error}") from None
    streams = Streams(config, target)
    store.fill(streams, folder)
    return frozen(streams, target)


def frozen(streams: Streams, target: Target) -> Streams:
    """Return the streams as decoding takes them."""
    return streams.to(target.device, target.dtype).eval().requires_grad_(False)


def _cut(value: Any, base: int, look_ahead: int) -> Any:
    """Return a layer's input for its first `own` rows: states, positions and rotations "B M …", or a mask "B 1 M S"."""
    if isinstance(value, tuple):
        return tuple(_cut(item, base, look_ahead) for item in value)
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    if value.ndim == 4:
        return value[:, :, :base, :-look_ahead]
    return value[:, :base] if value.shape[1] == base + look_ahead else value


def _name_of(target: Target, layer: int) -> str:
    return next(name for name, module in target.base.named_modules() if module is target.decoder_layers[layer])


def _linears(target: Target, first: int, kinds: list[str] | None) -> list[str]:
    """Return the names of the wanted linear layers in the decoder layers from `first` on."""
    by_kind: dict[str, list[str]] = {}  # by the last part of their names
    for layer in range(first, len(target.decoder_layers)):
        for name, module in target.decoder_layers[layer].named_modules():
            if isinstance(module, nn.Linear | Conv1D):
                by_kind.setdefault(name.rsplit(".", 1)[-1], []).append(f"{_name_of(target, layer)}.{name}")
    unknown = [name for name in kinds or [] if name not in by_kind]
    if unknown or not by_kind or kinds == []:
        missing = ", ".join(unknown) or "linear layer to adapt"
        raise ValueError(
            f"streams.modules is {kinds}: {target.name} has no {missing}; choose from {', '.join(by_kind)}"
        )
    return [name for kind, names in by_kind.items() if kinds is None or kind in kinds for name in names]


class StreamsDrafter(HostDrafter):
    """Drafts from the streams of the node that was accepted last."""

    reads_logits = single = True

    @dataclass(frozen=True)
    class Config:
        """The run that trained the streams, and the tree that is grown from them."""

        run: str
        tree: TreeConfig

    def __init__(self, config: Config, target: Target, name: str, streams: Streams | None = None) -> None:
        self.target, self.config, self.name = target, config.tree, name
        self.streams = streams or load_streams(Path(config.run).expanduser(), target)
        self.tree = config.tree.label
        self.depth = min(self.streams.config.streams, config.tree.deepest)  # deeper streams would draft nothing

    def start(self, prompt: list[int]) -> "StreamsState":
        """Begin a sequence, which has no streams before its first pass."""
        return StreamsState(self)


class StreamsState(DrafterState):
    """One sequence: the logits of the streams that were accepted last, and the streams of the last proposal."""

    def __init__(self, drafter: StreamsDrafter) -> None:
        self.config, self.streams, self.depth = drafter.config, drafter.streams, drafter.depth
        self.device = drafter.target.device
        self.drafted: Drafted | None = None
        self.node: Tensor | None = None  # which node each look-ahead token belongs to

    def update(self, commit: CommittedTokens) -> None:
        """Keep the streams of the node that was accepted last."""
        self.drafted = None
        if commit.verified is not None and commit.verified.look_ahead is not None and self.node is not None:
            mine = commit.verified.look_ahead[self.node == commit.verified.path[-1]]
            self.drafted = Drafted(mine) if len(mine) else None

    @torch.inference_mode()
    def propose(self, context: Context) -> Proposal:
        """Grow the tree that the last pass has drafted, and let the streams of its nodes ride along."""
        proposal = Proposal(trees.root(context.token[-1], self.device))
        if self.drafted is not None:
            self.drafted.max_depth = min(self.drafted.max_depth, context.max_draft_depth)
            proposal = grow(self.drafted, None, self.drafted.level(1, 1), self.config, context)
        return proposal._replace(look_ahead=self.look_ahead(proposal.tree, context.max_draft_depth))

    def look_ahead(self, tree: DraftTree, max_draft_depth: int) -> LookAhead | None:
        """Return the streams of all nodes, but for those that would draft deeper than can be committed."""
        size = len(tree.token)
        ancestors = trees.ancestors(tree)
        node = torch.arange(size, device=tree.token.device).repeat_interleave(self.depth)
        stream = torch.arange(1, self.depth + 1, device=node.device).repeat(size)
        offset = ancestors.sum(-1)[node] - 1 + stream
        fits = offset < max_draft_depth  # what a stream drafts stands one position further than the stream
        self.node, stream = node[fits], stream[fits]
        if not len(stream):
            return None
        among = earlier_streams(size, self.depth, node.device)[fits][:, fits]
        attn_mask = torch.cat([ancestors[self.node], among], 1)
        stack = self.streams.stack(self.node[None], stream)
        return LookAhead(tree.token[self.node].clamp_min(0), offset[fits], attn_mask, stack)


class Drafted:
    """The logits that one node's streams gave, by depth; what a tree grows from."""

    vocab = None

    def __init__(self, logits: Float[Tensor, "G V"]) -> None:
        self.logits = logits
        self.max_depth = len(logits)

    def level(self, depth: int, nodes: int) -> LevelOutput:
        """Return the logits of the tokens at `depth`, the same under every node."""
        logits = self.logits[depth - 1].expand(1, nodes, -1)
        return LevelOutput(logits, logits[..., :0])

    def expand(self, state: None, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Score the next depth: streams know nothing of the tokens that are drafted before."""
        return self.level(nodes.depth + 1, nodes.token.shape[1])
