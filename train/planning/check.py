"""Checks of a run before anything is loaded, by its configuration, the file system and the target's configuration."""

import logging
import shutil
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.features.store import FeatureStore
from data.text.prompts import first_samples, load_prompts, locate
from data.text.sources import (
    check_name,
    check_some_left,
    check_source,
    check_sources,
    held_out_shares,
    is_local,
    open_source,
)
from eval.config import eval_config
from eval.inputs.drafters import find_heads
from eval.measures.results import LIVE
from heads.common.files import check_writable
from heads.common.untrusted import regular
from heads.formats.hub import kind_of, resolve_head
from heads.mtp import Mtp
from inference.target.loading import AS_IT_IS, check_adapter, check_method, load_tokenizer
from train.config import RunConfig
from train.distributed import processes
from train.start import AUTO, CHECKPOINT, LAST_LAYER, STARTS, check_init

log = logging.getLogger(__name__)
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json", "*.gguf")  # one of which all have
WRITTEN = (  # by a run, beside its weights
    "checkpoints", "bad", "tensorboard", "wandb", "metrics.jsonl", "report.json", "report.md", "report.html",
    "training.json", "prompts.jsonl", "wandb-id.txt", "config.yaml", "provenance.json",
)  # fmt: skip


def reads_target(run: RunConfig) -> bool:
    """Return whether a run needs the target's layers: for features, decoding, initial weights, or changed weights."""
    # By default head=mtp starts from the last layer, whatever is measured while it trains.
    starts = run.init in (LAST_LAYER, CHECKPOINT) or (run.init == AUTO and isinstance(run.head, Mtp.Config))
    features, decodes = run.features, run.trainer.eval_prompts or run.objective.on_policy.prompts
    given = not features.runs_target and features.on_missing == "fail" and not decodes
    return starts or not given or not run.model.as_saved


def check_settings(run: RunConfig) -> None:
    """Refuse a run that cannot start on this machine, naming key and remedy, before the target's configuration is read.

    Reading that takes transformers a second.
    """
    model = run.model
    processes.check_machine(run.launcher, model)
    check_out(Path(run.out), replaces=run.resume or run.overwrite)
    check_writable(Path(run.out), "out")
    check_sources(run.data)
    if run.workload:
        check_source(locate(run.workload))
    if run.features.mode == "stored":
        FeatureStore(run.features.folder)
    if run.eval.prompts:
        find_heads(run.compare)
        eval_config(**evaluation(run))
    check_init(run.peft, run.head, run.init, model.where.placement)
    if run.init not in STARTS:
        kind_of(resolve_head(str(run.init)))
    check_method(model.quantize)
    if model.adapter not in (None, AS_IT_IS):
        check_adapter(model.adapter, model.quantize)


def check_plan(run: RunConfig) -> None:
    """Refuse data that a training would refuse by its first records, and settings of the final evaluation.

    Nothing is asked for or downloaded. A store of features that is there and cannot be read is refused too; one may be
    planned before it is extracted.
    """
    if run.eval.prompts:
        eval_config(**evaluation(run))
    if run.features.mode == "stored" and run.features.folder.exists():
        FeatureStore(run.features.folder)
    data, workload = run.data, run.workload and locate(run.workload)
    prompts = [name for name in (data.prompts, workload) if name]
    for name in (*data.paths, *prompts):
        check_name(name)
    shares = zip(data.paths, held_out_shares(data), strict=True)
    sources = [(open_source(name, data.split), held_out) for name, held_out in shares if is_local(name)]
    for source, held_out in sources:
        check_some_left(source.name, sum(1 for _ in islice(source, held_out + 1)), held_out, data)
    folder = Path(run.model.path)
    if folder.exists():  # a plan needs no tokenizer
        if folder.is_dir() and not any(file for pattern in TOKENIZERS for file in folder.glob(pattern)):
            log.warning("%s: has no tokenizer, so that the first records are not looked at", folder)
            return
        tokenizer = load_tokenizer(run.model.path, run.model.trust_remote_code)
        for source, _ in sources:
            first_samples(source, data, tokenizer)
        for name in filter(is_local, prompts):
            load_prompts(name, tokenizer, 1)


def unserved(path: str, beyond: str | None) -> str | None:
    """Return the line that no engine serves a head of a target, by its `beyond_tables`; None if engines can."""
    return beyond and f"{path}: {beyond}, which engines do not know when they draft: no head of it is exported to one"


def ordinary_mask(token: int | None, vocab_size: int, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the line that `head.mask_token` is a token that texts have; None if it is reserved, unused or none."""
    number = None if token is None else token % vocab_size
    if number is None or number >= len(tokenizer):
        return None
    added = tokenizer.added_tokens_decoder.get(number)
    if added is not None and added.special and number not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        return None
    word = tokenizer.decode([number])
    return (
        f"head.mask_token={token}: masked positions hold the embedding of token {number}, {word!r}, which texts "
        "have too; give the id of a reserved or unused token if the target has one"
    )


def check_out(out: Path, *, replaces: bool) -> None:
    """Refuse an output folder that holds a run, unless the run is resumed or overwritten.

    A run that failed before its first step does not count.
    """
    if holds_run(out) and not replaces:
        raise ValueError(
            f"{out} holds a run already: resume=true goes on with it, overwrite=true replaces it, name=… keeps both"
        )


def holds_run(out: Path) -> bool:
    """Whether a run in an output folder came to its first step; refuse a folder that no run writes."""
    if out.is_dir():
        regular(out)
    begun = [path for path in (out / "metrics.jsonl", out / "report.json") if path.exists() and path.stat().st_size]
    return bool(begun) or (out / "head").exists() or any(out.glob("checkpoints/step-*"))


def clear_out(out: Path, weights: str = "head") -> None:
    """Delete what a run wrote into its output folder."""
    for path in (out / name for name in (weights, f".{weights}.old", *WRITTEN)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def evaluation(run: RunConfig) -> dict[str, Any]:
    """Return the values of conf/eval.yaml for the final evaluation of a run: its head beside those of `compare`.

    Where a pass takes all processes it is live alone: each measures by its own clock what other trees would cost.
    """
    model: dict[str, Any] = {"trust_remote_code": run.model.trust_remote_code}
    settings = asdict(run.eval)
    if run.model.where.needs_all_ranks:
        model["placement"], settings["tier"] = run.model.placement, [LIVE]
    if run.eval.gate_dtype == AUTO:
        del settings["gate_dtype"]
    return {"run": run.out, "compare": run.compare, "workload": run.workload, "model": model, **settings}
