"""Names and docstrings use the field's terms (docs/glossary.md); private words and names without meaning stay out."""

import ast
import io
import keyword
import re
import tokenize
from collections.abc import Callable, Iterator
from functools import cache

from tests.test_rules import PRODUCT, ROOT, name

# Parts of a name that say less than the term beside them.
IDENTIFIERS = {
    "law": "probs, p or q", "laws": "probs", "likeliest": "argmax or top_k", "drawn": "sampled", "settled": "committed",
    "rider": "look_ahead", "riders": "look_ahead", "readout": "lm_head", "bare": "embeddings_only", "told": "record",
    "tally": "statistics", "heading": "metadata", "ladder": "speedup_breakdown", "rung": "stage", "rungs": "stages",
    "twin": "clone", "twins": "clones", "follower": "runner", "carried": "adapter", "lineage": "ancestors",
    "judge": "evaluator", "keeper": "writer", "remade": "recomputed", "mend": "fix", "place": "index, slot or device",
    "places": "indices", "spread": "scatter or interval", "forget": "reset", "observe": "update", "race": "scores",
    "coin": "uniform number", "coins": "uniforms",
}  # fmt: skip
# Variables that do not say what they hold.
MEANINGLESS = {"each", "found", "place", "told", "made", "part", "own", "known", "said", "wanted", "kept", "asked"}
# In docstrings and comments outside of code, those of the words above that are no ordinary English there.
PROSE = re.compile(r"\b(laws?|likeliest|riders?|twins?|lineage|tally|ladder|rungs?|plain decoding)\b", re.I)


@cache
def parts(identifier: str) -> list[str]:
    """Return the words of a name in snake_case or CamelCase."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", identifier).lower().split("_")


@cache
def read(source: str) -> tuple[list[tokenize.TokenInfo], ast.Module]:
    """Return the tokens of a source, and its tree."""
    return list(tokenize.generate_tokens(io.StringIO(source).readline)), ast.parse(source)


def banned(source: str) -> Iterator[str]:
    """Yield what is wrong with the names of a source, with its line."""
    tokens, tree = read(source)
    for token in tokens:
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            for word in parts(token.string):
                if word in IDENTIFIERS:
                    yield f"{token.start[0]}: {token.string}: say {IDENTIFIERS[word]}"
    classes = [item for item in ast.walk(tree) if isinstance(item, ast.ClassDef)]
    # These may be keys of a file.
    fields = {field.target for item in classes for field in item.body if isinstance(field, ast.AnnAssign)}
    for node in ast.walk(tree):
        if node in fields:
            continue
        bound = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
        if (bound := node.arg if isinstance(node, ast.arg) else bound) in MEANINGLESS:
            yield f"{getattr(node, 'lineno', 0)}: {bound}: say what it holds"


def prose(source: str) -> Iterator[str]:
    """Yield the private words in a source's docstrings and comments."""
    tokens, tree = read(source)
    texts = [token.string for token in tokens if token.type == tokenize.COMMENT]
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    for text in [*texts, *(ast.get_docstring(node) or "" for node in nodes)]:
        for word in PROSE.finditer(re.sub("`.*?`", "", text)):
            yield f"{word[0]}: {' '.join(text.split())[:60]!r}"


def in_product(check: Callable[[str], Iterator[str]]) -> dict[str, list[str]]:
    """Return what a check finds in each file of the product."""
    seen = {name(file): list(check(file.read_text(encoding="utf-8"))) for file in PRODUCT}
    return {file: lines for file, lines in seen.items() if lines}


def test_names_docstrings_and_comments_use_the_fields_terms() -> None:
    assert in_product(banned) == {}
    assert in_product(prose) == {}


def test_planted_words_are_seen() -> None:
    source = 'class TopLaw:\n    """The target\'s law."""\n\ndef f(found: int) -> None:\n    made = told_of(found)\n'
    assert [line.split(":")[1].strip() for line in banned(source)] == ["TopLaw", "told_of", "found", "made"]
    assert len(list(prose(source))) == 1
    assert list(banned("def placement(layer_kept: int) -> None:\n    foundation = 1\n")) == []
    assert not (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").count("plain decoding")
