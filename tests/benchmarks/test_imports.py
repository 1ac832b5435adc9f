"""Every benchmark imports and calls what is there, and the planted bugs are still where they were planted."""

import ast
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.planted import BUGS, Bug

ROOT = Path(__file__).parents[2]
OURS = ("heads", "inference", "data", "eval", "train", "ops", "tests", "benchmarks")
FILES = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("file", FILES)
def test_what_a_benchmark_imports_is_there(file: str) -> None:
    tree, imported = ast.parse((ROOT / file).read_text(encoding="utf-8")), dict[str, Any]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in OURS:
            module = import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name) or import_module(f"{node.module}.{name.name}"), name.name
                imported[name.asname or name.name] = getattr(module, name.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = imported.get(node.value.id)
            assert not isinstance(module, ModuleType) or hasattr(module, node.attr), ast.unparse(node)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.file}:{bug.right[:30]}")
def test_a_bugs_place_stands_once_and_its_tests_exist(bug: Bug) -> None:
    assert (ROOT / bug.file).read_text(encoding="utf-8").count(bug.right) == 1
    assert bug.wrong != bug.right
    assert all((ROOT / path.partition("::")[0]).is_file() for path in bug.tests)
