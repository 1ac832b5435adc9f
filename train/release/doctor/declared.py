"""Checks of what the files declare: the head's target, and the keys by which engines find a class, or stumble."""

import json
import re

from data.text.template import template_sha256
from heads.formats.published import dflash, eagle, eagle3, medusa, mimo
from heads.formats.store import CONFIG, MUST_AGREE, QUANTISED, WEIGHTS
from train.release.card.engines import GUESSES
from train.release.doctor.examined import BY_ARCHITECTURE, OWN, Against, Examined
from train.release.doctor.finding import OK, WRONG, Finding, Findings, listed, ok, unknown, wrong

TEMPLATE = "chat_template_sha256"  # of provenance.json and tokenizer_reference.json
OTHER = "give the head's own target with target=…, or train a head for this one"
SIBLING = "or, if it is another checkpoint of the same model, say model.sibling=true"
NOTHING = "it drafts from features that mean something else: next to nothing is accepted"
NUMBERS = ("target_hidden_size", "logit_scale")  # keys that engines read as numbers, so that a null stops them
CLASSES = {"eagle3": eagle3.CLASS, "eagle": eagle.CLASS, "medusa": medusa.CLASS, "dflash": dflash.CLASS,
           "mimo": mimo.CLASS}  # fmt: skip
METHODS = {"mimo": "mtp"}  # vLLM's methods, where they are not called as the forms
PRUNED = ("eagle3", "dflash")  # which may draft some tokens alone; these are never without architectures
TWICE = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "vocab_size", "rope_theta", "rope_scaling", "max_position_embeddings", "hidden_act",
)  # fmt: skip
LAST_WITH_MEDUSA = "0.32.0"  # of vLLM
UNFILLED = "no tensor fills the biases that engines make for it: they stay as memory happened to be"


def target(head: Examined, against: Against) -> Findings:
    """Whether the sizes and the fingerprint are the target's."""
    reported = head.report.get("target")  # of a foreign head: what lies beside it
    metadata = head.part("target") if head.form == OWN else reported if isinstance(reported, dict) else {}
    sizes = {"hidden_size": against.width, "vocab_size": against.vocabulary, "num_layers": against.layers}
    recorded = {key: metadata[key] for key in sizes if key in metadata}
    if head.form != OWN:
        recorded |= {key: head.layer[key] for key in ("hidden_size", "vocab_size") if key in head.layer}
    odd = [key for key, value in recorded.items() if value != sizes[key]]
    for key in odd:
        yield wrong(
            f"made for a target whose {MUST_AGREE[key]} is {recorded[key]}, and that of {against.path} is {sizes[key]}",
            "engines stop at a shape, or " + NOTHING,
            OTHER,
        )
    fingerprint = metadata.get("fingerprint")
    if fingerprint is None or against.spec is None:
        why = "nothing records it" if fingerprint is None else against.why
        if not odd:
            yield unknown(f"the sizes agree; whether the weights are those it was trained on is not known: {why}")
    elif fingerprint != against.spec.fingerprint and QUANTISED in fingerprint + against.spec.fingerprint:
        yield unknown("the sizes agree; of quantised weights no more can be told")
    elif fingerprint != against.spec.fingerprint:
        name = metadata.get("name") or head.said_target
        says = (
            f"made for the weights of {name}, {fingerprint}, and those of {against.path} are {against.spec.fingerprint}"
        )
        yield unknown(f"{says}: τ will show") if against.sibling else wrong(says, NOTHING, f"{OTHER}; {SIBLING}")
    elif not odd:
        yield ok(f"{against.path}, by its fingerprint")


def tokenizer(head: Examined, against: Against) -> Findings:
    """Whether the tokenizer is the one of the training."""
    trained, now = head.reference.get("tokenizer_sha256"), against.tokenizer_sha256
    if trained is None or now is None:
        yield unknown("nothing records its hash" if trained is None else "the target has no tokenizer.json")
    elif trained != now:
        yield wrong(
            f"tokenizer.json had the hash {trained[:12]}…, the target's now has {now[:12]}…",
            "texts become other tokens than those it was trained on: acceptance falls, or it drafts other tokens",
            "use the tokenizer of the training, or train again with this one",
        )
    else:
        yield ok(f"tokenizer.json is that of the training, {now[:12]}…")


def template(head: Examined, against: Against) -> Findings:
    """Whether the chat template is the one of the training."""
    records = [record for record in (head.origin, head.reference) if TEMPLATE in record]
    if not records or against.tokenizer is None:
        yield unknown("nothing records its hash" if not records else "the target has no tokenizer")
        return
    trained, now = records[0][TEMPLATE], template_sha256(against.tokenizer)
    if trained == now:
        yield ok("none, as in training" if now is None else f"that of the training, {now[:12]}…")
        return
    was, is_ = (f"the hash {value[:12]}…" if isinstance(value, str) else "none" for value in (trained, now))
    yield wrong(
        f"the template of the training had {was}, the target's now has {is_}",
        "chats are asked in other words than those it was trained on: acceptance falls in every engine, no error",
        "serve the target with the template of the training (--chat-template), or train again with this one",
    )


