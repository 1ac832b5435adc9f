"""Checks of the draft's vocabulary, of its lm_head, and of copies of the target's embedding."""

from typing import Any

import torch
from torch import Tensor

from heads.formats.published.written import KNOWN, OFFSETS
from heads.formats.store import CONFIG, WEIGHTS
from train.release.doctor.against import Against
from train.release.doctor.examined import OWN, Examined
from train.release.doctor.finding import WRONG, Findings, ok, unknown, wrong

LM_HEAD, IDS = "lm_head.weight", "vocab.ids"
PRUNED = ("eagle3", "dflash")
TELLING = 64  # numbers that all increase are ids, for offsets stay equal over tokens with neighbouring ids
WRONG_TOKENS = "every draft is another token than the head means: nothing is accepted, without an error"


def vocabulary(head: Examined, against: Against) -> Findings:
    """Whether the drafted tokens are tokens of the target, and the maps between both vocabularies agree."""
    full = against.vocabulary
    if head.form == OWN:
        ids = head.tensors.get(IDS)
        if ids is None:
            yield ok(f"all {full} tokens")
        elif not bool((ids.diff() > 0).all()) or int(ids.min()) < 0 or int(ids.max()) >= full:
            yield wrong(
                f"{IDS} does not increase from 0 to {full - 1}", WRONG_TOKENS, "train again, or from a checkpoint"
            )
        else:
            yield ok(f"{len(ids)} of {full} tokens")
        return
    if head.form not in PRUNED:
        yield ok(f"all {full} tokens")
        return
    declared, offset, mask = head.layer.get("draft_vocab_size"), head.stripped.get(OFFSETS), head.stripped.get(KNOWN)
    if head.form == "eagle3" and "draft_vocab_size" not in head.config:
        yield wrong(
            f"{CONFIG} has no draft_vocab_size",
            "SGLang stops with an AttributeError, TensorRT-LLM does not take it for EAGLE-3",
            f'set "draft_vocab_size": {full if offset is None else len(offset)} in {CONFIG}',
            "sglang", "trtllm",
        )  # fmt: skip
    silent = full if offset is None else len(offset)
    size = declared if isinstance(declared, int) else silent if "draft_vocab_size" not in head.layer else full
    if offset is None:
        if size < full:
            yield wrong(
                f"draft_vocab_size is {size} of {full} and there is no {OFFSETS}",
                f"vLLM takes the first {size} tokens for the drafted ones: {WRONG_TOKENS}",
                f"add {OFFSETS}, int64 ({size},): of each drafted token its id less its index",
            )
        else:
            yield ok(f"all {full} tokens")
        return
    maps = _maps(offset.long(), mask, size, full)
    yield from maps if "draft_vocab_size" in head.layer else (finding for finding in maps if finding.verdict == WRONG)


def _maps(offset: Tensor, mask: Tensor | None, size: int, full: int) -> Findings:
    """Check the offsets, and the mask beside them."""
    slot = torch.arange(len(offset))
    ids = slot + offset
    if size >= full and len(offset) >= full:
        yield wrong(
            f"{OFFSETS} is there though all {full} tokens are drafted",
            "vLLM refuses the head (ValueError)",
            f"remove {OFFSETS} and {KNOWN} from {WEIGHTS}",
            "vllm",
        )
    elif len(offset) != size:
        yield wrong(
            f"{OFFSETS} has {len(offset)} entries and draft_vocab_size is {size}",
            "engines stop at its shape",
            f'set "draft_vocab_size": {len(offset)} in {CONFIG}, if lm_head has as many rows',
        )
    elif _absolute(offset, mask, full):
        yield wrong(
            f"{OFFSETS} holds the tokens' ids themselves, not their offsets",
            f"every engine adds the index to it, so that {WRONG_TOKENS}",
            f"subtract torch.arange({len(offset)}) from {OFFSETS} in {WEIGHTS}",
        )
    elif not bool((ids.diff() > 0).all()) or int(ids.min()) < 0 or int(ids.max()) >= full:
        yield wrong(
            f"{OFFSETS} leads to ids that do not increase from 0 to {full - 1}",
            f"engines draft tokens twice or none of the target's, and stop or gather out of bounds; {WRONG_TOKENS}",
            f"write {OFFSETS} again: entry i is the id of drafted token i less i, in the order of lm_head's rows",
        )
    elif mask is not None and not _same(ids, mask, full):
        yield wrong(
            f"{KNOWN} does not name the tokens that {OFFSETS} leads to",
            "speculators and trainers that go on with it drop other tokens than the head drafts",
            f"write {KNOWN} again: true at the {len(ids)} ids, {full} entries",
            "speculators",
        )
    else:
        yield ok(f"{len(ids)} of {full} tokens, by offsets that increase")


