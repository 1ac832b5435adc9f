"""Token Recycling (Luo et al., arXiv 2408.08696): the target's latest top candidates after each token."""

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heads.base import Tokens
from heads.common.typed import Count, Number
from inference.drafters.host import DrafterState, HostDrafter
from inference.drafters.policy import TreeConfig, parents_of
from inference.protocol import CommittedTokens, DraftContext, Proposal
from inference.target.target import Target
from inference.verification.tree import DraftTree

FOLD = 256  # tokens in a row of the folded vocabulary


class Recycling(HostDrafter):
    """Fills a fixed tree, level by level, from the target's top candidates after each token.

    Every node of a verified tree, rejected ones included, updates its token's candidates from the target's logits; of
    equal tokens the last node counts. An unseen token has no candidates. Memory: `candidates` token ids for each seen
    token, at most the vocabulary.
    """

    reads_logits = True

    @dataclass(frozen=True)
    class Config:
        """The number of candidates for each token, whether they last across requests, and the tree as rank paths."""

        candidates: Count
        memory: bool
        paths: list[list[Number]]

    def __init__(self, config: Config, target: Target, name: str) -> None:
        target.check_masks(f"which drafter={name} needs: use drafter=prompt_lookup or suffix, which draft chains")
        tree = TreeConfig("static", 0, 0, 0, config.paths, [])
        if any(rank >= config.candidates for path in config.paths for rank in path):
            raise ValueError(f"drafter.{name}.paths: a rank runs from 0 to candidates - 1, {config.candidates - 1}")
        self.config, self.name, self.tree, paths = config, name, tree.label, tree.shape()
        above = parents_of(paths)[1:]
        self.nodes = [(len(path), p, path[-1]) for path, p in zip(paths, above, strict=True)]  # depth, parent, rank
        self.remembers = config.memory
        self.candidates: dict[int, Tokens] = {}

    def start(self, prompt: Tokens) -> "RecyclingState":
        """Begin a sequence with the candidates of earlier ones, or with none."""
        return RecyclingState(self, self.candidates if self.remembers else {})

    def reset(self) -> None:
        """Forget past requests, so that the next one starts cold."""
        self.candidates.clear()

    def clone(self) -> "Recycling":
        """Return a drafter with a copy of the candidates."""
        other = copy.copy(self)
        other.candidates = dict(self.candidates)
        return other


@dataclass
class RecyclingState(DrafterState):
    """One sequence: the candidates after each token, shared with later sequences if the drafter remembers."""

    drafter: Recycling
    candidates: dict[int, Tokens]

    @torch.inference_mode()
    def update(self, commit: CommittedTokens) -> None:
        """Update the candidates of all tokens in the verified tree."""
        if commit.verified is None or commit.verified.logits is None:
            return
        # On the host, where trees are filled: Python is faster than tensor operations for so few numbers.
        top = top_tokens(commit.verified.logits, self.drafter.config.candidates).tolist()
        self.candidates.update(zip(commit.verified.tree.token.tolist(), top, strict=True))

    def propose(self, context: DraftContext) -> Proposal:
        """Fill the tree from its root on."""
        token, parent = [context.token[-1]], [-1]
        index = {0: 0}  # node of the shape -> node of the tree
        for node, (depth, above, rank) in enumerate(self.drafter.nodes, 1):
            if depth > context.max_draft_depth:
                break
            followers = self.candidates.get(token[index[above]]) if above in index else None
            if followers is not None:
                index[node] = len(token)
                token.append(followers[rank])
                parent.append(index[above])
        return Proposal(DraftTree(torch.tensor(token), torch.tensor(parent)))


def top_tokens(logits: Float[Tensor, "N V"], count: int) -> Int[Tensor, "N K"]:
    """Return the top `count` tokens of each row, the best first.

    On a CPU a maximum is cheaper than a top-k. So the vocabulary is folded into rows of `FOLD`, and only the columns
    with the `count` highest maxima are searched: no other column can have a top token.
    """
    whole = logits.shape[1] // FOLD * FOLD
    if logits.device.type != "cpu" or whole < 32 * FOLD or count > FOLD:
        return logits.topk(count).indices
    column = logits[:, :whole].unflatten(1, (-1, FOLD)).amax(1).topk(count, sorted=False).indices
    rest = torch.arange(whole, logits.shape[1]).expand(len(logits), -1)
    token = torch.cat([(torch.arange(0, whole, FOLD)[:, None] + column[:, None]).flatten(1), rest], 1)
    return token.gather(1, logits.gather(1, token).topk(count).indices)
