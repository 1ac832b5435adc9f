"""Speculative streams (Bhendawade et al., arXiv 2402.11131) next to a frozen target: the module, and the drafter.

Each node of a pass is followed by its streams, one position further each. At the first of the top `layers` decoder
layers, stream j starts as the node's hidden state plus a learned embedding of j. In these layers low-rank adapters
(LoRA, arXiv 2106.09685) act only on the streams' rows, and the target's final norm and lm_head give stream j's probs of
the token j + 1 positions after the node's. Below these layers the streams' rows are computed but not read. The paper
fine-tunes the target with its streams; here the target's own rows do not change.

Every node of a tree is verified with its streams as look-ahead tokens, so the pass that accepts a node has already
drafted the tokens after its bonus token. Streams do not see each other's tokens, like Medusa's heads, so a tree grows
from the product of their probs. The prefill has no look-ahead tokens: the first step drafts nothing and only runs the
streams of its root.

Shape letters: B rows of a batch, T positions, A anchors, the rows that have streams, G streams of each, R = A G.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from heads import rows
from heads.base import LevelNodes, LevelOutput, Tokens
from heads.common.typed import Count, typed
from heads.formats.store import TargetSpec, assert_same_target, fill, read_folder
from heads.shapes import Nodes, Sequences
from inference.drafters.host import DrafterState, HostDrafter
from inference.drafters.policy import TreeConfig, grow
from inference.protocol import CommittedTokens, DraftContext, Proposal
from inference.target.model import forwards_replaced
from inference.target.target import Target
from inference.verification import tree as trees
from inference.verification.tree import Forward, LookAhead

KIND = "streams"  # the streams' name in a run's folder
StreamLogits = Float[Tensor, "B A G V"]


class Streams(nn.Module):
    """The embeddings and adapters of the streams of one target; only these are trained and saved.

    They act on the target's layers only in a pass with streams.

    Raises:
        ValueError: the configuration does not fit the target.
    """

    @dataclass(frozen=True)
    class Config:
        """The number of streams and of top layers, and the adapters' rank, scale and linear layers."""

        streams: Count
        layers: Count | None  # None: all
        rank: Count
        alpha: Count  # the adapters' output is scaled by alpha / rank
        modules: list[str] | None  # names of linear layers inside a decoder layer, as q_proj; None: all

    def __init__(self, config: Config, target: Target) -> None:
        super().__init__()
        target.check_masks("so no stream can ride along")
        self.config, self.target = config, target
        self.top = [*target.decoder_layers][-(config.layers or 0) :]  # a list: they must not become submodules
        linears = {linear for layer in self.top for linear in layer.modules() if isinstance(linear, nn.Linear | Conv1D)}
        self.linears = {
            name.replace(".", "/"): module
            for name, module in target.base.named_modules()
            if module in linears and (config.modules is None or name.rsplit(".", 1)[-1] in config.modules)
        }
        if not self.linears:
            raise ValueError(f"streams.modules is {config.modules}: {target.name} has no such linear layer")
        self.embedding = nn.Parameter(0.02 * torch.randn(config.streams, target.embeddings.hidden_size))
        self.adapters = nn.ModuleDict()
        for name, linear in self.linears.items():
            is_conv = isinstance(linear, Conv1D)
            down = nn.Linear(linear.nx if is_conv else linear.in_features, config.rank, bias=False)
            up = nn.Linear(config.rank, linear.nf if is_conv else linear.out_features, bias=False)
            nn.init.zeros_(up.weight)  # adapters start as no change
            self.adapters[name] = nn.ModuleDict({"down": down, "up": up})
        self.to(target.device)

    def stream_rows(
        self, anchor: Int[Tensor, "B A"], offset: Nodes, visible: Bool[Tensor, "B N N"]
    ) -> tuple[Int[Tensor, "B R"], Int[Tensor, "B R"], Bool[Tensor, "B R M"], Forward]:
        """Return the streams of the rows `anchor` of N: their rows, offsets, masks, and the decoder stack to run.

        A stream attends to its row's keys and to its row's streams up to itself. The stack's last R rows are streams.
        """
        source = anchor.repeat_interleave(self.config.streams, 1)
        count = source.shape[1]
        index = torch.arange(count, device=source.device)
        row = index // self.config.streams
        stream = index % self.config.streams  # counted from 0
        among = ((row == row[:, None]) & (index <= index[:, None])).expand(len(source), -1, -1)
        seen = visible.gather(1, source[:, :, None].expand(-1, -1, visible.shape[2]))
        scale = self.config.alpha / self.config.rank

        def begin(forward: Forward, hidden: Tensor, *args: Any, **inputs: Any) -> Any:
            begun = hidden.gather(1, source[:, :, None].expand(-1, -1, hidden.shape[2]))
            begun = begun + self.embedding[stream].to(hidden.dtype)
            return forward(torch.cat([hidden[:, :-count], begun], 1), *args, **inputs)

        def adapted(forward: Forward, adapter: Any, x: Tensor) -> Tensor:
            if x.ndim != 3:
                raise ValueError("streams.modules: some read no rows one by one (of experts?), name only attention's")
            result = forward(x)
            added = adapter.up(adapter.down(x[:, -count:].to(adapter.down.weight.dtype)))
            result[:, -count:].add_(added.to(result.dtype), alpha=scale)
            return result

        def run(**inputs: Any) -> Any:
            forwards = {self.top[0]: partial(begin, self.top[0].forward)}
            for name, linear in self.linears.items():
                forwards[linear] = partial(adapted, linear.forward, self.adapters[name])
            with forwards_replaced(forwards):
                return self.target.base(**inputs)

        return source, offset.gather(1, source) + stream + 1, torch.cat([seen, among], 2), run

    def forward(
        self, token: Sequences, document: Sequences, anchor: Int[Tensor, "B A"]
    ) -> tuple[StreamLogits, StreamLogits]:
        """Run packed rows and the streams of the rows `anchor` in one pass.

        Returns:
            The logits of the streams, and those of their teachers: by the legend of rows and depths, stream d of row t
            is depth d, so its teacher is the target's distribution at row t+d. No gradient reaches the teachers.
        """
        position, visible = rows.positions(document), rows.visible(document)
        source, stream_position, seen, stack = self.stream_rows(anchor, position, visible)
        attn_mask = torch.cat([nn.functional.pad(visible, (0, source.shape[1])), seen], 1)
        # A stream beyond the context has no teacher, and learned positions end there.
        position = torch.cat([position, stream_position], 1).clamp_max(self.target.max_model_len - 1)
        states = self.target.run(torch.cat([token, token.gather(1, source)], 1), position, attn_mask, None, stack=stack)
        logits = self.target.embeddings.logits
        rows_of_target, streams = states.last_hidden.split([token.shape[1], source.shape[1]], 1)
        with torch.no_grad():
            taught = torch.stack([rows.teacher(rows_of_target, d) for d in range(1, self.config.streams + 1)], 2)
            teacher = logits(taught[torch.arange(len(anchor), device=anchor.device)[:, None], anchor])
        return logits(streams).unflatten(1, (-1, self.config.streams)), teacher


