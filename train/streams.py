"""Train speculative streams for a frozen target, and keep those with the best acceptance.

    python train/streams.py model=tiny

Evaluate them like any drafter:

    python eval/run.py drafter=streams drafter.streams.run=outputs/tiny-streams model=tiny

A small share of the rows that the target has written are anchors: their streams are appended to the packed sequences
in the same pass of the frozen target. Batches and anchors depend on seed and step.
"""

import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch

from heads.shapes import PerSequence

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerate import Accelerator
from accelerate.utils import set_seed
from jaxtyping import Bool, Float, Int
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from data.batches import Batch, Batches, check_known, pack
from data.features.source import LiveFeatures
from data.text.prompts import load_training
from heads.base import Features, Layers, NamedTensors, Tokens, to_device
from heads.common.command import command
from heads.common.progress import print_line
from heads.common.target_config import check_sequence_length, context_of
from heads.common.typed import Count, Json, Share, typed
from heads.formats.store import write_folder
from heads.modules.vocab import argmax
from inference.drafters.contrib.streams import KIND, StreamLogits, Streams, StreamsDrafter
from inference.drafters.policy import TreeConfig
from inference.target.loading import configuration
from inference.target.placement import REPLICATE
from inference.target.target import Target
from inference.verification.rng import hash_key
from train import checkpoint
from train.build import among_processes, batches_for, prepare_out, provenance, sizes, values_of
from train.config import JobConfig
from train.distributed import launch
from train.distributed.processes import RunLock, on_main
from train.loop import AcceptanceEvaluator, Loop
from train.objective import ANCHORS, LossWeights, trainable
from train.resolve import accelerator_count, check_out, with_processes
from train.step import Stepper


@dataclass(frozen=True)
class StreamsRunConfig(JobConfig):
    """A training run of streams; conf/streams.yaml explains the keys."""

    every: Count
    decay: Share
    streams: Streams.Config

    def __post_init__(self) -> None:
        if self.launcher.strategy != "ddp":
            raise ValueError(f"launcher.strategy is {self.launcher.strategy}: streams are small LoRA factors, give ddp")
        if (self.trainer.optimizer, self.trainer.compile, self.trainer.recompute) != ("adamw", False, False):
            raise ValueError(
                "streams train by AdamW: leave trainer.optimizer, trainer.compile and recompute as they are"
            )
        super().__post_init__()


def anchors(
    batch: Batch, every: int, streams: int, keys: PerSequence
) -> tuple[Int[Tensor, "B A"], Bool[Tensor, "B A G"]]:
    """Return each sequence's anchors, and which of their streams have a teacher; padding is row 0 without streams.

    Every `every`-th trained token with a trained next token is an anchor, from a random start.
    """
    trained = trainable(batch.document, batch.loss_mask, streams).movedim(0, -1) & batch.loss_mask.bool()[:, :, None]
    starts = hash_key(keys, ANCHORS).tolist()
    chosen = [rows.nonzero()[key % every :: every, 0] for rows, key in zip(trained.any(-1), starts, strict=True)]
    row = pad_sequence([*chosen, chosen[0].new_zeros(1)], batch_first=True)[:-1]  # at least one
    used = torch.arange(row.shape[1]) < torch.tensor([*map(len, chosen)])[:, None]
    return row, trained.gather(1, row[:, :, None].expand(-1, -1, streams)) & used[:, :, None]


def stream_sums(
    draft: StreamLogits, teacher: StreamLogits, valid: Bool[Tensor, "B A G"]
) -> dict[str, Float[Tensor, "G"]]:
    """Return each stream's sums over anchors: cross-entropy with the target's probabilities, and agreement."""
    number = torch.arange(valid.shape[2], device=valid.device).expand_as(valid)[valid]
    q, p = draft[valid].float(), teacher[valid].float()
    loss = -(p.softmax(-1) * q.log_softmax(-1)).sum(-1)
    agrees = (argmax(q) == argmax(p)).to(loss.dtype)
    empty = loss.new_zeros(valid.shape[2])
    return {"loss": empty.index_add(0, number, loss), "accuracy": empty.index_add(0, number, agrees)}


class StreamsLoss(nn.Module):
    """The loss of streams, instead of a head's `Loss`: cross-entropy with the target's probabilities at anchors."""

    noise = 0.0

    def __init__(self, streams: Streams, run: StreamsRunConfig, *, autocast: bool) -> None:
        super().__init__()
        self.head, self.every, self.decay, self.autocast = streams, run.every, run.decay, autocast

    def sample_rows(self, batch: Batch, keys: Tensor) -> tuple[Tensor, LossWeights]:
        """Return the anchors of a micro-batch in this step, and the weight of each of their streams."""
        row, valid = anchors(batch, self.every, self.head.config.streams, keys)
        trained = valid.permute(2, 0, 1)
        return row, LossWeights(trained, trained.float(), trained.sum((1, 2)).float())

    def forward(
        self, features: Features, weight: Float[Tensor, "G B A"], anchors: Tensor, chunks: None
    ) -> tuple[Tensor, NamedTensors]:
        """Return the loss with its metrics; each weight is 0 or one over the global number of the stream's anchors."""
        with torch.autocast(weight.device.type, torch.bfloat16, enabled=self.autocast):
            draft, teacher = self.head(features.token, features.document, anchors)
        sums = stream_sums(draft, teacher, weight.permute(1, 2, 0) > 0)
        scale = weight.amax((1, 2)) * self.decay ** torch.arange(len(weight), device=weight.device)
        return (sums["loss"] * scale).sum(), {"soft_ce": sums["loss"].detach(), "accuracy": sums["accuracy"]}

    def chunks(self, trained: Tensor, device: torch.device, path: None = None) -> None:
        """Return None: anchors are not scored in chunks."""


