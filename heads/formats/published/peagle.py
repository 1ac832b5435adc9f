"""P-EAGLE: EAGLE-3's tensors, `mask_hidden` for its masked positions, and an embedding if it was trained.

vLLM and speculators read it. speculators also trains the embedding, which engines then read from the head's file.
"""

import logging

import torch

from heads.base import Embeddings, embedding_of
from heads.formats.published import eagle3
from heads.formats.published.exporting import Export, ExportedHead
from heads.formats.published.plan import EMBEDDING, PublishedHead, TensorMapping
from heads.formats.store import RETIRED

log = logging.getLogger(__name__)

MASK, OWN = "mask_hidden", "embedding.weight"  # the second is our name of EMBEDDING
SIGNATURE = (*eagle3.SIGNATURE, MASK)
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")  # keys of config.json, in speculators and elsewhere
DEPTHS = 8  # drafted tokens in training by speculators, if the file gives no number


def read(source: PublishedHead, embeddings: Embeddings) -> TensorMapping:
    """Return the mapping of the format's tensors."""
    plan = eagle3.read(source, embeddings)
    token = next((source.config[key] for key in MASK_TOKENS if source.config.get(key) is not None), None)
    filled, kind = {MASK: source.tensor(MASK).reshape(-1, embeddings.hidden_size)}, "shared"
    table = embedding_of(embeddings)
    for name, stored in source.tensors.items():  # a tensor of another shape is refused later
        if name.endswith(EMBEDDING) and stored.shape == table.shape and not torch.equal(table.to(stored), stored):
            filled[OWN], kind = stored, "own"
    of_eagle3 = {key: value for key, value in plan.config.items() if key not in RETIRED["peagle"]}
    methods = (source.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    depths = methods[0].get("speculative_tokens")
    if depths is None:
        log.warning("%s: config.json does not say how many tokens are drafted; %d is taken", source.folder, DEPTHS)
    config = {
        **of_eagle3,
        "depths": (DEPTHS if depths is None else depths),
        "mask_token": source.mask_token(token, embeddings),
        "embedding": kind,
    }
    return plan._replace(head="peagle", config=config, filled=filled, unread=plan.unread | {MASK})


def engines(source: Export) -> ExportedHead:
    """Export the head for vLLM and speculators."""
    config, tensors = eagle3.engines(source)
    _, order = source.outputs()
    tensors[MASK] = source.in_order(tensors[MASK].reshape(1, 1, -1), order)
    if OWN in tensors:
        tensors[EMBEDDING] = tensors.pop(OWN)
    proposal = config["speculators_config"]
    methods = [method | {"speculative_tokens": source.head.max_depth} for method in proposal["proposal_methods"]]
    kind = {
        "parallel_drafting": True,
        "mask_token_id": source.head.mask_token,
        "speculators_model_type": "peagle",
        "speculators_config": proposal | {"algorithm": "peagle", "proposal_methods": methods},
    }
    return ExportedHead(config | kind, tensors)
