"""DFlash and its successors: `fc`, `hidden_norm`, `layers.{i}`, `norm`.

DSpark adds `markov_head` and `confidence_head`, Domino `prefix_gru` and `embed_proj`, DFlash2 the layers'
`attention_conv` and `mlp_conv` and a `candidate_selector`.

vLLM, SGLang and the authors' code read the format. Its masked positions hold the target's embedding of a token; ours
are a parameter, so a head can be exported only if that is a row of the embedding. DFlash drafts from the masked
positions of a block, DSpark from the root token's position too. Only vLLM reads an lm_head, over a draft vocabulary.
Only SGLang runs Domino; it corrects all positions but the first, as we do. With an anchor that drafts, it drafts one
token fewer than the block has positions.
"""

import torch

from heads.base import Embeddings, draft_size, embedding_of
from heads.formats.published import plan
from heads.formats.published.exporting import EngineClass, Export, ExportedHead
from heads.modules.fusion import DFLASH_LAYERS

DSPARK, DFLASH2 = "Qwen3DSparkModel", "DFlash2DraftModel"
FOUND = f"DFlashDraftModel|{DFLASH2}|{DSPARK}"
CLASS = EngineClass(["DFlashDraftModel"], "qwen3", {
    "vllm": FOUND, "sglang": FOUND, "gguf": rf"{FOUND}|DSpark(DraftModel|Speculator)", "openvino": "DFlashDraftModel",
})  # fmt: skip
NAMES = {
    "fusion.fc.weight": "fc.weight",
    "before.weight": "markov_head.markov_w1.weight",
    "bias.weight": "markov_head.markov_w2.weight",
    "domino.gru.weight_ih": "prefix_gru.weight_ih_l0",
    "domino.gru.weight_hh": "prefix_gru.weight_hh_l0",
    "domino.down.weight": "embed_proj.0.weight",
    "domino.up.weight": "embed_proj.2.weight",
    "selector.predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector.successor.weight": "candidate_selector.successor_codebook",
    "selector.projection.weight": "candidate_selector.hidden_projection.weight",
    "confidence.weight": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
}
SIGNATURE = (r"fc\.weight", r"hidden_norm\.weight", r"layers\.0\.self_attn\.q_proj\.weight")
CONV = "layers.0.attention_conv.{}"
ROUNDED = 2**-8  # relative rounding error of a value trained in bf16
OURS = ("mask", "vocab.ids", "lm_head.weight")  # tensors with another layout in the format
# The key in config.json of each optional part, and one of its tensors by our name.
PARTS = {
    "markov_rank": "before.weight",
    "enable_confidence_head": "confidence.weight",
    "selector_rank": "selector.projection.weight",
    "conv_kernel_size": CONV.format("base_kernel"),
}


