"""`resolve`: check a composed configuration before anything is loaded, and fill in every null and `auto` once.

Given values stay. Placement and strategy are the fastest whose plan takes at most MAX_UTILISATION of every device, and
of the host's memory if known. The micro-batch stays open: its size is the plan's, and a trial on the device can reduce
it (train/build.py).
"""

import math
import re
import shutil
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from data.features.served import LayerIds
from data.features.store import FeatureStore
from data.text.prompts import locate
from data.text.sources import check_name, check_source, is_local
from eval.config import eval_config
from eval.inputs.drafters import find_heads
from eval.measures.results import LIVE
from heads import HEADS, best_line
from heads.base import HeadConfig
from heads.common.files import check_writable
from heads.common.progress import print_above_bars
from heads.common.resolvers import ROOT
from heads.common.target_config import check_sequence_length, context_of
from heads.common.typed import Json, typed
from heads.common.untrusted import regular, visible
from heads.formats.hub import kind_of, resolve_head
from heads.formats.published import export, is_published
from heads.formats.published.export import TargetFacts
from heads.formats.store import head_config, read_config
from inference.target import placement as placing
from inference.target.config import DTYPES, default_device, device_named, fast_dtype
from inference.target.loading import AS_IT_IS, check_adapter, check_method, check_quantized
from train.config import HERE, IGNORE, DeviceConfig, JobConfig, LauncherConfig, RunConfig, checked, run_config
from train.distributed import processes
from train.distributed.launch import launched, on_node, world
from train.plan import GIB, MAX_UTILISATION, PLAIN, Plan, plan, target_shape
from train.start import STARTS, check_init, check_kind, resolve_saved_config

GATE = "float32"  # dtype of the losslessness check if the target fits in it: 16-bit rounding blurs the comparison
DRAFT_VOCAB = 32000  # size of EAGLE-3's draft vocabulary
SIDE = 1024  # size of the matrices that measure a CPU's FLOP/s
# Overrides of features=stored; a plan does not depend on where the store is.
STORED = "features.mode=stored features.path=store"
WRITTEN = (  # files of a run, except its weights
    "checkpoints", "bad", "tensorboard", "wandb", "metrics.jsonl", "report.json", "report.md", "report.html",
    "training.json", "prompts.jsonl", "wandb-id.txt", "config.yaml", "provenance.json",
)  # fmt: skip
DEVICES = ROOT / "conf" / "device"
CGROUPS, GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LIMITS = ("memory.max", "memory.limit_in_bytes")  # files of control groups, version 2 and 1


def resolve(cfg: DictConfig) -> RunConfig:
    """Return the run of a composed configuration, checked, with every value set except the micro-batch.

    The order is: the head, the device, the number of processes, placement and strategy, the dtype of the losslessness
    check. With `plan=true` nothing is written or downloaded. A ValueError names an invalid key, value and remedy.
    """
    run = on_machine(run_config(cfg))
    check_run(run)
    run = resolve_placement(run)
    if run.plan is False:
        check_fits(run)
    config: HeadConfig | None = run.head
    init = str(run.init)
    if run.init not in STARTS:
        config = None  # the configuration of a head on the Hub, or of another project, is read with its weights
        if Path(init).expanduser().is_dir():
            folder = resolve_head(init)
            check_kind(run.head, kind_of(folder), init)
            if not is_published(folder):
                config = resolve_saved_config(run.head, head_config(folder, read_config(folder)), init)
    if run.engine is not None and config is not None:
        shape = target_shape(run.model)
        with torch.device("meta"):
            head = HEADS[config.name](config, shape.target)
        facts = TargetFacts(run.model.path, shape.config.to_dict(), torch.bfloat16, 1)
        export.check(head, run.engine, facts, shape.target.extra_ops())
    if best := best_line(cfg):
        print_above_bars(best)
    return run


