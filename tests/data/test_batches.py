import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from data.batches import Batches, Packed, fingerprint, pack, token_counts
from data.text.masks import Sample
from data.text.prompts import SAMPLES, CachedSamples, write_samples

LENGTH = 16


def documents(count: int, longest: int, seed: int = 0) -> list[Sample]:
    """Return documents whose every token is unique, with a random mask."""
    draw = random.Random(seed)
    samples: list[Sample] = []
    token = 1
    for i in range(count):
        size = draw.randint(1, longest)
        samples.append(Sample(str(i), list(range(token, token + size)), [draw.randint(0, 1) for _ in range(size)]))
        token += size
    return samples


def unpacked(packed: Packed) -> list[tuple[list[int], list[int]]]:
    """Return the documents in the rows: tokens and mask of each."""
    found = []
    for token, document, mask in zip(*packed, strict=True):
        for number in range(int(document.max()) + 1):
            inside = document == number
            found.append((token[inside].tolist(), mask[inside].tolist()))
    return found


def test_no_token_is_lost_and_long_documents_become_documents_of_their_own() -> None:
    samples = documents(200, LENGTH)
    assert sorted(unpacked(pack(samples, LENGTH))) == [(sample.token, sample.loss_mask) for sample in samples]
    (sample,) = documents(1, 1, seed=1)
    long = Sample("long", list(range(1, 34)), [0] * 13 + [1] * 20)
    packed = pack([long, sample], LENGTH)
    assert sorted(len(token) for token, _ in unpacked(packed)) == [1, 1, LENGTH, LENGTH]
    assert sorted(t for token, _ in unpacked(packed) for t in token) == sorted(long.token + sample.token)
    assert sum(sum(mask) for _, mask in unpacked(packed)) == 20 + sum(sample.loss_mask)


def test_padding_is_marked_and_documents_are_numbered_in_place() -> None:
    packed = pack([Sample("a", [7] * 5, [1] * 5), Sample("b", [8] * 9, [1] * 9)], LENGTH)
    assert packed.document.tolist() == [[0] * 9 + [1] * 5 + [-1] * 2]
    assert packed.token.tolist() == [[8] * 9 + [7] * 5 + [0] * 2]
    assert packed.loss_mask.tolist() == [[1] * 14 + [0] * 2]


def test_rows_are_nearly_full() -> None:
    packed = pack(documents(2000, LENGTH), LENGTH)
    assert float((packed.document >= 0).float().mean()) > 0.98


def test_cached_samples_pack_as_those_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.text.prompts.BATCH", 7)
    samples = [Sample(s.id, [t % 50 for t in s.token], s.loss_mask) for s in documents(40, 3 * LENGTH)]
    write_samples(samples, tmp_path / SAMPLES)
    cached = CachedSamples(tmp_path / SAMPLES)
    assert all(map(torch.equal, pack(cached, LENGTH), pack(samples, LENGTH)))
    assert fingerprint(cached) == fingerprint(samples)
    most = max(max(sample.token) for sample in samples) + 1
    counts = Counter(t for s in samples for t, on in zip(s.token, s.loss_mask, strict=True) if on)
    assert token_counts(cached, most).tolist() == [counts[token] for token in range(most)]
    assert torch.equal(token_counts(cached, most), token_counts(samples, most))


@pytest.fixture
def packed() -> Packed:
    return pack(documents(90, LENGTH), LENGTH)


@pytest.mark.parametrize(("world", "rows_per_step"), [(2, 1), (3, 7), (4, 6)])
def test_the_global_batch_is_the_same_for_every_world_size(packed: Packed, world: int, rows_per_step: int) -> None:
    for step in (0, 3, 17):
        one = Batches(packed, rows_per_step, 2, 5, 0, 1)(step)
        ranks = [Batches(packed, rows_per_step, 2, 5, rank, world)(step) for rank in range(world)]
        assert len({len(batches) for batches in ranks}) == 1
        alone = Counter(int(i) for batch in one for i in batch.index)
        together = Counter(int(i) for batches in ranks for batch in batches for i in batch.index if i >= 0)
        assert together == alone
        assert sum(alone.values()) == rows_per_step


def test_batches_hold_the_rows_they_name(packed: Packed) -> None:
    for batch in Batches(packed, 5, 2, 0, 0, 1)(4):
        assert len(batch.index) <= 2
        for part, whole in zip((batch.token, batch.document, batch.loss_mask), packed, strict=True):
            assert part.dtype == torch.long
            assert torch.equal(part, whole[batch.index].long())


def test_a_filler_batch_trains_nothing_and_has_real_tokens(packed: Packed) -> None:
    (real,) = Batches(packed, 1, 2, 0, 0, 3)(0)
    (padding,) = Batches(packed, 1, 2, 0, 2, 3)(0)
    assert int(real.index) >= 0
    assert int(padding.index) == -1
    assert not padding.loss_mask.any()
    assert (padding.document >= 0).any()
    *_, last = Batches(packed, 3, 1, 0, 1, 2)(0)
    assert last.token.equal(packed.token[:1].long()), (
        "a padding sequence has the first row's, whatever else the process has"
    )


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(packed: Packed) -> None:
    size, rows_per_step = len(packed.token), 7
    batches = Batches(packed, rows_per_step, 2, 0, 0, 1)
    stream = torch.cat([batches.sequences(step) for step in range(-(-2 * size // rows_per_step))]).tolist()
    first, second = stream[:size], stream[size : 2 * size]
    assert size % rows_per_step  # so a batch reaches over the epoch's end
    assert sorted(first) == sorted(second) == list(range(size))
    assert first != second
    assert Batches(packed, size, 2, 1, 0, 1).sequences(0).tolist() != second, "another seed begins as this one goes on"


def test_a_step_depends_on_the_seed_and_its_number_alone(packed: Packed) -> None:
    walked, jumped = Batches(packed, 7, 2, 3, 0, 1), Batches(packed, 7, 2, 3, 0, 1)
    for step in range(40):
        expected = walked.sequences(step)
    assert torch.equal(jumped.sequences(39), expected)
    assert not torch.equal(Batches(packed, 7, 2, 4, 0, 1).sequences(39), expected)
    few = Packed(*(part[:3] for part in packed))  # fewer rows than a step repeat
    assert sorted(Counter(Batches(few, 7, 2, 0, 0, 1).sequences(0).tolist()).values()) == [2, 2, 3]


def test_the_fingerprint_sees_tokens_masks_bounds_and_order() -> None:
    one, two = Sample("a", [1, 2], [0, 1]), Sample("b", [3], [1])
    assert fingerprint([one, two]) == fingerprint([Sample("c", [1, 2], [0, 1]), two])
    others = [
        [two, one],
        [one],
        [Sample("a", [1, 9], [0, 1]), two],
        [Sample("a", [1, 2], [1, 1]), two],
        [Sample("a", [1, 2, 3], [0, 1, 1])],
    ]
    ones = [Sample("a", [1], [1])] * 2, [Sample("a", [1, 1], [1, 1])]
    assert fingerprint(ones[0]) != fingerprint(ones[1])
    assert len({fingerprint(samples) for samples in [*others, [one, two]]}) == len(others) + 1
