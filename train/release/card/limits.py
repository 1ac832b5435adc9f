"""The limits of a head's numbers."""

from collections.abc import Iterator

from train.release.card.facts import Facts
from train.release.card.measured import clocked

TARGET = "The head serves the one target named above: {checked}; engines do not check, and accept next to nothing then."
CHECKED = {
    True: "another vocabulary, width, depth or other weights are refused on loading",
    False: "headstart refuses another vocabulary or width on loading, and cannot tell other weights in this format",
}
WORKLOADS = (
    "The numbers hold for the named workloads, device and settings. Text unlike the training text is accepted less "
    "often, which costs speed; the verifier keeps the target's output what it was."
)
LENGTH = (
    "The head was trained to look back at {n} tokens, and headstart lets it see as many. Engines let it see all: "
    "beyond {n} tokens it may draft worse there than measured here."
)
CHAIN = (
    "vLLM drafts and verifies one chain. The rows above with another tree than a chain do not hold there: expect fewer "
    "tokens a pass."
)
COLD = "Not measured above temperature 0, where fewer drafts are accepted as a rule."
SINGLE = "Not measured in batches: with many sequences in a pass a draft is worth less."
OWN_FORM = "The files are in headstart's own layout. Serving engines need an export (format=… of train/publish.py)."
FOREIGN = "The files are as format={form} has them; headstart reads them too, where a tree is given (tree=chain)."
EMBEDDINGS = (
    "The head reads the target's embedding and lm_head, {held}: the target's licence applies to them, and to any text "
    "that the target wrote for the training."
)
HELD = {True: "which are not in this repository", False: "of which this repository may hold a copy"}  # in our own form


def section(facts: Facts) -> str:
    """Return the limits as a list."""
    return "\n".join(f"- {line}" for line in _lines(facts))


def _lines(facts: Facts) -> Iterator[str]:
    rows = [row for row in clocked(facts.report) if facts.has_drafter(row["drafter"])]
    yield TARGET.format(checked=CHECKED[facts.form is None])
    yield WORKLOADS
    if facts.config["head"].get("length"):
        yield LENGTH.format(n=facts.config["head"]["length"])
    if any(not row["tree"].startswith("chain") for row in rows):
        yield CHAIN
    if rows and not any(row["temperature"] > 0 for row in rows):
        yield COLD
    if rows and not any(row["batch_size"] > 1 for row in rows):
        yield SINGLE
    yield OWN_FORM if facts.form is None else FOREIGN.format(form=facts.form)
    yield EMBEDDINGS.format(held=HELD[facts.form is None])