def on_machine(run: RunConfig) -> RunConfig:
    """Return a run whose null device values and number of processes are filled in from this machine.

    The processes are those of a launcher, or one for each accelerator. Refuse a `model.device` of another type.
    """
    device, launcher, requested = run.device, run.launcher, run.model.device
    kind = device_named(requested).type if device.type is None else device.type
    if requested is not None and requested.partition(":")[0] != kind:
        raise ValueError(f"device={device.name} is of type {kind}, and model.device={requested} is not: leave one out")
    if kind == "cpu":
        if device.type is None:
            cpu = preset("cpu")
            device = replace(device, context_gb=cpu.context_gb, slack=cpu.slack)
        device = replace(device, type=kind, memory_gb=device.memory_gb or free_bytes() / GIB)
    elif device.type is None:
        device = replace(device, type=kind, host_gb=device.host_gb or free_bytes() / GIB)
    if device.memory_gb is None:
        if not torch.cuda.is_available():
            raise ValueError(f"device.type={kind}: this machine has none; give device=h100 or another of conf/device")
        properties = torch.cuda.get_device_properties(requested or "cuda")
        tflops = device.tflops or peak_of(properties.name)
        device = replace(device, memory_gb=properties.total_memory / GIB, tflops=tflops, name=properties.name)
    if device.name == HERE and kind == "cpu" and device.tflops is None and run.plan is True:
        matrix = torch.ones(SIDE, SIDE, dtype=fast_dtype(torch.device("cpu")))
        seconds = []
        for _ in range(5):  # the best of several matrix products on all threads
            begin = time.perf_counter()
            torch.mm(matrix, matrix)
            seconds.append(time.perf_counter() - begin)
        device = replace(device, tflops=2 * SIDE**3 / min(seconds) / 1e12)
    accelerators = 1 if kind == "cpu" else accelerator_count(requested)
    return replace(run, device=device, launcher=with_processes(launcher, run.device.count or accelerators))


