"""Checks of the keys of config.json by which engines find the class of a head, and of those that they stumble over."""

import re

from heads.formats.published.written import NUMBERS
from heads.formats.store import CONFIG, WEIGHTS
from train.release.doctor.against import Against
from train.release.doctor.examined import OWN, Examined
from train.release.doctor.finding import Findings, ok, wrong

EAGLE3_VLLM = ("LlamaForCausalLM",)  # and whatever begins or ends with Eagle3
EAGLE_VLLM = {f"{name}ForCausalLM" for name in ("Llama", "Llama4", "MiniCPM", "Cohere", "Mistral", "MistralLarge3")}
EAGLE3_SGLANG = {"LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"}
EAGLE3_TRTLLM = {"LlamaForCausalLM", "LlamaForCausalLMEagle3"}
BLOCKS = {"DFlashDraftModel", "Qwen3DSparkModel"}
LAST_WITH_MEDUSA = "0.32.0"  # of vLLM
UNFILLED = "no tensor fills the biases that engines make for it: they stay as memory happened to be"


def architectures(head: Examined, _against: Against) -> Findings:
    """Whether each engine finds its class by the names that config.json gives."""
    said = set(head.architectures)
    if head.form == OWN:
        yield ok("headstart's own form, which engines do not load: export it with format=…")
        return
    if head.form == "eagle3":
        found = list(_eagle3(said))
    elif head.form == "eagle" and said:
        found = list(_eagle(said))
    elif head.form == "dflash" and not said & BLOCKS:
        found = [
            wrong(f"architectures is {sorted(said)}", "no engine finds its class", 'set it to ["DFlashDraftModel"]')
        ]
    elif head.form == "medusa" and said and "MedusaModel" not in said:
        found = [wrong(f"architectures is {sorted(said)}", "vLLM finds no class", 'set it to ["MedusaModel"]', "vllm")]
    else:
        found = []
    if said and head.config.get("model_type") is None:
        kind = {"medusa": "medusa", "dflash": "qwen3"}.get(head.form, "llama")
        found.append(
            wrong(
                f"{CONFIG} has no model_type",
                "SGLang refuses the head (Should have a `model_type` key)",
                f'set "model_type": "{kind}" in {CONFIG}',
                "sglang",
            )
        )
    yield from found or [ok(_known(head))]


def _known(head: Examined) -> str:
    if not head.architectures:
        return "none: the authors' own layout, for their code and headstart"
    served = f"; vLLM up to {LAST_WITH_MEDUSA} is the last engine that runs it" if head.form == "medusa" else ""
    return ", ".join(head.architectures) + served


def _eagle3(said: set[str]) -> Findings:
    lacking = []
    if not said & {*EAGLE3_VLLM} and not any("Eagle3" in name for name in said):
        lacking.append("vllm")
    lacking += [] if said & EAGLE3_SGLANG else ["sglang"]
    lacking += [] if said & EAGLE3_TRTLLM or any("Deepseek" in name for name in said) else ["trtllm"]
    if lacking:
        yield wrong(
            f"architectures is {sorted(said)}",
            "the engine finds no class for it and stops, or takes it for a whole model",
            f'set "architectures": ["LlamaForCausalLMEagle3"] in {CONFIG}',
            *lacking,
        )


def _eagle(said: set[str]) -> Findings:
    vllm, sglang = bool(said & EAGLE_VLLM), any(name.endswith("ForCausalLMEagle") for name in said)
    if not vllm or not sglang:
        yield wrong(
            f"architectures is {sorted(said)}",
            "vLLM prepends Eagle to a target's name and SGLang wants one that ends with Eagle: the other one stops",
            f'set "architectures": ["LlamaForCausalLMEagle", "LlamaForCausalLM"] in {CONFIG}',
            *(["vllm"] if not vllm else []), *(["sglang"] if not sglang else []),
        )  # fmt: skip


def keys(head: Examined, _against: Against) -> Findings:
    """Whether a key stands there that engines stop at, or by which they compute something else."""
    config, found = head.config, False
    for key in NUMBERS:
        if key in config and config[key] is None:
            found = True
            yield wrong(f"{key} is null", "vLLM and SGLang stop with a TypeError", f"remove {key} from {CONFIG}")
    if config.get("norm_before_residual") is True and head.form == "eagle3":
        found = True
        yield wrong(
            "norm_before_residual is true",
            "SGLang and TensorRT-LLM take the residual before the norm whatever is said: acceptance falls, no error",
            "serve it in vLLM alone, or train with head.norm_before_residual=false",
            "sglang", "trtllm",
        )  # fmt: skip
    if "norm_before_residual" not in config and "speculators_model_type" in config and "model_type" not in config:
        found = True
        yield wrong(
            "norm_before_residual is missing",
            "vLLM takes true for it in the speculators format, and speculators itself false: one of them drafts wrong",
            f'set "norm_before_residual": false in {CONFIG}, or true if it was trained so',
            "vllm", "speculators",
        )  # fmt: skip
    if head.form == "medusa" and "blocks.0.layers.0.bias" in head.bare and not config.get("medusa_fc_bias"):
        found = True
        yield wrong(
            f"medusa_fc_bias is {config.get('medusa_fc_bias', 'missing')} and the blocks have biases",
            "vLLM drops the biases without a word: acceptance falls",
            f'set "medusa_fc_bias": true in {CONFIG}',
            "vllm",
        )
    if not found:
        yield ok("none that engines stumble over")


def biases(head: Examined, _against: Against) -> Findings:
    """Whether the biases that engines make are those that the files hold."""
    found = False
    layered = any(name.endswith("_proj.bias") for name in head.bare)
    for key in ("bias", "attention_bias", "mlp_bias"):
        if head.architectures and head.config.get(key) is True and (key == "bias" or not layered):
            found = True
            yield wrong(f"{key} is true", UNFILLED, f'set "{key}": false in {CONFIG}')
    bias = head.bare.get("fc.bias")
    if head.form == "eagle" and head.architectures:
        if bias is None:
            found = True
            yield wrong(
                "fc.bias is missing",
                "SGLang makes it random: acceptance falls, without an error",
                f"add fc.bias of {len(head.bare['fc.weight']) if 'fc.weight' in head.bare else 'H'} zeros to {WEIGHTS}",
                "sglang",
            )
        elif bool(bias.any()):
            found = True
            yield wrong(
                "fc.bias is not zero",
                "vLLM drops it without a word and drafts something else; SGLang reads it",
                "train with head.bias=false, or serve it in SGLang alone (format=sglang)",
                "vllm",
            )
    if not found:
        yield ok("those that the files hold")


def named(head: Examined, _against: Against) -> Findings:
    """Whether vLLM, where no method is given, takes the head for what it is: it guesses by the path, in lower case."""
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
