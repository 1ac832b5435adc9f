"""Training of speculative streams: which rows are anchors, what is summed, that it helps, and whole jobs."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_dir

from data.batches import Batch, Batches, pack
from data.text.masks import Sample
from heads.common.resolvers import ROOT, register_resolvers
from inference.decode import RequestParams, autoregress, speculate
from inference.drafters.contrib.streams import Streams, StreamsDrafter
from inference.target.target import Target
from inference.verification.sample import GREEDY
from tests import toys
from tests.train import jobs
from train.build import among_processes
from train.objective import row_keys
from train.streams import StreamsRunConfig, anchors, loop_of, stream_sums, streams_config
from train.streams import job as streams_job

SMALL = [
    "data.length=32", "data.held_out=4", "data.max_tokens=64", "model.dtype=float32", "model.device=cpu",
    "trainer.batch_tokens=128", "trainer.micro_tokens=64", "trainer.eval_prompts=2", "trainer.eval_tokens=8",
    "trainer.precision=fp32", "trainer.steps=4", "trainer.eval_every=2", "trainer.save_every=2",
    "streams.layers=2", "streams.rank=4",
]  # fmt: skip


def configured(*overrides: str) -> StreamsRunConfig:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return streams_config(compose("streams", list(overrides)))


def batch(seed: int = 0, rows: int = 3, width: int = 24) -> Batch:
    """Return packed rows of several documents with prompts and answers, the last row's end without any."""
    draw = random.Random(seed)
    token = [[draw.randrange(toys.VOCAB) for _ in range(width)] for _ in range(rows)]
    document = [[0] * 9 + [1] * (width - 9) for _ in range(rows - 1)] + [[0] * 14 + [-1] * (width - 14)]
    mask = [[int(t % 9 > 2) for t in range(width)] for _ in range(rows)]
    return Batch(*(torch.tensor(part) for part in (token, document, mask)), torch.arange(rows))


@pytest.mark.parametrize("every", [1, 2, 5, 9])
def test_anchors_are_every_so_many_of_the_targets_own_rows(every: int) -> None:
    packed, starts = batch(), set()
    for seed in range(8):
        anchor, stream = anchors(packed, every, 3, row_keys(seed, 0, packed.index))
        for b in range(3):
            document, mask = packed.document[b].tolist(), packed.loss_mask[b].tolist()

            def teaches(t: int, j: int, document: list[int] = document, mask: list[int] = mask) -> bool:
                label = t + 1 + j
                return label < 24 and document[label] == document[t] >= 0 and mask[label] == mask[t] == 1

            own = [t for t in range(24) if any(teaches(t, j) for j in (1, 2, 3))]
            used = stream[b].any(-1)
            rows = anchor[b][used].tolist()
            start = own.index(rows[0]) if rows else every
            assert rows == own[start::every]
            assert start < every or len(own) <= start
            starts.add(start)
            for row, valid in zip(rows, stream[b][used].tolist(), strict=True):
                assert valid == [teaches(row, j) for j in (1, 2, 3)]
        again = anchors(packed, every, 3, row_keys(seed, 0, packed.index))
        assert again[0].equal(anchor)
        assert again[1].equal(stream)
    assert len(starts) == 1 if every == 1 else len(starts) > 1


def test_a_batch_that_trains_nothing_has_no_valid_anchor() -> None:
    packed = batch()
    row, valid = anchors(replace(packed, loss_mask=torch.zeros_like(packed.loss_mask)), 2, 3, packed.index)
    assert row.tolist() == [[0]] * 3
    assert not valid.any()


