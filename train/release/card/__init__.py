"""The model card of a published head: its results, its provenance, how to serve it, its limits.

Every number and name on it was recorded by the run, its head or its report; missing records are named as missing.

facts.py     the records that it is made of
metadata.py  the YAML that the Hub reads
measured.py  the table of results
plots.py     plots as pictures
engines.py   how to serve it, engine by engine
origin.py    provenance of target, data and weights
limits.py    limits of the numbers
text.py      names and values as text, not as markup
"""

from typing import Any

from train.release.card import engines, limits, measured, metadata, origin, plots
from train.release.card.facts import Facts
from train.release.card.text import bullets, code, escaped

__all__ = ["Facts", "card"]

TITLES = {
    "eagle": "An EAGLE head",
    "hass": "A HASS head",
    "eagle3": "An EAGLE-3 head",
    "medusa": "A Medusa head",
    "hydra": "A Hydra head",
    "mlp": "A recurrent MLP speculator",
    "mtp": "A multi-token-prediction (MTP) head",
    "block": "A block-parallel draft head",
}
INTRO = """\
It drafts tokens for {base}, which verifies them: speculative decoding, whose output is the target's own. Trained with
headstart."""


def title_of(head: str) -> str:
    """Return the title of a head's kind, of an unlisted one made from its name."""
    return TITLES.get(head, f"A {head} head")


def card(facts: Facts) -> dict[str, str | bytes]:
    """Return README.md with its YAML metadata, and the plots that it shows, by the names of their files."""
    pictures = plots.pictures_of(facts)
    head = facts.config["head"]
    about: dict[str, Any] = {"head": head, "tree": facts.config["tree"]}
    sections = {
        "What it is": "\n".join(bullets(about)),
        "Measured": measured.section(facts.report, {name: plot.caption for name, plot in pictures.items()}),
        "Serve it": engines.section(facts),
        "Where it comes from": origin.section(facts),
        "Provenance": "\n".join(bullets(facts.provenance)) or "Not recorded.",
        "Limits": limits.section(facts),
    }
    title = f"# {title_of(head['name'])} for {escaped(facts.base)}\n\n{INTRO.format(base=code(facts.base))}"
    body = "\n\n".join(f"## {name}\n\n{text}" for name, text in sections.items())
    return {
        "README.md": f"---\n{metadata.of(facts).to_yaml()}\n---\n\n{title}\n\n{body}\n",
        **{name: plot.png for name, plot in pictures.items()},
    }
