"""The setup of an evaluation: target, dtype, workloads and folder, and the settings of the measurement."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from torch import distributed

from data.text.prompts import Prompt
from eval.config import EngineConfig, EvalConfig
from eval.inputs.drafters import check_drafters, find_heads, model_of, own_prompts
from eval.inputs.workloads import Workload, distinct_names, read_workload, workload_names
from eval.tune import TUNED
from heads.common.files import check_writable
from heads.common.progress import Bar, print_above_bars
from heads.common.typed import Json
from heads.common.untrusted import visible
from heads.formats.hub import made_for
from heads.formats.store import CONFIG
from inference.decode import autoregress
from inference.drafters.head import saved_trees
from inference.target.config import ModelConfig, device_named, fast_dtype
from inference.target.loading import configuration, note_dtype
from inference.target.placement import check_single_process
from inference.target.target import Target


def prepared(config: EvalConfig) -> tuple[ModelConfig, list[str], Path]:
    """Return the target to load, the workloads and the report's folder; refuse invalid values before any is loaded."""
    runs = config.runs()
    first = next(iter(runs), None)
    model = model_of(first, config.model)
    check_drafters(config)
    names = workload_names(config.workload or own_prompts(first) or model.prompts)
    out = folder_for(config.out, runs, list(config.drafter))
    if model.sibling and config.out is None:
        out /= model.name  # the run's own report is of its own target
    device_named(model.device)
    check_writable(out, "out")
    has_report = (out / "report.json").exists() and not config.tune
    replaced = ", in place of the report there; out=FOLDER writes elsewhere" if has_report else ""
    print_above_bars(visible(f"evaluation on {', '.join(names)} with {model.path}, to {out}{replaced}"))
    configuration(model.path, model.trust_remote_code)
    return model, names, out


def folder_for(out: str | None, runs: Sequence[str], drafters: Sequence[str]) -> Path:
    """Return the report's folder: the user's, or the first run's, or one under outputs/ for heads and drafters."""
    if out:
        return Path(out).expanduser()
    first = Path(runs[0]).expanduser() if runs else Path("-".join(drafters))
    if first.is_dir() and not (first / CONFIG).is_file():
        return first
    resolved = first.resolve()  # not in a head's folder, which may be replaced or in git
    return Path("outputs") / (resolved.parent.name if resolved.name == "head" else first.name or resolved.name)


def load_target(model: ModelConfig, dtype: str, engine: EngineConfig) -> Target:
    """Load the target with its unquantised weights in `dtype`, and compile it if configured."""
    if not distributed.is_initialized():  # within a training's processes, placement over processes works
        check_single_process(model.placed, "an evaluation")
    target = Target.of(model, dtype)
    if engine.compile or engine.compile_drafts:
        target.compile(drafts_only=not engine.compile)
    return target


def dtype_for(config: EvalConfig, model: ModelConfig) -> str:
    """Return the dtype to time in: the evaluation's, else the model's, else the device's fast one, which is logged."""
    given = next((name for name in (config.dtype, model.dtype) if name != "auto"), None)
    if given is not None:
        return given
    chosen = fast_dtype(device_named(model.device))
    note_dtype(model.path, model.trust_remote_code, chosen)
    return str(chosen).removeprefix("torch.")


def read(config: EvalConfig, target: Target, names: Sequence[str]) -> list[Workload[Prompt]]:
    """Return the workloads; the target greedily writes missing answers of dialogues."""
    settings = config.params(0.0)

    def answer(token: list[int]) -> str:
        bar.show(bar.done + 1)
        return str(target.tokenizer.decode(autoregress(target, token, settings).tokens, skip_special_tokens=True))

    named = zip(names, distinct_names(names), strict=True)
    with Bar(None, "answering the dialogues") as bar:
        return [replace(read_workload(name, target, config, answer), name=shown) for name, shown in named]


def remarks_of(config: EvalConfig, target: Target) -> list[str]:
    """Return warnings: a coarse dtype, a sharded target, one tuned tree of several, heads of other targets."""
    remarks = []
    if config.gate_dtype in ("bfloat16", "float16"):
        remarks.append(f"losslessness is checked in {config.gate_dtype}, in which more of the tokens are near ties")
    if target.placed.needs_all_ranks:
        remarks.append(
            f"the target is sharded among {distributed.get_world_size()} processes, which all decode the same"
        )
    runs = config.runs() + config.compare
    heads = find_heads(runs, config.drafter) if target.sibling or "head" in config.drafter else {}
    if "head" in config.drafter and all(value is None for value in config.tree.values()):
        tuned = [
            name
            for name, folder in heads.items()
            if (folder.parent / TUNED).is_file() or saved_trees(folder, {})[1] is not None
        ]
        others = ", ".join(name for name in heads if name not in tuned)
        if tuned and others:
            remarks.append(
                f"the tree of {', '.join(tuned)} was tuned, that of {others} was not: tune it too, by tune=true"
            )
    for name, folder in heads.items() if target.sibling else ():
        saved = made_for(folder)
        if saved is not None and saved.fingerprint != target.spec.fingerprint:
            remarks.append(f"{name} was made for {saved} and is measured on {target.spec}")
    return remarks


def described(target: Target) -> Json:
    """Return the metadata that identifies a target."""
    parameters = sum(parameter.numel() for parameter in target.model.parameters())
    spec = {key: value for key, value in asdict(target.spec).items() if key != "name"}
    return {**spec, "parameters": parameters, "context": target.max_model_len, "quantized": target.quantized}


def devices_of(target: Target) -> dict[str, int]:
    """Return the number of devices of the target as the report's `count`, if more than one."""
    here = {parameter.device for parameter in target.model.parameters() if parameter.device.type not in ("cpu", "meta")}
    count = max(len(here), 1) * (distributed.get_world_size() if target.placed.needs_all_ranks else 1)
    return {"count": count} if count > 1 else {}
