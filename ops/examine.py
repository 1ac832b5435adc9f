"""The doctor's findings: right, wrong or unknown; a wrong finding has its cost and remedy."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from data.text.template import template_sha256
from eval.inputs.drafters import own_prompts
from eval.report.write import read_report
from heads.base import NamedTensors
from heads.common.errors import one_line
from heads.common.files import last_good
from heads.common.rope import Rope, positions_of
from heads.common.target_config import UNBOUNDED, context_of
from heads.common.typed import Json
from heads.common.untrusted import parse_yaml, parsed_file
from heads.formats.hub import downloaded, resolve_head, target_path
from heads.formats.published import dflash, eagle, eagle3, eagle4, format_of, medusa, mimo, peagle, plan
from heads.formats.published.files import stored_tensors, without_prefix
from heads.formats.store import CONFIG, QUANTISED, WEIGHTS
from heads.modules.fusion import EAGLE3_LAYERS, chosen_layers, default_layers
from inference.target.embeddings_only import AnyTarget, EmbeddingsOnly
from inference.target.target import Target
from train.release.config import TEMPLATE
from train.release.folder import tokenizer_sha256

OK, WRONG, UNKNOWN = VERDICTS = ("ok", "wrong", "not known")
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "speculators": "speculators",
           "gguf": "llama.cpp", "openvino": "optimum-intel"}  # fmt: skip


class Finding(NamedTuple):
    """A finding: one line of the examination."""

    verdict: str  # one of VERDICTS
    check: str  # the key, the tensor or the name of the check
    says: str  # the observation
    costs: str = ""  # the effect on each engine; only for wrong findings
    remedy: str = ""  # the key and value, or the command, that fixes it; only for wrong findings
    engines: tuple[str, ...] = ()  # the affected engines, keys of ENGINES; empty: all


Findings = Iterator[Finding]


# Findings that something is right, cannot be known here, or is wrong.
ok, unknown, wrong = (partial(Finding, verdict) for verdict in (OK, UNKNOWN, WRONG))


def meant_for(finding: Finding, engine: str | None) -> Finding:
    """Return a finding for one engine: a fault of other engines becomes ok, its own fault becomes wrong."""
    if engine in finding.engines:
        return finding._replace(verdict=WRONG)
    if engine is None or not finding.engines or finding.verdict != WRONG:
        return finding
    return ok(finding.check, f"{finding.says}, which harms {listed(finding.engines)}")


def listed(engines: Sequence[str]) -> str:
    """Return the names of engines as text."""
    return ", ".join(ENGINES[name] for name in engines)


def written(findings: Sequence[Finding]) -> str:
    """Return the findings as lines for the terminal, and their counts."""
    wide, name = max(map(len, VERDICTS)), max(len(finding.check) for finding in findings)
    lines, margin = [], " " * (wide + name + 4)
    for verdict, check, says, costs, remedy, _ in findings:
        lines.append(f"{verdict:{wide}}  {check:{name}}  {says}")
        if verdict == WRONG:
            lines += [f"{margin}costs: {costs}", f"{margin}remedy: {remedy}"]
    verdicts = [finding.verdict for finding in findings]
    return "\n".join([*lines, ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS)])


log = logging.getLogger(__name__)

OWN = "headstart"  # the format of our own heads; others are keys of heads.formats.published.FORMATS

_parsed = partial(parsed_file, remedy="download or write it again")
RECORDS: dict[str, Callable[[Path], Any]] = {
    "report.json": read_report, "tokenizer_reference.json": _parsed, "provenance.json": _parsed,
    "config.yaml": partial(_parsed, parse=parse_yaml),
}  # fmt: skip


@dataclass(frozen=True)
class Examined:
    """A head's folder and its records; a missing or unreadable record is empty."""

    name: str  # the user's name for the head
    folder: Path  # the head's folder
    config: Json  # its config.json
    report: Json  # report.json
    reference: Json  # tokenizer_reference.json
    origin: Json  # provenance.json
    run: Json  # the training's config.yaml
    prompts: str | None  # file of the run's held-out prompts, None without one

    @cached_property
    def stored(self) -> NamedTensors:
        """Return the tensors by their names in the files."""
        return stored_tensors(self.folder)

    @cached_property
    def tensors(self) -> NamedTensors:
        """Return the tensors by their names without a common prefix."""
        return without_prefix(self.stored)

    @cached_property
    def format_name(self) -> str:
        """Return OWN or a key of FORMATS; P-EAGLE counts as EAGLE-3, since engines use the same class."""
        if "format" in self.config:
            return OWN
        format_name = format_of(self.folder)
        return "eagle3" if format_name == "peagle" else format_name

    @property
    def layer(self) -> Json:
        """Return the keys of config.json, with the speculators format's decoder layer at the top level."""
        return {**section(self.config, "transformer_layer_config"), **self.config}

    @property
    def trained(self) -> Json:
        """Return `head` in the training's config.yaml, empty without it."""
        return section(self.run, "head")

    @property
    def said_target(self) -> str | None:
        """Return the target named in the head's files, or None."""
        names = (
            section(self.config, "target").get("name"),
            section(section(self.config, "speculators_config"), "verifier").get("name_or_path"),
            self.config.get("base_model_name_or_path"),
            self.reference.get("base_model"),
        )
        return next((name for name in names if name and isinstance(name, str)), None)