@dataclass
class BestStreams:
    """The best streams of a run, saved in a folder of their own."""

    folder: Path
    config: Streams.Config
    target: Target

    def decoding(self, weights: NamedTensors) -> Streams:
        """Return a copy for decoding, with these weights."""
        copy = Streams(self.config, self.target)
        copy.load_state_dict(weights)
        return copy

    def write(self, weights: NamedTensors) -> None:
        """Write the streams with these weights."""
        write_folder(self.folder, {KIND: asdict(self.config), "target": asdict(self.target.spec)}, weights)


def loop_of(
    run: StreamsRunConfig, accelerator: Accelerator, target: Target, streams: Streams, batches: Batches,
    prompts: list[Tokens], settings: Json,
) -> Loop:  # fmt: skip
    """Return the run's training loop, ready to start or to resume; `settings` are those that must not change."""

    def drafter(streams: Streams, tree: TreeConfig, name: str) -> StreamsDrafter:
        return StreamsDrafter(StreamsDrafter.Config(run.out, tree), target, name, streams)

    def features(token: Tensor, document: Tensor, _: Layers) -> Features:
        device = accelerator.device
        none = torch.empty(*token.shape, 0, device=accelerator.device)
        return Features(to_device(token, device), none[:, :, :, None], none, to_device(document, device))

    loss = StreamsLoss(streams, run, autocast=accelerator.mixed_precision == "bf16")
    source = LiveFeatures(SimpleNamespace(features=features), batches, ())  # no states: streams run the target
    stepper = Stepper(run.trainer, run.launcher, accelerator, loss, source, target.embeddings.hidden_size)
    evaluator = None
    if run.trainer.eval_prompts:
        evaluator = AcceptanceEvaluator(target, prompts, run.trainer, run.tree, run.name, drafter)
    best_streams = BestStreams(Path(run.out, KIND), run.streams, target)
    loss_values = {"every": run.every, "decay": run.decay}
    numerics = checkpoint.numerics(run.trainer, loss_values, run.launcher.strategy, accelerator.num_processes)
    fingerprint = {"settings": settings, "arithmetic": numerics}
    return Loop(Path(run.out), stepper, best_streams, evaluator, fingerprint, resumes=run.resume, config=values_of(run))


def job(run: StreamsRunConfig, accelerator: Accelerator, lock: RunLock) -> None:
    """Load everything and train."""
    set_seed(run.trainer.seed)
    model = run.model
    if model.placed.kind != REPLICATE:
        raise ValueError(f"model.placement={model.placement}: streams adapt the target's own layers: give replicate")
    check_sequence_length(run.data.length, context_of(configuration(model.path, model.trust_remote_code)), model.path)
    target = Target.of(model, device=str(accelerator.device))
    streams = Streams(run.streams, target)
    data = load_training(run.data, target.tokenizer, run.trainer.eval_prompts)
    packed = pack(data.samples, run.data.length)
    check_known(packed, data.held_out, target.tokenizer, target.embeddings.vocab_size)
    batches = batches_for(run.trainer, packed, accelerator)
    settings = checkpoint.settings(run.trainer, {"streams": run.streams}, target.spec.fingerprint, batches)

    def begin() -> None:
        origin = provenance(accelerator.num_processes, run.launcher.strategy, data, target.tokenizer)
        prepare_out(run, values_of(run), lock, settings, data, origin, KIND)
        print_line(f"{run.name}: {sizes(streams, data, packed)}")

    on_main(accelerator, begin)
    loop_of(run, accelerator, target, streams, batches, [prompt.token for prompt in data.held_out], settings).train()
    accelerator.wait_for_everyone()


def streams_config(cfg: DictConfig) -> StreamsRunConfig:
    """Return the typed configuration, without a final evaluation, which streams lack."""
    OmegaConf.set_struct(cfg, False)
    cfg.pop("eval", None)
    return typed(StreamsRunConfig, cfg)


@command("streams")
def main(cfg: DictConfig) -> None:
    """Compose, check, and launch or train."""
    with launch.main_first():
        launch.apply_launch_environment(cfg.launcher, accelerator_count(cfg.model.device))
        launch.check_mode()
        run = streams_config(cfg)
        run = replace(run, launcher=with_processes(run.launcher, accelerator_count(run.model.device)))
        if launch.needs_processes(run.launcher):
            raise SystemExit(launch.start(run.launcher, os.path.abspath(__file__), launch.user_overrides()))
        check_out(run)
        among_processes(run, job)


if __name__ == "__main__":
    main()
