"""Imports run one way: heads <- inference <- data <- eval <- train <- ops, and so between the folders of a package."""

import ast
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ["heads", "inference", "data", "eval", "train", "ops"]
MOST = 20  # modules in a folder, besides its sub-folders
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


def test_imports_run_one_way() -> None:
    files = [(layer, file) for layer in LAYERS for file in sorted((ROOT / layer).rglob("*.py"))]
    assert {layer for layer, _ in files} == set(LAYERS), "a folder holds no Python file"
    found = {str(file.relative_to(ROOT)): backwards(layer, file.read_text(encoding="utf-8")) for layer, file in files}
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("layer", "source", "names"),
    [
        ("heads", "import inference.tree", ["inference"]),
        ("data", "def f():\n    from train.loop import step", ["train"]),
        ("eval", "from tests.toy import target", ["tests"]),
        ("eval", "import torch\nfrom heads import HEADS\nfrom eval.metrics import tau\nimport dataclasses", []),
    ],
)
def test_a_backward_import_is_seen(layer: str, source: str, names: list[str]) -> None:
    assert backwards(layer, source) == names


def modules() -> dict[str, Path]:
    """Return the file of every module, by its dotted name; a package's is its __init__."""
    files = [file.relative_to(ROOT) for layer in LAYERS for file in sorted((ROOT / layer).rglob("*.py"))]
    return {".".join(file.with_suffix("").parts).removesuffix(".__init__"): ROOT / file for file in files}


def imports(source: str, known: Iterable[str]) -> set[str]:
    """Return the modules among the known ones that a source imports, wherever in it the import stands."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (inner & set(known)) or {node.module}
            names |= {node.module} if inner - set(known) else set()
    return names & set(known)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return names that import each other in a circle, none if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def contracted(graph: dict[str, set[str]], folder: str) -> dict[str, set[str]]:
    """Return the graph of what lies in a folder: its files, and each of its sub-folders as one."""

    def name(module: str) -> str:
        return ".".join(module.split(".")[: folder.count(".") + 2])

    found: dict[str, set[str]] = {}
    for module, others in graph.items():
        if module.startswith(f"{folder}."):
            inner = {name(other) for other in others if other.startswith(f"{folder}.")}
            found.setdefault(name(module), set()).update(inner - {name(module)})
    return found


FILES = modules()
PACKAGES = sorted(name for name, file in FILES.items() if file.name == "__init__.py")


def test_no_files_and_no_folders_import_each_other() -> None:
    graph = {name: imports(file.read_text(encoding="utf-8"), FILES) - {name} for name, file in FILES.items()}
    assert circle(graph) == []
    assert not any(circle(contracted(graph, package)) for package in PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_small_and_lists_its_files(package: str) -> None:
    folder = FILES[package].parent
    files = {file.name for file in folder.glob("*.py")} - {"__init__.py"}
    assert len(files) <= MOST
    described = ast.get_docstring(ast.parse(FILES[package].read_text(encoding="utf-8"))) or ""
    first = [line.split()[0] for line in described.splitlines() if line.split()]
    listed = {word for word in first if word.endswith((".py", "/"))}
    assert listed == files | {f"{file.parent.name}/" for file in folder.glob("*/__init__.py")}


def test_circles_are_seen() -> None:
    known = ["eval.a.one", "eval.b.two", "eval.c"]
    sources = {"eval.a.one": "from eval.b import two", "eval.b.two": "def f():\n    from eval import c", "eval.c": ""}
    graph = {name: imports(source, known) for name, source in sources.items()}
    assert circle(graph) == []
    graph["eval.c"] = imports("if TYPE_CHECKING:\n    from eval.a.one import thing", known)
    assert sorted(set(circle(graph))) == known
    apart = {"eval.a.one": {"eval.b.two"}, "eval.b.three": {"eval.a.four"}, "eval.b.two": set(), "eval.a.four": set()}
    assert circle(apart) == []
    assert sorted(set(circle(contracted(apart, "eval")))) == ["eval.a", "eval.b"]