def section(values: Json, key: str) -> Json:
    """Return a section of a file's values, empty if missing."""
    inner = values.get(key)
    return inner if isinstance(inner, dict) else {}


def read(run_or_repo: str) -> Examined:
    """Read a head's folder, a run's folder or a repository; refuse one without a head."""
    folder = resolve_head(run_or_repo)
    local = Path(run_or_repo).expanduser().is_dir()
    if not local:
        downloaded(run_or_repo, list(RECORDS))
    folders = [folder, folder.parent] if local and folder.name == "head" else [folder]
    config = _mapping([last_good(folder) / CONFIG], _parsed)
    report, reference, origin, run = (
        _mapping([parent / name for parent in folders], parse) for name, parse in RECORDS.items()
    )
    prompts = own_prompts(str(folder.parent)) if local and (folder.parent / "head").is_dir() else None
    return Examined(run_or_repo, folder, config, report, reference, origin, run, prompts)


def _mapping(paths: list[Path], parse: Callable[[Path], Any]) -> Json:
    """Return the content of the first existing file; empty and with a warning if it is damaged."""
    for path in filter(Path.is_file, paths):
        try:
            content = parse(path)
            return content if isinstance(content, dict) else {}
        except (OSError, ValueError) as error:
            log.warning("%s", one_line(error))
            break
    return {}


def load_target(given: str | None, head: Examined, dtype: str, measure: bool) -> tuple[AnyTarget, str]:
    """Load the given target, else the files' own; return it and why its layers are missing. Refuse none."""
    name = given or head.said_target
    if name is None:
        raise ValueError(f"{head.name}: its files do not say its target; give target=FOLDER or target=OWNER/NAME")
    path = target_path(str(Path(name).expanduser()) if given else name)
    adapter, why = section(head.config, "target").get("adapter"), "measure is false"
    if measure or isinstance(adapter, str):
        try:
            return Target.load(path, dtype, adapter=adapter if isinstance(adapter, str) else None), ""
        except (ValueError, OSError) as error:
            why = f"the target does not load ({one_line(error)})"
    try:
        return EmbeddingsOnly.load(path, "float32", "cpu", False), why
    except ValueError as error:
        raise ValueError(one_line(error).replace("model.path=", "target=", 1)) from None


CLASSES = {"eagle3": eagle3.CLASS, "eagle": eagle.CLASS, "medusa": medusa.CLASS, "dflash": dflash.CLASS,
           "mimo": mimo.CLASS}  # fmt: skip
