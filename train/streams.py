"""Train speculative streams for a frozen target, and keep those that were accepted most.

    python train/streams.py model=tiny

The evaluation is that of every draft source:

    python eval/run.py drafter=streams drafter.streams.run=outputs/tiny-streams model=tiny
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from accelerate import Accelerator
from accelerate.utils import set_seed
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from data.batches import Batches, check_known, fingerprint, pack
from data.prompts import load_training, save_prompts
from data.store_files import write_whole
from data.template import template_sha256
from heads.base import parameter_count
from heads.command import command
from heads.context import check_rows, context_of
from heads.errors import user_errors
from heads.redact import redacted_values
from heads.resolvers import register_resolvers
from heads.typed import typed
from inference.loading import configuration
from inference.placement import REPLICATE
from inference.streams import KIND, Streams
from inference.target import Target
from train import checkpoint, launch, processes, resume
from train.check import check_out
from train.lock import RunLock
from train.peers import RANKS, on_main
from train.run import provenance
from train.stream_loop import StreamLoop, StreamsRunConfig, settings

register_resolvers()


def prepare_out(run: StreamsRunConfig, resolved: dict[str, Any], lock: RunLock) -> None:
    """Make the output folder, once everything that a run needs has loaded."""
    out = Path(run.out)
    out.mkdir(parents=True, exist_ok=True)
    lock.take()
    checkpoint.clear(out / "checkpoints")
    shutil.rmtree(out / RANKS, ignore_errors=True)
    if run.overwrite and not run.resume:
        for part in ("checkpoints", KIND, f".{KIND}.old", "tensorboard", "wandb"):
            shutil.rmtree(out / part, ignore_errors=True)
        for part in ("metrics.jsonl", "prompts.jsonl", "wandb-id.txt"):
            (out / part).unlink(missing_ok=True)
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
    place = str(accelerator.device)
    if model.placement != REPLICATE:
        raise ValueError(f"model.placement={model.placement}: streams adapt the target's own layers: give replicate")
    check_rows(run.data.length, context_of(configuration(model.path, model.trust_remote_code)), model.path)
    target = Target.load(model.path, model.dtype, place, model.trust_remote_code, model.quantize, model.adapter)
    streams = Streams(run.streams, target)
    samples, prompts, counts = load_training(run.data, target.tokenizer, trainer.eval_prompts)
    packed = pack(samples, run.data.length)
    check_known(packed, target.tokenizer, target.ends.vocab_size)
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
    return typed(StreamsRunConfig, cfg)


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
