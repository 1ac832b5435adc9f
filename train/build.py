"""Building a training run from its resolved configuration: target, head, data, features and the training loop.

Every component is constructed here from its own typed configuration.
"""

import logging
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, find_executable_batch_size, set_seed
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from data.batches import Batches, Packed, check_known, fingerprint, pack, token_counts
from data.features.extraction import spec_of
from data.features.served import LayerIds, ServedFeatures, VllmServers, pieces
from data.features.source import FeaturesConfig, FeatureSource, LiveFeatures, StoredFeatures
from data.features.store import FeatureRequest, FeatureStore
from data.text.prompts import TrainingData, load_training, save_prompts
from data.text.sources import open_sources
from data.text.template import template_sha256
from eval.inputs.workloads import MIN_ANSWER_TOKENS
from eval.measures.machine import revision
from heads.base import DraftHead, Features, Tokens, parameter_count, to_device
from heads.common.errors import redacted_values, redacted_words
from heads.common.files import atomic_write, write_json
from heads.common.progress import print_line
from heads.common.target_config import context_of
from heads.common.typed import Json
from heads.formats.published import export
from heads.formats.published.export import TargetFacts
from heads.modules.layers import Recomputing
from heads.modules.vocab import choose_draft_vocab
from inference.drafters.policy import verifiable
from inference.target.embeddings import final_norm
from inference.target.embeddings_only import AnyTarget, EmbeddingsOnly, load_target
from inference.target.target import Target
from train import checkpoint
from train.config import RunConfig
from train.distributed import processes
from train.distributed.processes import RunLock, on_main
from train.loop import AcceptanceEvaluator, BestHead, Loop
from train.plan import plan
from train.resolve import check_out, clear_out, describe_choices
from train.rollouts import Rollouts
from train.start import AUTO, STARTS, adapt, fit_init, init_head, resolve_init
from train.step import Loss, Stepper, in_dtype

# Fields of a store's spec that must be the run's own.
SAME = ("target", "quantize", "width", "vocab", "length", "data", "rows", "layers")


def source_for(config: FeaturesConfig, target: AnyTarget, head: DraftHead, batches: Batches) -> FeatureSource:
    """Return a run's feature source; refuse a store of something else, or one that lacks sequences or layers."""
    if config.mode == "live":
        assert isinstance(target, Target)
        return LiveFeatures(target, batches, head.feature_layers)
    form = FeatureRequest(head.feature_layers, target.dtype)
    if config.mode == "engine":
        spec = target.spec
        norm = target.norm if isinstance(target, EmbeddingsOnly) else final_norm(target.base, spec.num_layers)
        servers = VllmServers(config, LayerIds.of(config.vllm_layers, form.layers, spec.num_layers), spec.hidden_size)
        servers.check(next(pieces(batches.packed, 0)), norm, target.embeddings)  # the longest sequence is packed first
        return ServedFeatures(servers, batches, form, norm, target.device, config.prefetch)
    folder = config.folder
    store = FeatureStore(folder)
    store.check(spec_of(target, batches.packed, form.layers, config), SAME)
    if missing := store.missing():
        why = next(iter(store.damaged.values()), f"row {missing[0]} is the first")
        raise ValueError(
            f"{folder}: {len(missing)} of {store.spec.rows} sequences are in no shard ({why}); continue the extraction"
        )
    return StoredFeatures(store, batches, form, target.device, config.prefetch)


def among_processes(run: Any, job: Callable[[Any, Accelerator, RunLock], None]) -> None:
    """Run a job on every process with the first process's configuration, while it locks the output folder."""
    accelerator = processes.accelerator_for(run.launcher, run.trainer, run.model)
    accelerator.wait_for_everyone()  # before this, other processes could see the first one's writes
    with RunLock(Path(run.out)) as lock:
        on_main(accelerator, lock.take)
        (run,) = broadcast_object_list([run])
        job(run, accelerator, lock)
    accelerator.end_training()