def architectures(head: Examined, _against: Against) -> Findings:
    """Whether each engine finds its class by the names that config.json gives."""
    names, served = head.architectures, CLASSES.get(head.form)
    patterns = {} if served is None or not (names or head.form in PRUNED) else served.found
    lacking = [engine for engine, pattern in patterns.items() if not any(re.fullmatch(pattern, name) for name in names)]
    if served is not None and lacking:
        # An engine that does not know a draft's name stops at once; a whole model's name it takes for the model.
        draft = any(fragment in name for fragment in BY_ARCHITECTURE for name in names)
        remedy = f'set "architectures": {json.dumps(served.architectures)} in {CONFIG}'
        yield Finding(
            OK if draft and len(lacking) < len(patterns) else WRONG,
            f"{', '.join(names) or 'none'}, which {listed(lacking)} does not know as a head: for it {remedy}",
            "the engine finds no class for it and stops, or takes it for a whole model",
            remedy,
            tuple(lacking),
        )
    if names and head.form != OWN and head.config.get("model_type") is None:
        yield wrong(
            f"{CONFIG} has no model_type",
            "SGLang refuses the head (Should have a `model_type` key)",
            f'set "model_type": "{"llama" if served is None else served.model_type}" in {CONFIG}',
            "sglang",
        )


def classes(head: Examined, _against: Against) -> str:
    """Return by what classes engines find the head."""
    if head.form == OWN:
        return "headstart's own form, which engines do not load: export it with format=…"
    if not head.architectures:
        return "none: the authors' own layout, for their code and headstart"
    last = f"; vLLM up to {LAST_WITH_MEDUSA} is the last engine that runs it" if head.form == "medusa" else ""
    return ", ".join(head.architectures) + last


def keys(head: Examined, _against: Against) -> Findings:
    """Whether config.json has a key that engines stop at, or by which they compute something else."""
    config = head.config
    for key in NUMBERS:
        if key in config and config[key] is None:
            yield wrong(f"{key} is null", "vLLM and SGLang stop with a TypeError", f"remove {key} from {CONFIG}")
    if config.get("norm_before_residual") is True and head.form == "eagle3":
        yield wrong(
            "norm_before_residual is true",
            "SGLang and TensorRT-LLM take the residual before the norm whatever is said: acceptance falls, no error",
            "serve it in vLLM alone, or train with head.norm_before_residual=false",
            "sglang", "trtllm",
        )  # fmt: skip
    if "norm_before_residual" not in config and "speculators_model_type" in config and "model_type" not in config:
        yield wrong(
            "norm_before_residual is missing",
            "vLLM takes true for it in the speculators format, and speculators itself false: one of them drafts wrong",
            f'set "norm_before_residual": false in {CONFIG}, or true if it was trained so',
            "vllm", "speculators",
        )  # fmt: skip
    if head.form == "medusa" and "blocks.0.layers.0.bias" in head.stripped and not config.get("medusa_fc_bias"):
        yield wrong(
            f"medusa_fc_bias is {config.get('medusa_fc_bias', 'missing')} and the blocks have biases",
            "vLLM drops the biases without a word: acceptance falls",
            f'set "medusa_fc_bias": true in {CONFIG}',
            "vllm",
        )


def biases(head: Examined, _against: Against) -> Findings:
    """Whether the biases that engines create are those in the files."""
    layered = any(name.endswith("_proj.bias") for name in head.stripped)
    for key in ("bias", "attention_bias", "mlp_bias"):
        if head.architectures and head.config.get(key) is True and (key == "bias" or not layered):
            yield wrong(f"{key} is true", UNFILLED, f'set "{key}": false in {CONFIG}')
    bias = head.stripped.get("fc.bias")
    width = len(head.stripped["fc.weight"]) if "fc.weight" in head.stripped else "H"
    if head.form == "eagle" and head.architectures:
        if bias is None:
            yield wrong(
                "fc.bias is missing",
                "SGLang makes it random: acceptance falls, without an error",
                f"add fc.bias of {width} zeros to {WEIGHTS}",
                "sglang",
            )
        elif bool(bias.any()):
            yield wrong(
                "fc.bias is not zero",
                "vLLM drops it without a word and drafts something else; SGLang reads it",
                "train with head.bias=false, or serve it in SGLang alone (format=sglang)",
                "vllm",
            )


def named(head: Examined, _against: Against) -> Findings:
    """Whether vLLM, where no method is given, recognises the head: it guesses by the path, in lower case."""
    if head.form not in CLASSES or not head.architectures:
        yield ok("no engine guesses by the name of this form")
        return
    path = head.name.lower()
    guess = next((guess for sign, guess in GUESSES.items() if sign in path), None)
    if guess is None or guess == head.form:
        yield ok("does not mislead vLLM; give method all the same" if guess is None else "names its kind")
        return
    method = "dspark" if dflash.DSPARK in head.architectures else METHODS.get(head.form, head.form)
    better = re.sub(rf"eagle[-_]?3?-?|-?{method}$", "", path.rstrip("/").rsplit("/", 1)[-1]).strip("-") or "NAME"
    yield wrong(
        f"{head.name} is taken for {guess}, and it is {method}",
        f"vLLM without a method looks for a class of {guess} and stops",
        f'call it {better}-{method}, and give "method": "{method}" in --speculative-config',
        "vllm",
    )


def twice(head: Examined, _against: Against) -> Findings:
    """Whether keys that config.json has twice agree, and none that engines fill in otherwise is there once alone."""
    inner = head.part("transformer_layer_config")
    for key in TWICE:
        if key in inner and key in head.config and inner[key] != head.config[key]:
            yield wrong(
                f"{key} is {head.config[key]}, and within transformer_layer_config {inner[key]}",
                "vLLM, SGLang and TensorRT-LLM read the one and speculators the other",
                "set both to the one that it was trained with",
            )
    heads, groups = head.config.get("num_attention_heads"), inner.get("num_key_value_heads")
    if "num_key_value_heads" not in head.config and heads is not None and groups not in (None, heads):
        yield wrong(
            f"num_key_value_heads is missing, and within transformer_layer_config {groups}",
            f"vLLM, SGLang and TensorRT-LLM take the {heads} of num_attention_heads, and stop at k_proj's shape",
            f'set "num_key_value_heads": {groups} in {CONFIG}',
            "vllm", "sglang", "trtllm",
        )  # fmt: skip
