"""Rollouts, for on-policy training: the current head drafts on training prompts and is trained at the drafted nodes.

A sequence's committed tokens are ordinary rows. Rejected draft tokens are appended to the sequence, where nothing
attends to them, and `Features.path[t, d - 1]` is the row of the token drafted from row t at depth d: a row of the
sequence if it was accepted, otherwise an appended row. So each head unrolls a path as it unrolls data, and a node's
teacher is the target's distribution there. One copy of a sequence has one path below each root; to train all nodes, it
has as many copies as its trees have leaves. A rollout depends on seed, step and weights, and is used only in its step.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from data.batches import Batch, Batches
from data.features.source import MicroBatch
from heads.base import Features, NamedTensors, Tokens, to_device
from inference.decode import RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.request import Pass
from inference.target.target import Target
from inference.verification.sample import Sampling
from train.losses import OnPolicyConfig

NODE, NONE = -1, -1  # document of rejected nodes and padding; the row after a path's end


class RolloutRow(NamedTuple):
    """A sequence with one path below each root: the fields of `Batch` and `Features` without the batch dimension."""

    token: Int[Tensor, "T"]
    document: Int[Tensor, "T"]
    hidden: Float[Tensor, "T L D"]
    last_hidden: Float[Tensor, "T D"]
    path: Int[Tensor, "T d"]
    trained: Bool[Tensor, "T d"]


def rollout_rows(prompt: Tokens, passes: Sequence[Pass], depths: int, nodes: str) -> list[RolloutRow]:
    """Return a sequence's copies from the target's passes, one per path below its roots."""
    token = torch.cat([torch.tensor(prompt[:1]), *(one.token.cpu() for one in passes)])[:-1]
    hidden = torch.cat([one.features.hidden[0] for one in passes])
    last = torch.cat([one.features.last_hidden[0] for one in passes])
    following = torch.arange(len(token))[:, None] + torch.arange(1, depths + 1)
    exists = following < len(token)
    path, written = following.where(exists, NONE), exists & (following >= len(prompt) - 1)
    text = RolloutRow(token, torch.zeros_like(token), hidden, last, path, written)
    if nodes == "text":
        return [text]
    paths = [_paths(one) for one in passes]
    count = max(1, *map(len, paths)) if nodes == "all" else 1
    return [_drafted(text, passes, paths, k, nodes) for k in range(count)]


def _paths(verified: Pass) -> list[list[int]]:
    """Return the path to each leaf of a pass's tree, the closest to the accepted path first."""
    if verified.tree is None:
        return []
    parent, paths = verified.tree.parent.tolist(), []
    for leaf in sorted(set(range(len(parent))) - set(parent)):
        path = [leaf]
        while path[-1]:
            path.append(parent[path[-1]])
        paths.append(path[::-1])
    return sorted(paths, key=lambda path: -len(set(path) & set(verified.path)))


def _drafted(text: RolloutRow, passes: Sequence[Pass], paths: list[list[list[int]]], k: int, nodes: str) -> RolloutRow:
    """Return the copy with the `k`-th path below each root, trained at nodes that no earlier copy has."""
    path, trained = text.path.clone(), torch.zeros_like(text.trained)
    token, last = Tokens(), [text.last_hidden]  # tokens and last hidden states of rejected nodes
    row = -1  # the row before the root
    for one, leaves in zip(passes, paths, strict=True):
        earlier = {node for leaf in leaves[:k] for node in leaf}
        if leaves:
            path[row, 1:] = NONE  # without the root, which is in every copy's sequence, where later rows attend to it
        for d, node in enumerate(leaves[k][: path.shape[1]] if k < len(leaves) else ()):
            if node in one.path:
                path[row, d] = row + 1 + d
            elif nodes != "accepted" and one.tree is not None:
                path[row, d] = len(text.token) + len(token)
                token.append(int(one.tree.token[node]))
                last.append(one.last[node][None])
            else:
                break
            trained[row, d] = node not in earlier
        row += len(one.token)
    return RolloutRow(
        torch.cat([text.token, torch.tensor(token, dtype=torch.long)]),
        pad(text.document, (0, len(token)), value=NODE),
        pad(text.hidden, (0, 0, 0, 0, 0, len(token))),
        torch.cat(last),
        pad(path, (0, 0, 0, len(token)), value=NONE),
        pad(trained, (0, 0, 0, len(token))),
    )


