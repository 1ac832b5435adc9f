"""The training objective: weighted losses of drafted rows against the target's distribution, computed in chunks.

Neither the drafts' logits nor the target's ever exist for a whole batch: with a vocabulary of 128k those of 4,096 rows
fill 2 GiB, several times over for a loss and its gradient. Rows go through in chunks, each of which gives its part of
the loss and of the gradient at once, so nothing is computed twice. The larger the vocabulary, the fewer rows are a
chunk.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads import rows
from heads.base import Draft, DraftHead, Features
from heads.modules.top_k import TopLogProbs, argmax, full_log_probs
from heads.modules.vocab import DraftLmHead
from train.losses import LOSSES, ObjectiveConfig, Rows, TeacherProbs

AUTO = -1  # as many logits in a chunk as suit the device
# Logits of a chunk's rows, of one depth. On a CPU so few that the allocator reuses the same memory (glibc does below
# 32 MiB): fresh pages cost more than the computation. Twice as many where an lm_head of the head's own is trained,
# whose gradient is added once a chunk.
CHUNK = {"cpu": 2**22, "cuda": 2**24}
ROWS = 2048  # of a chunk at most: with a small vocabulary more would only leave the processor's caches


def objective(
    head: DraftHead,
    drafts: list[Draft],
    features: Features,
    weight: Float[Tensor, "d B T"],
    config: ObjectiveConfig,
    chunk: int | None = AUTO,
    top: TopLogProbs | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, "d"]]]:
    """Return the weighted loss, and unweighted sums of each loss and of accuracy at each depth.

    Args:
        head: its `score` computes logits from the drafts' states.
        drafts: its unrolled drafts, one entry a depth.
        features: the batch; `last` gives the teacher through the target's lm_head.
        weight: of each row at each depth; rows of weight 0 are left out.
        config: the losses.
        chunk: logits of a chunk, AUTO by the device; None takes all rows at once by plain autograd: the reference.
        top: the teacher where a store kept the top-k tokens of each row; None computes it from `last`.
    """
    flat = [tuple(None if field is None else field.flatten(0, 1) for field in draft) for draft in drafts]
    size = chunk_size(head, weight.device.type) if chunk == AUTO else chunk
    work = Work(head, features, weight.flatten(1), config, size, top)
    if config.depth_weights == "dpace":
        depth_weight = dpace(work, [state for state, *_ in flat if state is not None])
    else:
        depth_weight = config.depth_decay ** torch.arange(len(drafts), device=weight.device)[:, None]
    work = work._replace(weight=work.weight * depth_weight)
    if chunk is None:
        loss, sums = work.run(flat)
    else:
        module: Any = head
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        chunked: Any = _Chunked.apply
        loss, sums = chunked(work, len(drafts), *(field for draft in flat for field in draft), *trained)
    return loss, dict(zip([*config.losses, "accuracy"], sums, strict=True))


def chunk_size(head: Any, device: str) -> int:
    """Return how many logits make a chunk on a device."""
    size = head.embeddings.vocab_size if head.vocab is None else len(head.vocab.ids)
    trains_lm_head = any(p.requires_grad and p.ndim == 2 and len(p) == size for p in head.parameters())
    return CHUNK.get(device, CHUNK["cuda"]) * (2 if trains_lm_head and device == "cpu" else 1)


@torch.no_grad()
def dpace(work: "Work", states: list[Tensor]) -> Float[Tensor, "d N"]:
    """Return D-PACE's weights (arXiv 2605.18810, equations 7 and 8): what a depth adds to the expected draft length.

    A draft's confidence is the probability c that it gives the text's token, smoothed to (1 - a)c + a. A depth's weight
    is the sum of the products of confidences up to it and up to each later depth. A depth that is not trained, since
    its token stands in the prompt, neither counts nor makes the others count less.
    """
    label_p, config = torch.zeros_like(work.weight), work.config
    for teacher in work.used().split(work.size()):
        probs = work.teacher_probs(teacher)
        for d, state in enumerate(states):
            pick = work.pick(d, teacher)
            x = work.rows(d, [state[pick.source], None, None], pick, probs)
            label_p[d, pick.source] = (-LOSSES["ce"](x, config)).exp().to(label_p.dtype)
    trained = work.weight > 0
    confidence = torch.where(trained, (1 - config.dpace_alpha) * label_p + config.dpace_alpha, 1.0)
    reach = confidence.cumprod(0) * trained
    return reach.flip(0).cumsum(0).flip(0)


class Pick(NamedTuple):
    """The trained rows `source` of one depth whose `teacher` rows are in a chunk, there at `position`."""

    teacher: Int[Tensor, "R"]
    position: Int[Tensor, "R"]
    source: Int[Tensor, "R"]


class Work(NamedTuple):
    """One flattened batch to score, and the loss of a chunk of its rows."""

    head: DraftHead
    features: Features
    weight: Float[Tensor, "d N"]
    config: ObjectiveConfig
    chunk: int | None
    top: TopLogProbs | None

    def size(self) -> int:
        """Return how many teacher rows make a chunk."""
        if self.chunk is None:
            return self.weight.shape[1]
        return max(1, min(ROWS, self.chunk // self.head.embeddings.vocab_size))

    def used(self) -> Int[Tensor, "n"]:
        """Return the rows that are the teacher of a trained row."""
        teaches = torch.zeros(self.weight.shape[1], dtype=torch.bool, device=self.weight.device)
        for depth, weight in enumerate(self.weight, 1):
            teaches[depth:] |= weight[:-depth] > 0
        return teaches.nonzero()[:, 0]

    def pick(self, d: int, teacher: Int[Tensor, "n"]) -> Pick:
        """Return the trained rows of depth `d` + 1 whose teachers are among these."""
        source = teacher - d - 1
        position = ((source >= 0) & (self.weight[d][source.clamp_min(0)] > 0)).nonzero()[:, 0]
        return Pick(teacher[position], position, source[position])

    @torch.no_grad()
    def teacher_probs(self, teacher: Int[Tensor, "n"]) -> TeacherProbs:
        """Return the target's distribution at these rows."""
        if self.top is not None:
            top = TopLogProbs(*(field.flatten(0, 1)[teacher] for field in self.top))
            log_p = full_log_probs(top, self.head.embeddings.vocab_size)
        else:
            logits = self.head.embeddings.logits(self.features.last.flatten(0, 1)[teacher])
            log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        best, vocab = argmax(log_p), self.head.vocab
        return TeacherProbs(log_p, best) if vocab is None else TeacherProbs(log_p[:, vocab.ids], vocab.index_of(best))

    def rows(self, d: int, fields: Sequence[Tensor | None], pick: Pick, probs: TeacherProbs) -> Rows:
        """Return the losses' input for the picked rows of depth `d` + 1, whose `fields` are those of their `Draft`."""
        state, feature, confidence = fields
        assert state is not None
        dtype, vocab = probs.log_p.dtype, self.head.vocab
        logits = self.head.score(state, d + 1)
        token = rows.label(self.features.token, d + 1).flatten()[pick.source]
        return Rows(
            probs,
            pick.position,
            logits.to(dtype).log_softmax(-1),
            token if vocab is None else vocab.index_of(token),
            None if feature is None else feature.to(dtype),
            self.features.last.flatten(0, 1)[pick.teacher].to(dtype),
            None if confidence is None else confidence.to(dtype),
            vocab is None,
        )

    def depth(self, d: int, fields: Sequence[Tensor | None], pick: Pick, probs: TeacherProbs) -> tuple[Tensor, Tensor]:
        """Return the weighted loss of the picked rows, and the sums of each loss and of right guesses."""
        x, total, sums = self.rows(d, fields, pick, probs), self.weight.new_zeros(()), []
        for name, factor in self.config.losses.items():
            value = LOSSES[name](x, self.config)
            total = total + factor * (value * self.weight[d][pick.source]).sum()
            sums.append(value.detach().sum())
        best = probs.best[pick.position]
        # The guess is right if nothing exceeds its log q: several times faster on a CPU than an argmax.
        right = x.log_q.detach().gather(-1, best.clamp_min(0)[:, None])[:, 0] >= x.log_q.detach().amax(-1)
        sums.append((right & x.covered).sum())
        return total, torch.stack([value.to(total.dtype) for value in sums])

    def run(self, drafts: Sequence[Sequence[Tensor | None]]) -> tuple[Tensor, Tensor]:
        """Return the loss and the sums of all rows at once, by plain autograd."""
        teacher = self.used()
        probs = self.teacher_probs(teacher)
        depths = []
        for d, fields in enumerate(drafts):
            pick = self.pick(d, teacher)
            depths.append(self.depth(d, [x if x is None else x[pick.source] for x in fields], pick, probs))
        return torch.stack([loss for loss, _ in depths]).sum(), torch.stack([sums for _, sums in depths], 1)


