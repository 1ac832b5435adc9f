"""The training objective: weighted losses of drafted rows against the target's distribution, computed in chunks.

The logits of a whole batch are never materialised: with a vocabulary of 128k those of 4,096 rows take 2 GiB, several
times for a loss and its gradient. Each chunk of rows computes its loss and its gradient together, so nothing is
computed twice. The host chooses the rows from the loss masks, which are on the host, so it never waits for the device.

Anchors and feature noise are hashes of the run's seed, the step and a sequence's index in the data, so they are the
same on every device, for any number of processes and micro-batches, and after resuming.
"""

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from heads import rows
from heads.base import DepthOutput, DraftHead, Features, draft_size, to_device
from heads.modules.vocab import AccumulatingModule, CandidateLmHead, argmax
from heads.shapes import Anchors, Paths, PerSequence, RowMask, Sequences
from inference.verification.rng import BITS, hash_key, seed_key
from train.losses import LOSSES, NOT_OF_LOGITS, READ_P, LossInputs, ObjectiveConfig, RowIndex, TeacherProbs

TeacherRows = Int[Tensor, "n"]
Trained = Bool[Tensor, "d B T"]  # the rows that are trained at each depth
ANCHORS, NOISE = range(2)  # the uses of a sequence's random numbers
VALUES = {"cpu": 2**15, "cuda": 2**22}  # random numbers hashed at a time: fits a CPU's cache, a GPU's memory


def row_keys(seed: int, step: int, index: PerSequence) -> PerSequence:
    """Return the random keys of a step's packed sequences."""
    return hash_key(hash_key(seed_key(seed), step), index)


def sample_anchors(has_loss: RowMask, count: int | None, keys: PerSequence) -> Anchors:
    """Sample `count` anchor rows of each packed sequence, rows with a loss first; None means `trained_rows`."""
    length = has_loss.shape[1]
    if count is None or count >= length:
        return None
    row = torch.arange(length, device=has_loss.device)
    order = hash_key(hash_key(keys, ANCHORS)[:, None], row)  # a permutation of 32 bits has no ties
    return (order + (has_loss.long() << BITS)).topk(count).indices.sort().values


