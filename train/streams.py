"""Train speculative streams for a frozen target, and keep those that were accepted most.

    python train/streams.py model=tiny

The evaluation is that of every draft source:

    python eval/run.py drafter=streams drafter.streams.run=outputs/tiny-streams model=tiny

Rows that the target has written, every few of them, are anchors: their streams run behind the packed rows in the same
pass, in which the target is read but never trained. The order of batches and anchors follows from seed and step alone.
"""

import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from accelerate import Accelerator
from accelerate.utils import set_seed
from jaxtyping import Bool, Float, Int
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import Tensor

from data.batches import Batch, Batches, check_known, fingerprint, pack
from data.config import DataConfig
from data.features.store_files import write_whole
from data.text.prompts import load_training, save_prompts
from data.text.template import template_sha256
from heads import rows
from heads.base import parameter_count
from heads.common.command import command
from heads.common.context import check_rows, context_of
from heads.common.errors import user_errors
from heads.common.redact import redacted_values
from heads.common.resolvers import register_resolvers
from heads.common.typed import typed
from heads.modules.top_k import argmax
from inference.decode import Settings, speculate
from inference.drafters.contrib.stream_layers import KIND, Streams, frozen, save_streams
from inference.drafters.contrib.streams import StreamsDrafter
from inference.drafters.policy import TreeConfig
from inference.target.config import ModelConfig
from inference.target.loading import configuration
from inference.target.placement import REPLICATE
from inference.target.target import Target
from inference.verification.sample import GREEDY
from train.checkpoints import format, resume
from train.checkpoints.saver import Saver
from train.checkpoints.state import TrainState
from train.config import LauncherConfig, TrainerConfig, check_name
from train.distributed import launch, processes
from train.distributed.control import RANKS, ProcessControl, on_main
from train.distributed.lock import RunLock
from train.optim import Average, adamw, learning_rate
from train.planning.check import check_out
from train.run import provenance
from train.tracking.track import Tracker

register_resolvers()


@dataclass(frozen=True)
class StreamsRunConfig:
    """One training run of streams, as conf/streams.yaml composes it.

    Attributes:
        every: one in so many of the target's own rows is an anchor.
        decay: the weight of stream j's loss is this to the power j - 1.
        tree: the tree that acceptance is measured with.
    """

    name: str
    out: str
    resume: bool
    overwrite: bool
    every: int
    decay: float
    model: ModelConfig
    streams: Streams.Config
    data: DataConfig
    trainer: TrainerConfig
    launcher: LauncherConfig
    tree: TreeConfig

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.every < 1:
            raise ValueError(f"every is {self.every}: give 1 or more, 1 makes every row of an answer an anchor")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay is {self.decay}: give a number above 0, up to 1")
        if self.launcher.strategy != "ddp":
            raise ValueError(
                f"launcher.strategy is {self.launcher.strategy}: streams are small LoRA factors, give launcher=ddp"
            )
        if self.trainer.eval_prompts < 1:
            raise ValueError("trainer.eval_prompts is 0: the best streams are those that measure best; give 1 or more")
        for key in ("batch_tokens", "micro_tokens"):
            tokens = getattr(self.trainer, key)
            if tokens < self.data.length:
                raise ValueError(f"trainer.{key} is {tokens}, less than a row of data.length={self.data.length}")


class Anchors(NamedTuple):
    """The anchors of a batch, and which of their streams have a teacher; row 0 without any fills up."""

    row: Int[Tensor, "B A"]
    valid: Bool[Tensor, "B A G"]


def anchors(batch: Batch, every: int, streams: int, seed: int) -> Anchors:
    """Return every so many of each row's trained tokens that have a trained one ahead, from a random one on."""
    depths = [rows.valid(batch.document, batch.mask, depth) for depth in range(1, streams + 1)]
    trained = torch.stack(depths, -1) & batch.mask.bool()[:, :, None]
    chosen = []
    for is_trained, index in zip(trained.any(-1), batch.index.tolist(), strict=True):
        rng = torch.Generator().manual_seed(seed + index)
        start = int(torch.randint(every, (), generator=rng))
        chosen.append(is_trained.nonzero()[start::every, 0])
    count = max(1, *map(len, chosen))
    row = torch.stack([torch.cat([anchor, anchor.new_zeros(count - len(anchor))]) for anchor in chosen])
    used = torch.stack([torch.arange(count) < len(anchor) for anchor in chosen])
    return Anchors(row, trained.gather(1, row[:, :, None].expand(-1, -1, streams)) & used[:, :, None])


