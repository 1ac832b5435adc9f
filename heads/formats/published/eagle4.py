"""EAGLE-4 in the format of its engine plug-ins (eagle-harness 0.1.3) and of NeMo Automodel's export.

The format has EAGLE-3.1's tensors of one layer under `layers.0`, the target's embedding, and the candidates' two
factors. The plug-ins refuse unknown keys and tensors, several layers, and a draft vocabulary. Other engines get the
head without its factors: an EAGLE-3.1 head that drafts over the whole vocabulary.
"""

from heads.base import Embeddings, draft_size, embedding_of
from heads.formats.published import eagle3
from heads.formats.published.exporting import EngineClass, Export, ExportedHead
from heads.formats.published.plan import EMBEDDING, STATES, PublishedHead, TensorMapping

UP, DOWN = "efficient_lm_head.weight", "efficient_lm_head_down_proj.weight"
OURS = {"lm_head.candidate_up.weight": UP, "lm_head.candidate_down.weight": DOWN}
SIGNATURE = (*eagle3.SIGNATURE, r"efficient_lm_head\.weight")
CLASS = EngineClass(["LlamaForCausalLMEagle4"], "llama", {})


def read(source: PublishedHead, embeddings: Embeddings) -> TensorMapping:
    """Return the mapping of the format's tensors."""
    plan = eagle3.read(source, embeddings, sliding=True)
    chosen = source.config.get("efficient_lm_head_config") or {}
    if chosen.get("type", "low_rank") != "low_rank":
        raise source.refusal(f"candidates of another kind (efficient_lm_head_config.type={chosen['type']})")
    config = {
        **plan.config,
        "candidates": chosen.get("num_candidates"),
        "candidate_rank": source.tensor(UP).shape[1],
    }
    return plan._replace(head="eagle4", config=config, rename=lambda name: OURS.get(name) or plan.rename(name))


def engines(source: Export) -> ExportedHead:
    """Export the head for the plug-ins."""
    options = source.config
    source.refuse(
        layers=1, kv_injection=False, qk_norm=False, norm_before_residual=False, joint_norm=False, draft_vocab=None
    )
    if options.candidates is None:
        raise source.refusal("no candidates", "which the plug-ins need; train them with experiment=candidates")
    _, tensors = eagle3.engines(source._replace(format_name="sglang"))
    outputs, _ = source.outputs()
    window = {} if options.length is None else {"sliding_window": options.length}
    config = source.engine_config(CLASS, 1) | window | {
        "draft_vocab_size": draft_size(source.head), "target_hidden_size": source.embeddings.hidden_size,
        "num_aux_hidden_states": len(outputs), "fc_norm": options.feature_norm, "norm_output": options.norm_output,
        "eagle_config": {"use_aux_hidden_state": True, STATES: outputs},
        "use_sliding_window": bool(window), "layer_types": ["sliding_attention" if window else "full_attention"],
        "efficient_lm_head_config": {
            "type": "low_rank", "rank": options.candidate_rank, "num_candidates": options.candidates,
        },
    }  # fmt: skip
    ours = source.head.state_dict()
    factors = {theirs: ours[name] for name, theirs in OURS.items()}
    return ExportedHead(config, tensors | factors | {EMBEDDING: embedding_of(source.embeddings)})
