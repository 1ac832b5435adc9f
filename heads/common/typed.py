"""Conversion of values in YAML or JSON to dataclasses, with their types, ranges and choices checked."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import BooleanNode, DictConfig, FloatNode, IntegerNode, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from heads.common.untrusted import CUT, shown

T = TypeVar("T")
Json = dict[str, Any]  # a JSON object
CONF = Path(__file__).resolve().parents[2] / "conf"
UNSET = "???"  # marks a required value in YAML
SCALARS: dict[type, tuple[Any, str]] = {
    int: (IntegerNode, "a whole number"),
    float: (FloatNode, "a number"),
    bool: (BooleanNode, "true or false"),
    str: (StringNode, "a text"),
}


class Within(NamedTuple):
    """A range from `least` to `most`; `above` and `below` exclude the ends."""

    least: int | float
    most: int | float
    above: bool = False
    below: bool = False

    def remedy(self, value: Any) -> str | None:
        """Return the remedy for a value outside the range, as NaN is, None for a value inside."""
        if not (value > self.least if self.above else value >= self.least):
            return f"give a number above {self.least}" if self.above else f"give {self.least} or more"
        if not (value < self.most if self.below else value <= self.most):
            return f"give a number below {self.most}" if self.below else f"give {self.most} or less"
        return None


class OneOf(NamedTuple):
    """A choice among names."""

    names: tuple[str, ...]

    def remedy(self, value: Any) -> str | None:
        """Return the remedy for an unknown name, None for one of `names`."""
        return None if value in self.names else f"choose {', '.join(self.names)}"


SEVERAL = OneOf(())  # marks a list for which a single value may also be given; the list is not empty
MACHINE = Within(-(2**63), 2**63 - 1)  # the default range of a number
LARGEST = 2**31 - 1  # no tensor dimension of ours is larger

LmHead = Annotated[str, OneOf(("shared", "own"))]  # the target's lm_head, or one of the head's own
Count = Annotated[int, Within(1, LARGEST)]
Number = Annotated[int, Within(0, LARGEST)]
Parts = Annotated[int, Within(1, 256)]  # layers, heads or depths of a draft head
Width = Annotated[int, Within(1, 1 << 20)]  # a dimension of a head's weights
NewTokens = Annotated[int, Within(2, LARGEST)]  # at least two: the first token comes from the prefill, before any draft
RowLength = Annotated[int, Within(2, 1 << 24)]  # tokens
Amount = Annotated[float, Within(0, MACHINE.most)]
Positive = Annotated[float, Within(0, MACHINE.most, above=True)]
Fraction = Annotated[float, Within(0, 1)]
Share = Annotated[float, Within(0, 1, above=True)]
Decay = Annotated[float, Within(0, 1, below=True)]


def typed(
    schema: type[T], cfg: object, prefix: str = "", built_fields: Mapping[str, object] = MappingProxyType({})
) -> T:
    """Build the dataclass `schema` from `cfg`, whose keys are prefixed by `prefix` in errors.

    `built_fields` holds fields that are already built; they override those of `cfg`. Interpolations of a DictConfig are
    resolved against its root. Any other `cfg` may come from the Hub: it must be a dict without interpolations, since a
    resolver would let a foreign file read this machine's environment. Refuse an unknown key, a wrong type, a missing
    value and a number out of range, in one line with the key's full name.
    """
    values = cfg
    if isinstance(cfg, DictConfig):
        prefix = cfg._get_full_key(None)
        try:
            values = OmegaConf.to_container(cfg, resolve=True)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]  # the other lines describe OmegaConf's own types
            raise ValueError(f"{error.full_key}: {reason}") from None
    elif isinstance(cfg, dict) and (held := [key for key, value in cfg.items() if "${" in repr(value)]):
        raise ValueError(
            f"{join(prefix, held[0])} is {shown(cfg[held[0]])}: an interpolation is not allowed here, give the value"
        )
    return build(schema, values, prefix, built_fields)


def from_yaml(schema: type[T], config: str, **values: Any) -> T:
    """Build the dataclass from conf/CONFIG.yaml with these values replaced, for callers without Hydra."""
    read: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{config}.yaml"))
    return typed(schema, {key: value for key, value in {**read, **values}.items() if key not in ("defaults", "hydra")})


def build(schema: Any, values: Any, prefix: str, built_fields: Mapping[str, object] = MappingProxyType({})) -> Any:
    """Build a dataclass as `typed` does, from values without interpolations."""
    init = {f.name: f for f in fields(schema) if f.init}
    valid = ", ".join(init)
    if not isinstance(values, dict):
        raise ValueError(f"{prefix or 'the config'} is {shown(values)}, expected a mapping with the keys {valid}")
    if unknown := [join(prefix, key) for key in values if key not in init]:
        near = nearest(unknown[0].rpartition(".")[2], init)
        raise ValueError(f"{unknown[0]} is not a known key; {near and f'{near} '}valid keys: {valid}")
    given = {name: value for name, value in values.items() if value != UNSET and name not in built_fields}
    optional = {name for name, f in init.items() if f.default is not MISSING or f.default_factory is not MISSING}
    if missing := [join(prefix, name) for name in init if name not in {*given, *built_fields, *optional}]:
        raise ValueError(f"{', '.join(missing)} {'are' if missing[1:] else 'is'} missing; valid keys: {valid}")
    hints = get_type_hints(schema, include_extras=True)
    return schema(
        **{name: convert(hints[name], value, join(prefix, name)) for name, value in given.items()}, **built_fields
    )


def convert(hint: Any, value: Any, key: str) -> Any:
    """Convert a value to a type; refuse numbers out of range and unknown names, naming the key."""
    within: Within | OneOf = MACHINE
    if get_origin(hint) in (Union, UnionType):
        if value is None and NoneType in get_args(hint):
            return None
        hint = next(option for option in get_args(hint) if option is not NoneType)
    if get_origin(hint) is Annotated:
        hint, within = get_args(hint)
        if within is SEVERAL:
            if not isinstance(value, list):
                return [convert(get_args(hint)[0], value, key)]
            if not value:
                raise ValueError(f"{key} is empty: give at least one value")
    origin, inner = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return build(hint, value, key)
    if hint in SCALARS or (hint is Any and not isinstance(value, dict | list)):
        check(value, MACHINE, key)  # before the conversion, since OmegaConf cannot convert numbers that are too large
        if hint is Any or type(value) is hint:
            scalar = value
        else:
            try:
                scalar = SCALARS[hint][0](value, is_optional=False)._value()
            except OmegaConfBaseException:
                scalar = None
        if hint is not Any and scalar in (None, UNSET):
            raise ValueError(f"{key}: {shown(value)} is not {SCALARS[hint][1]}")
        check(scalar, within, key)
        return scalar
    if hint is Any:
        origin, inner = type(value), (Any, Any)
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{key} is {shown(value)}, expected a mapping")
        return {convert(inner[0], k, key): convert(inner[1], v, join(key, k)) for k, v in value.items()}
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} is {shown(value)}, expected a list")
    hints = inner if origin is tuple and ... not in inner else inner[:1] * len(value)
    if len(hints) != len(value):
        raise ValueError(f"{key} is {shown(value)}, expected a list of {len(hints)}")
    return origin(convert(hints[i], item, f"{key}[{i}]") for i, item in enumerate(value))


def check(value: Any, within: Within | OneOf, key: str) -> None:
    """Refuse a number that is not finite or out of range, and an unknown name."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} is {value}: give a finite number")
    ranged = isinstance(value, str if isinstance(within, OneOf) else int | float)
    if ranged and (remedy := within.remedy(value)):
        raise ValueError(f"{key} is {shown(value)}: {remedy}")


def join(prefix: str, key: Any) -> str:
    """Return the full name of a key; an untrusted key stays on one line."""
    name = str(key) if str(key).isprintable() and len(str(key)) <= CUT else shown(key)
    return f"{prefix}.{name}" if prefix else name


def nearest(word: str, names: Iterable[str]) -> str:
    """Return a "did you mean" question with the names nearest to a misspelt one; empty if none is near."""
    every = sorted(set(names))
    parent, _, last = word.rpartition(".")
    near = [name for name in every if name.endswith(f".{word}")] or get_close_matches(word, every, 2, 0.75)
    if not near and not any(name.startswith(f"{parent}.") for name in every):  # a section of another command
        near = [name for name in every if f".{name}".endswith(f".{last}")][:2]
    return f"do you mean {' or '.join(near)}?" if near else ""