def read(source: plan.PublishedHead, embeddings: Embeddings) -> plan.TensorMapping:
    """Return the mapping of the format's tensors."""
    options, stored = source.config | (source.config.get("dflash_config") or {}), source.tensors
    get = options.get
    ours = {name: stored[foreign] for name, foreign in NAMES.items() if foreign in stored}
    plan.check_width(source, "fc.weight", embeddings)
    plain = {"markov_head_type": "vanilla", "use_swa": False, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}
    for key, value in plain.items():
        if get(key) not in (None, value):
            raise source.refusal(f"{key}={options[key]}")
    parts = PARTS | ({"projector_type": "domino.gru.weight_hh"} if get("projector_type") == "domino" else {})
    for key, name in parts.items():
        if get(key):
            source.tensor(NAMES.get(name, name), key)
    ids = plan.drafted_by_offsets(source, embeddings)
    domino, markov, selector = (ours.get(f"{name}.weight") for name in ("domino.down", "before", "selector.projection"))
    if domino is not None and get("pure_draft_prefix_len") != 1:
        raise source.refusal(f"pure_draft_prefix_len={get('pure_draft_prefix_len')}")
    for key in ("block_size",) if selector is None else ("block_size", "selector_top_k"):
        if not isinstance(get(key), int):
            raise source.error(f"config.json does not say {key}; download it again")
    anchor = get("sample_from_anchor" if domino is None else "shift_label", markov is not None)
    token, feature_layers = source.mask_token(get("mask_token_id"), embeddings), get(plan.BLOCK_OUTPUTS)
    fc, confidence = stored["fc.weight"], ours.get("confidence.weight")
    filled = {"mask": embedding_of(embeddings, torch.tensor(token)).to("cpu", fc.dtype)}
    if markov is not None and confidence is not None and confidence.shape[1] == len(fc):
        # The format's confidence head does not read the Markov state: its columns are zeros.
        filled["confidence.weight"] = torch.cat([confidence, confidence.new_zeros(1, markov.shape[1])], 1)
    if feature_layers is None and get(plan.BLOCK_STATES) is not None:
        feature_layers = plan.as_outputs(options[plan.BLOCK_STATES])
    if feature_layers is None and fc.shape[1] != DFLASH_LAYERS * embeddings.hidden_size:
        raise source.error(
            f"config.json does not say {plan.BLOCK_OUTPUTS}, and fc.weight does not join the default five"
        )
    conv = {"conv": None, "conv_group": 1}
    if CONV.format("base_kernel") in stored:
        _, taps, width = source.tensor(CONV.format("base_kernel")).shape
        groups = len(source.tensor(CONV.format("kernel_projection.weight"))) // (2 * taps)
        conv = {"conv": taps, "conv_group": width // max(groups, 1)}
    config = {
        "depths": options["block_size"] - (0 if anchor else 1),
        "layers": source.count(r"layers\.(\d+)\.self_attn\.q_proj\.weight$"),
        "feature_layers": feature_layers,
        "causal": bool(get("is_causal", get("causal_head") or get("causal"))),
        "from_anchor": bool(anchor),
        "markov_rank": None if markov is None else markov.shape[1],
        "domino": None if domino is None else domino.shape[1] - len(fc),
        "domino_rank": 1 if domino is None else len(domino),
        "selector_rank": None if selector is None else len(selector),
        "selector_top_k": get("selector_top_k") or 1,
        "confidence": confidence is not None,
        "mask_token": token,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in stored,
        "lm_head": "own" if "lm_head.weight" in stored else "shared",
        **conv,
        **plan.decoder(source, "layers.0.", embeddings, sliding=True),
    }
    unread = {plan.OFFSETS, plan.KNOWN, *(NAMES[name] for name in filled if name in NAMES)} & stored.keys()
    return plan.TensorMapping("block", config, lambda name: NAMES.get(name, name), filled, unread, ids)


def engines(source: Export) -> ExportedHead:
    """Export the head for the format's engines, or for the requested engine; refuse unsupported options."""
    options, markov = source.config, source.config.markov_rank
    source.refuse(qk_norm=True)
    if source.head.vocab is None:
        source.refuse(lm_head="shared")
    elif source.format_name not in ("vllm", "gguf"):
        source.refuse(draft_vocab=None)
    if options.confidence and markov is None:
        raise source.refusal("confidence=true without a Markov term", "which is DSpark's; give head.markov_rank a rank")
    if markov is not None and not options.from_anchor:
        raise source.refusal("markov_rank with from_anchor=false", "and DSpark drafts from its anchor")
    if options.domino is not None and source.format_name != "sglang":
        raise source.refusal(
            f"domino={options.domino}", "which SGLang alone runs; export it with format=sglang, or leave format out"
        )
    if (options.conv is None) != (options.selector_rank is None):
        raise source.refusal(
            "one of conv and selector_rank", "and DFlash2 has both; train with head.conv=2 head.selector_rank=256"
        )
    if markov is None and options.domino is None and options.from_anchor:
        raise source.refusal(
            "from_anchor=true", "and DFlash drafts from its mask slots; train with head.from_anchor=false"
        )
    outputs, order = source.outputs()
    architectures = [DSPARK] if markov else [DFLASH2] if options.selector_rank else CLASS.architectures
    token, mask = (options.mask_token or 0) % source.embeddings.vocab_size, source.tensors["mask"]
    row = embedding_of(source.embeddings, torch.tensor(token)).to(mask.device, torch.float32)
    same = mask.is_meta or torch.allclose(mask.float(), row, rtol=ROUNDED, atol=1e-7)
    if options.mask_token is None or not same:
        what = "was trained" if options.mask_token is None else f"is not the target's embedding of token {token}"
        raise source.refusal(f"a mask slot that {what}", "and the format has the target's embedding of a token there")
    # vLLM drops the confidence head without the first key.
    confidence = dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), options.confidence)
    terms = {}
    if options.domino is not None:
        terms = {
            "projector_type": "domino", "pure_draft_prefix_len": 1, "shift_label": options.from_anchor,
            "gru_hidden_dim": options.domino, "emb_dim": options.domino_rank,
        }  # fmt: skip
    elif options.conv is not None:
        terms = {
            "conv_kernel_size": options.conv, "conv_group_size": options.conv_group,
            "selector_rank": options.selector_rank, "selector_top_k": options.selector_top_k,
        }  # fmt: skip
    config = source.engine_config(CLASS._replace(architectures=architectures), options.layers) | {
        "layer_types": ["full_attention"] * options.layers,
        "is_causal": options.causal,  # SGLang reads the sliding window only from here
        "block_size": source.head.size,
        "num_target_layers": source.embeddings.num_layers,  # read by lmdeploy and mlx-vlm
        "dflash_config": {
            "block_size": source.head.size,  # read by lmdeploy and onnxruntime-genai
            "mask_token_id": token,
            plan.BLOCK_OUTPUTS: outputs,
            "causal": options.causal,
            "sample_from_anchor": options.from_anchor,
            **terms,
        },
        **({} if options.domino is None else {"emb_dim": options.domino_rank}),
        **({} if markov is None else {"markov_rank": markov, "markov_head_type": "vanilla"} | confidence),
        **({} if source.head.vocab is None else {"draft_vocab_size": draft_size(source.head)}),
    }
    tensors = {NAMES.get(name, name): tensor for name, tensor in source.tensors.items() if name not in OURS}
    tensors["fc.weight"] = source.in_order(tensors["fc.weight"], order)
    if source.head.vocab is not None:
        tensors |= {"lm_head.weight": source.read_out("lm_head"), **source.vocabulary()}
    return ExportedHead(config, tensors)


def openvino(source: Export) -> ExportedHead:
    """Export a DFlash head for OpenVINO, whose masked positions all see each other; refuse later variants' options."""
    source.refuse(causal=False, markov_rank=None, selector_rank=None, conv=None)
    return engines(source)
