"""Train a draft head for a frozen target, evaluate it against the target, write the report.

    python train/run.py model=llama70b head=eagle

This is the composition root: every part is constructed here, by hand, from its typed configuration.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import hydra
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from data.batches import Batches, fingerprint, pack, token_counts
from data.prompts import load_training, save_prompts
from eval.config import eval_config
from eval.run import evaluate
from heads.base import frozen_count, parameter_count
from heads.errors import user_errors
from heads.layers import Recomputing
from heads.resolvers import ROOT, register_resolvers
from heads.vocab import prune
from inference.target import default_device, fast_dtype
from train import adapt, launch, sweep
from train.config import RunConfig, run_config
from train.features import load_target, origin_of, source_for
from train.loop import Loop
from train.plan import plan, table
from train.start import CHECKPOINT, LAST_LAYER, check_start, first_head, settled

register_resolvers()


def check_out(run: RunConfig) -> None:
    """Refuse an output folder that holds a run, unless that is resumed or overwritten."""
    if (Path(run.out) / "config.yaml").exists() and not (run.resume or run.overwrite):
        raise ValueError(
            f"{run.out} holds a run already: resume=true goes on with it, overwrite=true replaces it, name=… keeps both"
        )


def prepare_out(run: RunConfig, resolved: dict[str, Any]) -> None:
    """Make the output folder, once everything that a run needs has loaded: a mistake costs no earlier run."""
    out = Path(run.out)
    if run.overwrite and not run.resume:
        for part in ("checkpoints", "head", ".head.old"):
            shutil.rmtree(out / part, ignore_errors=True)
        for part in ("metrics.jsonl", "report.json", "report.md", "training.json", "prompts.jsonl"):
            (out / part).unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(resolved)))


def provenance(world: int, data: str) -> dict[str, Any]:
    """Return where this run came from: code, versions, command, processes, data."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return {
        "git_revision": git("rev-parse", "HEAD") or None,
        "git_dirty": bool(git("status", "--porcelain")),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "command": " ".join(sys.argv),
        "world_size": world,
        "data_fingerprint": data,
    }


def start_of(run: RunConfig) -> dict[str, Any]:
    """Return what a run that starts from a head starts from, and what of it is trained."""
    return {} if run.init is None else {"init": run.init, "peft": asdict(run.peft)}


def accelerator_for(run: RunConfig) -> Accelerator:
    """Return accelerate's handle with the precision that the run asks for, or that the device is fast in."""
    wanted = run.trainer.precision
    if wanted == "auto":
        place = torch.device(run.model.device or default_device())
        wanted = "bf16" if fast_dtype(place) == torch.bfloat16 else "fp32"
    return Accelerator(mixed_precision="bf16" if wanted == "bf16" else "no", cpu=run.model.device == "cpu")


def batches_for(run: RunConfig, packed: Any, accelerator: Accelerator) -> Batches:
    """Cut the token budgets of the trainer into rows."""
    rows = max(1, run.trainer.batch_tokens // run.data.length)
    micro = max(1, run.trainer.micro_tokens // run.data.length)
    return Batches(packed, rows, micro, run.trainer.seed, accelerator.process_index, accelerator.num_processes)


def train(run: RunConfig, resolved: dict[str, Any]) -> None:
    """Run the whole job on this process."""
    accelerator = accelerator_for(run)
    main, console = accelerator.is_main_process, Console()
    check_out(run)
    check_start(run.peft, run.init)
    accelerator.wait_for_everyone()  # no process may find what another one starts to write
    set_seed(run.trainer.seed)
    target = load_target(run, str(accelerator.device))
    run = settled(run, target)
    head: Any = first_head(run, target).to(accelerator.device)
    run = replace(run, head=head.config)
    resolved = {**resolved, "head": asdict(head.config), "init": run.init}
    target.feature_layers = head.feature_layers
    for module in head.modules():
        if isinstance(module, Recomputing):
            module.recompute = run.trainer.recompute
    wanted = max(run.eval.prompts, run.trainer.eval_prompts)
    samples, prompts, counts = load_training(run.data, target.tokenizer, wanted, run.workload)
    if run.init in (None, LAST_LAYER, CHECKPOINT):  # else the vocabulary is chosen already
        prune(head, token_counts(samples, target.ends.vocab_size))
    adapt.adapt(head, run.peft)
    packed = pack(samples, run.data.length)
    batches = batches_for(run, packed, accelerator)
    source = source_for(run, target, head, batches)
    if main:
        prepare_out(run, resolved)
        save_prompts(prompts, Path(run.out, "prompts.jsonl"))
        origin = {
            **provenance(accelerator.num_processes, fingerprint(samples)),
            "data": counts.report(),
            **start_of(run),
            **origin_of(source),
        }
        Path(run.out, "provenance.json").write_text(json.dumps(origin, indent=2) + "\n")
        console.print(counts.line(run.data), highlight=False)
        started = f"starts from {run.init}, whose numbers replace those of head={run.head.name}; " if run.init else ""
        beside = f" beside {frozen:,} frozen ones" if (frozen := frozen_count(head)) else ""
        filled = float((packed.document >= 0).float().mean())
        console.print(
            f"{run.name}: {started}{parameter_count(head):,} trained parameters{beside}, {len(samples):,} samples, "
            f"{len(packed.token):,} rows of {run.data.length} tokens ({filled:.0%} filled)",
            highlight=False,
        )
    accelerator.wait_for_everyone()
    held_out = [prompt.token for prompt in prompts]
    Loop(run, accelerator, target, head, batches, source, held_out, resolved).train()
    accelerator.wait_for_everyone()
    if main and run.eval.prompts:
        report(run)
    accelerator.end_training()


def report(run: RunConfig) -> None:
    """Evaluate the kept head beside those of `compare`; exit with status 1 if it is not lossless."""
    trust = {"trust_remote_code": run.model.trust_remote_code}
    found = evaluate(
        eval_config(run=run.out, compare=run.compare, workload=run.workload, model=trust, **asdict(run.eval))
    )
    sweep.note(run.name, run.head.name, Path(run.out))
    if not found.passed:
        raise SystemExit(1)


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(cfg: DictConfig) -> None:
    """Compose, check, and plan, launch or train."""
    with user_errors():
        run = run_config(cfg)
        resolved = OmegaConf.to_container(cfg, resolve=True)
        assert isinstance(resolved, dict)
        if run.plan:
            Console().print(table(run, plan(run)))
        elif run.launcher.num_processes * run.launcher.num_nodes > 1 and not launch.launched():
            status = launch.relaunch(run.launcher, os.path.abspath(__file__), HydraConfig.get().overrides.task)
            raise SystemExit(status)
        else:
            train(run, {str(k): v for k, v in resolved.items()})


if __name__ == "__main__":
    main()
