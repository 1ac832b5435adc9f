"""The loss and its gradient: chunk by chunk as all at once, against formulas, and by weights that say what counts."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heads import HEADS, rows
from heads.base import DepthOutput, Features, NewRows
from tests import toys
from train.losses import LOSSES, ObjectiveConfig, OnPolicyConfig
from train.objective import (
    CPU_LOGITS,
    MIN_CHUNKS,
    ROWS,
    LossContext,
    chunk_rows,
    chunked,
    dpace,
    labels,
    loss_weights,
    objective,
    trainable,
)
from train.step import Flops

CONFIG = ObjectiveConfig(
    losses={"soft_ce": 1.0}, depth_weights="decay", depth_decay=0.5, dpace_alpha=0.5, depths=2, normalize="token",
    anchors=None, noise=0.0, eta=3.0, top_k=4, base_loss_share=None,
    on_policy=OnPolicyConfig(0, 1, 64, 0.0, "text", 1.0, None),
)  # fmt: skip


def weights_of(features: Features, mask: torch.Tensor, of: ObjectiveConfig, anchors: Any = None) -> Any:
    return loss_weights(features.document, trainable(features.document, mask, of.depths), anchors, of)


def batch(layers: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> tuple[Features, torch.Tensor]:
    target = toys.target("llama", dtype)
    token = torch.tensor([toys.prompt(1, 16), toys.prompt(2, 16)])
    document = torch.zeros(2, 16, dtype=torch.long)
    document[0, 9:], document[1, 12:] = 1, -1
    mask = (torch.arange(16) > 3).long().expand(2, 16).clone()
    return target.features(token, document, layers), mask


def config(**losses: float) -> ObjectiveConfig:
    return replace(CONFIG, losses=losses)


def all_at_once(
    head: Any, drafts: list[DepthOutput], features: Features, weight: torch.Tensor, of: ObjectiveConfig,
    base: float = 0.0, parts: Any = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """Return the loss and the sums of all rows at once, by plain autograd."""
    parts = parts or chunked(weight > 0, weight[0].numel(), weight.device, features.path)
    work = LossContext(head, features, weight.flatten(1), of, parts, labels(head, features), base)
    flat = [DepthOutput._make(None if x is None else x.flatten(0, 1) for x in draft) for draft in drafts]
    flat = flat if base else [draft._replace(base_state=None) for draft in flat]
    decay = of.depth_decay ** torch.arange(len(drafts), device=weight.device)[:, None]
    by = decay if of.depth_weights == "decay" else dpace(work, [draft.state for draft in flat])
    work, [(teacher, by_depth)] = work._replace(weight=work.weight * by), parts
    probs, found = work.teacher_probs(teacher), []
    for d, (draft, own) in enumerate(zip(flat, by_depth, strict=True)):
        picked = DepthOutput._make(x if x is None else x[own.source] for x in draft)
        found.append(work.depth(d, picked, own, probs))
    sums = torch.stack([each for _, each in found], 1)
    return torch.stack([loss for loss, _ in found]).sum(), dict(zip([*of.losses, "accuracy"], sums, strict=True))


def loss_of(
    head: Any,
    drafts: list[DepthOutput],
    features: Features,
    mask: torch.Tensor,
    of: ObjectiveConfig,
    chunk: int | None = 4,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss in chunks of so many teacher rows, None for all by plain autograd."""
    weight = weights_of(features, mask, of).row
    if chunk is None:
        return all_at_once(head, drafts, features, weight, of)
    return objective(head, drafts, features, weight, of, chunked(weight > 0, chunk, weight.device))


