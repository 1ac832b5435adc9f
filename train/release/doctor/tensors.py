"""Checks of the tensors: readable, those of the format, finite; the draft's vocabulary, its lm_head, the embedding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heads.common.errors import one_line
from heads.formats.published import dflash, eagle, eagle3, mimo
from heads.formats.published.exporting import Shapes
from heads.formats.published.plan import EMBEDDING, KNOWN, OFFSETS, is_targets_embedding
from heads.formats.store import CONFIG, WEIGHTS
from heads.modules.fusion import EAGLE3_LAYERS
from train.release.doctor.declared import PRUNED
from train.release.doctor.examined import OWN, Against, Examined
from train.release.doctor.finding import Finding, Findings, ok, unknown, wrong

LM_HEAD, IDS = "lm_head.weight", "vocab.ids"
EXPORT = "write it again: python train/publish.py run=… format=…"
LOST = "train again from an earlier checkpoint, or export again from a good one"
ELSEWHERE = {OFFSETS, KNOWN, LM_HEAD, EMBEDDING, "fc.bias", "mask_hidden"}  # of engines, or of another check
SHAPES: dict[str, Callable[[dict[str, Any]], Shapes]] = {  # by a config.json that is complete
    "eagle": eagle.shapes, "eagle3": eagle3.shapes, "dflash": dflash.shapes, "mimo": mimo.shapes,
}  # fmt: skip
CHAINED = ("eagle", "eagle3", "dflash")  # the forms that engines read by names without a prefix
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
DTYPES = {"float32", "bfloat16", "float16"}
WRONG_TOKENS = "every draft is another token than the head means: nothing is accepted, without an error"


def readable(head: Examined, _against: Against) -> Findings:
    """Whether the files can be read at all."""
    for name in (CONFIG, WEIGHTS):
        if name in head.trouble:
            trouble, _, remedy = head.trouble[name].rpartition("; ")
            yield wrong(trouble or remedy, "nothing loads it", remedy if trouble else "download or export it again")
    if WEIGHTS not in head.trouble and not head.form:
        some = ", ".join(sorted(head.tensors)[:3])
        yield wrong(f"tensors such as {some} are of no format known here", "no engine finds its head", EXPORT)
    elif not head.trouble.keys() & {CONFIG, WEIGHTS}:
        yield ok(f"{CONFIG} and {len(head.tensors)} tensors, the form of {head.form}")


def names(head: Examined, _against: Against) -> Findings:
    """Whether the names are those that engines look for, and the shapes those that config.json makes."""
    prefixed = sorted(name for name in head.tensors if name.startswith("model."))
    if head.form in CHAINED and prefixed:
        yield wrong(
            f"{prefixed[0]} and {len(prefixed) - 1} more begin with model.",
            "vLLM stops at the first; SGLang loads nothing of an EAGLE-1 head and drafts from random weights",
            f"take model. from the front of every name in {WEIGHTS}",
            "vllm", "sglang",
        )  # fmt: skip
    if head.form not in SHAPES:
        return
    try:
        shapes = SHAPES[head.form](completed(head))
    except (ValueError, OSError) as error:
        yield wrong(one_line(error), "no loader can make the head", f"correct {CONFIG}, or {EXPORT}")
        return
    if any(name.startswith(eagle3.MIDDLE) for name in head.stripped):
        shapes = {name.replace(eagle3.FIRST, eagle3.MIDDLE): shape for name, shape in shapes.items()}
    if missing := sorted(shapes.keys() - head.stripped.keys() - ELSEWHERE):
        yield wrong(
            f"{', '.join(missing)} missing",
            "vLLM leaves it as memory happened to be, SGLang makes it random, llama.cpp drafts without it: no error",
            EXPORT,
        )
    both = sorted(head.stripped.keys() & shapes.keys())
    if other := [name for name in both if tuple(head.stripped[name].shape) != shapes[name]]:
        name = other[0]
        yield wrong(
            f"{name} is {tuple(head.stripped[name].shape)} where {CONFIG} makes it {shapes[name]}"
            + (f", and {len(other) - 1} more" if other[1:] else ""),
            "engines stop at it",
            f"correct the number in {CONFIG} that says so, or {EXPORT}",
        )


def completed(head: Examined) -> dict[str, Any]:
    """Return config.json with the engines' defaults for missing keys; refuse gaps that they fill from another model."""
    config = head.layer
    lacking = [key for key in NEEDED if not isinstance(config.get(key), int)]
    if lacking:
        raise ValueError(f"{CONFIG} does not say {lacking[0]}, for which engines take that of Llama-2-7B")
    fc, width = head.stripped.get("fc.weight"), config["hidden_size"]
    silent = {
        "num_hidden_layers": 1,
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": width // max(config["num_attention_heads"], 1),
        "num_aux_hidden_states": EAGLE3_LAYERS if fc is None or fc.ndim != 2 else fc.shape[1] // max(width, 1),
        "draft_vocab_size": config["vocab_size"],
    }
    return {**config, **{key: config.get(key) or value for key, value in silent.items()}}


