"""What training minimises: losses of drafted rows against the target's law, each row with its weight.

Neither the drafts' logits nor the target's ever exist for a whole batch: with a vocabulary of 128k those of 4,096 rows
fill 2 GiB, several times over for a loss and its gradient. Rows go through in chunks, each of which gives its part of
the loss and of the gradient at once, so nothing is computed twice. The larger the vocabulary, the fewer rows are a
chunk.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heads import rows
from heads.base import Draft, DraftHead, Features
from heads.modules.top_k import TopLaw, likeliest, whole_law
from heads.modules.vocab import Readout
from train.losses import LOSSES, Law, ObjectiveConfig, Rows

AUTO = -1  # as many logits in a chunk as the device likes
# Logits of a chunk's rows, of one depth. On a CPU so few that the allocator hands the same memory out again (glibc does
# below 32 MiB): fresh pages cost more than the arithmetic. Twice as many where an lm_head of the head's own is trained,
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
    top: TopLaw | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, "d"]]]:
    """Return the weighted loss, and unweighted sums of each loss and of accuracy at each depth.

    Args:
        head: whose `score` makes logits of the drafts' states.
        drafts: what it unrolled, one entry a depth.
        features: the batch; `last` gives the teacher through the target's lm_head.
        weight: what each row counts at each depth; rows of weight 0 are left out.
        config: the losses.
        chunk: logits of a chunk, AUTO by the device; None takes all rows at once by plain autograd: the reference.
        top: the teacher where it was kept as the likeliest tokens of each row; None takes that of `last`.
    """
    flat = [tuple(None if part is None else part.flatten(0, 1) for part in draft) for draft in drafts]
    size = suited(head, weight.device.type) if chunk == AUTO else chunk
    work = Work(head, features, weight.flatten(1), config, size, top)
    if config.depth_weights == "dpace":
        each = dpace(work, [state for state, *_ in flat if state is not None])
    else:
        each = config.depth_decay ** torch.arange(len(drafts), device=weight.device)[:, None]
    work = work._replace(weight=work.weight * each)
    if chunk is None:
        loss, sums = work.run(flat)
    else:
        module: Any = head
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        chunked: Any = _Chunked.apply
        loss, sums = chunked(work, len(drafts), *(part for draft in flat for part in draft), *trained)
    return loss, dict(zip([*config.losses, "accuracy"], sums, strict=True))


def suited(head: Any, device: str) -> int:
    """Return how many logits make a chunk on a device."""
    size = head.embeddings.vocab_size if head.vocab is None else len(head.vocab.ids)
    own = any(each.requires_grad and each.ndim == 2 and len(each) == size for each in head.parameters())
    return CHUNK.get(device, CHUNK["cuda"]) * (2 if own and device == "cpu" else 1)


@torch.no_grad()
def dpace(work: "Work", states: list[Tensor]) -> Float[Tensor, "d N"]:
    """Return D-PACE's weights (arXiv 2605.18810, equations 7 and 8): what a depth adds to the expected draft.

    A draft's confidence is the probability c that it gives the text's token. With (1 - a)c + a in its place, a depth
    weighs as much as the products of confidences up to it and up to each later depth, summed. A depth that is not
    trained, since its token stands in the prompt, neither counts nor makes the others count less.
    """
    sure, config = torch.zeros_like(work.weight), work.config
    for teacher in work.used().split(work.size()):
        law = work.law(teacher)
        for d, state in enumerate(states):
            pick = work.pick(d, teacher)
            x = work.rows(d, [state[pick.source], None, None], pick, law)
            sure[d, pick.source] = (-LOSSES["ce"](x, config)).exp().to(sure.dtype)
    trained = work.weight > 0
    share = torch.where(trained, (1 - config.dpace_alpha) * sure + config.dpace_alpha, 1.0)
    reach = share.cumprod(0) * trained
    return reach.flip(0).cumsum(0).flip(0)


class Pick(NamedTuple):
    """The rows of one depth whose teachers are among a chunk's: which of the chunk, and their own numbers."""

    teacher: Int[Tensor, "R"]
    place: Int[Tensor, "R"]
    source: Int[Tensor, "R"]


