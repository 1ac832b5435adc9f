"""Checks of the keys of config.json by which engines find the class of a head, and of those that they stumble over."""

import re

from heads.formats.published.written import NUMBERS
from heads.formats.store import CONFIG, WEIGHTS
from train.release.doctor.against import Against
from train.release.doctor.examined import OWN, Examined
from train.release.doctor.finding import Findings, ok, wrong

EAGLE3_VLLM = ("LlamaForCausalLM",)  # and any name that begins or ends with Eagle3
EAGLE_VLLM = {f"{name}ForCausalLM" for name in ("Llama", "Llama4", "MiniCPM", "Cohere", "Mistral", "MistralLarge3")}
EAGLE3_SGLANG = {"LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"}
EAGLE3_TRTLLM = {"LlamaForCausalLM", "LlamaForCausalLMEagle3"}
BLOCKS = {"DFlashDraftModel", "Qwen3DSparkModel"}
LAST_WITH_MEDUSA = "0.32.0"  # of vLLM
UNFILLED = "no tensor fills the biases that engines make for it: they stay as memory happened to be"


def architectures(head: Examined, _against: Against) -> Findings:
    """Whether each engine finds its class by the names that config.json gives."""
    names = set(head.architectures)
    if head.form == OWN:
        yield ok("headstart's own form, which engines do not load: export it with format=…")
        return
    if head.form == "eagle3":
        findings = list(_eagle3(names))
    elif head.form == "eagle" and names:
        findings = list(_eagle(names))
    elif head.form == "dflash" and not names & BLOCKS:
        findings = [
            wrong(f"architectures is {sorted(names)}", "no engine finds its class", 'set it to ["DFlashDraftModel"]')
        ]
    elif head.form == "medusa" and names and "MedusaModel" not in names:
        findings = [
            wrong(f"architectures is {sorted(names)}", "vLLM finds no class", 'set it to ["MedusaModel"]', "vllm")
        ]
    else:
        findings = []
    if names and head.config.get("model_type") is None:
        kind = {"medusa": "medusa", "dflash": "qwen3"}.get(head.form, "llama")
        findings.append(
            wrong(
                f"{CONFIG} has no model_type",
                "SGLang refuses the head (Should have a `model_type` key)",
                f'set "model_type": "{kind}" in {CONFIG}',
                "sglang",
            )
        )
    yield from findings or [ok(_summary(head))]


def _summary(head: Examined) -> str:
    if not head.architectures:
        return "none: the authors' own layout, for their code and headstart"
    served = f"; vLLM up to {LAST_WITH_MEDUSA} is the last engine that runs it" if head.form == "medusa" else ""
    return ", ".join(head.architectures) + served


def _eagle3(names: set[str]) -> Findings:
    lacking = []
    if not names & {*EAGLE3_VLLM} and not any("Eagle3" in class_name for class_name in names):
        lacking.append("vllm")
    lacking += [] if names & EAGLE3_SGLANG else ["sglang"]
    lacking += [] if names & EAGLE3_TRTLLM or any("Deepseek" in class_name for class_name in names) else ["trtllm"]
    if lacking:
        yield wrong(
            f"architectures is {sorted(names)}",
            "the engine finds no class for it and stops, or takes it for a whole model",
            f'set "architectures": ["LlamaForCausalLMEagle3"] in {CONFIG}',
            *lacking,
        )


def _eagle(names: set[str]) -> Findings:
    vllm, sglang = bool(names & EAGLE_VLLM), any(class_name.endswith("ForCausalLMEagle") for class_name in names)
    if not vllm or not sglang:
        yield wrong(
            f"architectures is {sorted(names)}",
            "vLLM prepends Eagle to a target's name and SGLang wants one that ends with Eagle: the other one stops",
            f'set "architectures": ["LlamaForCausalLMEagle", "LlamaForCausalLM"] in {CONFIG}',
            *(["vllm"] if not vllm else []), *(["sglang"] if not sglang else []),
        )  # fmt: skip


