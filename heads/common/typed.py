"""Conversion of values in YAML or JSON to dataclasses, with their types and ranges checked."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from heads.common.ranges import MACHINE, OneOf, Within
from heads.common.untrusted import CUT, shown

T = TypeVar("T")
NUMBERS = (list[int], list[list[int]])  # OmegaConf takes a third of a millisecond for each of their numbers


def bracketed(words: Sequence[str], *keys: str) -> list[str]:
    """Return a command's words with `KEY=A,B` as `KEY=[A,B]` for these keys, which Hydra would take for a sweep."""
    pairs = [word.partition("=") for word in words]
    return [
        f"{key}=[{value}]" if key in keys and value and value[0] not in "['\"" and value != "null" else word
        for word, (key, _, value) in zip(words, pairs, strict=True)
    ]


def typed(schema: type[T], cfg: object, prefix: str = "", ready: Mapping[str, object] = MappingProxyType({})) -> T:
    """Build the dataclass `schema` from `cfg`, whose keys are prefixed by `prefix` in errors.

    `ready` has the fields that are built already, which override those of `cfg`. Interpolations of a DictConfig are
    resolved against its root. Anything else, which may come from the Hub, must be a dict and have none: a resolver
    would let a foreign file read this machine's environment.

    Raises:
        ValueError: an unknown key, a wrong type, a missing value or a number out of range, in one line with the key's
            full name.
    """
    values: Any = cfg
    if isinstance(cfg, DictConfig):
        prefix = cfg._get_full_key(None)
        try:
            values = OmegaConf.to_container(cfg, resolve=True)
        except OmegaConfBaseException as error:
            raise ValueError(f"{error.full_key}: {first_line(error)}") from None
    elif isinstance(cfg, dict) and (held := [key for key, value in cfg.items() if "${" in repr(value)]):
        raise ValueError(
            f"{join(prefix, held[0])} is {shown(cfg[held[0]])}: an interpolation is not allowed here, give the value"
        )
    built: T = build(schema, values, prefix, ready)
    return built


def build(schema: Any, values: Any, prefix: str, ready: Mapping[str, object] = MappingProxyType({})) -> Any:
    """Build one dataclass; its nested ones first, because OmegaConf cannot merge into a frozen one below the root."""
    names = [f.name for f in fields(schema) if f.init]
    if not isinstance(values, dict):
        raise ValueError(
            f"{prefix or 'the config'} is {shown(values)}, expected a mapping with the keys {', '.join(names)}"
        )
    hints = get_type_hints(schema)
    for key in values:
        if key not in names:
            raise ValueError(f"{join(prefix, key)} is not a known key; valid keys: {', '.join(names)}")
    required = [f.name for f in fields(schema) if f.init and f.default is MISSING and f.default_factory is MISSING]
    missing = [n for n in required if values.get(n, "???") == "???"]
    if missing:
        keys = ", ".join(join(prefix, n) for n in missing)
        raise ValueError(f"{keys} {'is' if len(missing) == 1 else 'are'} missing; valid keys: {', '.join(names)}")
    values = {name: value for name, value in values.items() if name not in ready}
    nested = {n: convert(hints[n], v, join(prefix, n)) for n, v in values.items() if holds_dataclass(hints[n])}
    leaves = {n: v for n, v in values.items() if n not in nested and v != "???"}
    for name, value in leaves.items():
        check_values(value, None, join(prefix, name))  # OmegaConf cannot convert numbers that are too large
    right = {n: copy.deepcopy(v) for n, v in leaves.items() if hints[n] in NUMBERS and are_numbers(hints[n], v)}
    plain = [f for f in fields(schema) if f.init and f.name not in ready and not holds_dataclass(hints[f.name])]
    blank = [(f.name, hints[f.name], field(default=f.default, default_factory=f.default_factory)) for f in plain]
    base = OmegaConf.structured(make_dataclass(schema.__name__, blank, kw_only=True))
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(base, {n: v for n, v in leaves.items() if n not in right}))
    except OmegaConfBaseException as error:
        key = join(prefix, str(error.full_key))
        raise ValueError(f"{key}: {first_line(error)}; valid keys: {', '.join(names)}") from None
    assert isinstance(merged, dict)
    merged |= right
    arguments = {f.name: merged[f.name] for f in plain}
    # OmegaConf hands a tuple field back as a list.
    arguments |= {n: tuple(v) for n, v in arguments.items() if v is not None and holds_tuple(hints[n])}
    ranges = get_type_hints(schema, include_extras=True)
    for name, value in arguments.items():
        if not fits(hints[name], value):
            raise ValueError(f"{join(prefix, name)} is {shown(value)}, expected {hints[name]}")
        check_values(value, range_of(ranges[name]), join(prefix, name))
    return schema(**arguments, **nested, **ready)