def test_sums_are_those_of_a_loop() -> None:
    torch.manual_seed(0)
    draft, teacher = torch.randn(2, 4, 3, 7), torch.randn(2, 4, 3, 7)
    valid = torch.rand(2, 4, 3) < 0.5
    valid[:, :, 2] = False
    loss, accuracy = [0.0] * 3, [0.0] * 3
    for b, a, g in valid.nonzero().tolist():
        p, q = teacher[b, a, g].softmax(-1), draft[b, a, g].softmax(-1)
        loss[g] -= float((p * q.log()).sum())
        accuracy[g] += float(p.argmax() == q.argmax())
    found = stream_sums(draft, teacher, valid)
    torch.testing.assert_close(found["loss"], torch.tensor(loss))
    assert found["accuracy"].tolist() == accuracy
    assert loss[2] == 0


def test_training_raises_acceptance(tmp_path: Path) -> None:
    """On the target's own texts, which the streams learn nearly by heart."""
    target, count = toys.target(), 24
    texts = [
        toys.prompt(seed) + autoregress(target, toys.prompt(seed), RequestParams(count, GREEDY)).tokens
        for seed in range(4)
    ]
    samples = [Sample(str(i), text, [0] * 7 + [1] * count) for i, text in enumerate(texts)]
    run = configured(
        f"out={tmp_path}", *SMALL, "trainer.steps=60", "trainer.batch_tokens=128", "trainer.micro_tokens=128",
        "trainer.eval_every=60", "trainer.save_every=60", "trainer.lr_width=64", "trainer.clip=5.0", "every=1",
    )  # fmt: skip
    torch.manual_seed(0)
    streams = Streams(run.streams, target)
    prompts = [text[:7] for text in texts]
    run = replace(run, trainer=replace(run.trainer, eval_prompts=4, eval_tokens=count))
    loop = loop_of(run, Accelerator(cpu=True), target, streams, Batches(pack(samples, 32), 4, 4, 0, 0, 1), prompts, {})
    untrained = loop.evaluator.tau(loop.best_head.decoding(loop.stepper.state.weights()), bool)
    loop.train()
    after = loop.progress["best_tau"]
    assert (untrained["tau"], after) > (0, 0)
    assert after > untrained["tau"] + 0.8
    drafter = StreamsDrafter(StreamsDrafter.Config(str(tmp_path), run.tree), target, "streams")
    made = speculate(target, drafter, prompts[0], RequestParams(count, GREEDY))
    assert made.tokens == texts[0][7:]
    assert made.tau > 1.5


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return the folder and the overrides of a finished run."""
    folder = tmp_path_factory.mktemp("job")
    overrides = [*jobs.make(folder)[:2], *SMALL, "decay=0.5"]
    among_processes(configured(*overrides, f"out={folder / 'whole'}"), streams_job)
    return folder, overrides


def test_a_run_leaves_its_contract_behind(job: tuple[Path, list[str]]) -> None:
    out = job[0] / "whole"
    names = {path.name for path in out.iterdir()}
    assert {"config.yaml", "provenance.json", "metrics.jsonl", "checkpoints", "streams", "prompts.jsonl"} <= names
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "tau" in record] == [2, 4]
    assert sorted(jobs.losses(out)) == [1, 2, 3, 4]
    for record in (record for record in records if "loss" in record):
        assert record["loss"] == pytest.approx(sum(0.5**g * mean for g, mean in enumerate(record["soft_ce"])), rel=1e-4)
    content = json.loads((out / "streams" / "config.json").read_text())
    assert content["streams"]["layers"] == 2
    assert content["target"]["fingerprint"] == Target.load(str(job[0] / "target"), "float32", "cpu").spec.fingerprint


@pytest.mark.parametrize(
    "override", ["trainer.optimizer=muon", "trainer.compile=true", "trainer.recompute=true", "launcher.strategy=fsdp2"]
)
def test_what_would_have_no_effect_is_refused(override: str) -> None:
    with pytest.raises(ValueError, match="streams"):
        configured(override)


def test_a_run_goes_on_bit_for_bit(job: tuple[Path, list[str]]) -> None:
    folder, overrides = job
    whole, out = folder / "whole", folder / "resumed"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    among_processes(configured(*overrides, f"out={out}", "resume=true"), streams_job)
    assert jobs.losses(out) == jobs.losses(whole)