DRAFT = re.compile("eagle|medusa|dflash|dspark|mtp|mimo", re.IGNORECASE)  # parts of draft models' class names
THERE, MISSING = "there", "missing"  # presence of a tensor or key
LENGTH = 2048  # a Llama's default number of positions
OTHER_LAYERS = "reads other layers than it was trained on: acceptance falls, often to nothing, without an error"
UNFILLED = "makes biases that no tensor fills: they stay as memory happened to be"
# NVIDIA modelopt 0.47 writes this when it exports a head that was trained without it (eagle_export_rope_scaling).
MODELOPT = {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 2048}


def key(name: str, actual: Any, right: Any, engines: dict[str, str], remedy: str = "") -> Finding:
    """Compare a key of config.json, or a tensor, with the value that matches the training.

    A missing key has the engines' default, or MISSING. `engines` maps each engine that reads the key to the effect of
    another value; the default `remedy` is to set the right value.
    """
    value = actual if actual in (THERE, MISSING) else json.dumps(actual, default=str).strip('"')
    if actual == right and type(actual) is type(right):
        return ok(name, f"{value}, read by {listed([*engines])}")
    costs = "; ".join(f"{listed([engine])} {what}" for engine, what in engines.items())
    return wrong(name, value, costs, remedy or f'set "{name}" to {json.dumps(right)} in {CONFIG}', tuple(engines))


