"""The folder that transformers runs a head from: headstart's own modules, cut down to what the head uses.

transformers takes the entry and the files beside it that relative imports name, so the folder is flat and every import
of ours becomes one of a sibling. Of a module stay the statements that the entry leads to, as they stand in the source.
Annotations are not evaluated there: jaxtyping's shapes stay readable and need no jaxtyping. There is no
requirements.txt: transformers checks it whenever anything loads the folder with trust_remote_code, converters too.
"""

import ast
import importlib.util
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from heads import HEADS
from heads.formats.published import FORMATS

FOLDER = "custom_generate"
PACKAGE = __name__.rpartition(".")[0]
HEADS_PACKAGE = PACKAGE.removesuffix(".formats.custom_generate")  # heads, or headstart.heads where it is installed
ENTRY = (f"{PACKAGE}.generate", "generate")
INSTEAD = {f"{HEADS_PACKAGE}.common.typed": f"{PACKAGE}.typed"}
LIBRARIES = {*sys.stdlib_module_names, "torch", "transformers", "safetensors"}
FORMAT = re.compile(r'^    "(\w+)": Format\(.*\n', re.MULTILINE)  # a line of the table
ROOT = Path(__file__).parents[3]


def files(kind: str) -> dict[str, str]:
    """Return a published folder's code by file name, for heads of one of HEADS in our format and other projects'.

    Raises:
        ValueError: the code needs a library that is not installed wherever transformers is.
    """
    modules = _collected(*ENTRY, _tables(kind))
    names = _flat(modules)
    texts = {f"{FOLDER}/{names[name]}.py": _written(module, names) for name, module in modules.items()}
    return dict(sorted(texts.items()))


def _tables(kind: str) -> dict[str, str]:
    """Return the sources of the two modules that list heads and formats, with those of one kind of head."""
    kinds = [name for name, head in HEADS.items() if issubclass(HEADS[kind], head)]  # HASS is published as EAGLE
    heads = "".join(f"from {HEADS[name].__module__} import {HEADS[name].__qualname__}\n" for name in kinds)
    table = ", ".join(f'"{name}": {HEADS[name].__qualname__}' for name in kinds)
    formats = f"{HEADS_PACKAGE}.formats.published"
    return {
        HEADS_PACKAGE: f'"""The heads that this code drafts with."""\n\n{heads}\nHEADS = {{{table}}}\n',
        formats: FORMAT.sub(lambda m: m[0] if FORMATS[m[1]].head in kinds else "", _source(formats)[0]),
    }


class Imported(NamedTuple):
    """The origin of an imported name: a name in another module of ours, None for that module itself."""

    module: str
    name: str | None


class Module:
    """A module of ours, with its used statements and imports."""

    def __init__(self, name: str, source: str, path: str) -> None:
        self.name, self.path, self.lines = name, path, source.splitlines()
        self.tree = ast.parse(source)
        self.used_statements: set[ast.stmt] = set()
        self.used: set[str] = set()  # names that are imported
        self.members: dict[str, set[str]] = defaultdict(set)  # of modules that are imported, by their names here
        self.bound = {name: statement for statement in self.tree.body for name in _bound(statement)}

    def library(self, name: str) -> bool:
        """Say whether a name is imported from a library, so that annotations may keep it."""
        statement = self.bound.get(name)
        return isinstance(statement, ast.ImportFrom) and str(statement.module).partition(".")[0] in LIBRARIES

    def imported(self, name: str) -> Imported | None:
        """Return the origin of a name that is imported from a module of ours."""
        statement = self.bound[name]
        if isinstance(statement, ast.Import):
            assert not any(_ours(self.name, alias.name) for alias in statement.names)
            return None
        if not isinstance(statement, ast.ImportFrom) or not _ours(self.name, str(statement.module)):
            return None
        original = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
        if _is_module(f"{statement.module}.{original}"):
            return Imported(f"{statement.module}.{original}", None)
        return Imported(INSTEAD.get(str(statement.module), str(statement.module)), original)


def _ours(name: str, other: str) -> bool:
    """Say whether a module that another one imports is bundled, and not a library."""
    top = other.partition(".")[0]
    if top in LIBRARIES:
        return False
    if top not in {"heads", *(head.__module__.partition(".")[0] for head in HEADS.values())}:
        raise ValueError(f"{name} needs {top}, which is not wherever transformers is; a published head cannot use it")
    return True


def _collected(entry: str, name: str, tables: dict[str, str]) -> dict[str, Module]:
    """Return the modules that a name leads to, with their used statements recorded."""
    modules: dict[str, Module] = {}
    waiting, seen = [(entry, name)], set[tuple[str, str]]()
    while waiting:
        owner, member = waiting.pop()
        if (owner, member) in seen:
            continue
        seen.add((owner, member))
        if owner not in modules:
            source, path = _source(owner)
            modules[owner] = Module(owner, tables.get(owner, source), path)
        waiting += _led_to(modules[owner], member)
    return modules


