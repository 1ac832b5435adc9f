"""typed(): values of every kind arrive, and every mistake is one line with the full key."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from transformers import PreTrainedConfig

from heads.common.resolvers import ROOT, register_resolvers
from heads.common.target_config import UNBOUNDED, check_sequence_length, context_of
from heads.common.typed import Amount, Count, typed
from tests import toys


@dataclass(frozen=True)
class Layer:
    """A nested section."""

    width: int
    rate: float | None


@dataclass(frozen=True)
class Group:
    """A section that nests another."""

    layer: Layer
    spare: Layer | None


@dataclass(frozen=True)
class Config:
    """One field of every kind."""

    name: str
    group: Group
    paths: list[list[int]]
    layers: tuple[Count, ...]
    weights: dict[str, Amount]
    limit: int | None
    head: Any
    rows: list[Layer]
    table: dict[str, Layer]

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ValueError("name is bad: choose another")


@pytest.mark.parametrize("value", [[], [[]], 3, None, "x"])
def test_what_is_no_mapping_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="expected a mapping with the keys name"):
        typed(Config, value)


def values(**changes: Any) -> dict[str, Any]:
    layer = {"width": 3, "rate": None}
    return {
        "name": "n",
        "group": {"layer": layer, "spare": None},
        "paths": [[0], [0, 1]],
        "layers": [1, 2],
        "weights": {"a": 1},
        "limit": None,
        "head": {"free": [1, {"deep": True}]},
        "rows": [layer],
        "table": {"x": layer},
    } | changes


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create], ids=["dict", "DictConfig"])
def test_every_kind_of_value(wrap: Any) -> None:
    layer = Layer(3, None)
    config = typed(Config, wrap(values()))
    assert config == Config(
        "n", Group(layer, None), [[0], [0, 1]], (1, 2), {"a": 1.0}, None, {"free": [1, {"deep": True}]}, [layer],
        {"x": layer},
    )  # fmt: skip
    assert type(config.weights["a"]) is float
    assert type(config.head) is dict
    assert type(config.paths[0]) is list


def test_optional_section_and_interpolation() -> None:
    root = OmegaConf.create({"width": 7, "section": values()})
    root.section.group.spare = {"width": "${width}", "rate": "1e-3"}
    assert typed(Config, root.section).group.spare == Layer(7, 1e-3)
    ready = Layer(1, None)
    assert typed(Group, {"layer": {}, "spare": None}, built_fields={"layer": ready}) == Group(ready, None)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"nmae": 1}, ["nmae", "not a known key", "name", "limit"]),
        ({"a\nb\x1b[2J": 1}, [r"'a\nb\x1b[2J' is not a known key"]),
        ({"k" * 10_000: 1}, [f"'{'k' * 100}", "k… is not a known key"]),
        ({"layers": [1, [2]]}, ["layers"]),
        ({"group": {"layer": {"width": 3, "rat": 1, "rate": 1}, "spare": None}}, ["group.layer.rat ", "width, rate"]),
        (
            {"group": {"layer": {"width": "wide", "rate": 1}, "spare": None}},
            ["group.layer.width: 'wide' is not a whole number"],
        ),
        ({"group": {"layer": {"width": True, "rate": 1}, "spare": None}}, ["group.layer.width: True"]),
        ({"group": {"layer": {"width": 3}, "spare": None}}, ["group.layer.rate is missing", "width, rate"]),
        ({"group": 4}, ["group is 4", "layer, spare"]),
        ({"rows": [{"width": 3, "rate": 1}, {"width": 3, "rate": "x"}]}, ["rows[1].rate: 'x' is not a number"]),
        ({"table": {"x": {"width": 3, "rate": 1, "odd": 1}}}, ["table.x.odd"]),
        ({"paths": [[0], ["q"]]}, ["paths[1][0]: 'q'"]),
        ({"layers": [1, 0]}, ["layers[1] is 0", "give 1 or more"]),
        ({"weights": {"a": 1, "b": -1}}, ["weights.b is -1", "give 0 or more"]),
        ({"weights": 3}, ["weights is 3", "a mapping"]),
        ({"name": None}, ["name: None is not a text"]),
        ({"name": "???"}, ["name is missing"]),
        ({"name": "bad"}, ["name is bad"]),
        ({"name": "${oc.env:HOME}"}, ["name is", "interpolation"]),
    ],
)
def test_mistakes_are_one_line(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        typed(Config, values(**changes))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    assert all(part in message for part in parts), message


def test_key_is_full_below_the_root() -> None:
    root = OmegaConf.create({"head": {"config": {"width": 1, "rate": 2, "extra": 3}}})
    with pytest.raises(ValueError, match=r"^head\.config\.extra is not a known key"):
        typed(Layer, root.head.config)
    root = OmegaConf.create({"head": {"width": "${nowhere}", "rate": 2}})
    with pytest.raises(ValueError, match=r"head\.width.*nowhere"):
        typed(Layer, root.head)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rows_are_as_long_as_the_target_reads_at_most(name: str, tmp_path: Path) -> None:
    register_resolvers()
    toys.ARCHITECTURES[name].save_pretrained(tmp_path)
    for path, wanted, length in [(str(tmp_path), 512, 160), (str(tmp_path), 64, 64), ("me/not-here", 512, 512)]:
        values = OmegaConf.create({"path": path, "length": f"${{sequence_length:${{path}},{wanted}}}"})
        assert values.length == length
    context = context_of(toys.ARCHITECTURES[name])
    check_sequence_length(160, context, name)
    with pytest.raises(ValueError, match=f"data.length is 161, but {name} reads at most 160 tokens: give 160 or less"):
        check_sequence_length(161, context, name)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_rank_is_at_most_the_targets_width(name: str, tmp_path: Path) -> None:
    register_resolvers()
    toys.ARCHITECTURES[name].save_pretrained(tmp_path)
    for path, rank in ((str(tmp_path), toys.SIZES["hidden_size"]), ("me/not-here", 256)):
        head = OmegaConf.load(ROOT / "conf" / "head" / "block.yaml")
        assert OmegaConf.create({"model": {"path": path}, "head": head}).head.markov_rank == rank


def test_a_target_that_says_nothing_reads_any_length() -> None:
    assert context_of(PreTrainedConfig()) == UNBOUNDED
