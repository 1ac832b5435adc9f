"""Imports run one way: heads <- inference <- data <- eval <- train."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ["heads", "inference", "data", "eval", "train"]
OUTSIDE = {"tests", "examples", "benchmarks", "conf"}  # folders that no package may lean on


def imported(source: str) -> list[str]:
    """Return the top-level packages that a source imports, wherever in it the import stands."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return [name.split(".")[0] for name in names]


def backwards(layer: str, source: str) -> list[str]:
    """Return what a file of `layer` imports but must not."""
    above = set(LAYERS[LAYERS.index(layer) + 1 :]) | OUTSIDE
    return [name for name in imported(source) if name in above]


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_run_one_way(layer: str) -> None:
    files = sorted((ROOT / layer).rglob("*.py"))
    assert files, f"{layer}/ holds no Python file"
    found = {str(file.relative_to(ROOT)): backwards(layer, file.read_text(encoding="utf-8")) for file in files}
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("layer", "source", "names"),
    [
        ("heads", "import inference.tree", ["inference"]),
        ("data", "def f():\n    from train.loop import step", ["train"]),
        ("inference", "if TYPE_CHECKING:\n    from data.prompts import Sample", ["data"]),
        ("eval", "from tests.toy import target", ["tests"]),
        ("eval", "import torch\nfrom heads import HEADS\nfrom eval.metrics import tau\nimport dataclasses", []),
    ],
)
def test_a_backward_import_is_seen(layer: str, source: str, names: list[str]) -> None:
    assert backwards(layer, source) == names