def with_processes(launcher: LauncherConfig, accelerators: int) -> LauncherConfig:
    """Return a launcher whose null number of processes on a node is that of its accelerators, or as launched."""
    if launcher.num_processes is not None:
        return launcher
    if launched():
        return replace(launcher, num_processes=on_node(), num_nodes=world() // on_node())
    return replace(launcher, num_processes=accelerators)


def accelerator_count(device: str | None) -> int:
    """Return how many processes a command starts: one per accelerator, one on a CPU or a given `device`."""
    return torch.cuda.device_count() if (device or default_device()) == "cuda" else 1


def preset(name: str) -> DeviceConfig:
    """Return the device `name` of conf/device."""
    values: Any = OmegaConf.merge(*(OmegaConf.load(DEVICES / f"{file}.yaml") for file in (HERE, name)))
    values.pop("defaults", None)
    return typed(DeviceConfig, values)


def peak_of(driver: str) -> float | None:
    """Return the peak of the device whose `match` is the longest in a driver's name, up to a word's end, or None."""
    presets = [preset(file.stem) for file in sorted(DEVICES.glob("*.yaml"))]
    peaks = [(len(d.match), d.tflops) for d in presets if d.match and re.search(rf"{re.escape(d.match)}(?!\w)", driver)]
    return max(peaks, default=(0, None))[1]


def free_bytes() -> int:
    """Return this machine's free memory, or the limit of a container or a cluster's job if that is lower."""
    least = int(psutil.virtual_memory().available)
    for line in GROUPS.read_text().splitlines() if GROUPS.is_file() else []:
        _, kind, group = line.split(":", 2)
        folder = CGROUPS / kind / group[1:]
        for file in (above / name for above in (folder, *folder.parents) for name in LIMITS):
            if file.is_file() and (limit := file.read_text().strip()).isdigit():
                least = min(least, int(limit))
    return least


def resolve_placement(run: RunConfig) -> RunConfig:
    """Return a run with its first placement and strategy that fit, and the dtype of its losslessness check.

    If none fits, the run has the pair that exceeds least. The check is in GATE if that fits, otherwise in the dtype
    that is timed. A run without any possible placement is refused with the first one's reason.
    """
    shares: dict[float, RunConfig] = {}
    errors = []
    several = run.launcher.world > 1
    placements: tuple[str, ...] = (run.model.placement,)
    strategies: tuple[str, ...] = (run.launcher.strategy,)
    if run.model.placement == placing.AUTO:
        placements = (
            placing.REPLICATE,
            *placing.SHARDED * several,
            *(placing.DEVICE_MAP, placing.OFFLOAD) * (not run.alone_on_cpu),
        )
    if run.launcher.strategy == placing.AUTO:
        strategies = ("ddp", "fsdp2") if several else ("ddp",)
    options = [(placement, run.model.offload, strategy) for placement, strategy in product(placements, strategies)]
    if run.model.placement == placing.AUTO and run.device.host_gb is not None:  # offloading may exceed the host
        options += [(placing.OFFLOAD, "disk", strategy) for strategy in strategies if placing.OFFLOAD in placements]
    for placement, offload, strategy in options:
        model = replace(run.model, placement=placement, offload=offload)
        option = replace(run, model=model, launcher=replace(run.launcher, strategy=strategy))
        try:
            shares.setdefault(share := checked_plan(option).utilization, option)
        except ValueError as error:
            errors.append(error)
            continue
        if share <= MAX_UTILISATION:
            break
    if not shares:
        raise errors[0]
    run = shares[min(shares)]
    if run.eval.gate_dtype != placing.AUTO:
        return run
    exact = replace(run, eval=replace(run.eval, gate_dtype=GATE))
    if not run.eval.prompts or run.alone_on_cpu or plan(exact).utilization <= MAX_UTILISATION:
        return exact
    fast = fast_dtype(torch.device(str(run.device.type)))
    names = (run.eval.dtype, run.model.dtype, *(name for name, dtype in DTYPES.items() if dtype == fast))
    return replace(run, eval=replace(run.eval, gate_dtype=next(name for name in names if name != placing.AUTO)))


def check_run(run: RunConfig) -> None:
    """Refuse a run that cannot start on this machine, naming key and remedy, before the target's files are read.

    A plan makes no network request, needs no disk space, and its store may be missing.
    """
    model, data, out = run.model, run.data, Path(run.out)
    if run.eval.prompts:
        eval_config(**evaluation(run))
    for name in filter(None, (*data.paths, data.prompts, run.workload and locate(run.workload))):
        if run.plan is not True or is_local(name):
            is_trained = name in data.paths
            holds_out = is_trained and not data.prompts and data.held_out >= len(data.paths)
            check_source(name, data.split if is_trained else "", 2 if holds_out else 1)
        else:
            check_name(name)
    if run.features.mode == "stored" and (run.plan is not True or run.features.folder.exists()):
        FeatureStore(run.features.folder)
    if run.plan is True:
        return
    processes.check_machine(run.launcher, model)
    find_heads(run.compare if run.eval.prompts else [])
    check_out(run)
    check_writable(out, "out")
    if run.init not in STARTS:
        head = resolve_head(str(run.init))
        if run.overwrite and head.resolve().is_relative_to(out.resolve()):
            raise ValueError(f"init={run.init} is the run that overwrite=true replaces ({out}): give another name")
    check_method(model.quantize)
    if model.adapter not in (None, AS_IT_IS):
        check_adapter(model.adapter, model.quantize)


def checked_plan(run: RunConfig) -> Plan:
    """Return a plan; refuse what loading the target, or its configuration, would refuse."""
    planned = plan(checked(run))
    model, placed, launcher = run.model, run.model.placed, run.launcher
    config = planned.shape.config
    text = config.get_text_config()
    group = model.tensor_parallel or launcher.local
    check_init(run.peft, run.head, run.init, placed.kind)
    check_sequence_length(run.data.length, context_of(text), model.path)
    if run.features.mode == "engine":
        LayerIds.of(run.features.vllm_layers, planned.cost.feature_layers, planned.shape.target.num_layers)
    placing.check_weights(placed, check_quantized(model.path, config, model.quantize), None)
    placing.check_offload(placed, str(run.device.type))
    if placed.needs_all_ranks:
        placing.check_processes(placed, launcher.world, group)
    if placed.kind == placing.TENSOR_PARALLEL:
        if text.model_type not in PLAIN and not getattr(text, "base_model_tp_plan", None):
            raise ValueError(
                f"model.placement={placing.TENSOR_PARALLEL}: transformers has no plan to cut {model.path} up"
            )
        placing.check_shape(text, group, model.path)
    if placed.kind == placing.DEVICE_MAP and run.device.type != "cpu":
        placing.check_devices(len(model.devices or range(run.device.count or launcher.local)), launcher.local)
    return planned


def check_fits(run: RunConfig) -> None:
    """Refuse a run that does not fit the memory of its devices or host, or the disk of its folder, by the plan."""
    planned = plan(run)
    parent = next(path for path in Path(run.out).absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    needed = planned.disk["checkpoints"] + planned.disk["head"]
    if not (run.resume or run.overwrite) and needed > free:
        raise ValueError(
            f"{run.name}: its checkpoints and head take {gib(needed)}, and {parent} has {gib(free)} free: free space, "
            f"give another out, or keep fewer by trainer.keep={max(1, run.trainer.keep // 2)}"
        )
    if planned.utilization <= 1:
        return
    where = "this machine" if run.alone_on_cpu else "a device"
    exceeded = planned.memory
    if planned.host is not None and planned.memory.utilization <= 1:
        where = "a node's host"
        exceeded = planned.host
    raise ValueError(
        f"{run.name} does not fit: it needs {gib(exceeded.peak)} of memory, and {where} has "
        f"{gib(exceeded.capacity or 0)} free: give {remedy(run) or 'another head, or more or larger devices'}; "
        f"plan=true shows where it goes, plan={IGNORE} starts all the same"
    )


def remedy(run: RunConfig) -> str | None:
    """Return overrides with which a run fits, one change or several; None if there are none.

    Cheap changes come first, those that do not affect the training's result before the others.
    """
    length = run.data.length
    half = length // 2
    head = asdict(run.head)
    several = run.launcher.world > 1
    unsharded = run.launcher.strategy == "ddp"
    whole = run.model.placement == placing.REPLICATE
    options = {
        "model.offload=disk": run.model.placement == placing.OFFLOAD and run.model.offload == "cpu",
        f"trainer.micro_tokens={length}": (run.trainer.micro_tokens or 0) >= 2 * length,
        "launcher.strategy=fsdp2": several and unsharded,
        **{f"model.placement={kind}": several and whole for kind in placing.SHARDED},
        "trainer.recompute=true": not run.trainer.recompute,
        "features=stored trainer.eval_prompts=0": run.features.mode == "live",
        "eval.prompts=0": run.eval.prompts > 0,
        "trainer.optimizer=muon": run.trainer.optimizer == "adamw" and unsharded,
        "model.placement=offload": whole,
        "model.quantize=int8": run.model.quantize is None,
        f"head.draft_vocab={DRAFT_VOCAB}": head.get("draft_vocab", DRAFT_VOCAB) is None,
        "head.lm_head=shared": head.get("lm_head") == "own",
        f"data.length={half} trainer.micro_tokens={half}": length > 512,
    }

    def utilization(overrides: str) -> float:
        sections: Any = OmegaConf.from_dotlist(overrides.replace("features=stored", STORED).split())
        changed = replace(run, **{key: replace(getattr(run, key), **sections[key]) for key in sections})
        try:
            return checked_plan(changed).utilization
        except ValueError:  # settings that cannot be combined
            return math.inf

    possible = [overrides for overrides, is_possible in options.items() if is_possible]
    for overrides in possible:
        if utilization(overrides) <= 1:
            return overrides
    chosen, least = "", utilization("")
    for overrides in possible:
        together = f"{chosen} {overrides}".strip()
        if overrides.partition("=")[0] not in chosen and (share := utilization(together)) < least:
            chosen, least = together, share
            if least <= 1:
                return chosen
    return None


def check_out(run: JobConfig) -> None:
    """Refuse an output folder that holds a run, unless the run is resumed or overwritten.

    A run that failed before its first step is ignored.
    """
    out = Path(run.out)
    regular(out)
    begun = any(path.exists() and path.stat().st_size for path in (out / "metrics.jsonl", out / "report.json"))
    if (begun or (out / "head").exists() or any(out.glob("checkpoints/step-*"))) and not (run.resume or run.overwrite):
        raise ValueError(
            f"{out} holds a run already: resume=true continues with it, overwrite=true replaces it, name=… keeps both"
        )


def clear_out(out: Path, weights: str = "head") -> None:
    """Delete what a run wrote into its output folder."""
    for path in (out / name for name in (weights, f".{weights}.old", *WRITTEN)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def evaluation(run: RunConfig) -> Json:
    """Return the values of conf/eval.yaml for the final evaluation of a run: its head and those of `compare`.

    If a pass needs all processes, only the tier `live` is measured: each would measure other costs of other trees.
    """
    model: Json = {"trust_remote_code": run.model.trust_remote_code}
    settings = asdict(run.eval)
    if run.model.placed.needs_all_ranks:
        model["placement"], settings["tier"] = run.model.placement, [LIVE]
    if run.eval.gate_dtype == placing.AUTO:
        del settings["gate_dtype"]
    return {"run": run.out, "compare": run.compare, "workload": run.workload, "model": model, **settings}


def table(planned: Plan) -> Group:
    """Return a plan as tables for the terminal; if it does not fit, with overrides with which it does."""
    run, cost, device, trainer = planned.run, planned.cost, planned.run.device, planned.run.trainer
    totals = {
        "data": visible(run.data.named), "target parameters": planned.shape.embeddings + planned.shape.inner,
        "active parameters": planned.shape.active + planned.shape.embeddings, "head parameters": cost.whole,
        "trained parameters": cost.trained, "steps": trainer.steps, "tokens": trainer.steps * trainer.batch_tokens,
        "micro tokens": planned.micro_batch_size * run.data.length,
        "a step": f"{trainer.batch_tokens:,} tokens in sequences of {run.data.length:,}",
        **{f"disk: {name}": gib(size) for name, size in planned.disk.items()},
        "operations, target and head": "{:.2g} + {:.2g}".format(*planned.flops),
    }  # fmt: skip
    if planned.hours is None:
        totals["hours"] = f"not known: device={device.name} has no peak; give device.tflops"
    else:
        totals[f"time at an assumed {device.mfu:.0%} of {device.name}'s peak"] = format_hours(planned.hours)
        if device.type != "cpu":
            totals["GPU hours"] = f"{planned.hours * run.launcher.world:,.1f}"
        if run.features.mode == "stored":
            totals["GPU hours of the extraction, elsewhere"] = f"{planned.target_hours:,.1f}"
    tables = [_table(f"plan: {run.name} -> {run.out}", totals)]
    for title, use in (("the fullest device", planned.memory), ("host memory of each node", planned.host)):
        if use is not None:
            fits = "fits" if use.utilization <= 1 else "does NOT fit"
            stages = {f"while: {stage}": (1 + use.slack) * size for stage, size in use.stages.items()}
            last = {"final evaluation, all else freed": use.evaluation} if use.evaluation else {}
            rows = {"process": use.process, **use.resident, **stages, **last}
            capacity = "" if use.capacity is None else f" of {gib(use.capacity)}, {fits}"
            tables.append(_table(f"{title}: {gib(use.peak)}{capacity}", {row: gib(size) for row, size in rows.items()}))
    if planned.utilization <= 1:
        verdict = "it fits; without plan=true the same command runs it"
    elif overrides := remedy(run):
        verdict = f"it does not fit; with this it does: {overrides}"
    else:
        verdict = "it does not fit with any change: take more or larger devices, or another head"
    mismatch = export.engine_mismatch(run.head, planned.shape.target.extra_ops())
    lines = filter(None, (describe_choices(planned), mismatch, verdict))
    return Group(*tables, *(escape(visible(line)) for line in lines))


def _table(title: str, rows: Json) -> Table:
    shown = Table(title=title, show_header=False, min_width=60)
    shown.add_column(overflow="fold")
    shown.add_column(justify="right")
    for name, value in rows.items():
        shown.add_row(name, escape(value if isinstance(value, str) else f"{value:,}"))
    return shown


def gib(size: float) -> str:
    """Format bytes in GiB or MiB."""
    return f"{size / GIB:,.2f} GiB" if size >= 2**27 else f"{size / 2**20:,.1f} MiB"


def format_hours(hours: float) -> str:
    """Format a time in hours, minutes or seconds."""
    return f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:.0f} min" if hours >= 1 / 30 else f"{3600 * hours:.0f} s"


def describe_choices(planned: Plan) -> str:
    """Return the chosen values in one line, as overrides."""
    run, launcher = planned.run, planned.run.launcher
    nodes = f"{launcher.num_nodes} x " if launcher.num_nodes > 1 else ""
    count = "1 process" if launcher.local == 1 else f"{launcher.local} processes"
    disk = f" model.offload={run.model.offload}" if run.model.placement == placing.OFFLOAD else ""
    last = f" eval.gate_dtype={run.eval.gate_dtype}" if run.eval.prompts else ""
    idle = ""
    if (few := run.sequences_per_step) < launcher.world:
        idle = (
            f"; a step of trainer.batch_tokens={run.trainer.batch_tokens} is {few} sequence{'s' * (few > 1)} for "
            f"{launcher.world} processes, so some have nothing to do: give {launcher.world * run.data.length} or more"
        )
    return (
        f"{nodes}{count}, placed by the plan: model.placement={run.model.placement}{disk} launcher.strategy="
        f"{launcher.strategy} trainer.micro_tokens={planned.micro_batch_size * run.data.length}{last}{idle}"
    )