FIELDS = len(Draft._fields)


class _Chunked(torch.autograd.Function):
    """Compute the loss chunk by chunk and depth by depth, with the gradient in the forward pass."""

    @staticmethod
    def forward(ctx: Any, work: Work, depths: int, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the loss and the sums, and keep the gradient of the drafts' tensors and of the head's parameters."""
        count = depths * FIELDS
        needs_grad = ctx.needs_input_grad[2:]
        trained = [x for x in inputs[count:] if x is not None]
        grads: list[Any] = [
            torch.zeros_like(x) if x is not None and needed and i < count else None
            for i, (x, needed) in enumerate(zip(inputs, needs_grad, strict=True))
        ]
        losses = work.weight.new_zeros(())
        sums = work.weight.new_zeros(len(work.config.losses) + 1, depths)
        module: Any = work.head
        input_index = {id(x): i for i, x in enumerate(inputs[count:], count)}
        lm_heads = [m for m in module.modules() if isinstance(m, DraftLmHead) and id(m.weight) in input_index]
        with ExitStack() as stack:
            added = [stack.enter_context(lm_head.adding()) for lm_head in lm_heads]
            for teacher in work.used().split(work.size()):
                probs = work.teacher_probs(teacher)
                for d in range(depths):
                    pick, first = work.pick(d, teacher), d * FIELDS
                    with torch.enable_grad():
                        fields = [
                            None if x is None else x.detach()[pick.source] for x in inputs[first : first + FIELDS]
                        ]
                        leaves = {i: x for i, x in enumerate(fields, first) if x is not None and needs_grad[i]}
                        leaves = {i: x.requires_grad_() for i, x in leaves.items()}
                        loss, depth_sums = work.depth(d, fields, pick, probs)
                    losses, sums[:, d] = losses + loss.detach(), sums[:, d] + depth_sums
                    targets = [*leaves.values(), *trained]
                    partial: Any = torch.autograd.grad(loss, targets, allow_unused=True) if loss.requires_grad else ()
                    where = [*leaves, *range(count, len(inputs))]
                    for i, grad in zip(where, partial, strict=bool(partial)):
                        if grad is not None and i < count:
                            grads[i][pick.source] = grad  # a row has one teacher at a depth, so it comes once
                        elif grad is not None:
                            grads[i] = grad if grads[i] is None else grads[i].add_(grad)
        for lm_head, lm_head_grads in zip(lm_heads, added, strict=True):
            i = input_index[id(lm_head.weight)]
            for grad in lm_head_grads:
                grads[i] = grad if grads[i] is None else grads[i].add_(grad)
        ctx.grads = grads
        ctx.mark_non_differentiable(sums)
        return losses, sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the kept gradient times the upstream one, and release it: that of a large lm_head is large."""
        grads, ctx.grads = ctx.grads, None
        if upstream[0].device.type == "cpu" and upstream[0] == 1:  # where looking costs nothing
            return None, None, *grads
        return None, None, *(None if grad is None else grad.mul_(upstream[0]) for grad in grads)


class Weights(NamedTuple):
    """The weights of a batch: which rows are trained at each depth, how much each counts, and the normaliser.

    `amount` is the number of rows or of documents, by `ObjectiveConfig.normalize`; summed over the global batch it
    divides the loss.
    """

    trained: Bool[Tensor, "d B T"]
    row: Float[Tensor, "d B T"]
    amount: Float[Tensor, "d"]


def trainable(document: Int[Tensor, "B T"], mask: Int[Tensor, "B T"], depths: int) -> Bool[Tensor, "d B T"]:
    """Return the rows that can be trained at each depth; `mask` is 1 where the target would write the token."""
    return torch.stack([rows.valid(document, mask, d) for d in range(1, depths + 1)])


def weights(
    document: Int[Tensor, "B T"],
    mask: Int[Tensor, "B T"],
    anchors: Bool[Tensor, "B T"] | None,
    config: ObjectiveConfig,
) -> Weights:
    """Return the weights of a batch's rows, without those of depths; `anchors` are drafted from, None for all rows."""
    trained = trainable(document, mask, config.depths)
    if anchors is not None:
        trained = trained & anchors
    if config.normalize == "token":
        return Weights(trained, trained.float(), trained.sum((1, 2)).float())
    number = (document != document.roll(1, 1)).long()
    number[:, 0] = 0
    number = number.cumsum(1).expand_as(trained)  # 0, 1, 2, … along a row, so documents of a row differ
    held = torch.zeros(trained.shape, device=trained.device).scatter_add(2, number, trained.float())
    return Weights(trained, trained / held.gather(2, number).clamp_min(1), (held > 0).sum((1, 2)).float())