def keys(head: Examined, _against: Against) -> Findings:
    """Whether config.json has a key that engines stop at, or by which they compute something else."""
    config, faulty = head.config, False
    for key in NUMBERS:
        if key in config and config[key] is None:
            faulty = True
            yield wrong(f"{key} is null", "vLLM and SGLang stop with a TypeError", f"remove {key} from {CONFIG}")
    if config.get("norm_before_residual") is True and head.form == "eagle3":
        faulty = True
        yield wrong(
            "norm_before_residual is true",
            "SGLang and TensorRT-LLM take the residual before the norm whatever is said: acceptance falls, no error",
            "serve it in vLLM alone, or train with head.norm_before_residual=false",
            "sglang", "trtllm",
        )  # fmt: skip
    if "norm_before_residual" not in config and "speculators_model_type" in config and "model_type" not in config:
        faulty = True
        yield wrong(
            "norm_before_residual is missing",
            "vLLM takes true for it in the speculators format, and speculators itself false: one of them drafts wrong",
            f'set "norm_before_residual": false in {CONFIG}, or true if it was trained so',
            "vllm", "speculators",
        )  # fmt: skip
    if head.form == "medusa" and "blocks.0.layers.0.bias" in head.stripped and not config.get("medusa_fc_bias"):
        faulty = True
        yield wrong(
            f"medusa_fc_bias is {config.get('medusa_fc_bias', 'missing')} and the blocks have biases",
            "vLLM drops the biases without a word: acceptance falls",
            f'set "medusa_fc_bias": true in {CONFIG}',
            "vllm",
        )
    if not faulty:
        yield ok("none that engines stumble over")


def biases(head: Examined, _against: Against) -> Findings:
    """Whether the biases that engines create are those in the files."""
    faulty = False
    layered = any(name.endswith("_proj.bias") for name in head.stripped)
    for key in ("bias", "attention_bias", "mlp_bias"):
        if head.architectures and head.config.get(key) is True and (key == "bias" or not layered):
            faulty = True
            yield wrong(f"{key} is true", UNFILLED, f'set "{key}": false in {CONFIG}')
    bias = head.stripped.get("fc.bias")
    width = len(head.stripped["fc.weight"]) if "fc.weight" in head.stripped else "H"
    if head.form == "eagle" and head.architectures:
        if bias is None:
            faulty = True
            yield wrong(
                "fc.bias is missing",
                "SGLang makes it random: acceptance falls, without an error",
                f"add fc.bias of {width} zeros to {WEIGHTS}",
                "sglang",
            )
        elif bool(bias.any()):
            faulty = True
            yield wrong(
                "fc.bias is not zero",
                "vLLM drops it without a word and drafts something else; SGLang reads it",
                "train with head.bias=false, or serve it in SGLang alone (format=sglang)",
                "vllm",
            )
    if not faulty:
        yield ok("those that the files hold")


def named(head: Examined, _against: Against) -> Findings:
    """Whether vLLM, where no method is given, recognises the head: it guesses by the path, in lower case."""
    kinds = {"eagle3": "eagle3", "eagle": "eagle", "medusa": "medusa", "dflash": "dflash"}
    if head.form not in kinds or not head.architectures:
        yield ok("no engine guesses by the name of this form")
        return
    path = head.name.lower()
    guess = "eagle" if "eagle-" in path else "eagle3" if "eagle3" in path else None
    if guess is None or guess == kinds[head.form]:
        yield ok("does not mislead vLLM; give method all the same" if guess is None else "names its kind")
        return
    better = re.sub(r"eagle[-_]?3?-?", "", path.rstrip("/").rsplit("/", 1)[-1]).strip("-") or "NAME"
    yield wrong(
        f"{head.name} is taken for {guess}, and it is {kinds[head.form]}",
        f"vLLM without a method looks for a class of {guess} and stops",
        f'call it {better}-{kinds[head.form]}, and give "method": "{kinds[head.form]}" in --speculative-config',
        "vllm",
    )
