"""The model card of a published head: its results, its provenance, how to serve it, its limits.

Every number and name on it was recorded by the run, its head or its report; missing records are named as missing.
Untrusted names and values are shown literally, never as markup. The text is README.jinja. Pictures are rendered by the
report's library on an opaque white ground, so that they read the same on a dark page. The command lines of the engines
were tried with the versions named here; the formats themselves are in heads/formats/published/.
"""

import importlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, StrictUndefined

from eval.live import extras
from eval.live.extras import METRICS, records
from eval.measures.results import LIVE
from eval.report import plots, sections
from eval.report.plots import Plot
from eval.report.render import grid
from eval.report.view import Result, results_of, without_ending
from heads import HEADS
from heads.formats.hub import REPO, on_hub
from heads.formats.published import dflash, eagle, eagle3, gguf, hydra, medusa, mimo, peagle
from heads.formats.published.export import FORMATS, READERS
from heads.formats.published.plan import STATES
from heads.formats.store import CONFIG
from heads.modules.fusion import EAGLE3_LAYERS, default_layers
from train.release.config import PublishConfig

MARKUP = re.compile(r"([\\`*_\[\]<>~&#!|])")


@dataclass(frozen=True)
class Facts:
    """The records of a head; an empty mapping where the run has none of that kind."""

    publish: PublishConfig
    config: dict[str, Any]  # the head's own config.json
    served: dict[str, Any]  # the published one, another in a foreign format
    tokenizer_sha256: str | None  # of the target's tokenizer.json
    report: dict[str, Any]
    provenance: dict[str, Any]
    settings: dict[str, Any]  # the run's config.yaml
    refused: dict[str, str]  # why formats of engines do not take the exported head, by format
    base_id: str | None  # the Hub's id of a model, in the config.json of a target that is a folder
    decodes: bool  # whether the folder carries custom_generate

    @property
    def kind(self) -> str:
        """The kind of the head."""
        return str(self.config["head"]["name"])

    @property
    def run(self) -> Path:
        """The run's folder."""
        return Path(self.publish.run).expanduser()

    @property
    def head(self) -> dict[str, Any]:
        """The head's configuration, without a limit of its vocabulary that the target's lies within."""
        whole = (self.config["head"].get("draft_vocab") or 0) >= self.config["target"]["vocab_size"]
        return {**self.config["head"], **({"draft_vocab": None} if whole else {})}

    @property
    def model(self) -> str | None:
        """The target's id on the Hub: its name, or that which the config.json in its folder has; None without one."""
        return self.base if self.hub else self.base_id

    @property
    def hub(self) -> bool:
        """Whether the target is on the Hub."""
        return on_hub(self.config["target"]["name"])

    @property
    def base(self) -> str:
        """The target: its Hub id, or the last part of its folder."""
        name = str(self.config["target"]["name"])
        return name if self.hub else Path(name).name

    @property
    def path(self) -> str:
        """The target's path in command lines."""
        return self.base if self.hub else f"path/to/{self.base}"

    @property
    def live(self) -> list[Result]:
        """The results by decoding, which a clock has measured."""
        return [result for result in results_of(self.report) if result.row.get("tier", LIVE) == LIVE]

    @property
    def mine(self) -> list[Result]:
        """Those of them that are this head's."""
        return [result for result in self.live if self.has_drafter(result.row["drafter"])]

    @property
    def drawbacks(self) -> list[str]:
        """What the run's own report says against the head, in sentences."""
        whole = [result for result in self.mine if result.overall and result.row.get("request_rate") is None]
        speedups = [result.row["speedup"] for result in whole if result.row["speedup"] is not None]
        sentences = ["It is not lossless in its own report, which therefore gives it no speedup."]
        sentences *= any(result.failed for result in whole)
        if speedups and max(speedups) < 1:
            best = f"{max(speedups):.2f} times the same engine without drafts at best"
            sentences.append(f"It is slower than decoding without it in its own report: {best}.")
        return sentences

    def has_drafter(self, drafter: str) -> bool:
        """Whether a row's drafter is this head, named by its kind, and by its run too where there are several."""
        kind, _, run = drafter.partition(" ")
        return kind == self.kind and (not run or Path(run).name == self.run.resolve().name)


def escaped(text: str) -> str:
    """Return a text in one line, every sign of Markdown and HTML in it as itself."""
    return MARKUP.sub(r"\\\1", " ".join(text.split()))