def build(run: RunConfig, accelerator: Accelerator, lock: RunLock) -> Loop:
    """Load target, head and data, create the output folder, and return the loop; refuse what does not fit together.

    Three values need the loaded target: whether it verifies trees, the weights of `init=auto`, and the micro-batch.
    """
    if not accelerator.is_main_process:
        logging.disable(logging.WARNING)  # only the main process logs warnings
    set_seed(run.trainer.seed)
    resumes = run.resume and checkpoint.checkpoints(Path(run.out) / "checkpoints")
    init = checkpoint.first_init(Path(run.out), run.head.name) if resumes and run.init == AUTO else run.init
    target = load_target(run.model, str(accelerator.device), with_layers=run.reads_target)
    if isinstance(target, Target):
        run = replace(run, tree=verifiable(target, run.tree))
    config, init = resolve_init(init, run.head, target)
    head: Any = init_head(config, init, target, run.base).to(accelerator.device)
    if run.engine is not None:
        facts = TargetFacts(run.model.path, target.config.to_dict(), torch.bfloat16, 1)
        export.check(head, run.engine, facts, target.embeddings.extra_ops())
    for module in head.modules():
        if isinstance(module, Recomputing):
            module.recompute = run.trainer.recompute
    prompts = max(run.eval.prompts, run.trainer.eval_prompts)
    data = load_training(run.data, target.tokenizer, prompts, run.workload, max_prompt_tokens(run, target.config))
    packed = pack(data.samples, run.data.length)
    check_known(packed, data.held_out, target.tokenizer, target.embeddings.vocab_size)
    if init in STARTS:  # a head to start from has already chosen its draft vocabulary
        choose_draft_vocab(head, token_counts(data.samples, target.embeddings.vocab_size))
    if run.trainer.micro_tokens is None:
        micro_tokens = run.data.length * executable_micro_batch(run, accelerator, target, head, packed)
        run = replace(run, trainer=replace(run.trainer, micro_tokens=micro_tokens))
    batches = batches_for(run.trainer, packed, accelerator)
    if not resumes:
        fit_init(head, init, target, batches, run.trainer.steps)
    adapt(head, run.peft)
    source = source_for(run.features, target, head, batches)
    values = values_of(run) | redacted_values({"head": asdict(head.config), "init": init})
    trained = {"head": head.config, "peft": run.peft}
    settings = checkpoint.settings(run.trainer, trained, target.spec.fingerprint, batches)

    def begin() -> None:
        origin = {
            **provenance(accelerator.num_processes, run.launcher.strategy, data, target.tokenizer),
            "micro_tokens": run.trainer.micro_tokens,
            "sources": [source.provenance() for source in open_sources(run.data)],
            "init": init,
            "peft": asdict(run.peft),
        }
        if isinstance(source, ServedFeatures):
            origin["features"] = dict(zip(source.servers.urls, source.servers.models, strict=True))
        elif isinstance(source, StoredFeatures):
            origin["features"] = {"path": str(source.store.folder), **asdict(source.store.spec)}
        prepare_out(run, values, lock, settings, data, origin)
        started = f"head={run.head.name} starts from {init}; " if init else ""
        print_line(f"{run.name}: {started}{sizes(head, data, packed)}")
        if (mismatch := export.engine_mismatch(head.config, target.embeddings.extra_ops())) is not None:
            print_line(mismatch)
        if not run.alone_on_cpu:
            print_line(describe_choices(plan(run)))

    on_main(accelerator, begin)
    logging.disable(logging.NOTSET)
    held_out = [prompt.token for prompt in data.held_out]
    return loop_of(run, accelerator, target, head, source, held_out, values, settings)


def executable_micro_batch(
    run: RunConfig, accelerator: Accelerator, target: AnyTarget, head: Any, packed: Packed
) -> int:
    """Return the sequences of a micro-batch: the plan's number, or fewer if a trial runs out of memory.

    The trial runs two micro-batches in which every row is trained, with the optimiser's state. Processes that share the
    target's or head's passes cannot run trials of their own; for them the plan decides.
    """
    device, size = accelerator.device, plan(run).micro_batch_size

    def trial(size: int) -> int:
        loss = Loss(head, run.objective, compiled=False, autocast=accelerator.mixed_precision == "bf16")
        optimizer_state = [torch.empty_like(p) for p in head.parameters() if p.requires_grad for _ in range(2)]
        (batch, *_) = Batches(packed, size, size, run.trainer.seed, 0, 1)(0)
        batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
        anchors, weight = loss.sample_rows(batch, batch.index)
        shape = (*batch.token.shape, len(head.feature_layers) + 1, head.embeddings.hidden_size)
        for _ in range(2):
            if isinstance(target, Target) and run.features.mode == "live":
                features = target.features(batch.token, batch.document, head.feature_layers)
            else:
                states = torch.zeros(shape, dtype=target.dtype, device=device)
                token, document = (to_device(field, device) for field in (batch.token, batch.document))
                features = Features(token, states[:, :, 1:], states[:, :, 0], document)
            if accelerator.mixed_precision == "no":
                features = in_dtype(features, next(head.parameters()).dtype)
            rows = None if anchors is None else to_device(anchors, device)
            loss(features, to_device(weight.row, device), rows, loss.chunks(weight.trained, device))[0].backward()
        del optimizer_state
        head.zero_grad()
        return size

    if run.launcher.strategy == "ddp" and not run.model.placed.needs_all_ranks:
        try:
            size = find_executable_batch_size(trial, starting_batch_size=size)()
        except RuntimeError as error:
            if "reached zero" not in str(error):
                raise
            raise ValueError(
                f"{run.name}: one sequence of data.length={run.data.length} does not fit this device: lower it, or "
                "give trainer.recompute=true or a smaller head"
            ) from error
    return int(accelerator.gather(torch.tensor([size], device=device)).min())