@pytest.mark.parametrize(
    ("vocab", "head_vocab", "trains", "expected"),
    [
        (2, None, False, ROWS),
        (CPU_LOGITS // 5, None, False, 5),
        (CPU_LOGITS // 5, 7, True, 10),
        (CPU_LOGITS * 2, None, False, 1),
    ],
)
def test_a_chunk_on_the_cpu_holds_as_many_logits_whatever_the_vocabulary(
    vocab: int, head_vocab: int | None, trains: bool, expected: int
) -> None:
    """Twice as many where an lm_head is trained; a bias of that length, or another matrix, is none."""
    size = head_vocab or vocab
    frozen = [torch.empty(size, 1, device="meta", requires_grad=trains), torch.empty(size, device="meta")]
    head = SimpleNamespace(
        embeddings=SimpleNamespace(vocab_size=vocab),
        vocab=None if head_vocab is None else SimpleNamespace(ids=range(head_vocab)),
        parameters=lambda: [frozen[0], frozen[1].requires_grad_(), torch.empty(3, 1, requires_grad=True)],
    )
    assert chunk_rows(head, "cpu", 64) == expected


def test_on_a_device_a_chunk_is_a_share_of_the_rows_in_powers_of_two() -> None:
    found = [chunk_rows(None, "cuda", count) for count in (1, MIN_CHUNKS, 4 * MIN_CHUNKS, 7 * MIN_CHUNKS, 10**9)]
    assert found == [1, 1, 4, 4, ROWS]


def test_a_label_is_the_token_of_the_next_row_down_the_path() -> None:
    token = torch.tensor([[7, 5, 9, 4]])
    features = Features(token, torch.empty(1, 4, 0, 2), torch.empty(1, 4, 2), torch.zeros_like(token))
    target = toys.target()
    head: Any = toys.head("eagle", target)
    assert head.vocab is None
    assert labels(head, features).tolist()[:3] == [5, 9, 4]
    # Row 0 is followed by row 2, row 1 by row 3; the others end a path.
    followed = features._replace(path=torch.tensor([[[2, 3], [3, 0], [0, 0], [0, 0]]]))
    assert labels(head, followed).tolist() == [9, 4, -1, -1]
    pruned: Any = toys.head("eagle pruned", target)
    assert labels(pruned, followed).tolist() == pruned.vocab.index_of(torch.tensor([9, 4, -1, -1])).tolist()


def test_the_share_of_the_base_moves_from_the_first_to_the_last() -> None:
    assert [CONFIG.base_loss_share_at(at) for at in (0.0, 0.5, 1.0)] == [0, 0, 0]
    assert [replace(CONFIG, base_loss_share=[1.0, 0.25]).base_loss_share_at(at) for at in (0.0, 0.5, 1.0)] == [
        1,
        0.625,
        0.25,
    ]


def test_operations_are_counted_alike_however_small_the_chunks() -> None:
    """The gradient of an lm_head of its own, added up in place, counts too."""
    head: Any = toys.head("eagle3", toys.target("llama")).requires_grad_()
    features, mask = batch(head.feature_layers)
    counts, of = [], replace(CONFIG, depths=4)
    for chunk in (2048, 4):
        with Flops() as count:
            loss, _ = loss_of(head, head.unroll(features, 4), features, mask, of, chunk)
            loss.backward()
        counts.append(count.total)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", [*HEADS, *toys.OPTIONS])
def test_chunks_give_the_loss_and_gradient_of_all_rows_at_once(name: str) -> None:
    """And every parameter has a gradient: one without stops a data-parallel run."""
    head: Any = toys.head(name, toys.target("llama", torch.float64)).requires_grad_().train()
    features, mask = batch(head.feature_layers, torch.float64)
    kinds = {kind: 0.3 + 0.1 * i for i, kind in enumerate(LOSSES)}
    depths = min(4, head.max_depth)
    first = head.unroll(features, depths)[0]
    if first.feature is None:
        kinds.pop("smooth_l1")
    if first.confidence is None:
        kinds.pop("confidence")
    if not name.endswith("with candidates"):
        del kinds["candidates"], kinds["missed"]
    settings = [("decay", 3), ("dpace", 2048)] if name in ("eagle pruned", "block of DSpark") else [("decay", 3)]
    for depth_weights, chunk in settings:
        of = replace(CONFIG, losses=kinds, depth_weights=depth_weights, depths=depths)
        found = []
        for size in (None, chunk):
            head.zero_grad()
            loss, sums = loss_of(head, head.unroll(features, depths), features, mask, of, size)
            (2 * loss).backward()
            assert [key for key, p in head.named_parameters() if p.grad is None] == []
            found.append((loss.detach(), sums, {key: p.grad.clone() for key, p in head.named_parameters()}))
        (loss, sums, grads), (again, sums_again, grads_again) = found
        assert loss > 0
        torch.testing.assert_close(again, loss, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(grads_again, grads, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(sums_again, sums, rtol=1e-6, atol=1e-6, check_dtype=False)


def test_the_teachers_rows_are_pruned_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.target("llama", torch.float64)
    head: Any = toys.head("eagle pruned", target).requires_grad_()
    features, mask = batch(head.feature_layers, torch.float64)
    of = config(**{kind: 0.3 for kind in LOSSES if kind not in ("confidence", "candidates", "missed")})
    weight = weights_of(features, mask, of).row
    chunks, found = chunked(weight > 0, 7, weight.device), []
    for rows_at_once in (512, 2):
        monkeypatch.setattr("train.objective.TEACHER_ROWS", rows_at_once)
        head.zero_grad()
        drafts = head.unroll(features, 2)
        loss, _ = objective(head, drafts, features, weight, of, chunks)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in head.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["block of DSpark", "eagle3 injected"])
def test_a_head_that_has_drafted_can_be_trained(name: str) -> None:
    """What decoding keeps, in inference mode, no gradient could go through."""
    target, head = toys.target("llama", torch.float64), toys.head(name, toys.target("llama", torch.float64))
    made: Any = head.requires_grad_()
    target.embeddings._rows_by_ids.clear()
    features, mask = batch(made.feature_layers, torch.float64)
    with torch.inference_mode():
        made.extend(None, NewRows(Features(*(part[:1] for part in features[:4])), features.token[:1]))
    loss, _ = loss_of(made, made.unroll(features, 4), features, mask, replace(CONFIG, depths=4))
    loss.backward()
    assert all(p.grad is not None for key, p in made.named_parameters() if not key.startswith("confidence"))


def test_the_teacher_is_the_target_itself() -> None:
    """A head that copies the target's next features has no divergence, no feature loss and full accuracy."""
    features, mask = batch()
    head: Any = toys.head("eagle", toys.target())
    drafts = [DepthOutput(rows.teacher(features.last_hidden, d), rows.teacher(features.last_hidden, d)) for d in (1, 2)]
    _, sums = loss_of(head, drafts, features, mask, config(smooth_l1=1.0, kl=1.0, tv=1.0, reverse_kl=1.0, jsd=1.0))
    for name in ("smooth_l1", "kl", "tv", "reverse_kl", "jsd"):
        assert sums[name].abs().max() < 1e-4
    counted = weights_of(features, mask, CONFIG)
    assert sums["accuracy"].tolist() == counted.normalizer.tolist() == counted.trained.sum((1, 2)).tolist()


def test_the_first_draft_after_the_prompt_is_trained() -> None:
    """Row 2 drafts token 4, the first that the mask says the target wrote (SpecForge#885)."""
    features, mask = batch()
    trained = weights_of(features, mask, CONFIG).trained
    assert trained[0, 0].nonzero()[0].item() == 2
    assert trained[1, 0].nonzero()[0].item() == 1


def test_micro_batches_sum_to_the_whole() -> None:
    features, mask = batch()
    head: Any = toys.head("eagle", toys.target())
    chosen = config(smooth_l1=1.0, soft_ce=0.1)
    whole, _ = loss_of(head, head.unroll(features, 2), features, mask, chosen)
    parts = torch.zeros(())
    for b in range(2):
        piece = Features(*(part[b : b + 1] for part in features[:4]))
        parts = parts + loss_of(head, head.unroll(piece, 2), piece, mask[b : b + 1], chosen)[0]
    torch.testing.assert_close(parts, whole)


def test_depths_decay_and_features_must_be_predicted() -> None:
    features, mask = batch()
    head: Any = toys.head("eagle", toys.target())
    drafts = head.unroll(features, 2)
    loss, sums = loss_of(head, drafts, features, mask, config(soft_ce=2.0))
    torch.testing.assert_close(loss, (sums["soft_ce"] * torch.tensor([2.0, 1.0])).sum())
    with pytest.raises(ValueError, match="predicts no features"):
        loss_of(head, [d._replace(feature=None) for d in drafts], features, mask, config(smooth_l1=1.0))
    with pytest.raises(ValueError, match="predicts no acceptance"):
        loss_of(head, drafts, features, mask, config(confidence=1.0))


@pytest.mark.parametrize("name", ["eagle", "eagle pruned"])
def test_dpace_weighs_a_depth_by_what_it_adds_to_the_expected_draft(name: str) -> None:
    features, mask = batch()
    head: Any = toys.head(name, toys.target())
    vocab = range(toys.VOCAB) if head.vocab is None else head.vocab.ids.tolist()
    drafts = head.unroll(features, 3)
    of = replace(config(ce=1.0), depth_weights="dpace", depths=3, dpace_alpha=0.3)
    weight = weights_of(features, mask, of).row
    loss, _ = objective(head, drafts, features, weight, of, chunked(weight > 0, 4, weight.device))
    expected = 0.0
    for b, t in [(b, t) for b in range(2) for t in range(16)]:
        sure, losses = [], []
        for d in range(1, 4):
            if weight[d - 1, b, t] == 0:
                continue
            log_q = head.compute_logits(drafts[d - 1].state[b, t], d).log_softmax(-1)
            token = int(features.token[b, t + 1 + d])
            losses.append(-log_q[vocab.index(token)].item() if token in vocab else 0.0)
            sure.append(0.7 * math.exp(-losses[-1]) * (token in vocab) + 0.3)
        for j, value in enumerate(losses):
            share = sum(float(torch.tensor(sure[: m + 1]).prod()) for m in range(j, len(sure)))
            expected += share * value
    assert loss.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("step", [None, 2])
def test_documents_count_alike_when_normalised_by_sequence(step: int | None) -> None:
    """Each by its rows that are drafted from, where those are sampled."""
    features, mask = batch()
    anchors = None if step is None else (torch.arange(16) % step == 0).expand(2, 16)
    by = weights_of(features, mask, replace(CONFIG, normalize="sequence"), anchors)
    documents = [(0, slice(0, 9)), (0, slice(9, 16)), (1, slice(0, 12))]
    assert by.normalizer.tolist() == [3.0, 3.0]
    for b, where in documents:
        torch.testing.assert_close(by.row[:, b, where].sum(-1), torch.ones(2))
    assert by.row[:, 1, 12:].abs().max() == 0


@pytest.mark.parametrize("name", ["eagle", "eagle pruned"])
def test_accuracy_counts_the_rows_whose_guess_is_the_targets_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that a pruned vocabulary lacks is never right, whatever is guessed in its place."""
    head: Any = toys.head(name, toys.target())
    features, mask = batch(head.feature_layers)
    drafts, score = head.unroll(features, 2), head.compute_logits
    first = 2.0 * (torch.arange(toys.VOCAB if head.vocab is None else len(head.vocab.ids)) == 0)
    monkeypatch.setattr(head, "compute_logits", lambda state, depth: score(state, depth) + first)
    _, sums = loss_of(head, drafts, features, mask, CONFIG)
    wanted, counts, missed = head.embeddings.logits(features.last_hidden).argmax(-1), [], 0
    for d, trained in enumerate(trainable(features.document, mask, 2), 1):
        guess, best = head.compute_logits(drafts[d - 1].state, d).argmax(-1), rows.teacher(wanted, d)
        place = best if head.vocab is None else head.vocab.index_of(best)
        counts.append(int((trained & (guess == place)).sum()))
        missed += int((trained & (place < 0) & (guess == 0)).sum())
    assert sums["accuracy"].tolist() == counts
    assert (missed > 0) == (head.vocab is not None)


@pytest.mark.parametrize("whole", [False, True])
def test_the_uncorrected_logits_have_their_share_of_the_loss(whole: bool) -> None:
    head: Any = toys.head("block of Domino", toys.target("llama", torch.float64)).requires_grad_()
    features, mask = batch(head.feature_layers, torch.float64)
    weight = weights_of(features, mask, CONFIG).row
    chunks = chunked(weight > 0, 4, weight.device)
    of = replace(config(soft_ce=0.5), depths=4, base_loss_share=[0.8, 0.2])

    def gradient(base: float, *, uncorrected: bool = False) -> torch.Tensor:
        drafts = head.unroll(features, 4)
        drafts = [draft._replace(state=draft.base_state) for draft in drafts] if uncorrected else drafts
        given = (head, drafts[:2], features, weight, of)
        loss, sums = all_at_once(*given, base) if whole else objective(*given, chunks, base)
        if not uncorrected:
            torch.testing.assert_close(sums["soft_ce"], plain_sums, check_dtype=False)
        return torch.autograd.grad(loss, head.fusion.fc.weight)[0]

    plain_sums = all_at_once(head, head.unroll(features, 4)[:2], features, weight, of)[1]["soft_ce"]
    assert of.base_loss_share_at(0.5) == pytest.approx(0.5)
    both = 0.25 * gradient(0.0, uncorrected=True) + 0.75 * gradient(0.0)
    torch.testing.assert_close(gradient(0.25), both)


def test_the_uncorrected_logits_have_no_share_of_the_predicted_acceptance() -> None:
    """It predicts that of what is drafted: the corrected logits."""
    head: Any = toys.head("block of DSpark", toys.target("llama", torch.float64)).requires_grad_()
    torch.nn.init.normal_(head.bias.weight, std=2.0)
    features, mask = batch(head.feature_layers, torch.float64)
    of = replace(config(confidence=1.0), depths=4)
    weight = weights_of(features, mask, of).row
    chunks = chunked(weight > 0, 3, weight.device)

    def gradient(base: float) -> torch.Tensor:
        head.zero_grad()
        objective(head, head.unroll(features, 4), features, weight, of, chunks, base)[0].backward()
        grad: torch.Tensor = head.confidence.bias.grad.clone()
        return grad

    torch.testing.assert_close(gradient(0.5), gradient(0.0), rtol=1e-9, atol=0)
    torch.testing.assert_close(gradient(1.0), gradient(0.0), rtol=1e-9, atol=0)


def step_of(name: str, autocast: bool) -> tuple[float, torch.Tensor]:
    """Return a head's loss and the gradient of all its parameters."""
    head: Any = toys.head(name, toys.target()).requires_grad_()
    for parameter in head.parameters():  # bf16 errors of a few percent shall stay that
        if parameter.ndim == 2:
            parameter.data *= 0.3
    features, mask = batch(head.feature_layers)
    depths = min(4, head.max_depth)
    of = replace(config(soft_ce=1.0), depths=depths)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, _ = loss_of(head, head.unroll(features, depths), features, mask, of)
    loss.backward()
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in head.parameters())
    found = [p.grad.flatten() for p in head.parameters() if p.grad is not None]
    return loss.item(), torch.cat(found)


@pytest.mark.parametrize("name", ["medusa", "eagle3", "block of DSpark", "eagle pruned", "mlp tied"])
def test_a_step_in_bf16_is_that_in_fp32_but_for_rounding(name: str) -> None:
    (loss, grad), (quick_loss, quick_grad) = step_of(name, False), step_of(name, True)
    assert quick_loss == pytest.approx(loss, rel=0.05)
    assert torch.cosine_similarity(grad, quick_grad, dim=0) > 0.98
    assert float(quick_grad.norm()) == pytest.approx(float(grad.norm()), rel=0.1)