def values(head: Examined, _against: Against) -> Findings:
    """Whether every tensor holds finite numbers that are not all zero."""
    for name, tensor in sorted(head.tensors.items()):
        if not tensor.is_floating_point():
            continue
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            yield wrong(
                f"{name} holds {bad} values that are NaN or infinite of {tensor.numel()}",
                "engines load it and no draft of its is accepted",
                LOST,
            )
        elif tensor.ndim > 1 and not bool(tensor.any()):
            yield wrong(f"{name} is all zero", "what it reads is lost: drafts are not accepted", LOST)


def dtype(head: Examined, against: Against) -> Findings:
    """Whether config.json says the dtype, and says that of the tensors and of the target."""
    kinds = sorted({str(t.dtype).removeprefix("torch.") for t in head.tensors.values() if t.is_floating_point()})
    if head.form == OWN:
        yield ok(f"{', '.join(kinds)}; this form is loaded in the target's dtype")
        return
    if head.form == "medusa" or not head.architectures:
        yield ok(f"{', '.join(kinds)}; whoever reads this form casts it to the target's dtype")
        return
    declared = head.config.get("torch_dtype") or head.config.get("dtype")
    served = str(against.config.get("dtype") or "").removeprefix("torch.")
    actual = kinds[0] if len(kinds) == 1 else "bfloat16"
    right = served if served in DTYPES - {"float32"} else actual
    if declared is None:
        yield wrong(
            f"{CONFIG} has no torch_dtype",
            "SGLang takes float32 for it and runs the head in float16, whose range features overflow",
            f'set "torch_dtype": "{right}" in {CONFIG}',
            "sglang",
        )
    elif kinds and kinds != [declared]:
        yield wrong(
            f"torch_dtype is {declared} and the tensors are {', '.join(kinds)}",
            "engines cast every tensor as they load, so that what runs is not what was measured",
            f'set "torch_dtype": "{actual}" in {CONFIG}, or export with dtype={declared}',
        )
    elif served in DTYPES - {"float32"} and declared != served:
        yield wrong(
            f"torch_dtype is {declared} and the target's {served}",
            "SGLang runs the head in another dtype than the features it reads; vLLM casts it",
            f"export with dtype={served}",
            "sglang", "trtllm",
        )  # fmt: skip
    else:
        theirs = served or "a dtype that they do not say"
        yield ok(f"{declared}, as the tensors are; the target's files are in {theirs}")


def loads(why: str) -> Finding:
    """Return whether our own loader accepts it."""
    if not why:
        return ok("headstart loads it for this target")
    trouble, _, remedy = why.rpartition("; ")
    return wrong(trouble or why, "headstart refuses it, so that nothing can be measured", remedy if trouble else EXPORT)


def drafted(head: Examined, against: Against) -> str:
    """Return how many of the target's tokens it drafts."""
    ids = head.tensors.get(IDS) if head.form == OWN else head.stripped.get(OFFSETS)
    return f"all {against.vocabulary} tokens" if ids is None else f"{len(ids)} of {against.vocabulary} tokens"


def vocabulary(head: Examined, against: Against) -> Findings:
    """Whether engines read the size of the draft's vocabulary, and find its map where they need one."""
    full, offset = against.vocabulary, head.stripped.get(OFFSETS)
    if head.form not in PRUNED:
        return
    silent = full if offset is None else len(offset)
    if head.form == "eagle3" and "draft_vocab_size" not in head.config:
        yield wrong(
            f"{CONFIG} has no draft_vocab_size",
            "SGLang stops with an AttributeError, TensorRT-LLM does not take it for EAGLE-3",
            f'set "draft_vocab_size": {silent} in {CONFIG}',
            "sglang", "trtllm",
        )  # fmt: skip
    declared = head.layer.get("draft_vocab_size", silent)
    size = declared if isinstance(declared, int) else full
    if offset is not None and size >= full and len(offset) >= full:
        yield wrong(
            f"{OFFSETS} is there though all {full} tokens are drafted",
            "vLLM refuses the head (ValueError)",
            f"remove {OFFSETS} and {KNOWN} from {WEIGHTS}",
            "vllm",
        )
    elif offset is None and size < full:
        yield wrong(
            f"draft_vocab_size is {size} of {full} and there is no {OFFSETS}",
            f"vLLM takes the first {size} tokens for the drafted ones: {WRONG_TOKENS}",
            f"add {OFFSETS}, int64 ({size},): of each drafted token its id less its index",
        )