def loop_of(
    run: RunConfig, accelerator: Accelerator, target: AnyTarget, head: Any, source: FeatureSource,
    prompts: list[Tokens], values: Json, settings: Json,
) -> Loop:  # fmt: skip
    """Return the run's training loop, ready to start or to resume.

    `run.tree` is one that the target can verify. Trackers record `values`; `settings` are `checkpoint.settings`.
    """
    trainer, evaluator, rollouts = run.trainer, None, None
    loss = Loss(head, run.objective, compiled=trainer.compile, autocast=accelerator.mixed_precision == "bf16")
    best_head = BestHead(Path(run.out, "head"), head, target, run.tree)
    if isinstance(target, Target):
        if trainer.eval_prompts:
            evaluator = AcceptanceEvaluator(target, prompts, trainer, run.tree, run.name)
        if isinstance(source, LiveFeatures) and trainer.compile:
            source.forwards = target.compiled_forwards()
        if (drafted := run.objective.on_policy).prompts:
            rollouts = Rollouts(target, best_head.decoding, run.tree, drafted, run.objective.depths, source.batches)
    stepper = Stepper(trainer, run.launcher, accelerator, loss, source, target.embeddings.hidden_size, rollouts)
    weighed = {f"objective.{key}": value for key, value in asdict(run.objective).items()}
    numerics = checkpoint.numerics(trainer, weighed, run.launcher.strategy, accelerator.num_processes)
    this_run = {"settings": settings, "arithmetic": numerics}
    return Loop(Path(run.out), stepper, best_head, evaluator, this_run, resumes=run.resume, config=values)


def batches_for(trainer: Any, packed: Packed, accelerator: Accelerator) -> Batches:
    """Return the run's batches, with the trainer's token counts converted to sequences."""
    length = packed.token.shape[1]
    step, micro_batch = (tokens // length for tokens in (trainer.batch_tokens, trainer.micro_tokens))
    return Batches(packed, step, micro_batch, trainer.seed, accelerator.process_index, accelerator.num_processes)


def max_prompt_tokens(run: RunConfig, config: Any) -> int | None:
    """Return the maximum tokens of a held-out prompt; None if nothing is measured.

    The final evaluation decodes longer answers than the measurements during training.
    """
    if run.eval.prompts and run.workload is None:
        return context_of(config) - MIN_ANSWER_TOKENS
    return context_of(config) - 1 if run.trainer.eval_prompts else None


def prepare_out(
    run: Any, values: Json, lock: RunLock, settings: Json, data: TrainingData,
    origin: Json, weights: str = "head",
) -> None:  # fmt: skip
    """Create the output folder after everything has loaded, so that a failed start does not replace an earlier run.

    config.yaml receives `values`, provenance.json `origin`. Then print the data's statistics.
    """
    out = Path(run.out)
    if run.resume:
        checkpoint.check(out, settings)
        if not checkpoint.checkpoints(out / "checkpoints"):
            print_line(f"{out}: nothing to resume, begins at step 0")
    out.mkdir(parents=True, exist_ok=True)
    lock.take()
    check_out(run)  # again: another run may have written there meanwhile
    for left in (out / "checkpoints").glob(f"{checkpoint.PARTIAL}*"):  # left by a killed run
        shutil.rmtree(left, ignore_errors=True)
    if run.overwrite and not run.resume:
        clear_out(out, weights)
    atomic_write(out / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(values)).encode())
    if data.held_out:
        save_prompts(data.held_out, out / "prompts.jsonl")
    else:  # prompts of a failed start may now be trained on
        (out / "prompts.jsonl").unlink(missing_ok=True)
    write_json(out / "provenance.json", redacted_values(origin))
    print_line(data.counts.line(run.data))


def provenance(world: int, strategy: str, data: TrainingData, tokenizer: PreTrainedTokenizerBase) -> Json:
    """Return this run's provenance: code, versions, command, processes, strategy, data."""
    code = revision()
    return {
        "git_revision": code["revision"],
        "git_dirty": bool(code["dirty"]),
        "versions": {"python": platform.python_version(), **checkpoint.VERSIONS},
        "command": " ".join(redacted_words(sys.argv)),
        "world_size": world,
        "strategy": strategy,
        "data_fingerprint": fingerprint(data.samples),
        "chat_template_sha256": template_sha256(tokenizer),
        "data": data.counts.report(),
    }


def sizes(head: Any, data: TrainingData, packed: Packed) -> str:
    """Describe the sizes of the head and of its data."""
    count, length = packed.token.shape
    return (
        f"{parameter_count(head):,} trained parameters, {len(data.samples):,} samples, {count:,} sequences of {length} "
        "tokens"
    )


def values_of(run: Any) -> Json:
    """Return a run's configuration without secrets, for trackers and config.yaml."""
    return redacted_values(asdict(run))