class Work(NamedTuple):
    """One batch's rows to score, numbered through the flattened batch, and what a chunk of them gives."""

    head: DraftHead
    features: Features
    weight: Float[Tensor, "d N"]
    config: ObjectiveConfig
    chunk: int | None
    top: TopLaw | None

    def size(self) -> int:
        """Return how many teacher rows make a chunk."""
        if self.chunk is None:
            return self.weight.shape[1]
        return max(1, min(ROWS, self.chunk // self.head.embeddings.vocab_size))

    def used(self) -> Int[Tensor, "n"]:
        """Return the rows that are teachers of a trained row."""
        found = torch.zeros(self.weight.shape[1], dtype=torch.bool, device=self.weight.device)
        for depth, weight in enumerate(self.weight, 1):
            found[depth:] |= weight[:-depth] > 0
        return found.nonzero()[:, 0]

    def pick(self, d: int, teacher: Int[Tensor, "n"]) -> Pick:
        """Return the trained rows of depth `d` + 1 whose teachers are among these."""
        source = teacher - d - 1
        place = ((source >= 0) & (self.weight[d][source.clamp_min(0)] > 0)).nonzero()[:, 0]
        return Pick(teacher[place], place, source[place])

    @torch.no_grad()
    def law(self, teacher: Int[Tensor, "n"]) -> Law:
        """Return the target's law at these rows."""
        if self.top is not None:
            kept = TopLaw(*(part.flatten(0, 1)[teacher] for part in self.top))
            log_p = whole_law(kept, self.head.embeddings.vocab_size)
        else:
            logits = self.head.embeddings.logits(self.features.last.flatten(0, 1)[teacher])
            log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        best, vocab = likeliest(log_p), self.head.vocab
        return Law(log_p, best) if vocab is None else Law(log_p[:, vocab.ids], vocab.place(best))

    def rows(self, d: int, fields: Sequence[Tensor | None], pick: Pick, law: Law) -> Rows:
        """Return what the losses read of these rows of depth `d` + 1, of whose draft `fields` are the parts."""
        state, feature, confidence = fields
        assert state is not None
        dtype, vocab = law.log_p.dtype, self.head.vocab
        logits = self.head.score(state, d + 1)
        token = rows.label(self.features.token, d + 1).flatten()[pick.source]
        return Rows(
            law,
            pick.place,
            logits.to(dtype).log_softmax(-1),
            token if vocab is None else vocab.place(token),
            None if feature is None else feature.to(dtype),
            self.features.last.flatten(0, 1)[pick.teacher].to(dtype),
            None if confidence is None else confidence.to(dtype),
            vocab is None,
        )

    def depth(self, d: int, fields: Sequence[Tensor | None], pick: Pick, law: Law) -> tuple[Tensor, Tensor]:
        """Return the weighted loss of these rows, and the sums of each loss and of right guesses."""
        x, total, sums = self.rows(d, fields, pick, law), self.weight.new_zeros(()), []
        for name, factor in self.config.losses.items():
            value = LOSSES[name](x, self.config)
            total = total + factor * (value * self.weight[d][pick.source]).sum()
            sums.append(value.detach().sum())
        best = law.best[pick.place]
        # Likeliest is what nothing exceeds: several times faster on a CPU than a search for its place.
        likeliest = x.log_q.detach().gather(-1, best.clamp_min(0)[:, None])[:, 0] >= x.log_q.detach().amax(-1)
        sums.append((likeliest & x.known).sum())
        return total, torch.stack([each.to(total.dtype) for each in sums])

    def run(self, drafts: Sequence[Sequence[Tensor | None]]) -> tuple[Tensor, Tensor]:
        """Return the loss and the sums of all rows at once, by plain autograd."""
        teacher = self.used()
        law = self.law(teacher)
        found = []
        for d, fields in enumerate(drafts):
            pick = self.pick(d, teacher)
            found.append(self.depth(d, [x if x is None else x[pick.source] for x in fields], pick, law))
        return torch.stack([loss for loss, _ in found]).sum(), torch.stack([sums for _, sums in found], 1)


FIELDS = len(Draft._fields)


class _Chunked(torch.autograd.Function):
    """The loss chunk by chunk and depth by depth; the gradient is ready when the loss is."""

    @staticmethod
    def forward(ctx: Any, work: Work, depths: int, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the loss and the sums, and keep the gradient of the drafts' tensors and of the head's parameters."""
        count = depths * FIELDS
        wanted = ctx.needs_input_grad[2:]
        trained = [x for x in inputs[count:] if x is not None]
        grads: list[Any] = [
            torch.zeros_like(x) if x is not None and want and i < count else None
            for i, (x, want) in enumerate(zip(inputs, wanted, strict=True))
        ]
        losses = work.weight.new_zeros(())
        sums = work.weight.new_zeros(len(work.config.losses) + 1, depths)
        module: Any = work.head
        place = {id(x): i for i, x in enumerate(inputs[count:], count)}
        readouts = [each for each in module.modules() if isinstance(each, Readout) and id(each.weight) in place]
        with ExitStack() as stack:
            added = [stack.enter_context(each.adding()) for each in readouts]
            for teacher in work.used().split(work.size()):
                law = work.law(teacher)
                for d in range(depths):
                    pick, first = work.pick(d, teacher), d * FIELDS
                    with torch.enable_grad():
                        fields = [
                            None if x is None else x.detach()[pick.source] for x in inputs[first : first + FIELDS]
                        ]
                        asked = [(first + i, x) for i, x in enumerate(fields) if x is not None and wanted[first + i]]
                        asked = [(i, x.requires_grad_()) for i, x in asked]
                        loss, each = work.depth(d, fields, pick, law)
                    losses, sums[:, d] = losses + loss.detach(), sums[:, d] + each
                    leaves = [x for _, x in asked] + trained
                    found: Any = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else ()
                    where = [i for i, _ in asked] + list(range(count, len(inputs)))
                    for i, grad in zip(where, found, strict=bool(found)):
                        if grad is not None and i < count:
                            grads[i][pick.source] = grad  # a row has one teacher at a depth, so it comes once
                        elif grad is not None:
                            grads[i] = grad if grads[i] is None else grads[i].add_(grad)
        for readout, whole in zip(readouts, added, strict=True):
            i = place[id(readout.weight)]
            for grad in whole:
                grads[i] = grad if grads[i] is None else grads[i].add_(grad)
        ctx.grads = grads
        ctx.mark_non_differentiable(sums)
        return losses, sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the kept gradient, scaled in place, and keep it no longer: of a large lm_head it is large."""
        grads, ctx.grads = ctx.grads, None
        if upstream[0].device.type == "cpu" and upstream[0] == 1:  # where looking costs nothing
            return None, None, *grads
        return None, None, *(None if grad is None else grad.mul_(upstream[0]) for grad in grads)