def readings(head: Examined, loaded: Any, target: AnyTarget) -> Findings:
    """Yield a finding for each key that engines read; none of them reads our own format."""
    get, layer, tensors, format_name = head.config.get, head.layer, head.tensors, head.format_name
    if format_name == OWN:
        yield ok("architectures", "headstart's own form, which engines do not load: export it with format=…")
        return
    if format_name == "eagle4" and get("architectures") == eagle4.CLASS.architectures:
        yield ok(
            "architectures", "format=eagle4, for EAGLE-4's plug-ins; engines themselves load format=vllm and others"
        )
        return
    if format_name not in CLASSES or not (get("architectures") or format_name in ("eagle3", "dflash")):
        yield ok("architectures", "the authors' own layout, for their code and headstart")
        return
    yield _architectures(head)
    if format_name != "medusa":
        yield _positions(head, target)
    model_type = get("model_type") or MISSING
    right = CLASSES[format_name].model_type if model_type == MISSING else model_type
    yield key("model_type", model_type, right, {"sglang": "refuses the head"})
    if format_name == "medusa":
        biased = "blocks.0.layers.0.bias" in tensors
        yield key("medusa_fc_bias", get("medusa_fc_bias", False), biased, {"vllm": "drops the blocks' biases"})
        return
    dtype = str(next(t.dtype for t in tensors.values() if t.is_floating_point())).removeprefix("torch.")
    yield key(
        "torch_dtype", get("torch_dtype", get("dtype", MISSING)), dtype,
        {"sglang": "casts the tensors to it, and to float16 where it is missing, whose range features overflow"},
    )  # fmt: skip
    length, context = layer.get("max_position_embeddings", LENGTH), context_of(target.config)
    if context != UNBOUNDED:
        yield key(
            "max_position_embeddings", length, max(length, context),
            {"vllm": "before 0.32 caps the context that it serves there", "sglang": "crashes or slows down beyond it"},
        )  # fmt: skip
    for name in ("bias", "attention_bias", "mlp_bias"):
        yield key(name, get(name, False), False, dict.fromkeys(("vllm", "sglang"), UNFILLED))
    if format_name != "mimo":
        yield key(
            "model.*", THERE if any(name.startswith("model.") for name in head.stored) else MISSING, MISSING,
            {"vllm": "stops at the first", "sglang": "loads none of an EAGLE-1 head, and drafts from random weights"},
            f"take model. from the front of every name in {WEIGHTS}",
        )  # fmt: skip
    shipped = next((tensor for name, tensor in tensors.items() if name.endswith(plan.EMBEDDING)), None)
    if shipped is not None and peagle.MASK not in tensors:
        whose = "the target's" if plan.is_targets_embedding(shipped, target.embeddings) else "another than the target's"
        yield key(
            plan.EMBEDDING, whose, "the target's",
            {"vllm": "drafts from it, and SGLang from the target's"},
            f"remove it from {WEIGHTS}: engines take the target's",
        )  # fmt: skip
    if format_name == "eagle":
        yield key(
            "lm_head.weight", THERE if "lm_head.weight" in tensors else MISSING, MISSING,
            {"vllm": "refuses the head", "sglang": "takes the target's in its place"},
            f"remove it from {WEIGHTS}; where it was trained, train with head.lm_head=shared",
        )  # fmt: skip
        remedy, bias = f"add {len(tensors['fc.weight'])} zeros of that name to {WEIGHTS}", tensors.get("fc.bias")
        yield key("fc.bias", MISSING if bias is None else THERE, THERE, {"sglang": "makes it random"}, remedy)
        yield key(
            "fc.bias", "zero" if bias is None or not bias.any() else "not zero", "zero", {"vllm": "drops it"},
            "train with head.bias=false, or serve it in SGLang (format=sglang)",
        )  # fmt: skip
    if format_name not in ("eagle3", "dflash"):
        return
    yield key(
        "tie_word_embeddings", get("tie_word_embeddings", False), False,
        {"sglang": "puts the embedding in the lm_head's place: accepts nothing, or stops at its shape"},
    )  # fmt: skip
    # The target's layers: some keys count outputs from 0, others states, of which the embedding is the first.
    layers, count = [*loaded.feature_layers], target.spec.num_layers
    if "feature_layers" in head.trained and len(layers) > 1:
        layers = sorted(chosen_layers(head.trained["feature_layers"], len(layers), count))
    if format_name == "dflash":
        block, states = section(head.config, "dflash_config").get(plan.BLOCK_OUTPUTS, MISSING), plan.as_states(layers)
        read = {"sglang": f"stops without it, else {OTHER_LAYERS}", "vllm": OTHER_LAYERS}
        yield key(f"dflash_config.{plan.BLOCK_OUTPUTS}", block, layers, read)
        yield key(plan.BLOCK_STATES, get(plan.BLOCK_STATES) or states, states, {"speculators": OTHER_LAYERS})
        return
    nested, default = section(head.config, "eagle_config").get(plan.STATES), default_layers(EAGLE3_LAYERS, count)
    read = dict.fromkeys(("vllm", "speculators"), OTHER_LAYERS)
    yield key(plan.STATES, get(plan.STATES) or plan.as_states(default), plan.as_states(layers), read)
    yield key(f"eagle_config.{plan.STATES}", nested or default, layers, {"sglang": OTHER_LAYERS})
    rows = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else None
    yield key(
        "draft_vocab_size", get("draft_vocab_size", MISSING), rows,
        {"vllm": "stops at the shape of lm_head", "sglang": "stops without the key, or makes an lm_head at random",
         "trtllm": "takes the head for another method"},
    )  # fmt: skip
    residual = "takes the residual before the norm all the same: acceptance falls, without an error"
    yield key(
        "norm_before_residual", get("norm_before_residual", False), False,
        {"sglang": residual, "trtllm": residual}, "serve it in vLLM, or train with head.norm_before_residual=false",
    )  # fmt: skip
    fed = "feeds the normed output back, which from depth 2 on is not what it was trained on"
    normed = getattr(loaded, "feeds_normed", False)
    yield key("norm_output", bool(get("norm_output")), normed, dict.fromkeys(("vllm", "sglang", "trtllm"), fed))


def _architectures(head: Examined) -> Finding:
    """Compare the head's class names with those that each engine knows.

    An engine stops at an unknown draft model's name, and takes a whole model's name for the whole model.
    """
    names, served = head.config.get("architectures") or [], CLASSES[head.format_name]
    unaware = [engine for engine, pattern in served.found.items() if not any(re.fullmatch(pattern, n) for n in names)]
    if not unaware:
        return ok("architectures", ", ".join(names))
    verdict = OK if len(unaware) < len(served.found) and any(map(DRAFT.search, names)) else WRONG
    remedy = f'set "architectures": {json.dumps(served.architectures)} in {CONFIG}'
    says = f"{', '.join(names) or 'none'}, which {listed(unaware)} does not know as a head: for it {remedy}"
    costs = "the engine finds no class for it and stops, or takes it for a whole model"
    return Finding(verdict, "architectures", says, costs, remedy, tuple(unaware))