def trained_rows(has_loss: RowMask) -> Anchors:
    """Return each packed sequence's rows with a loss, in order, padded to a common number; None for all rows.

    The number is a multiple of 1/16 of the length, for few different shapes.
    """
    length, most = has_loss.shape[1], int(has_loss.sum(1).max())
    step = max(1, length // 16)
    count = -(-most // step) * step
    if not 0 < count < length:
        return None
    return has_loss.long().argsort(dim=1, descending=True, stable=True)[:, :count].sort(1).values


def noisy(features: Features, noise: float, keys: PerSequence) -> Features:
    """Add EAGLE's uniform feature noise, scaled by the ratio of its reference length to this length."""
    if noise == 0:
        return features
    length, layers = features.hidden.shape[1:3]
    scale, device = noise * 512 / length, features.last_hidden.device
    position, layer = (torch.arange(size, device=device) for size in (length, 1 + layers))
    key = hash_key(hash_key(hash_key(keys, NOISE)[:, None], position)[:, :, None], layer)  # a key for each vector
    noised = []
    for x, vector_keys in ((features.last_hidden, key[:, :, 0]), (features.hidden, key[:, :, 1:])):
        noised.append(x.clone(memory_format=torch.contiguous_format))
        unit = torch.arange(x.shape[-1], device=device)
        size = max(1, VALUES.get(device.type, VALUES["cuda"]) // x.shape[-1])
        for some, some_keys in zip(
            noised[-1].flatten(0, -2).split(size), vector_keys.flatten().split(size), strict=True
        ):
            some.add_(hash_key(some_keys[:, None], unit).float().mul_(scale / 2**BITS).sub_(scale / 2))
    last, hidden = noised
    return features._replace(last_hidden=last, hidden=hidden)


ROWS = 2048  # maximum rows per chunk: enough to fill an accelerator's matmuls
MIN_CHUNKS = 16  # minimum number of chunks, so that a chunk's tensors stay small next to the states
# Maximum logits per depth of a chunk on a CPU: glibc's allocator reuses memory below 32 MiB, and fresh pages cost more
# than the computation. Twice as many if the head trains its own lm_head, whose gradient is added once per chunk.
CPU_LOGITS = 2**22
TEACHER_ROWS = 512  # rows at a time with logits over the whole vocabulary, if the head has a draft vocabulary


def objective(
    head: Any,
    drafts: list[DepthOutput],
    features: Features,
    weight: Float[Tensor, "d B T"],
    config: ObjectiveConfig,
    chunks: "Chunks",
    base_loss_share: float = 0.0,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, "d"]]]:
    """Return the weighted loss, and unweighted sums of each loss and of accuracy at each depth.

    Args:
        head: a module and `DraftHead`, whose `compute_logits` computes logits from the drafts' states.
        features: the batch; `last_hidden` gives the teacher through the target's lm_head.
        chunks: the rows to score, from `chunked`.
        base_loss_share: the share of `base_state` in the losses of logits, if the head has one.
    """
    flat = [DepthOutput._make(None if x is None else x.flatten(0, 1) for x in draft) for draft in drafts]
    if not base_loss_share:
        flat = [draft._replace(base_state=None) for draft in flat]
    work = LossContext(head, features, weight.flatten(1), config, chunks, labels(head, features), base_loss_share)
    if config.depth_weights == "dpace":
        depth_weight = dpace(work, [draft.state for draft in flat])
    else:
        depth_weight = config.depth_decay ** torch.arange(len(drafts), device=weight.device)[:, None]
    work = work._replace(weight=work.weight * depth_weight)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    apply: Any = _Chunked.apply
    loss, sums = apply(work, len(drafts), *(field for draft in flat for field in draft), *trained)
    return loss, dict(zip([*config.losses, "accuracy"], sums, strict=True))


def chunk_rows(head: Any, device: str, count: int) -> int:
    """Return the number of teacher rows of a chunk on a device; all depths together have `count` rows."""
    if device != "cpu":
        return min(ROWS, 1 << max(0, (count // MIN_CHUNKS).bit_length() - 1))  # a power of two, as batch sizes are
    size = draft_size(head)
    trains_lm_head = any(p.requires_grad and p.ndim == 2 and len(p) == size for p in head.parameters())
    return max(1, min(ROWS, CPU_LOGITS * (2 if trains_lm_head else 1) // head.embeddings.vocab_size))


def labels(head: DraftHead, features: Features) -> Int[Tensor, "N"]:
    """Return the label at each teacher row: the next token; -1 outside the draft vocabulary or after a path's end."""
    token = rows.drafted_token(features.token, 1, features.path)
    if features.path is not None:
        token = torch.where(features.path[..., 0] > 0, token, -1)
    return token.flatten() if head.vocab is None else head.vocab.index_of(token.flatten())


@torch.no_grad()
def dpace(work: "LossContext", states: list[Tensor]) -> Float[Tensor, "d N"]:
    """Return D-PACE's weights (arXiv 2605.18810, equations 7 and 8): a depth's share of the expected draft length.

    A draft's confidence is its probability c of the label, 0 without a label, smoothed to (1 - a)c + a. A depth's
    weight is the sum of the products of confidences up to it and up to each later depth. A depth that is not trained,
    because its label is in the prompt, has no weight and does not lower the others'.
    """
    label_p, config = torch.zeros_like(work.weight), work.config
    for teacher, by_depth in work.chunks:
        probs = work.teacher_probs(teacher)
        for d, (state, pick) in enumerate(zip(states, by_depth, strict=True)):
            x = work.loss_inputs(d, DepthOutput(state[pick.source]), pick, probs)
            label_p[d, pick.source] = torch.where(x.label >= 0, (-LOSSES["ce"](x, config)).exp(), 0).to(label_p.dtype)
    trained = work.weight > 0
    confidence = torch.where(trained, (1 - config.dpace_alpha) * label_p + config.dpace_alpha, 1.0)
    return (confidence.cumprod(0) * trained).flip(0).cumsum(0).flip(0)


class DepthRows(NamedTuple):
    """The trained rows `source` of one depth, with their teachers, at `position` in the chunk."""

    teacher_row: RowIndex
    position: RowIndex
    source: RowIndex


class Chunk(NamedTuple):
    """The teacher rows of a flattened batch that are scored together, and the rows of each depth that they teach."""

    teacher_row: TeacherRows
    by_depth: list[DepthRows]


Chunks = list[Chunk]


def chunked(trained: Trained, size: int, device: torch.device, path: Paths = None) -> Chunks:
    """Return the trained rows in chunks of `size` teachers, copied to a device asynchronously.

    If `trained` is on the device, the host waits for the device. The teacher of row t at depth d is row t + d, or
    `path[t, d - 1]`; at one depth no two rows have the same teacher.
    """
    trained_row = []  # depth -> for each teacher row, the trained row that it teaches; -1 for none
    row_index = torch.arange(trained[0].numel(), device=trained.device).view_as(trained[0])
    for depth, flags in enumerate(trained, 1):
        source = flags.flatten().nonzero()[:, 0]
        teacher = rows.drafted_token(row_index, depth, path).flatten()[source]  # its row is the teacher's
        trained_row.append(torch.full_like(flags.flatten(), -1, dtype=torch.long).scatter(0, teacher, source))
    chunks = []
    for teacher in (torch.stack(trained_row) >= 0).any(0).nonzero()[:, 0].split(size):
        sources = [row[teacher] for row in trained_row]
        pairs = zip([(source >= 0).nonzero()[:, 0] for source in sources], sources, strict=True)
        chunks.append(Chunk(teacher, [DepthRows(teacher[at], at, source[at]) for at, source in pairs]))
    if trained.device == device:
        return chunks
    vectors, layout = tree_flatten(chunks)
    return tree_unflatten(to_device(torch.cat(vectors), device).split([*map(len, vectors)]), layout)


class LossContext(NamedTuple):
    """A flattened batch to score; computes the loss of a chunk of its rows."""

    head: Any
    features: Features
    weight: Float[Tensor, "d N"]
    config: ObjectiveConfig
    chunks: Chunks
    label: Int[Tensor, "N"]  # label of the rows that each row teaches
    base_loss_share: float = 0.0

    @torch.no_grad()
    def teacher_probs(self, teacher: TeacherRows, *, reuse_memory: bool = False) -> TeacherProbs:
        """Return the target's distribution over the draft vocabulary, at the teacher rows.

        Logits are computed for TEACHER_ROWS rows at a time. With `reuse_memory` the probs overwrite unread log-probs.
        """
        embeddings, vocab, pieces = self.head.embeddings, self.head.vocab, []
        for piece in teacher.split(max(1, len(teacher) if vocab is None else TEACHER_ROWS)):
            logits = embeddings.logits(self.features.last_hidden.flatten(0, 1)[piece])
            log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            best = argmax(log_p)
            pieces.append((log_p, best) if vocab is None else (log_p[:, vocab.ids], vocab.index_of(best)))
        probs = TeacherProbs(*(pieces[0] if len(pieces) == 1 else map(torch.cat, zip(*pieces, strict=True))))
        if reuse_memory and READ_P.issuperset(self.config.losses):
            if vocab is not None:
                probs.log_mass = probs.log_mass  # cached before its input is overwritten
            probs.p = probs.log_p.exp_()
            del probs.log_p
        return probs

    def loss_inputs(self, d: int, draft: DepthOutput, pick: DepthRows, probs: TeacherProbs) -> LossInputs:
        """Return the losses' inputs for a draft of the picked rows at depth `d` + 1."""
        logits = self.head.compute_logits(draft.state, d + 1)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        lm_head: Any = getattr(self.head, "lm_head", None)
        has_candidates = isinstance(lm_head, CandidateLmHead)
        return LossInputs(
            probs,
            pick.position,
            logits.to(dtype).log_softmax(-1),
            self.label[pick.teacher_row],
            None if draft.feature is None else draft.feature.to(dtype),
            None if draft.feature is None else self.features.last_hidden.flatten(0, 1)[pick.teacher_row].to(dtype),
            None if draft.confidence is None else draft.confidence.to(dtype),
            self.head.vocab is None,
            lm_head.scores(draft.state.detach()).to(dtype) if has_candidates else None,
            lm_head.count if has_candidates else 0,
        )

    def depth(self, d: int, draft: DepthOutput, pick: DepthRows, probs: TeacherProbs) -> tuple[Tensor, Tensor]:
        """Return the picked rows' weighted loss, and the sums of each loss and of correct guesses."""
        x, total, sums = self.loss_inputs(d, draft, pick, probs), self.weight.new_zeros(()), []
        row_weight = weight = self.weight[d][pick.source]
        if draft.base_state is not None:
            uncorrected = self.loss_inputs(d, draft._replace(state=draft.base_state), pick, probs)
            for name, factor in self.config.losses.items():
                if name not in NOT_OF_LOGITS:
                    base_loss = (LOSSES[name](uncorrected, self.config) * row_weight).sum()
                    total = total + self.base_loss_share * factor * base_loss
            weight = row_weight * (1 - self.base_loss_share)
        for name, factor in self.config.losses.items():
            value = LOSSES[name](x, self.config)
            total = total + factor * (value * (row_weight if name in NOT_OF_LOGITS else weight)).sum()
            sums.append(value.detach().sum())
        # A guess is correct if no log q exceeds that of the target's token; on a CPU much faster than an argmax.
        right = x.log_q.detach().gather(-1, x.best.clamp_min(0)[:, None])[:, 0] >= x.log_q.detach().amax(-1)
        sums.append((right & x.covered).sum())
        return total, torch.stack([value.to(total.dtype) for value in sums])


FIELDS = len(DepthOutput._fields)


class _Chunked(torch.autograd.Function):
    """The loss, chunk by chunk and depth by depth; the forward pass computes the gradient too."""

    @staticmethod
    def forward(ctx: Any, work: LossContext, depths: int, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the loss and the sums, and save the gradients of the drafts' tensors and the head's parameters."""
        count = depths * FIELDS
        needs_grad = ctx.needs_input_grad[2:]
        trained = [x for x in inputs[count:] if x is not None]
        grads: list[Any] = [
            torch.zeros_like(x) if x is not None and needed and i < count else None
            for i, (x, needed) in enumerate(zip(inputs, needs_grad, strict=True))
        ]
        losses = work.weight.new_zeros(())
        sums = work.weight.new_zeros(len(work.config.losses) + 1, depths)
        input_index = {id(x): i for i, x in enumerate(inputs[count:], count)}
        lm_heads = [m for m in work.head.modules() if isinstance(m, AccumulatingModule) and id(m.weight) in input_index]
        with ExitStack() as stack:
            added = [stack.enter_context(lm_head.accumulate_gradient()) for lm_head in lm_heads]
            for teacher, by_depth in work.chunks:
                probs = work.teacher_probs(teacher, reuse_memory=True)
                for d, pick in enumerate(by_depth):
                    first = d * FIELDS
                    with torch.enable_grad():
                        fields = [None if x is None else x.detach()[pick.source] for x in inputs[first:][:FIELDS]]
                        present = ((i, x) for i, x in enumerate(fields, first) if x is not None and needs_grad[i])
                        leaves = {i: x.requires_grad_() for i, x in present}
                        loss, depth_sums = work.depth(d, DepthOutput._make(fields), pick, probs)
                    losses, sums[:, d] = losses + loss.detach(), sums[:, d] + depth_sums
                    targets = [*leaves.values(), *trained]
                    partial: Any = torch.autograd.grad(loss, targets, allow_unused=True) if loss.requires_grad else ()
                    for i, grad in zip([*leaves, *range(count, len(inputs))], partial, strict=bool(partial)):
                        if grad is not None and i < count:
                            grads[i][pick.source] = grad  # each row is in one chunk per depth
                        elif grad is not None:
                            grads[i] = grad if grads[i] is None else grads[i].add_(grad)
        for lm_head, added_grad in zip(lm_heads, added, strict=True):
            if added_grad.total is not None:
                i = input_index[id(lm_head.weight)]
                grads[i] = added_grad.total if grads[i] is None else grads[i].add_(added_grad.total)
        ctx.grads = grads
        ctx.mark_non_differentiable(sums)
        return losses, sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the saved gradient times the upstream one, and free it: a large lm_head's is large."""
        grads, ctx.grads = ctx.grads, None
        return None, None, *(None if grad is None else grad.mul_(upstream[0]) for grad in grads)


class LossWeights(NamedTuple):
    """The loss weights of a batch: the trained rows at each depth, their weights, and the normaliser.

    `normalizer` counts rows or documents, by `ObjectiveConfig.normalize`; its sum over the batch divides the loss.
    """

    trained: Trained
    row: Float[Tensor, "d B T"]
    normalizer: Float[Tensor, "d"]


def trainable(document: Sequences, mask: Sequences, depths: int) -> Trained:
    """Return the rows that can be trained at each depth; `mask` is 1 at tokens that the target would write."""
    return torch.stack([rows.valid(document, mask, d) for d in range(1, depths + 1)])


def loss_weights(
    document: Sequences, trained: Trained, anchors: RowMask | None, config: ObjectiveConfig
) -> LossWeights:
    """Return a batch's row weights, before the depths' weights; `anchors` are the rows to draft from, None for all."""
    if anchors is not None:
        trained = trained & anchors
    if config.normalize == "token":
        return LossWeights(trained, trained.float(), trained.sum((1, 2)).float())
    number = (document != document.roll(1, 1)).long()
    number[:, 0] = 0
    number = number.cumsum(1).expand_as(trained)  # 0, 1, 2, … along a sequence, so its documents differ
    held = torch.zeros(trained.shape, device=trained.device).scatter_add(2, number, trained.float())
    return LossWeights(trained, trained / held.gather(2, number).clamp_min(1), (held > 0).sum((1, 2)).float())