def _led_to(module: Module, name: str) -> Iterator[tuple[str, str]]:
    """Keep the statement that binds a name; yield the names that it needs in turn."""
    statement = module.bound[name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        module.used.add(name)
        origin = module.imported(name)
        if origin and origin.name:
            yield origin.module, origin.name
    elif statement not in module.used_statements:
        module.used_statements.add(statement)
        for node in _run(statement):
            if isinstance(node, ast.Name) and node.id in module.bound:
                yield module.name, node.id
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        module.used |= {name for name in names if module.library(name)}
        for node, origin in _accesses(module, statement):
            module.members[_root(node)].add(node.attr)
            yield origin.module, node.attr


def _accesses(module: Module, statement: ast.stmt) -> Iterator[tuple[ast.Attribute, Imported]]:
    """Yield the attributes of modules of ours in a statement, such as `rows.positions`."""
    for node in _run(statement):
        if isinstance(node, ast.Attribute) and isinstance(module.bound.get(_root(node)), ast.ImportFrom):
            origin = module.imported(_root(node))
            if origin and origin.name is None:
                yield node, origin


def _root(node: ast.Attribute) -> str:
    return node.value.id if isinstance(node.value, ast.Name) else ""


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and what is in it but for annotations, which do not run."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _run(child)


def _bound(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a module binds."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.split(".")[0] for alias in statement.names]
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    return [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _flat(modules: dict[str, Module]) -> dict[str, str]:
    """Return the name of each module's file: its last word, with the folder's before it where that is taken."""
    names: dict[str, str] = {}
    for name in sorted(modules, key=lambda name: (name.count("."), name)):
        words = name.split(".")
        names[name] = words[-1] if words[-1] not in names.values() else "_".join(words[-2:])
    return names


def _written(module: Module, names: dict[str, str]) -> str:
    head, *rest = module.tree.body
    doc = module.lines[: head.end_lineno]
    imports = list[str]()
    for statement in rest:
        lines = list(_import(module, statement, names))
        apart = lines and imports and not module.lines[statement.lineno - 2]
        imports += ["", *lines] if apart else lines
    body = [line for statement in rest if statement in module.used_statements for line in _statement(module, statement)]
    note = f"# From {module.path} of headstart {_version()}, Apache-2.0: what of it a head drafts with."
    return "\n".join([note, "", *doc, "", "from __future__ import annotations", "", *imports, *body]) + "\n"


def _import(module: Module, statement: ast.stmt, names: dict[str, str]) -> Iterator[str]:
    """Yield the kept part of an import: names that are used, from files beside this one where they are ours."""
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return
    near, far = [], []
    for alias in statement.names:
        name = alias.asname or alias.name.split(".")[0]
        if name not in module.used:
            continue
        origin = module.imported(name)
        renamed = "" if alias.asname is None else f" as {alias.asname}"
        if origin is None:
            far.append(alias.name + renamed)
        elif origin.name:
            near.append((origin.module, origin.name + renamed))
        else:  # a module itself, whose import transformers would not see: its members instead
            near += [(origin.module, f"{member} as {name}_{member}") for member in sorted(module.members[name])]
    if far:
        start = "import" if isinstance(statement, ast.Import) else f"from {statement.module} import"
        yield f"{start} {', '.join(far)}"
    for other, group in groupby(near, lambda pair: pair[0]):
        yield f"from .{names[other]} import {', '.join(name for _, name in group)}"


def _statement(module: Module, statement: ast.stmt) -> list[str]:
    """Return the lines of a statement, with the comment right above it."""
    first = min([statement.lineno, *(node.lineno for node in getattr(statement, "decorator_list", []))]) - 1
    lines = module.lines[first : statement.end_lineno]
    for node, _ in sorted(_accesses(module, statement), key=lambda pair: -pair[0].col_offset):
        row, line = node.lineno - 1 - first, lines[node.lineno - 1 - first].encode()
        member = f"{_root(node)}_{node.attr}".encode()
        lines[row] = (line[: node.col_offset] + member + line[node.end_col_offset :]).decode()
    while module.lines[first - 1].startswith("#"):
        first -= 1
        lines.insert(0, module.lines[first])
    apart = isinstance(statement, ast.FunctionDef | ast.ClassDef) or not module.lines[first - 1]
    return [*([""] if apart else []), *([""] if isinstance(statement, ast.FunctionDef | ast.ClassDef) else []), *lines]


@cache
def _source(name: str) -> tuple[str, str]:
    """Return a module's text, and where it stands in the repository."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(path.name)
    return path.read_text(encoding="utf-8"), shown.as_posix()


@cache
def _is_module(name: str) -> bool:
    """Say whether a dotted name is a module, and not what one defines."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@cache
def _version() -> str:
    project = ROOT / "pyproject.toml"
    match = re.search(r'^version = "(.*)"', project.read_text(), re.MULTILINE) if project.is_file() else None
    return match[1] if match else version("headstart")
