"""DFlash, and DSpark with its `markov_head` and `confidence_head`, for vLLM, SGLang and their authors' code.

Its mask slots hold the target's embedding of one token, so a head goes into this format only where its own mask slot is
one of the embedding's rows. Layers are counted as ours are. vLLM alone reads an lm_head, over a pruned vocabulary.
"""

from typing import Any

from torch import Tensor

from heads.formats.export.files import KNOWN, OFFSETS, Foreign, Shapes
from heads.formats.export.source import Source, layer_shapes
from heads.formats.layer_ids import BLOCK_OUTPUTS
from heads.formats.published.dflash import NAMES

OURS = ("mask", "vocab.ids", "lm_head.weight")  # tensors that have another form there
NORMS = ("input_layernorm", "post_attention_layernorm")


def engines(source: Source) -> Foreign:
    """Return the head for the format's engines, or the one that is asked for.

    Raises:
        ValueError: it has options that they do not run.
    """
    options, markov = source.config, source.config.markov_rank
    source.refuse(qk_norm=True)
    if source.head.vocab is None:
        source.refuse(lm_head="shared")
    elif source.form != "vllm":
        source.refuse(draft_vocab=None)
    if options.confidence and markov is None:
        raise source.refusal("confidence=true without a Markov term", "which is DSpark's; give head.markov_rank a rank")
    if markov is not None and not options.from_anchor:
        raise source.refusal("markov_rank with from_anchor=false", "and DSpark drafts from its anchor")
    if markov is None and options.from_anchor:
        raise source.refusal(
            "from_anchor=true", "and DFlash drafts from its mask slots alone; train with head.from_anchor=false"
        )
    outputs, order = source.outputs()
    config = {
        "architectures": ["DFlashDraftModel" if markov is None else "Qwen3DSparkModel"],
        "model_type": "qwen3",
        "torch_dtype": source.dtype,
        "num_hidden_layers": options.layers,
        **source.decoder(),
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * options.layers,
        "is_causal": options.causal,  # of a slot's sight; SGLang reads it here alone
        "block_size": source.head.size,
        "dflash_config": {
            "mask_token_id": _mask_token(source),
            BLOCK_OUTPUTS: outputs,
            "causal": options.causal,
            "sample_from_anchor": options.from_anchor,
        },
        **({} if markov is None else {"markov_rank": markov, "markov_head_type": "vanilla"}),
        **({} if source.head.vocab is None else {"draft_vocab_size": source.draft_vocab()}),
    }
    tensors = {NAMES.get(name, name): tensor for name, tensor in source.tensors.items() if name not in OURS}
    tensors["fc.weight"] = source.in_order(tensors["fc.weight"], order)
    if source.head.vocab is not None:
        tensors |= {"lm_head.weight": source.read_out("lm_head"), **source.vocabulary()}
    found = shapes(config)
    if options.confidence:
        found |= {NAMES["confidence.weight"]: (1, config["hidden_size"] + markov), NAMES["confidence.bias"]: (1,)}
    return Foreign(config, tensors, found)


def shapes(config: dict[str, Any]) -> Shapes:
    """Return the shapes but for the confidence's, of which config.json does not speak."""
    width, full = config["hidden_size"], config["vocab_size"]
    drafted, rank = config.get("draft_vocab_size", full), config.get("markov_rank")
    count = len(config["dflash_config"][BLOCK_OUTPUTS])
    found: Shapes = {"fc.weight": (width, count * width), "hidden_norm.weight": (width,), "norm.weight": (width,)}
    for i in range(config["num_hidden_layers"]):
        inner = f"layers.{i}.self_attn."
        found |= layer_shapes(config, f"layers.{i}.", width, NORMS)
        found |= {f"{inner}{kind}_norm.weight": (config["head_dim"],) for kind in "qk"}
    if rank is not None:
        found |= {NAMES["before.weight"]: (full, rank), NAMES["bias.weight"]: (drafted, rank)}
    if drafted < full:
        found |= {"lm_head.weight": (drafted, width), OFFSETS: (drafted,), KNOWN: (full,)}
    return found


def _mask_token(source: Source) -> int:
    """Return the token whose embedding the mask slots hold."""
    mask: Tensor = source.tensors["mask"]
    rows = (source.embedding().to(mask.device, mask.dtype) == mask).all(1).nonzero()
    if not len(rows):
        raise source.refusal(
            "a mask slot that was trained", "and the format has the target's embedding of a token there"
        )
    return int(rows[0])
