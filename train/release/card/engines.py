"""Serving a head: the command line of every engine that reads its format, and the engines that do not.

The formats were tried with the engine versions named here; the formats themselves are in heads/formats/published/.
"""

import importlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from heads import HEADS
from heads.formats.layer_ids import STATES
from heads.formats.published import dflash, eagle, eagle3, gguf, hydra, medusa, mimo, peagle
from heads.formats.published.export import FORMATS
from heads.formats.store import CONFIG
from heads.modules.fusion import EAGLE3_LAYERS, default_layers
from train.release.card.facts import Facts, block, code, escaped

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
    short = block(f"vllm serve {facts.publish.repo}")  # which takes the target from the head, and so from the Hub
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
