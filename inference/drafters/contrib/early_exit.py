"""LayerSkip (Elhoushi et al., arXiv 2404.16710): the target's first layers, its final norm and its lm_head draft.

Nothing is run twice: the drafted rows' keys and values in these layers stay in the target's cache, and verification
goes on from the states that the rows left them with. Lossless for every target; a target that was not trained to exit
early is rarely followed.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from heads.base import LevelNodes, LevelOutput
from heads.common.ranges import Count
from inference.drafters.host import DrafterState, HostDrafter
from inference.drafters.policy import TreeConfig, grow
from inference.protocol import Context, Proposal
from inference.target import probe
from inference.target.cache import TargetCache
from inference.target.stack import FirstLayersOutput, Parts
from inference.target.target import Target
from inference.verification import tree as trees
from inference.verification.tree import DraftTree


class EarlyExit(HostDrafter, DrafterState):
    """Drafts a chain or a tree of any policy with the target's first layers; its state is the target's cache."""

    single = True

    @dataclass(frozen=True)
    class Config:
        """How many layers draft, and the tree they grow."""

        exit_layer: Count
        tree: TreeConfig

    def __init__(self, config: Config, target: Target, name: str) -> None:
        depth = len(target.decoder_layers)
        if config.exit_layer >= depth:
            raise ValueError(
                f"drafter.early_exit.exit_layer is {config.exit_layer}, but {target.name} has {depth} layers: "
                f"give 1 to {depth - 1}"
            )
        self.parts, self.config, self.name = target.parts, config, name
        if not probe.splits(target, target.parts, config.exit_layer):
            raise ValueError(
                f"drafter.early_exit: the layers of {target.name} cannot be run in two parts (they share more than "
                "hidden states); choose another drafter"
            )
        self.tree = config.tree.label

    def start(self, prompt: list[int]) -> "EarlyExit":
        """Return the state of any sequence: none of its own."""
        return self

    @torch.inference_mode()
    def propose(self, context: Context) -> Proposal:
        """Grow the tree, and let its leaves enter too."""
        assert context.cache is not None
        if context.max_draft_depth < 1:
            return Proposal(trees.root(context.token[-1], self.parts.target.device))
        drafting = Drafting(self.parts, self.config.exit_layer, context.cache, context.max_draft_depth)
        level = drafting.begin(context.token[-1])
        proposal = grow(drafting, None, level, self.config.tree, context)
        return proposal._replace(first_layers=drafting.finish(proposal.tree))


class Drafting:
    """One step's drafted rows: run, cached behind the committed ones, and at the end brought into the tree's order.

    A tree policy grows from it as from a head. `level` holds the level's row numbers, counted from the root's.
    """

    vocab = None

    def __init__(self, parts: Parts, layers: int, cache: TargetCache, max_draft_depth: int) -> None:
        self.parts, self.layers, self.cache, self.max_depth = parts, layers, cache, max_draft_depth
        self.prefix = cache.length
        self.device = parts.target.device
        self.number: dict[tuple[int, int], int] = {}  # of the row of (its parent's number, its token)
        self.position = torch.arange(self.prefix, device=self.device)  # of all cached rows of the first layers
        self.hidden: list[Tensor] = []
        self.level = range(0)

    @property
    def count(self) -> int:
        """How many rows were drafted."""
        return len(self.position) - self.prefix

    def begin(self, root: int) -> LevelOutput:
        """Run the root."""
        token = torch.tensor([root], device=self.device)
        attn_mask = torch.ones(1, 1, dtype=torch.bool, device=self.device)
        return self.run(token, [-1], token.new_tensor([self.prefix]), attn_mask)

    def expand(self, state: None, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Run the next tree level of one sequence; every node sees the root besides what its mask says."""
        (token,), mask = nodes.token, nodes.mask[0]
        above = [self.level[index] for index in nodes.parent[0].tolist()]
        position = torch.full_like(token, self.prefix + nodes.depth)
        return self.run(token, above, position, torch.cat([mask.new_ones(len(mask), 1), mask], 1))

    def finish(self, tree: DraftTree) -> FirstLayersOutput:
        """Run the tree's nodes that were not expanded, and leave the rows of its nodes alone, in their order."""
        rows: list[int] = []
        leaves: list[int] = []
        tree = tree._replace(token=tree.token.clamp_min(0))  # padding is run too
        for node, (token, parent) in enumerate(zip(tree.token.tolist(), tree.parent.tolist(), strict=True)):
            row = self.number.get((rows[parent] if parent >= 0 else -1, token))
            if row is None:
                row = self.count + len(leaves)
                leaves.append(node)
            rows.append(row)
        if leaves:
            ancestors = trees.ancestors(tree)[leaves]
            attn_mask = ancestors.new_zeros(len(leaves), self.count + len(leaves))
            leaf, ancestor = ancestors.nonzero(as_tuple=True)
            # Siblings of one token share a row.
            attn_mask[leaf, torch.tensor(rows, device=attn_mask.device)[ancestor]] = True
            above = [rows[parent] for parent in tree.parent[leaves].tolist()]
            self.run(tree.token[leaves], above, self.prefix + ancestors.sum(-1) - 1, attn_mask)
        self.cache.keep(self.prefix, rows, self.layers)
        return FirstLayersOutput(self.layers, torch.cat(self.hidden)[rows])

    def run(
        self, token: Int[Tensor, "N"], above: list[int], position: Int[Tensor, "N"], attn_mask: Bool[Tensor, "N M"]
    ) -> LevelOutput:
        """Run rows, given the numbers of their parents' rows, and which of the M drafted rows so far each sees."""
        first = self.count
        keys = zip(above, token.tolist(), strict=True)
        self.number.update((key, first + i) for i, key in enumerate(keys))
        committed = attn_mask.new_ones(len(attn_mask), self.prefix)
        hidden, logits = self.parts.run_first_layers(
            self.layers, token, position, torch.cat([committed, attn_mask], 1), self.cache, self.position
        )
        self.position = torch.cat([self.position, position])
        self.hidden.append(hidden)
        self.level = range(first, first + len(token))
        return LevelOutput(logits[None], hidden[None])