def convert(hint: Any, value: Any, key: str) -> Any:
    """Build the dataclasses inside a value whose type is a dataclass, or an optional, a list or a dict of one."""
    origin, inner = get_origin(hint), [a for a in get_args(hint) if holds_dataclass(a)]
    if origin is None:
        return build(hint, value, key)
    if origin in (Union, UnionType):
        return None if value is None and NoneType in get_args(hint) else convert(inner[0], value, key)
    if origin is list and isinstance(value, list):
        return [convert(inner[0], v, f"{key}[{i}]") for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {k: convert(inner[0], v, join(key, k)) for k, v in value.items()}
    raise ValueError(f"{key} is {shown(value)}, expected a {origin.__name__}")


def fits(hint: Any, value: Any) -> bool:
    """Say whether a value is of a type down to its elements; OmegaConf lets lists and dicts pass for those."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return True
    if origin in (Union, UnionType):
        return any(fits(option, value) for option in inner)
    if origin is dict:
        return isinstance(value, dict) and all(fits(inner[0], k) and fits(inner[1], v) for k, v in value.items())
    if origin is tuple and inner[1:] != (...,):
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(fits, inner, value))
    if origin in (list, tuple):
        return isinstance(value, origin) and all(fits(inner[0], element) for element in value)
    return isinstance(value, (int, float) if hint is float else hint)


def range_of(hint: Any) -> Within | OneOf | None:
    """Return the range or choice that annotates a type, None without one."""
    if isinstance(hint, Within | OneOf):
        return hint
    return next((within for arg in get_args(hint) if (within := range_of(arg))), None)


def check_values(value: Any, within: Within | OneOf | None, key: str) -> None:
    """Check that every number of a value is finite, and in the range, or that a name is one of the choice.

    Raises:
        ValueError: naming the key, and the item within it.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            check_values(item, within, join(key, name))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            check_values(item, within, f"{key}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} is {value}: give a finite number")
    elif isinstance(value, str if isinstance(within, OneOf) else int | float) and (
        remedy := (within or MACHINE).remedy(value)
    ):
        raise ValueError(f"{key} is {shown(value)}: {remedy}")


def are_numbers(hint: Any, value: Any) -> bool:
    """Say whether a value is of a type of NUMBERS."""
    (inner,) = get_args(hint)
    return isinstance(value, list) and all(
        type(item) is int if inner is int else are_numbers(inner, item) for item in value
    )


def holds_tuple(hint: Any) -> bool:
    """Say whether a type is a tuple, or an optional one."""
    inner = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return any(get_origin(option) is tuple for option in inner)


def holds_dataclass(hint: Any) -> bool:
    """Say whether a type is or contains a dataclass."""
    return is_dataclass(hint) or any(holds_dataclass(a) for a in get_args(hint))


def join(prefix: str, key: Any) -> str:
    """Return the full name of a key; an untrusted one stays one line."""
    name = str(key) if str(key).isprintable() and len(str(key)) <= CUT else shown(key)
    return f"{prefix}.{name}" if prefix else name


def first_line(error: Exception) -> str:
    """Return the first line of OmegaConf's error; the others are about its own types."""
    return str(error).splitlines()[0]
