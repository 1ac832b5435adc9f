"""Speculative streams as a draft source (Bhendawade et al., arXiv 2402.11131; see stream_layers.py).

Every node of a tree is verified with its streams behind it as look-ahead tokens, so the pass that accepts a node has
drafted what may follow its bonus token already. Streams know nothing of each other's tokens, as Medusa's heads do not,
so a tree grows from the product of their probs. The prefill takes no look-ahead tokens: the first step drafts nothing
and only brings the streams of its root along.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads.base import Level
from inference.drafters.contrib.stream_layers import Streams, earlier_streams, load_streams
from inference.drafters.policy import TreeConfig, grow
from inference.protocol import Commit, Context, Drafter, DrafterState, Proposal
from inference.target.target import Target
from inference.verification import tree as trees
from inference.verification.tree import DraftTree, LookAhead


class StreamsDrafter(Drafter):
    """Drafts from the streams of the node that was accepted last."""

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

    def update(self, commit: Commit) -> None:
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
            proposal = grow(self.drafted, None, self.drafted.level(1, 1), self.config, [context])[0]
        return proposal._replace(look_ahead=self.look_ahead(proposal.tree, context.room))

    def look_ahead(self, tree: DraftTree, room: int) -> LookAhead | None:
        """Return the streams of all nodes, but for those that would draft deeper than can be committed."""
        size = len(tree.token)
        ancestors = trees.ancestors(tree)
        node = torch.arange(size, device=tree.token.device).repeat_interleave(self.depth)
        stream = torch.arange(1, self.depth + 1, device=node.device).repeat(size)
        offset = ancestors.sum(-1)[node] - 1 + stream
        fits = offset < room  # what a stream drafts stands one position further than the stream
        self.node, stream = node[fits], stream[fits]
        if not len(stream):
            return None
        among = earlier_streams(size, self.depth, node.device)[fits][:, fits]
        seen = torch.cat([ancestors[self.node], among], 1)
        stack = self.streams.stack(self.node[None], stream)
        return LookAhead(tree.token[self.node], offset[fits], seen, stack)


class Drafted:
    """The logits that one node's streams gave, by depth; what a tree grows from."""

    vocab = None

    def __init__(self, logits: Float[Tensor, "G V"]) -> None:
        self.logits = logits
        self.max_depth = len(logits)

    def level(self, depth: int, nodes: int) -> Level:
        """Return the logits of the tokens at `depth`, the same under every node."""
        logits = self.logits[depth - 1].expand(1, nodes, -1)
        return Level(logits, logits[..., :0])

    def expand(
        self,
        state: None,
        level: Level,
        token: Int[Tensor, "1 N"],
        parent: Int[Tensor, "1 N"],
        mask: Bool[Tensor, "1 N M"],
        depth: int,
    ) -> Level:
        """Score the next depth: streams know nothing of the tokens that are drafted before."""
        return self.level(depth + 1, token.shape[1])
