"""Token Recycling (Luo et al., arXiv 2408.08696): what the target last found likely after each token."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from inference.drafters import Commit, Context, Proposal
from inference.target import Target
from inference.tree import DraftTree


class Recycling:
    """Fills a fixed tree, level by level, from a matrix of the target's top candidates after each token.

    Every node of a verified tree, the rejected ones too, renews its token's row with the target's logits there; of
    equal tokens the last node counts. Candidates that are not known yet are not drafted. Memory: the matrix,
    vocabulary x `candidates` token ids.
    """

    @dataclass(frozen=True)
    class Config:
        """How many candidates are kept for each token, whether across requests, and the tree as rank paths.

        Raises:
            ValueError: naming the value that is out of range.
        """

        candidates: int
        memory: bool
        paths: list[list[int]]

        def __post_init__(self) -> None:
            """Check the tree and that the matrix can fill it."""
            if not self.paths:
                raise ValueError("drafter.recycling.paths is empty: give at least one path")
            known = {tuple(path) for path in self.paths}
            for path in self.paths:
                if len(path) > 1 and tuple(path[:-1]) not in known:
                    raise ValueError(f"drafter.recycling.paths holds {path} without its parent {path[:-1]}: add it")
                if not path or not 0 <= path[-1] < self.candidates:
                    raise ValueError(
                        f"drafter.recycling.paths holds {path}: a rank runs from 0 to candidates - 1, "
                        f"{self.candidates - 1}"
                    )

    feature_layers: tuple[int, ...] = ()

    def __init__(self, config: Config, target: Target, name: str) -> None:
        if not target.takes_trees:
            raise ValueError(f"{target.name}: its attention does not honour a tree mask, which drafter={name} needs")
        vocabulary = target.ends.vocab_size
        if config.candidates > vocabulary:
            raise ValueError(
                f"drafter.recycling.candidates is {config.candidates}: give at most {vocabulary}, the vocabulary"
            )
        self.config, self.name, self.device = config, name, target.device
        paths = sorted({tuple(path) for path in config.paths}, key=lambda path: (len(path), path))
        self.tree = f"static-{len(paths)}"
        place = {path: node for node, path in enumerate([(), *paths])}
        self.parent = torch.tensor([-1, *(place[path[:-1]] for path in paths)], device=self.device)
        self.rank = torch.tensor([0, *(path[-1] for path in paths)], device=self.device)
        ends = [1 + sum(len(path) <= depth for path in paths) for depth in range(len(paths[-1]) + 1)]
        self.levels = list(pairwise(ends))  # the first node and one past the last node of each
        # -1 is unknown, and so is all in the last row, which -1 reads: what lies below an unknown token.
        self.matrix = torch.full((vocabulary + 1, config.candidates), -1, device=self.device)

    def forget(self) -> None:
        """Forget past requests too, so that the next one starts cold."""
        self.matrix.fill_(-1)

    def reset(self, prompt: list[int]) -> None:
        """Keep the matrix for the next request, or start it cold."""
        if not self.config.memory:
            self.forget()

    @torch.inference_mode()
    def observe(self, commit: Commit) -> None:
        """Renew the rows of all tokens in the verified tree."""
        if commit.verified is None:
            return
        likely = commit.verified.logits.topk(self.config.candidates).indices
        # One node a token: with repeated indices the order of writing would be open.
        node = {token: node for node, token in enumerate(commit.verified.tree.token.tolist())}
        self.matrix[list(node)] = likely[list(node.values())]

    @torch.inference_mode()
    def propose(self, context: Context) -> Proposal:
        """Fill the tree from its root on."""
        levels = self.levels[: context.room]
        size = levels[-1][1] if levels else 1
        token = torch.full((size,), context.token[-1], device=self.device)
        for start, end in levels:
            token[start:end] = self.matrix[token[self.parent[start:end]], self.rank[start:end]]
        known = token >= 0
        number = known.cumsum(0) - 1
        parent = self.parent[:size][known]
        return Proposal(DraftTree(token[known], torch.where(parent < 0, parent, number[parent])))
