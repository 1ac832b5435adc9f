"""The model card of a published head: its results, its provenance, how to serve it, its limits.

Every number and name on it was recorded by the run, its head or its report; missing records are named as missing. The
text is README.jinja, which escapes by the functions of facts.py.

facts.py     the records that it is made of; names and values as text, not as markup
sections.py  the YAML that the Hub reads, results and plots, provenance
engines.py   how to serve it, engine by engine
"""

import json
import shlex
from functools import partial
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from train.release.card import engines, sections
from train.release.card.facts import Facts, block, bullets, code, escaped

__all__ = ["Facts", "card"]

TITLES = {
    "eagle": "An EAGLE head",
    "hass": "A HASS head",
    "eagle3": "An EAGLE-3 head",
    "peagle": "A P-EAGLE head",
    "medusa": "A Medusa head",
    "hydra": "A Hydra head",
    "mlp": "A recurrent MLP speculator",
    "mtp": "A multi-token-prediction (MTP) head",
    "block": "A block-parallel draft head",
}
TEMPLATE = Path(__file__).with_name("README.jinja")


def title_of(head: str) -> str:
    """Return the title of a head's kind, of an unlisted one made from its name."""
    return TITLES.get(head, f"A {head} head")


def card(facts: Facts) -> dict[str, str | bytes]:
    """Return README.md with its YAML metadata, and the plots that it shows, by the names of their files."""
    pictures = sections.pictures_of(facts)
    rows = [result.row for result in facts.mine]
    environment = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    quoted = partial(json.dumps, ensure_ascii=False)  # as Python writes a text, in one line
    environment.filters |= {"shell": shlex.quote, "quoted": quoted, "bullets": bullets}
    environment.filters |= {"block": block, "code": code, "escaped": escaped}
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        facts=facts,
        repo=facts.publish.repo,
        form=facts.publish.format,
        metadata=sections.metadata(facts).to_yaml(),
        title=title_of(facts.kind),
        results=sections.table(facts),
        conditions=sections.conditions(facts.report),
        pictures=pictures,
        warning=engines.misleading(facts.publish.repo, facts.kind),
        engines=list(engines.serving(facts)),
        origin=sections.origin(facts),
        rows=rows,
        trees=[row["tree"] for row in rows if not row["tree"].startswith("chain")],
    )
    return {"README.md": text, **{name: picture.png for name, picture in pictures.items()}}
