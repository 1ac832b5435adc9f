"""command(): a mistake is one line without values; head=best and the head's own training values are filled in."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from heads import HEADS, best_line, with_head
from heads.common.command import CONF, describe_override_error, help_text, keys, quoted
from heads.common.resolvers import register_resolvers
from heads.common.target_config import EXPERTS, best_head, experts_of, logit_factor
from heads.common.typed import nearest
from train import convert

SECRET = "cAnArY0123"
Call = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take back what a command sets."""
    monkeypatch.delenv("HEADSTART_DEBUG", raising=False)
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Return a function that runs a command with these words, and returns the sources that it was to convert."""
    monkeypatch.chdir(tmp_path)
    found: list[str] = []
    monkeypatch.setattr(convert, "find_pickle", found.append)
    monkeypatch.setattr(convert, "convert", lambda *_: tmp_path)

    def run(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["convert.py", *words])
        GlobalHydra.instance().clear()
        convert.main()
        return found

    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"foo.api_key={SECRET}"], "foo.api_key is not a known key: --help lists them"),
        (["hydra.job={nane:x}"], "hydra.job.nane is not a known key: "),
        ([f"out=interval({SECRET},1)"], "the override out=… cannot be read: give KEY=VALUE"),
        (["hydra.run.dir=${nope:x}"], "Unsupported interpolation type"),
        (
            ["hydra/launcher=oracle"],
            "error: In 'hydra/config': Could not find 'hydra/launcher/oracle' Available options in",
        ),
    ],
)
def test_a_mistake_in_the_overrides_is_one_line_without_their_values(
    words: list[str], message: str, call: Call, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        call(*words)
    told = capfd.readouterr()
    assert caught.value.code == 2
    assert told.err.startswith("error: ")
    assert message in told.err
    assert told.err.count("\n") == 1
    assert SECRET not in told.err + told.out


@pytest.mark.parametrize(
    ("config", "word", "names"),
    [
        ("train", "hed", "head"),
        ("train", "modl.path", "model.path"),
        ("train", "trainer.stpes", "trainer.steps or trainer.spike"),
        ("train", "steps", "trainer.steps"),
        ("generate", "promt", "prompt"),
        ("eval", "eval.hf", "hf"),  # as train/run.py names it
    ],
)
def test_a_misspelt_key_gets_the_nearest_names(config: str, word: str, names: str) -> None:
    assert nearest(word, keys(config)) == f"do you mean {names}?"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=/tmp/mine"], "model=/tmp/mine is not there: choose one of "),
        (["model=/tmp/mine"], "; one's own is given by model.path=…"),
        (["model=tny"], "model=tny is not there: do you mean tiny?"),
        (["head=eagle3", "head.lm_hed=own"], "head.lm_hed is not a known key: do you mean head.lm_head"),
        (["head=eagle3", "head.depths=5"], "head.depths is not a known key: --help lists them, "),
        (["objective.losses.kll=1"], "objective.losses.kll is not a known key: +objective.losses.kll=… adds one"),
        (
            ["features.endpoint.extra.low=1"],
            "features.endpoint.extra.low is not a known key: +features.endpoint.extra.low=… adds one",
        ),
    ],
)
def test_a_mistake_in_a_trainings_words_says_what_to_give(words: list[str], message: str) -> None:
    with (
        initialize_config_dir(str(CONF), version_base="1.3"),
        pytest.raises((HydraException, OmegaConfBaseException)) as caught,
    ):
        compose("train", words)
    assert message in describe_override_error(caught.value, words, "train")


def test_the_help_lists_the_keys_of_the_head_that_is_named() -> None:
    named = {line.split("=")[0].strip() for line in help_text("train", ["head=eagle3"]).splitlines()}
    assert {"head.feature_norm", "head.lm_head"} <= named
    assert "head.feature_norm" not in help_text("train")


@pytest.mark.parametrize("config", sorted(file.stem for file in CONF.glob("*.yaml")))
def test_the_help_of_every_command_has_what_its_yaml_says(config: str) -> None:
    lines = help_text(config).splitlines()
    used = lines[lines.index("Most used:") + 1 : lines.index("Examples:") - 1]
    assert 1 < len(used) <= 10
    assert len(set(lines[lines.index("Examples:") :]) & set(used)) == len(used), "they stand in their groups too"


@pytest.mark.parametrize("value", ["plain", "o'brien/l.jsonl", "a\\'b", "ends\\", "two words, [one]={list}", ""])
def test_a_quoted_value_is_read_back(value: str) -> None:
    override = OverridesParser.create().parse_override(f"log={quoted(value)}")
    assert override.value() == value


def composed(*words: str, config: str = "train") -> Any:
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return with_head(compose(config, list(words)))


def test_numbers_are_read_under_each_familys_key() -> None:
    scales = {"logit_scale": 0.5, "lm_head_multiplier": 3.0, "logits_scaling": 4.0}
    read = [logit_factor(SimpleNamespace(**given)) for given in ({}, *({key: scales[key]} for key in scales), scales)]
    assert read == [1.0, 0.5, 3.0, 0.25, 0.375]
    for key, chosen in product(EXPERTS, ("num_experts_per_tok", "top_k_experts")):
        assert experts_of(SimpleNamespace(**{key: 8, chosen: 2})) == (8, 2)
        assert experts_of(SimpleNamespace(**{key: 8, chosen: 8})) == (8, 8)
        assert experts_of(SimpleNamespace(**{key: 8, chosen: 9})) is experts_of(SimpleNamespace(**{key: 8})) is None


def test_a_heads_training_values_are_taken_where_none_are_given() -> None:
    cfg = composed("head=hass", "trainer.lr=1e-3", "objective.noise=0", "+objective.losses.soft_ce=2.0")
    assert (cfg.trainer.optimizer, cfg.trainer.lr) == ("adamw", 1e-3)
    assert (cfg.objective.depths, cfg.objective.depth_decay, cfg.objective.noise) == (3, 1.0, 0)
    assert dict(cfg.objective.losses) == {"smooth_l1": 0.1, "soft_ce": 2.0, "top_k": 1.0}
    assert "training" not in cfg.head
    block = composed("head=block", "head.depths=3", "objective.anchors=null")
    assert (block.objective.depths, block.objective.anchors, block.trainer.lr) == (3, None, 2e-2)


def test_every_head_says_how_it_is_trained() -> None:
    open_values = {key for key, value in OmegaConf.load(CONF / "objective" / "default.yaml").items() if value == "auto"}
    for head in HEADS:
        training = OmegaConf.load(CONF / "head" / f"{head}.yaml").training
        assert open_values <= {*training.objective}, head
        assert {"optimizer", "lr"} <= {*training.trainer}
        assert training.objective.losses


MTP = {"name": "mtp"}


# The sizes of Gemma 3 270M, Llama 3.2 1B, SmolLM2 135M, Llama 3.1 8B and 70B, and of toys.
@pytest.mark.parametrize(
    ("layers", "width", "vocab", "options", "why"),
    [
        (
            18,
            640,
            262_144,
            {**MTP, "draft_vocab": 16_384},
            "since mlp would train about 1,344M parameters for a target of 256M; ",
        ),
        (
            16,
            2048,
            128_256,
            {**MTP, "draft_vocab": 16_384},
            "since mlp would train about 2,118M parameters for a target of",
        ),
        (30, 576, 49_152, {**MTP, "draft_vocab": 8_192}, "since it drafts best for a target of 30 layers; "),
        (32, 4096, 128_256, {**MTP, "draft_vocab": 65_536}, "since it drafts best for a target of 32 layers; "),
        (80, 8192, 128_256, MTP, "since it drafts best for a target of 80 layers; "),
        (20, 512, 512, MTP, "since it drafts best for a target of 20 layers; "),
        (19, 512, 512, {"name": "mlp"}, "since a pass of this target, 19 layers, costs little more"),
        (2, 64, 50, {"name": "mlp"}, "since a pass of this target, 2 layers, costs little more"),
    ],
)
def test_the_best_head_is_small_for_its_target(
    layers: int, width: int, vocab: int, options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    values = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": width, "vocab_size": vocab}
    (tmp_path / "config.json").write_text(json.dumps(values))
    found, told = best_head(str(tmp_path), None, False)
    assert found == options
    assert told.startswith(why)


@pytest.mark.parametrize("config", ["data", "train"])
def test_the_best_head_is_taken_where_none_is_named(config: str, tmp_path: Path) -> None:
    values = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(values))
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(config, [f"model.path={tmp_path}"])
    assert with_head(cfg).head.name == "mlp"
    told = best_line(cfg)
    assert told
    assert told.startswith("head=best: mlp, since a pass")
    if config == "train":
        cfg.engine = "llamacpp"
        assert with_head(cfg).head.items() >= {"name": "eagle3", "feature_norm": False, "norm_output": False}.items()
        line = "head=best: eagle3 head.feature_norm=false head.norm_output=false, which llamacpp loads; on the"
        assert str(best_line(cfg)).startswith(line)


def test_no_best_head_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"model.path=no/where: neither here nor .* HF_HUB_OFFLINE"):
        composed("head=best", "model.path=no/where")
