"""The design's rules that no linter knows."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from heads import rows
from tests import shapes

ROOT = Path(__file__).parents[1]
PACKAGES = shapes.PACKAGES
FOLDERS = [*PACKAGES, "conf", "tests", "examples", "benchmarks"]
SOURCES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
PRODUCT = [file for file in SOURCES if file.relative_to(ROOT).parts[0] in PACKAGES]
# Whole configurations are seen where they are composed; everything else takes the part that it needs.
WHOLE = {
    "RunConfig": {"train/run.py", "train/build.py", "train/config.py", "train/plan.py", "train/resolve.py", "ops/"},
    "EvalConfig": {"eval/run.py", "eval/setup.py", "eval/config.py"},
}
# Names of the standard library that the oldest supported Python, 3.10, does not have.
NEWER = {
    "typing": {"Self", "Never", "LiteralString", "Required", "NotRequired", "Unpack", "assert_never", "override"},
    "contextlib": {"chdir"}, "datetime": {"UTC"}, "enum": {"StrEnum"}, "hashlib": {"file_digest"},
    "itertools": {"batched"},
}  # fmt: skip
YAMLS = sorted((ROOT / "conf").rglob("*.yaml"))
SILENCERS = re.compile(r"noqa|type:\s*ignore|(mypy|ruff|pylint|pyright|isort):|pragma:")


def name(file: Path) -> str:
    """Return a file's path in the checkout."""
    return str(file.relative_to(ROOT))


tree = functools.cache(ast.parse)


def silencers(source: str) -> list[str]:
    """Return the comments that silence a tool; text in strings is none."""
    if not SILENCERS.search(source):  # which is much faster
        return []
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT and SILENCERS.search(token.string)]


def defaults(source: str) -> list[str]:
    """Return the fields with a default value in dataclasses whose values belong in YAML: those named …Config."""
    found = []
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and item.value is not None]
            found += [f"{node.name}.{ast.unparse(item.target)}" for item in fields]
    return found


def names(source: str) -> set[str]:
    """Return the names that a source reads or writes."""
    return {node.id for node in ast.walk(tree(source)) if isinstance(node, ast.Name)}


def set_outside(source: str, attribute: str) -> list[str]:
    """Return the functions that assign an attribute, other than constructors."""
    found = []
    for function in ast.walk(tree(source)):
        if isinstance(function, ast.FunctionDef) and function.name != "__init__":
            stored = (node for node in ast.walk(function) if isinstance(node, ast.Attribute))
            if any(node.attr == attribute and isinstance(node.ctx, ast.Store) for node in stored):
                found.append(function.name)
    return found


def asked_names(source: str) -> list[str]:
    """Return the comparisons with a head's name."""
    return [
        ast.unparse(side)
        for node in ast.walk(tree(source))
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq)
        for side in [node.left, *node.comparators]
        if re.search(r"head(\.config)?\.name$", ast.unparse(side))
    ]


def miscalls(source: str) -> list[str]:
    """Return calls of imported functions of ours with other arguments than they take; a starred one may give any."""
    ours: dict[str, ast.arguments] = {}
    for node in ast.walk(tree(source)):
        file = ROOT / f"{str(getattr(node, 'module', None)).replace('.', '/')}.py"
        if isinstance(node, ast.ImportFrom) and file.is_file():
            made = {item.name: item for item in tree(file.read_text()).body if isinstance(item, ast.FunctionDef)}
            known = [alias for alias in node.names if alias.name in made and not made[alias.name].decorator_list]
            ours |= {alias.asname or alias.name: made[alias.name].args for alias in known}
    found = []
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ours:
            takes, named = ours[node.func.id], {word.arg for word in node.keywords}
            places = [item.arg for item in takes.posonlyargs + takes.args]
            given = {*places[: len(node.args)], *named}
            needed = {*places[: len(places) - len(takes.defaults)]}
            needed |= {item.arg for item, value in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if not value}
            unknown = named - {*places, *(item.arg for item in takes.kwonlyargs)}
            surplus = (len(node.args) > len(places) and not takes.vararg) or (unknown and not takes.kwarg)
            starred = None in named or any(isinstance(item, ast.Starred) for item in node.args)
            if not starred and (needed - given or surplus):
                found.append(ast.unparse(node))
    return found