def _positions(head: Examined, target: AnyTarget) -> Finding:
    """Compare the rotary positions under both keys with each other, the training's and the target's."""
    declared, theirs = positions_of(head.layer) or plan.PLAIN, positions_of(target.config.to_dict())
    older = positions_of({key: value for key, value in head.layer.items() if key != "rope_parameters"})
    trained = positions_of(head.trained)
    costs = "attention is turned by other angles than in training: acceptance falls with the distance, without an error"
    if older not in (None, declared):
        says = f"rope_parameters says {_shown(declared)} and rope_theta with rope_scaling {_shown(older)}"
        costs = f"engines on transformers 5 read the one, older ones the other; in one of them {costs}"
        return wrong("rope", says, costs, f"set both to {_shown(trained or theirs or declared)}")
    if trained not in (None, declared):
        says = f"{CONFIG} says {_shown(declared)}, the training's config.yaml {_shown(trained)}"
        return wrong("rope", says, costs, f"set {_keys(trained)} in {CONFIG}")
    if trained is not None or theirs is None or theirs == declared:
        return ok("rope", f"{_shown(declared)}, as {'the target has it' if trained is None else 'it was trained'}")
    why = "right only if it was trained so"
    if theirs.scaling is None and declared.scaling == MODELOPT:
        why = f"NVIDIA modelopt adds this scaling to heads that were trained without it: if so, set {_keys(theirs)}"
    return unknown("rope", f"{_shown(declared)} where the target has {_shown(theirs)}: {why}")


def _keys(rope: Rope) -> str:
    return f'"rope_theta": {rope.theta:g} and "rope_scaling": {json.dumps(rope.scaling)}'


def _shown(rope: Rope) -> str:
    scaling = "" if rope.scaling is None else f" scaled by {rope.scaling}"
    return f"theta {rope.theta:g}{scaling}" + ("" if rope.share == 1 else f" over {rope.share:g} of the width")


def records(head: Examined, target: AnyTarget, sibling: bool) -> Findings:
    """Compare the training's records of its target with the target: weights, tokenizer, chat template."""
    path, now = target.spec.name, target.spec.fingerprint
    fingerprint = section(head.config if head.format_name == OWN else head.report, "target").get("fingerprint")
    if not isinstance(fingerprint, str) or QUANTISED in fingerprint + now or (sibling and fingerprint != now):
        yield unknown("target", f"whether its weights are those of {path} is not recorded: τ will show")
    elif fingerprint != now:
        yield wrong(
            "target", f"made for the weights {fingerprint} of {head.said_target}, and those of {path} are {now}",
            "it drafts from features that mean something else: next to nothing is accepted",
            "give the head's own target with target=…, or for another checkpoint of the same model sibling=true",
        )  # fmt: skip
    else:
        yield ok("target", f"{path}, by its fingerprint")
    template = {**head.reference, **head.origin}.get(TEMPLATE, MISSING)
    for name, trained, current, remedy in (
        ("tokenizer", head.reference.get("tokenizer_sha256") or MISSING, tokenizer_sha256(path), "use the training's"),
        ("chat template", template, template_sha256(target.tokenizer), "serve the training's (--chat-template)"),
    ):
        if MISSING in (trained, current or trained):
            yield unknown(name, "nothing records its hash")
        elif trained != current:
            yield wrong(
                name, f"its hash was {trained}, the target's now is {current}",
                "texts become other tokens than those it was trained on: acceptance falls, without an error",
                f"{remedy}, or train again with this one",
            )  # fmt: skip
        else:
            yield ok(name, f"that of the training, {current}")