def stream_sums(
    draft: Float[Tensor, "B A G V"], teacher: Float[Tensor, "B A G V"], valid: Bool[Tensor, "B A G"]
) -> dict[str, Float[Tensor, "G"]]:
    """Return each stream's sums over anchors: cross-entropy with the target's probabilities, and agreement."""
    number = torch.arange(valid.shape[2], device=valid.device).expand_as(valid)[valid]
    q, p = draft[valid].float(), teacher[valid].float()
    loss = -(p.softmax(-1) * q.log_softmax(-1)).sum(-1)
    agrees = (argmax(q) == argmax(p)).to(loss.dtype)
    empty = loss.new_zeros(valid.shape[2])
    return {"loss": empty.index_add(0, number, loss), "accuracy": empty.index_add(0, number, agrees)}


def settings(run: StreamsRunConfig, batches: Batches) -> dict[str, Any]:
    """Return what may not change when a run goes on, by the keys that a user knows."""
    nested = {f"streams.{key}": value for key, value in asdict(run.streams).items()}
    return resume.plain(resume.data_settings(run.trainer, batches) | nested)


class StreamLoop:
    """One run, on every process alike; the main process alone measures and writes."""

    def __init__(
        self, run: StreamsRunConfig, accelerator: Accelerator, target: Target, streams: Streams, batches: Batches,
        prompts: list[list[int]], resolved: dict[str, Any],
    ) -> None:  # fmt: skip
        self.run, self.accelerator, self.target, self.streams = run, accelerator, target, streams
        self.batches, self.prompts, self.out = batches, prompts, Path(run.out)
        self.average = Average(streams, run.trainer.ema)
        self.optimizer: Any
        self.module, self.optimizer = accelerator.prepare(streams, adamw(streams, run.trainer))
        self.state = TrainState(streams, self.optimizer, self.average)
        self.control = ProcessControl(accelerator, self.out, run.trainer.timeout)
        self.saver = Saver(self.out, self.control, run.trainer.keep)
        self.start, self.progress = 0, {"best_tau": 0.0, "best_step": 0, "stale": 0}
        if run.resume:
            self.load()
        self.tracker = Tracker(
            self.out, active=accelerator.is_main_process, steps=run.trainer.steps, start=self.start,
            trackers=run.trainer.trackers, config=resolved,
        )  # fmt: skip

    def load(self) -> None:
        """Continue from the newest checkpoint that is good, if there is one."""
        path = self.saver.newest()
        if path is not None:
            state = format.state_of(path)
            resume.restore(self.state, path)
            self.start, self.progress = state["step"], self.progress | state.get("progress", {})

    def save(self, step: int) -> None:
        """Write a checkpoint beside the training."""
        content = {"progress": dict(self.progress), "settings": settings(self.run, self.batches)}
        self.saver.save(self.state, step, content, int(self.progress["best_step"]))

    def train(self) -> None:
        """Run all steps, or until measurements stay without a new best for too long."""
        trainer = self.run.trainer
        try:
            for step in range(self.start, trainer.steps):
                self.step(step)
                done, stopped = step + 1, False
                if done % trainer.eval_every == 0 or done == trainer.steps:
                    stopped = self.measure(done)
                if done % trainer.save_every == 0 or done == trainer.steps or stopped:
                    self.save(done)
                if stopped:
                    self.tracker.say(f"stopped at step {done}: no better τ in {trainer.patience} measurements")
                    break
            self.saver.finish()
        finally:
            self.saver.close()
            self.tracker.close()

    def step(self, step: int) -> None:
        """Take one optimiser step on the global batch."""
        begin, trainer, device = time.perf_counter(), self.run.trainer, self.accelerator.device
        seed = trainer.seed + step * 10_000_019
        micro = [(b, anchors(b, self.run.every, self.run.streams.streams, seed)) for b in self.batches(step)]
        counted = torch.stack([chosen.valid.sum((0, 1)) for _, chosen in micro]).sum(0).float()
        shared: Any = self.accelerator.reduce(counted.to(device), "sum")
        trained = shared.clamp_min(1)
        totals: dict[str, Tensor] = {}
        for i, (batch, chosen) in enumerate(micro):
            for name, value in self.backward(batch, chosen, trained, last=i + 1 == len(micro)).items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), trainer.clip or torch.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update(self.streams)
        if (step + 1) % trainer.log_every == 0:
            summed: Any = self.accelerator.reduce(torch.stack([totals["loss"], totals["accuracy"]]), "sum")
            means = summed / trained
            self.tracker.log(
                {
                    "step": step + 1,
                    "loss": float((means[0] * self.weights(device)).sum()),
                    "soft_ce": means[0].tolist(),
                    "accuracy": means[1].tolist(),
                    "lr": self.rate(step),
                    "grad_norm": float(norm),
                    "rows": int(trained[0]),
                    "tokens_per_second": trainer.batch_tokens / (time.perf_counter() - begin),
                }
            )

    def weights(self, device: torch.device) -> Float[Tensor, "G"]:
        """Return the weight of each stream's loss."""
        return self.run.decay ** torch.arange(self.run.streams.streams, device=device)

    def rate(self, step: int) -> float:
        """Return the step's learning rate at this target's width."""
        return learning_rate(step, self.run.trainer) * self.run.trainer.lr_width / self.target.embeddings.hidden_size

    def backward(self, batch: Batch, chosen: Anchors, trained: Tensor, *, last: bool) -> dict[str, Tensor]:
        """Add one micro-batch's gradient, divided by the global count; processes average theirs, hence the factor."""
        device, processes = self.accelerator.device, self.accelerator.num_processes

        def go() -> dict[str, Tensor]:
            with self.accelerator.autocast():
                draft, teacher = self.module(batch.token.to(device), batch.document.to(device), chosen.row.to(device))
            sums = stream_sums(draft, teacher, chosen.valid.to(device))
            self.accelerator.backward((sums["loss"] / trained * self.weights(device)).sum() * processes)
            return {name: value.detach() for name, value in sums.items()}

        if last:
            return go()
        with self.accelerator.no_sync(self.module):
            return go()

    def measure(self, step: int) -> bool:
        """Measure τ with the real verifier, keep the streams if the best; return whether patience has run out."""
        patience = self.run.trainer.patience
        if self.accelerator.is_main_process:
            weights = self.average.state(self.streams)
            copy = Streams(self.run.streams, self.target)
            copy.load_state_dict(weights)
            tau = self.acceptance_length(frozen(copy, self.target))
            better = tau > self.progress["best_tau"]
            self.progress["stale"] = 0 if better else self.progress["stale"] + 1
            if better:
                self.progress |= {"best_tau": tau, "best_step": step}
                save_streams(self.out / KIND, self.run.streams, weights, self.target.spec)
            self.tracker.log({"step": step, "tau": tau, "best": better})
            self.tracker.say(f"step {step}: τ {tau:.3f}{'  (best, kept)' if better else ''}")
        self.accelerator.wait_for_everyone()
        stale = torch.tensor([float(self.progress["stale"])], device=self.accelerator.device)
        summed: Any = self.accelerator.reduce(stale, "sum")
        return patience is not None and bool(summed.item() >= patience)

    def acceptance_length(self, streams: Streams) -> float:
        """Return τ pooled over the prompts, decoding greedily."""
        config = StreamsDrafter.Config(self.run.out, self.run.tree)
        drafter = StreamsDrafter(config, self.target, self.run.name, streams)
        settings = Settings(self.run.trainer.eval_tokens, GREEDY)
        answers = [speculate(self.target, drafter, p, settings) for p in self.prompts[: self.run.trainer.eval_prompts]]
        return sum(len(answer.tokens) - 1 for answer in answers) / max(1, sum(len(answer.steps) for answer in answers))


