"""Checks that a head is one of this target: sizes, weights, tokenizer and chat template."""

from typing import Any

from data.text.template import template_sha256
from heads.formats.store import MUST_AGREE, QUANTISED
from train.release.doctor.against import Against
from train.release.doctor.examined import OWN, Examined
from train.release.doctor.finding import Findings, ok, unknown, wrong

TEMPLATE = "chat_template_sha256"  # of provenance.json and tokenizer_reference.json
OTHER = "give the head's own target with target=…, or train a head for this one"
NOTHING = "it drafts from features that mean something else: next to nothing is accepted"


def target(head: Examined, against: Against) -> Findings:
    """Whether the sizes and the fingerprint are the target's."""
    metadata = head.part("target") if head.form == OWN else _reported(head)
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
        yield wrong(
            f"made for the weights of {name}, {fingerprint}, "
            f"and those of {against.path} are {against.spec.fingerprint}",
            NOTHING,
            OTHER,
        )
    elif not odd:
        yield ok(f"{against.path}, by its fingerprint")


def _reported(head: Examined) -> dict[str, Any]:
    """Return the target's metadata in the report beside a foreign head."""
    metadata = head.report.get("target")
    return metadata if isinstance(metadata, dict) else {}


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