class StreamsDrafter(HostDrafter):
    """Drafts from the streams of the last accepted node."""

    reads_logits = single = True

    @dataclass(frozen=True)
    class Config:
        """The run that trained the streams, and the tree policy."""

        run: str
        tree: TreeConfig

    def __init__(self, config: Config, target: Target, name: str, streams: Streams | None = None) -> None:
        self.config, self.name, self.tree = config.tree, name, config.tree.label
        if streams is None:
            folder = Path(config.run).expanduser() / KIND
            content = read_folder(folder, KIND, (KIND, "target"))
            assert_same_target(folder, typed(TargetSpec, content["target"]), target.spec)
            streams = Streams(typed(Streams.Config, content[KIND], KIND), target)
            fill(streams, folder)
        self.streams = streams.to(target.device, target.dtype).eval().requires_grad_(False)

    def start(self, prompt: Tokens) -> "StreamsState":
        """Begin a sequence, which has no streams before its first pass."""
        return StreamsState(self)


class StreamsState(DrafterState):
    """A sequence's state: the logits of the last accepted node's streams, from which a tree grows."""

    vocab = None

    def __init__(self, drafter: StreamsDrafter) -> None:
        self.config, self.streams, self.max_depth = drafter.config, drafter.streams, 0
        self.logits: Float[Tensor, "G V"] | None = None

    def update(self, commit: CommittedTokens) -> None:
        """Keep the streams of the last accepted node."""
        verified = commit.verified
        if verified is not None and verified.look_ahead is not None:
            self.logits = verified.look_ahead.unflatten(0, (len(verified.tree.token), -1))[verified.path[-1]]

    @torch.inference_mode()
    def propose(self, context: DraftContext) -> Proposal:
        """Grow a tree from the streams of the last pass, with the streams of its nodes as look-ahead tokens."""
        proposal = Proposal(trees.root(context.token[-1], self.streams.target.device))
        if self.logits is not None:
            self.max_depth = min(len(self.logits), context.max_draft_depth)
            level = LevelOutput(self.logits[None, :1], self.logits[None, :1, :0])
            proposal = grow(self, None, level, self.config, context)
        token = proposal.tree.token
        visible = trees.ancestors(proposal.tree)[None]
        node = torch.arange(len(token), device=token.device)[None]
        source, offset, seen, stack = self.streams.stream_rows(node, visible.sum(-1) - 1, visible)
        return proposal._replace(look_ahead=LookAhead(token[source[0]].clamp_min(0), offset[0], seen[0], stack))

    def expand(self, state: None, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Return the next depth's logits, equal for every node: streams do not see the tokens drafted before."""
        assert self.logits is not None
        logits = self.logits[nodes.depth].expand(1, nodes.token.shape[1], -1)
        return LevelOutput(logits, logits[..., :0])