def violations(files: list[Path], rule: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Return what breaks a rule, by file."""
    assert files
    return {name(file): found for file in files if (found := rule(file.read_text(encoding="utf-8")))}


def test_no_file_is_long() -> None:
    assert violations(SOURCES, lambda source: source.splitlines()[800:]) == {}


def test_the_oldest_python_has_the_names_that_are_imported() -> None:
    imports = [(file, node) for file in SOURCES for node in ast.walk(tree(file.read_text(encoding="utf-8")))]
    assert [
        f"{name(file)}: {node.module}.{alias.name}"
        for file, node in imports
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in NEWER.get(str(node.module), ())
    ] == []


def test_nothing_silences_a_tool() -> None:
    assert violations(SOURCES, silencers) == {}
    silent = "x = 1  # no" + "qa: E501\ny = 2  # type:" + " ignore[arg-type]\n"
    assert len(silencers(silent)) == 2
    assert silencers('text = "# type:' + ' ignore"  # a string\n') == []


def test_calls_give_what_functions_take() -> None:
    """In files that mypy leaves out, some of which `make test` does not run."""
    imported = "from heads.rows import shift_left as moved\n"
    assert miscalls(f"{imported}moved(x)\nmoved(x, 1, 2)\nmoved(x, number=1)") == [
        "moved(x)", "moved(x, 1, 2)", "moved(x, number=1)"
    ]  # fmt: skip
    assert miscalls(f"{imported}moved(*x)\nmoved(x, count=1)") == []
    assert violations([file for file in SOURCES if file not in PRODUCT], miscalls) == {}


def test_a_config_has_types_and_no_values() -> None:
    assert violations(PRODUCT, defaults) == {}
    assert defaults("class AConfig:\n    x: int = 1\n    y: int\n") == ["AConfig.x"]
    assert defaults("class Settings:\n    x: int = 1\n") == []


def test_a_whole_configuration_stays_where_it_is_composed() -> None:
    for whole, places in WHOLE.items():
        seen = violations(PRODUCT, lambda source, whole=whole: sorted({whole} & names(source)))
        assert seen, f"no file names {whole}"
        assert [file for file in seen if not any(file.startswith(place) for place in places)] == [], whole


def test_the_layers_that_a_head_reads_are_set_where_it_is_made() -> None:
    assert violations(PRODUCT, lambda source: set_outside(source, "feature_layers")) == {}
    source = "class A:\n    def __init__(self):\n        self.x = 1\n    def f(self, a):\n        a.x, b = 2, self.x\n"
    assert set_outside(source, "x") == ["f"]
    assert set_outside(source, "b") == []


def test_yaml_names_no_code() -> None:
    assert violations(YAMLS, lambda source: re.findall("_target_", source)) == {}


def test_nobody_asks_which_head_it_is() -> None:
    assert violations(PRODUCT, asked_names) == {}
    assert asked_names('if x == head.config.name or y == heads.name:\n    z = head.name == "eagle"\n') == [
        "head.config.name",
        "head.name",
    ]


def test_shapes_are_found_wherever_a_signature_has_them() -> None:
    def listed(x: list[Float[Tensor, "n"]]) -> None: ...
    def optional(x: int, y: Float[Tensor, "n"] | None = None) -> None: ...
    def returned() -> tuple[int, Float[Tensor, "n"]]: ...
    def none(x: Tensor, y: list[int]) -> str: ...

    class Field(NamedTuple):
        x: Float[Tensor, "n"]

    made = [listed, optional, returned, classmethod(listed), staticmethod(listed), property(returned), Field]
    assert all(map(shapes.has_shapes, made))
    assert not any(map(shapes.has_shapes, [none, classmethod(none), property(none)]))


def test_the_first_calls_of_a_test_are_checked_and_some_of_the_others() -> None:
    checked: list[int] = []
    called = shapes.sampled(lambda _: None, checked.append)
    for call in range(1, 65):
        called(call)
    assert checked == [*range(1, 17), 32, 48, 64]


def test_shapes_are_executable() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        rows.positions(torch.zeros(3, dtype=torch.long))