def prepare_out(run: StreamsRunConfig, resolved: dict[str, Any], lock: RunLock) -> None:
    """Make the output folder, once everything that a run needs has loaded."""
    out = Path(run.out)
    out.mkdir(parents=True, exist_ok=True)
    lock.take()
    format.clear(out / "checkpoints")
    shutil.rmtree(out / RANKS, ignore_errors=True)
    if run.overwrite and not run.resume:
        for folder in ("checkpoints", KIND, f".{KIND}.old", "tensorboard", "wandb"):
            shutil.rmtree(out / folder, ignore_errors=True)
        for file in ("metrics.jsonl", "prompts.jsonl", "wandb-id.txt"):
            (out / file).unlink(missing_ok=True)
    write_whole(out / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(resolved)).encode())


def train(run: StreamsRunConfig, resolved: dict[str, Any]) -> None:
    """Run the whole job on this process, alone in its output folder."""
    accelerator = processes.accelerator_for(run.launcher, run.trainer, run.model)
    check_out(Path(run.out), replaces=run.resume or run.overwrite)
    accelerator.wait_for_everyone()  # no process may find what another one starts to write
    with RunLock(Path(run.out)) as lock:
        on_main(accelerator, lock.take)
        job(run, resolved, accelerator, lock)
    accelerator.end_training()