def code(value: object) -> str:
    """Return a value as code, whatever backticks it holds."""
    text = " ".join(str(value).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def block(text: str, language: str = "") -> str:
    """Return lines as a block of code, whatever backticks they hold."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def bullets(values: dict[str, Any]) -> str:
    """Return a nested list of everything that is set."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            lines += [f"- {escaped(str(key))}:", *(indent(bullets(value), "  ").splitlines())]
        elif value not in (None, [], {}, ""):
            lines.append(f"- {escaped(str(key))}: {code(value)}")
    return "\n".join(lines)


TASK = "text-generation"
METRIC_NAMES = {"tau": "τ, tokens of a target pass", "speedup": "speedup over autoregressive decoding"}
WIDTH = 620  # pixels, of which each is SCALE on a side
SCALE = 1.6
NAMES = ("drafter", "tree", "workload")  # columns of names from outside
STYLE = {
    "background": "white",
    "padding": 14,
    "view": {"stroke": None},
    "axis": {"labelFontSize": 12, "titleFontSize": 12, "gridColor": "#e6e6e6", "labelLimit": 300},
    "legend": {"orient": "bottom", "columns": 3, "labelLimit": 260, "symbolOpacity": 1, "title": None},
    "title": {"fontSize": 13, "anchor": "start", "fontWeight": "normal"},
    "point": {"filled": True},
}


def metadata(facts: Facts) -> ModelCardData:
    """Return the metadata, checked by huggingface_hub's own types."""
    measured, names, readers = eval_results(facts), set[str](), list[str]()
    for source in facts.provenance.get("sources") or []:
        if "revision" in source and REPO.fullmatch(name := str(source["name"]).partition(":")[0]):
            names.add(name)
    if facts.publish.format is not None:  # the engines that share its writer and take this head
        writer = FORMATS[facts.publish.format][facts.kind]
        readers = [name for name in READERS if FORMATS[name].get(facts.kind) is writer and name not in facts.refused]
    return ModelCardData(
        license=facts.publish.license,
        base_model=facts.model,
        datasets=sorted(names) or None,
        library_name="headstart",
        pipeline_tag=TASK,
        tags=["speculative-decoding", "draft-head", facts.kind, *readers],
        model_name=facts.publish.repo.split("/")[1] if measured else None,
        eval_results=measured or None,
    )


def eval_results(facts: Facts) -> list[EvalResult]:
    """Return the head's own results by decoding, a failed one without its speedup."""
    evaluations = []
    for result in facts.mine:
        row = result.row
        workload, rate = without_ending(row["workload"]), row.get("request_rate")
        where = f"T={row['temperature']:g}, batch {row['batch_size']}, tree {row['tree']}"
        where += f", {rate:g} requests per second" if rate is not None else ""
        where += f", {row['category']}" if row.get("category") else ""
        for metric, name in METRIC_NAMES.items():
            if row[metric] is None or (metric == "speedup" and result.failed):
                continue
            ends = [round(end, 4) for end in row[f"{metric}_ci"] or ()]
            uncertain = len({*ends}) > 1  # an interval without width: requests are alike or too few
            evaluations.append(
                EvalResult(
                    task_type=TASK,
                    dataset_type=workload,
                    dataset_name=workload,
                    dataset_config=where,
                    metric_type=metric,
                    metric_name=name,
                    metric_value=round(row[metric], 4),
                    metric_args={"interval_95": ends} if uncertain else None,
                )
            )
    return evaluations


class Picture(NamedTuple):
    """A plot's picture and its caption."""

    caption: str
    png: bytes


def table(facts: Facts) -> str:
    """Return the table of the results by decoding, that of a failed one withheld; empty where there are none."""
    shown = sections.table(sections.CARD, facts.live)

    def cell(title: str, text: str) -> str:  # the table itself escapes the sign that ends a cell
        return "|".join(map(escaped, text.split("|"))) if title in NAMES else text

    lines = [[cell(title, text) for title, text in zip(shown.titles, line, strict=True)] for line in shown.lines]
    return grid(shown.titles, lines) if lines else ""


def conditions(report: dict[str, Any]) -> str:
    """Return the device, settings and date of the measurement."""
    device, settings = report.get("device", {}), report.get("settings", {})
    where = [str(device[key]) for key in ("name", "dtype", "torch", "transformers") if device.get(key) is not None]
    sentences = [f"Device, dtype, versions of torch and transformers: {escaped(', '.join(where))}."] if where else []
    if settings.get("prompts") is not None:
        sentences.append(
            escaped(f"{settings['prompts']} prompts a workload, {settings.get('max_new_tokens')} new tokens at most.")
        )
    if date := (settings.get("provenance") or {}).get("date"):
        sentences.append(f"Measured on {escaped(str(date)[:10])}.")
    return " ".join(sentences)


def pictures_of(facts: Facts) -> dict[str, Picture]:
    """Return the plots that the run has numbers for, by the names of their files."""
    curves: dict[str, Any] = extras.training({facts.kind: facts.run / "head"})
    curves = curves or {
        name: curve
        for name, curve in facts.report.get("training", {}).items()
        if facts.has_drafter(name) and curve.keys() >= {"steps", "tau"}  # an earlier version's may lack some
    }
    plots_by_name = {
        "speedup": plots.speedup(facts.live),
        "acceptance": plots.acceptance(facts.live),
        "training": plots.learning_curve(
            {name: {**curve, "tau": curve["tau"] if len(curve["tau"]) > 1 else []} for name, curve in curves.items()}
        ),
    }
    return {f"plots/{name}.png": _picture(shown) for name, shown in plots_by_name.items() if shown}


def _picture(shown: Plot) -> Picture:
    """Return a plot as a picture."""
    whole = {
        **{key: value for key, value in shown.spec.items() if key != "autosize"},  # to the page
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "config": STYLE,
        "width": WIDTH,
        "title": shown.caption,
    }
    import vl_convert

    return Picture(shown.caption, bytes(vl_convert.vegalite_to_png(json.dumps(whole), scale=SCALE)))


def origin(facts: Facts) -> dict[str, list[str]]:
    """Return the lines about the origin of target, data and training."""
    target = {**facts.config["target"], "name": facts.base, "sha256 of tokenizer.json": facts.tokenizer_sha256}
    return {"Target": [bullets(target)], "Data": list(_data(facts)), "Training": list(_training(facts))}


def _data(facts: Facts) -> Iterator[str]:
    counts, sources = facts.provenance.get("data") or {}, facts.provenance.get("sources") or []
    paths = (facts.settings.get("data") or {}).get("path") or []
    names = [str(source["name"]) for source in sources] or list(counts.get("records", {}))
    names = names or [str(source) for source in (paths if isinstance(paths, list) else [paths])]
    if not names:
        yield "The run has not recorded on what it was trained."
        return
    by_name = {str(source["name"]): source for source in sources}
    for name in names:
        read, trained_on = counts.get("records", {}).get(name), counts.get("kept", {}).get(name, 0)
        records_of_it = "" if read is None else f", {trained_on:,} of {read:,} records"
        yield f"- {code(shown(name))}{records_of_it}{_identity(by_name.get(name, {}))}"
    dropped = {key: counts[key] for key in ("duplicates", "contaminated", "short") if counts.get(key)}
    if dropped:
        yield "- dropped: " + ", ".join(f"{n:,} {escaped(key)}" for key, n in dropped.items())
    if counts.get("tokens"):
        fraction = counts.get("trained", 0) / counts["tokens"]
        yield f"- {counts['samples']:,} samples of {counts['tokens']:,} tokens, {fraction:.0%} of them trained on"
    if counts.get("held_out"):
        yield f"- {counts['held_out']:,} records held out for measuring"
    if fingerprint := facts.provenance.get("data_fingerprint"):
        yield f"- fingerprint of the samples: {code(fingerprint)}"


def _identity(source: dict[str, Any]) -> str:
    """Return the revision or hash of a source, and who wrote its answers."""
    text = "".join(f", {key} {code(source[key])}" for key in ("revision", "sha256") if source.get(key))
    answers = source.get("answers")
    if answers:
        text += "; who wrote its answers: " + ", ".join(
            f"{escaped(key)} {code(value)}" for key, value in _flat(answers) if value not in (None, "", [], {})
        )
    return text


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield key.replace("_", " "), value


def _training(facts: Facts) -> Iterator[str]:
    trainer, file = facts.settings.get("trainer") or {}, facts.run / METRICS
    steps_recorded = list(records(file)) if file.is_file() else []
    steps = [record["step"] for record in steps_recorded if record.get("loss") is not None]
    rows = sum(record.get("rows") or 0 for record in steps_recorded)
    if steps:
        of = f" of {trainer['steps']:,}" if trainer.get("steps") else ""
        yield f"- {max(steps):,}{of} optimiser steps"
        if trainer.get("batch_tokens"):
            yield f"- {max(steps) * trainer['batch_tokens']:,} tokens seen at most, {trainer['batch_tokens']:,} a step"
        if rows:
            yield f"- {rows:,} positions trained on, those of repeated passes counted again"
    best = [record for record in steps_recorded if record.get("best") and record.get("tau") is not None]
    if best:
        yield f"- the published weights are those of step {best[-1]['step']:,}, the best by the verifier"
    objective = facts.settings.get("objective") or {}
    if objective.get("losses"):
        yield f"- losses by weight: {code(objective['losses'])}, depths trained: {code(objective.get('depths'))}"
    if facts.provenance.get("init"):
        yield f"- started from {code(shown(str(facts.provenance['init'])))}"


def shown(name: str) -> str:
    """Return a source's name without the folders of the machine that it lay on."""
    return Path(name).name if Path(name).is_absolute() else name


VLLM, VLLM_OLD, SGLANG, TRTLLM = "vLLM 0.33.0", "vLLM 0.32.0", "SGLang 0.5.23", "TensorRT-LLM 1.4.0rc"
BOTH_VLLM = "vLLM 0.32.0 and 0.33.0"
LLAMA = "llama.cpp of llama-cpp-python 0.3.36"
Serving = tuple[str, str]  # an engine, and how it serves the head

# vLLM's guess of the method where none is given, by a substring of the lower-cased path: the first match counts.
GUESSES = {"eagle-": "eagle", "eagle3": "eagle3"}
METHODS = {"hass": "eagle"}  # heads that are served as another

# Of format=checkpoint: why an engine runs a family's module not at all, beside those that it runs.
NOT_IN_TRANSFORMERS = {
    "MiMoForCausalLM": "has no class for it",
    "Qwen3NextForCausalLM": "finds no module by the config.json of published models",
}
NOT_IN_LLAMA = {
    "MiMoForCausalLM": "its converter does not know MiMoForCausalLM",
    "DeepseekV3ForCausalLM": "its converter leaves the module out",
}


def serving(facts: Facts) -> Iterator[Serving]:
    """Yield how each engine serves the head."""
    form, kind = facts.publish.format, facts.kind
    if form is not None:
        yield from SERVED[FORMATS[form][kind]](facts)
        return
    forms = ", ".join(form for form, kinds in FORMATS.items() if kind in kinds)
    remedy = f"publish it with format= one of {forms}" if forms else "no format of theirs holds this kind of head"
    yield "Serving engines", f"vLLM, SGLang and TensorRT-LLM do not read headstart's own layout: {remedy}."


def of_checkpoint(folder: Path) -> Iterator[Serving]:
    """Yield how each engine drafts with the module in a target's own folder, or why it does not."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    family, layers, name = config["architectures"][0], config["num_hidden_layers"], str(folder)
    speculative = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
    yield "vLLM", shlex.join(["vllm", "serve", name, "--speculative-config", speculative])
    yield "transformers", _in_transformers(family, layers, name)
    file = f"{name}.gguf"
    convert = shlex.join(["python", "convert_hf_to_gguf.py", name, "--outfile", file])
    serve = shlex.join(["llama-server", "-m", file, "--spec-type", "draft-mtp", "--spec-draft-n-max", "1"])
    yield "llama.cpp", NOT_IN_LLAMA.get(family, f"{convert} && {serve}")


def _in_transformers(family: str, layers: int, folder: str) -> str:
    if family in NOT_IN_TRANSFORMERS:
        return NOT_IN_TRANSFORMERS[family]
    patterns = getattr(importlib.import_module("transformers"), family)._keys_to_ignore_on_load_unexpected or ()
    if not any(re.search(pattern, f"model.layers.{layers}.enorm.weight") for pattern in patterns):
        return f"looks for the module behind as many layers as published models have, and these are {layers}"
    call = f'pipeline("text-generation", {json.dumps(folder, ensure_ascii=False)})("Hello", use_mtp=True)'
    return shlex.join(["python", "-c", f"from transformers import pipeline; print({call})"])


def misleading(repo: str, head: str) -> str | None:
    """Return a remark where the repository's name says another head: vLLM guesses the method from the name."""
    method = METHODS.get(head, head)
    sign = next((sign for sign in GUESSES if sign in repo.lower()), None)
    if sign is not None and (taken := GUESSES[sign]) != method:
        kind = "EAGLE-1" if taken == "eagle" else "EAGLE-3"
        better = ", such as …-eagle3" if method == "eagle3" else ""
        return (
            f'note: vLLM takes a path that holds "{sign}", such as {repo}, for {kind}, but the head is {head}; give it '
            f"another name{better}, or always give the method"
        )
    words = set(re.split(r"[^a-z0-9]+", repo.split("/")[1].lower().replace("eagle-3", "eagle3")))
    others = sorted(words & {*HEADS, "eagle3"} - {head, method})
    if not others:
        return None
    return f"note: {repo} says {others[0]} but the head is {head}; serving engines guess the method from the name"


def _taken(facts: Facts, form: str, engine: str, how: str) -> Serving:
    """Return how an engine serves the head, or why its format does not take it."""
    why = facts.refused.get(form)
    return (engine, how) if why is None else ("Not served by", f"{engine}: {escaped(why)}.")


def _eagle3(facts: Facts) -> Iterator[Serving]:
    short = block(f"vllm serve {facts.publish.repo}")  # it takes the target from the head, so from the Hub
    alone = f"\n\nor, with the same target and number of tokens:\n\n{short}" if facts.hub else ""
    yield _taken(facts, "vllm", BOTH_VLLM, _vllm(facts, "eagle3", facts.publish.draft_tokens) + alone)
    yield _taken(facts, "sglang", SGLANG, _sglang(facts, "EAGLE3"))
    layers, count = facts.served["eagle_config"][STATES], facts.config["target"]["num_layers"]
    lines = ["speculative_config:", "  decoding_type: Eagle3", f"  max_draft_len: {facts.publish.draft_tokens}"]
    lines.append(f"  speculative_model: {facts.publish.repo}")
    if layers != default_layers(EAGLE3_LAYERS, count):  # which it reads by default
        lines.append(f"  eagle3_layers_to_capture: {layers}")
    line = f"trtllm-serve {shlex.quote(facts.path)} --config draft.yaml"
    yield _taken(
        facts, "trtllm", TRTLLM, (f"with this as draft.yaml:\n\n{block(chr(10).join(lines), 'yaml')}\n\n{block(line)}")
    )


def _peagle(facts: Facts) -> Iterator[Serving]:
    (method,) = facts.served["speculators_config"]["proposal_methods"]
    # Which vLLM finds in the head's own config.json only where it is given no other.
    yield BOTH_VLLM, _vllm(facts, "eagle3", method["speculative_tokens"], parallel_drafting=True)
    yield "Not served by", f"{SGLANG} and {TRTLLM}, which draft one token after another."


def _eagle(facts: Facts) -> Iterator[Serving]:
    yield _taken(facts, "vllm", BOTH_VLLM, _vllm(facts, "eagle", facts.publish.draft_tokens))
    yield _taken(facts, "sglang", SGLANG, _sglang(facts, "EAGLE"))
    yield "Not served by", f"{TRTLLM}, which reads EAGLE-3 alone."


def _medusa(facts: Facts) -> Iterator[Serving]:
    yield f"{VLLM_OLD} and earlier", _vllm(facts, "medusa", facts.served["num_heads"])
    yield (
        "Not served by",
        f"{VLLM}, which has removed Medusa; SGLang, which never had it; TensorRT-LLM, which has removed it with its "
        "TensorRT backend: 1.2.x builds an engine of the authors' layout (format=medusa).",
    )


def _whole_block(facts: Facts) -> int:
    """Return the tokens of a whole block: with fewer masks than it was trained with, a slot sees others than then."""
    idle = 0 if facts.served["dflash_config"]["sample_from_anchor"] else 1  # the anchor's slot
    return int(facts.served["block_size"]) - idle


def _dflash(facts: Facts) -> Iterator[Serving]:
    method = "dspark" if "DSpark" in facts.served["architectures"][0] else "dflash"
    version = VLLM if method == "dspark" else BOTH_VLLM
    yield _taken(facts, "vllm", version, _vllm(facts, method, _whole_block(facts)))
    yield _taken(facts, "sglang", SGLANG, block(_sglang_server(facts, method.upper())))
    yield "Not tried", f"{TRTLLM}, which has a loader of its own for these heads."


def _mimo(facts: Facts) -> Iterator[Serving]:
    tokens, overrides = facts.publish.draft_tokens, json.dumps(mimo.overrides(facts.served))
    yield _taken(facts, "vllm", BOTH_VLLM, _vllm(facts, "mtp", tokens, "--hf-overrides", overrides))
    yield _taken(facts, "sglang", SGLANG, _sglang(facts, "NEXTN"))
    yield "Not served by", f"{TRTLLM}, which reads MTP modules of the target's own checkpoint."


def _llama(method: str, tokens: int) -> str:
    words = ["llama-server", "-m", "TARGET.gguf", "-md", gguf.FILE, "--spec-type", method]
    return block(shlex.join([*words, "--spec-draft-n-max", str(tokens)]))


def _gguf_eagle3(facts: Facts) -> Iterator[Serving]:
    yield LLAMA, _llama("draft-eagle3", facts.publish.draft_tokens)
    yield from _eagle3(facts)


def _gguf_block(facts: Facts) -> Iterator[Serving]:
    yield LLAMA, _llama("draft-dspark" if "markov_rank" in facts.served else "draft-dflash", _whole_block(facts))
    yield from _dflash(facts)


def _authors(reader: str, facts: Facts) -> Iterator[Serving]:
    others = [form for form, kinds in FORMATS.items() if facts.kind in kinds and form != facts.publish.format]
    engines = f"; for engines publish it with format= one of {', '.join(others)}" if others else ""
    yield "The authors' own code", f"{reader} reads this layout, for {code(facts.path)}{engines}."


SERVED: dict[Callable[..., Any], Callable[[Facts], Iterator[Serving]]] = {
    eagle3.engines: _eagle3,
    peagle.engines: _peagle,
    eagle.engines: _eagle,
    medusa.engines: _medusa,
    dflash.engines: _dflash,
    mimo.engines: _mimo,
    gguf.of_eagle3: _gguf_eagle3,
    gguf.of_block: _gguf_block,
    eagle3.authors: partial(_authors, "SafeAILab/EAGLE"),
    eagle.authors: partial(_authors, "SafeAILab/EAGLE"),
    medusa.authors: partial(_authors, "FasterDecoding/Medusa"),
    hydra.authors: partial(_authors, "zankner/Hydra"),
}


def _vllm(facts: Facts, method: str, tokens: int, *further: str, **options: bool) -> str:
    config = {"method": method, "model": facts.publish.repo, "num_speculative_tokens": tokens, **options}
    return block(shlex.join(["vllm", "serve", facts.path, *further, "--speculative-config", json.dumps(config)]))


def _sglang(facts: Facts, algorithm: str) -> str:
    server, tokens = _sglang_server(facts, algorithm), facts.publish.draft_tokens
    chain, tree = (
        block(
            f"{server} --speculative-num-steps {steps} --speculative-eagle-topk {wide} "
            f"--speculative-num-draft-tokens {count}"
        )
        for steps, wide, count in [(tokens, 1, tokens + 1), (5, 4, 8)]
    )
    return f"{chain}\n\nor with a tree:\n\n{tree}"


def _sglang_server(facts: Facts, algorithm: str) -> str:
    words = ["python", "-m", "sglang.launch_server", "--model-path", facts.path, "--speculative-algorithm", algorithm]
    return shlex.join([*words, "--speculative-draft-model-path", facts.publish.repo])


TITLES = {
    "eagle": "An EAGLE head",
    "hass": "A HASS head",
    "eagle3": "An EAGLE-3 head",
    "peagle": "A P-EAGLE head",
    "medusa": "A Medusa head",
    "hydra": "A Hydra head",
    "mlp": "A recurrent MLP speculator",
    "mtp": "A multi-token-prediction (MTP) head",
    "block": "A block-parallel draft head",
}
TEMPLATE = Path(__file__).with_name("README.jinja")


def title_of(head: str) -> str:
    """Return the title of a head's kind, of an unlisted one made from its name."""
    return TITLES.get(head, f"A {head} head")


def card(facts: Facts) -> dict[str, str | bytes]:
    """Return README.md with its YAML metadata, and the plots that it shows, by the names of their files."""
    pictures = pictures_of(facts)
    rows = [result.row for result in facts.mine]
    environment = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    quoted = partial(json.dumps, ensure_ascii=False)  # as Python writes a text, in one line
    environment.filters |= {"shell": shlex.quote, "quoted": quoted, "bullets": bullets}
    environment.filters |= {"block": block, "code": code, "escaped": escaped}
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        facts=facts,
        repo=facts.publish.repo,
        form=facts.publish.format,
        metadata=metadata(facts).to_yaml(),
        title=title_of(facts.kind),
        results=table(facts),
        conditions=conditions(facts.report),
        pictures=pictures,
        warning=misleading(facts.publish.repo, facts.kind),
        engines=list(serving(facts)),
        origin=origin(facts),
        rows=rows,
        trees=[row["tree"] for row in rows if not row["tree"].startswith("chain")],
    )
    return {"README.md": text, **{name: picture.png for name, picture in pictures.items()}}