def whose_lm_head(head: Examined, _against: Against) -> str:
    """Return whose lm_head engines use."""
    return "its own" if LM_HEAD in head.stripped else "the target's"


def lm_head(head: Examined, against: Against) -> Findings:
    """Whether the lm_head that an engine uses is the one that was trained."""
    weight, full = head.stripped.get(LM_HEAD), against.vocabulary
    if head.form in PRUNED and head.config.get("tie_word_embeddings"):
        yield wrong(
            "tie_word_embeddings is true",
            "SGLang puts the embedding in the lm_head's place: nothing is accepted, or it stops at the shape",
            f'set "tie_word_embeddings": false in {CONFIG}',
            "sglang",
        )
    if head.form == "eagle" and weight is not None and head.architectures:
        yield wrong(
            f"{LM_HEAD} is there, and EAGLE-1 has none",
            "vLLM refuses the head (ValueError), SGLang takes the target's in its place",
            f"remove {LM_HEAD} from {WEIGHTS}; where it was trained, train with head.lm_head=shared",
            "vllm", "sglang",
        )  # fmt: skip
    if head.form == "eagle3":
        yield from _of_eagle3(weight, head.layer.get("draft_vocab_size"), full, OFFSETS in head.stripped)


def _of_eagle3(weight: Tensor | None, declared: Any, full: int, pruned: bool) -> Findings:
    if weight is not None:
        size = declared if isinstance(declared, int) else full
        if weight.shape[0] != size:
            yield wrong(
                f"{LM_HEAD} has {weight.shape[0]} rows and draft_vocab_size is {declared}",
                "engines stop at its shape",
                f'set "draft_vocab_size": {weight.shape[0]} in {CONFIG}'
                + ("" if pruned or weight.shape[0] == full else f", and add {OFFSETS}"),
            )
    elif isinstance(declared, int) and declared < full:
        yield wrong(
            f"{LM_HEAD} is missing and {declared} of {full} tokens are drafted",
            "vLLM and SGLang leave it as memory happened to be: nothing is accepted, without an error",
            "export it again: python train/publish.py run=… format=… writes the rows of the target's",
        )
    elif isinstance(declared, int):
        yield wrong(
            f"{LM_HEAD} is missing and draft_vocab_size is {declared}, the number of all tokens",
            "SGLang makes it random: accept rate 0.00, without an error",
            f'set "draft_vocab_size": null in {CONFIG}, or add the target\'s lm_head as {LM_HEAD}',
            "sglang",
        )


def embedding(head: Examined, against: Against) -> Findings:
    """Whether an embedding that is shipped is the target's."""
    shipped = {name: tensor for name, tensor in head.tensors.items() if name.endswith(EMBEDDING)}
    if not shipped:
        yield ok("none is shipped; engines take the target's")
        return
    if head.parallel:
        yield ok("one is shipped, which engines draft from, as P-EAGLE trains it")
        return
    if against.embeddings is None:
        yield unknown(f"the target's weights do not load here ({against.why})")
        return
    shape = against.embeddings.vocab_size, against.embeddings.hidden_size
    for name, tensor in shipped.items():
        if tensor.shape != shape:
            yield wrong(
                f"{name} is {tuple(tensor.shape)}, the target's {shape}",
                "engines stop at its shape",
                f"remove {name} from {WEIGHTS}: engines take the target's; is this its target?",
            )
        elif not is_targets_embedding(tensor, against.embeddings):
            yield wrong(
                f"{name} is not the target's embedding",
                "vLLM keeps it and drafts from it, SGLang takes the target's: fine in the one, nothing accepted in the "
                "other",
                f"remove {name} from {WEIGHTS}: engines take the target's",
                "vllm",
            )
        else:
            yield ok(f"{name} is the target's")