def job(run: StreamsRunConfig, resolved: dict[str, Any], accelerator: Accelerator, lock: RunLock) -> None:
    """Load and train."""
    trainer, model = run.trainer, run.model
    set_seed(trainer.seed)
    if model.placement != REPLICATE:
        raise ValueError(f"model.placement={model.placement}: streams adapt the target's own layers: give replicate")
    check_rows(run.data.length, context_of(configuration(model.path, model.trust_remote_code)), model.path)
    target = Target.of(model, device=str(accelerator.device))
    streams = Streams(run.streams, target)
    samples, prompts, counts = load_training(run.data, target.tokenizer, trainer.eval_prompts)
    packed = pack(samples, run.data.length)
    check_known(packed, target.tokenizer, target.embeddings.vocab_size)
    step, micro = (tokens // run.data.length for tokens in (trainer.batch_tokens, trainer.micro_tokens))
    batches = Batches(packed, step, micro, trainer.seed, accelerator.process_index, accelerator.num_processes)

    def begin() -> None:
        console = Console()
        if run.resume:
            resume.check(Path(run.out), settings(run, batches))
        prepare_out(run, resolved, lock)
        save_prompts(prompts, Path(run.out, "prompts.jsonl"))
        origin = provenance(accelerator.num_processes, run.launcher.strategy, fingerprint(samples)) | {
            "chat_template_sha256": template_sha256(target.tokenizer),
            "data": counts.report(),
        }
        write_whole(Path(run.out, "provenance.json"), (json.dumps(redacted_values(origin), indent=2) + "\n").encode())
        console.print(counts.line(run.data), highlight=False)
        console.print(
            f"{run.name}: {parameter_count(streams):,} trained parameters, {len(samples):,} samples, "
            f"{len(packed.token):,} rows of {run.data.length} tokens",
            highlight=False,
        )

    on_main(accelerator, begin)
    StreamLoop(run, accelerator, target, streams, batches, [prompt.token for prompt in prompts], resolved).train()
    accelerator.wait_for_everyone()


def streams_config(cfg: DictConfig) -> StreamsRunConfig:
    """Return the typed configuration, without the final evaluation that trainer=debug makes small: here is none."""
    OmegaConf.set_struct(cfg, False)
    cfg.pop("eval", None)
    run = typed(StreamsRunConfig, cfg)
    check_name(run.name)
    return run


@command("streams")
def main(cfg: DictConfig) -> None:
    """Compose, check, and launch or train."""
    with user_errors(), launch.main_first():
        launch.check_mode()
        run = streams_config(cfg)
        resolved = redacted_values(OmegaConf.to_container(cfg, resolve=True))
        assert isinstance(resolved, dict)
        if launch.missing(run.launcher):
            words = launch.overrides()
            raise SystemExit(launch.start(run.launcher, os.path.abspath(__file__), words))
        train(run, {str(key): value for key, value in resolved.items()})


if __name__ == "__main__":
    main()