@dataclass
class Rollouts:
    """The rollouts of one process, for any step, on prompts from its part of the step's batch."""

    target: Target
    decoding: Callable[[NamedTensors], Any]  # weights -> a head for decoding
    tree: TreeConfig
    config: OnPolicyConfig
    depths: int
    batches: Batches

    def due(self, step: int) -> bool:
        """Whether a step has a rollout."""
        return step % self.config.every == 0

    def __call__(self, step: int, batches: Sequence[Batch], weights: NamedTensors) -> tuple[list[MicroBatch], int]:
        """Return micro-batches of drafts by a head with these weights, and the number of tokens the target read."""
        draw = random.Random(f"{self.batches.seed}/{step}/{self.batches.rank}")
        prompts = self.prompts(batches, draw)
        sampling = Sampling(self.config.temperature, 0, 1.0)
        settings = [
            RequestParams(self.config.tokens, sampling, seed=draw.getrandbits(31), keep_passes=True) for _ in prompts
        ]
        drafter = HeadDrafter(self.decoding(weights), self.tree, "on_policy")
        size = len(prompts) if self.target.takes_trees else 1
        with self.target.uncaptured():  # CUDA graphs of these weights would serve no other step
            answers = speculate(self.target, drafter, prompts, settings, batch_size=size)
        sequences = [
            rollout_rows(prompt, answer.target_passes, self.depths, self.config.nodes)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        size, width = self.batches.micro_batch_size, self.batches.packed.token.shape[1]
        groups = [[*chain(*sequences[first : first + size])] for first in range(0, len(sequences), size)]
        read = sum(map(len, prompts)) + sum(taken.drafted + 1 for answer in answers for taken in answer.steps)
        return [_micro_batch(group, self.target.device, width) for group in groups], read

    def prompts(self, batches: Sequence[Batch], draw: random.Random) -> list[Tokens]:
        """Return prompts: the batches' documents up to the start of an answer, or plain text up to its middle.

        Every process has the same number: with fewer documents they repeat.
        """
        texts = [
            (batch.token[row][held].tolist(), batch.loss_mask[row][held].tolist())
            for batch in batches
            for row in range(len(batch.token))
            for number in batch.document[row].unique().tolist()
            if number >= 0 and (held := batch.document[row] == number).sum() > 1
        ]
        texts = texts or [(batches[0].token[0, :2].tolist(), [1, 1])]
        chosen = draw.sample(texts, min(self.config.prompts, len(texts)))
        prompts = []
        for number in range(self.config.prompts):
            token, mask = chosen[number % len(chosen)]
            starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
            prompts.append(
                token[: (draw.choice(starts) if starts else len(token) // 2)][-(self.target.max_model_len - 2) :]
            )
        return prompts


def _micro_batch(copies: list[RolloutRow], device: torch.device, length: int) -> MicroBatch:
    """Return copies as a micro-batch; on CUDA padded to a few widths, each with compiled kernels."""
    width = length if device.type == "cuda" else 1

    def joined(field: int, value: int = 0) -> Any:
        rows = pad_sequence([copy[field] for copy in copies], batch_first=True, padding_value=value)
        return pad(rows, (*(0, 0) * (rows.ndim - 2), 0, -rows.shape[1] % width), value=value)

    token, hidden, last, path = joined(0), joined(2), joined(3), joined(4).clamp_min(0)
    document, trained = joined(1, NODE), joined(5).permute(2, 0, 1).contiguous()
    index = -2 - torch.arange(len(copies))  # negative indices, of no sequence in the data
    batch = Batch(token, document, torch.zeros_like(token), index, path, trained)
    token, document, path = (to_device(field, device) for field in (token, document, path))
    features = Features(token, hidden, last, document, path)
    return MicroBatch(batch, lambda: features)