def _absolute(offset: Tensor, mask: Tensor | None, full: int) -> bool:
    """Say whether these are ids: increasing, of the vocabulary, and by the mask or by their range no offsets."""
    if not len(offset) or not bool((offset.diff() > 0).all()) or int(offset.min()) < 0 or int(offset.max()) >= full:
        return False
    if mask is not None and len(mask) == full:
        return _same(offset, mask, full)
    return int(offset[-1]) + len(offset) - 1 >= full or len(offset) >= TELLING


def _same(ids: Tensor, mask: Tensor, full: int) -> bool:
    return len(mask) == full and torch.equal(mask.bool().nonzero()[:, 0], ids)


def lm_head(head: Examined, against: Against) -> Findings:
    """Whether the lm_head that an engine uses is the one that was trained."""
    weight, full = head.stripped.get(LM_HEAD), against.vocabulary
    faulty = False
    if head.form in PRUNED and head.config.get("tie_word_embeddings"):
        faulty = True
        yield wrong(
            "tie_word_embeddings is true",
            "SGLang puts the embedding in the lm_head's place: nothing is accepted, or it stops at the shape",
            f'set "tie_word_embeddings": false in {CONFIG}',
            "sglang",
        )
    if head.form == "eagle" and weight is not None and head.architectures:
        faulty = True
        yield wrong(
            f"{LM_HEAD} is there, and EAGLE-1 has none",
            "vLLM refuses the head (ValueError), SGLang takes the target's in its place",
            f"remove {LM_HEAD} from {WEIGHTS}; where it was trained, train with head.lm_head=shared",
            "vllm", "sglang",
        )  # fmt: skip
    if head.form == "eagle3":
        fault = list(_of_eagle3(weight, head.layer.get("draft_vocab_size"), full, OFFSETS in head.stripped))
        faulty = faulty or bool(fault)
        yield from fault
    if not faulty:
        yield ok("the target's" if weight is None else "its own")


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
    shipped = {name: tensor for name, tensor in head.tensors.items() if name.endswith("embed_tokens.weight")}
    if not shipped:
        yield ok("none is shipped; engines take the target's")
        return
    if against.embeddings is None:
        yield unknown(f"the target's weights do not load here ({against.why})")
        return
    table = against.embeddings.head_weight()
    every = torch.arange(against.embeddings.vocab_size, device=table.device)
    target = against.embeddings.embed(every).detach().float().cpu()
    for name, tensor in shipped.items():
        if tensor.shape != target.shape:
            yield wrong(
                f"{name} is {tuple(tensor.shape)}, the target's {tuple(target.shape)}",
                "engines stop at its shape",
                f"remove {name} from {WEIGHTS}: engines take the target's; is this its target?",
            )
        elif not torch.allclose(tensor.float(), target, rtol=2e-2, atol=2e-2 * float(target.std())):
            yield wrong(
                f"{name} is not the target's embedding",
                "vLLM keeps it and drafts from it, SGLang takes the target's: fine in the one, nothing accepted in the "
                "other",
                f"remove {name} from {WEIGHTS}: engines take the target's",
                "vllm",
            )
        else:
            yield ok(f"{name} is the target's")
