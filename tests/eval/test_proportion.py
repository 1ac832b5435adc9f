"""An evaluation in proportion to its minutes: what it leaves out, in which order, and what it keeps."""

import re
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from eval import sessions
from eval.config import eval_config
from eval.sessions import FLOOR, command_of, in_proportion
from heads.common.resolvers import ROOT, register_resolvers
from heads.common.typed import bracketed

FULL = (16, 3, ["live", "teacher_forced"])


@pytest.mark.parametrize(
    ("minutes", "prompts", "kept"),
    [
        (60.0, 16, FULL),
        (4.0, 16, (16, 3, ["live"])),
        (2.0, 16, (16, 1, ["live"])),
        (1.0, 16, (9, 1, ["live"])),
        (0.001, 16, (FLOOR, 1, ["live"])),
        (0.001, 2, (2, 1, ["live"])),
    ],
)
def test_what_does_not_fit_is_left_out(
    minutes: float, prompts: int, kept: tuple[int, int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With answers of a second: of 16 prompts and 3 repeats 195 s, of 1 repeat 99, and other trees 156 s more."""
    monkeypatch.setattr(sessions, "_answer_seconds", lambda *_: 1.0)
    workload, target = SimpleNamespace(prompts=[None] * prompts), SimpleNamespace()
    reduced = in_proportion(eval_config(run="outputs/x", minutes=minutes, prompts=64), target, [workload])
    config = reduced.config
    assert (config.prompts, config.repeats, config.tiers()) == kept
    assert reduced.seconds <= 60 * minutes or config.prompts == min(FLOOR, prompts)
    assert (f"{kept[0]} of 16 prompts" in str(reduced)) == (kept[0] < prompts)
    assert ("python eval/run.py run=outputs/x" in str(reduced)) == (kept != FULL)


def test_the_checks_above_temperature_0_are_counted_and_as_many_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With answers of a second: 16 prompts once more as they are, alone and by baseline and head, and 30,000 draws."""
    monkeypatch.setattr(sessions, "_answer_seconds", lambda *_: 1.0)
    workload = SimpleNamespace(prompts=[None] * 16)

    def seconds(minutes: float, **values: Any) -> tuple[float, int]:
        config = eval_config(run="outputs/x", minutes=minutes, prompts=64, tier=["live"], hf=False, **values)
        reduced = in_proportion(config, SimpleNamespace(), [workload])
        return reduced.seconds, reduced.config.prompts

    cold, hot = (seconds(60.0, temperature=temperature)[0] for temperature in (0.0, 0.7))
    draws = hot - cold - 16 * 3
    assert draws == pytest.approx(30_000 * sessions.DRAW / eval_config(run="x").max_new_tokens, rel=0.05)
    assert seconds(60.0, temperature=0.7, gate_tv=0.04)[0] == pytest.approx(hot - 0.75 * draws, rel=0.001)
    assert seconds(draws / 60, temperature=0.7)[1] == FLOOR
    found, prompts = seconds((draws + 70) / 60, temperature=0.7)
    assert FLOOR < prompts < 16
    assert draws + 50 < found <= draws + 70


@pytest.mark.parametrize(
    ("workload", "word"), [("my.jsonl", "my.jsonl"), (["my.jsonl", "gsm8k"], "[my.jsonl,gsm8k]")], ids=["one", "two"]
)
def test_the_command_that_measures_all_of_it_is_whole(
    workload: str | list[str], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_answer_seconds", lambda *_: 1.0)
    words = {"run": "outputs/x", "compare": ["outputs/y"], "workload": workload, "minutes": 0.1}
    config = eval_config(**words, drafter={"head": {}, "suffix": {}})
    reduced = in_proportion(config, SimpleNamespace(), [SimpleNamespace(prompts=[None] * 16)])
    command = f"python eval/run.py run=outputs/x compare=[outputs/y] drafter=[head,suffix] workload={word}"
    assert str(reduced).endswith(f"all of it: {command}")


def test_the_command_that_measures_all_of_it_measures_what_was_asked_for() -> None:
    """Every value that is not conf/eval.yaml's own is in it, and none that is; read back it is the same evaluation."""
    values: dict[str, Any] = {
        "workload": "my prompts.jsonl", "temperature": [0.0, 1.0], "batch_size": [1, 4], "request_rate": 2.5,
        "max_new_tokens": 64, "prompts": 5, "tree": {"kind": "chain", "depth": 4}, "dtype": "float32", "hf": False,
        "tier": ["live"], "model": {"path": "examples/tiny", "quantize": "int8"},
        "engine": {"compile": False, "compile_drafts": True},
    }  # fmt: skip
    given = eval_config(run=["outputs/x", "outputs/y"], minutes=1.0, **values)
    words = shlex.split(command_of(given))[2:]
    assert not [word for word in words if re.match("minutes|seed|repeats|tuner|client|drafter|compare", word)]
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed: Any = OmegaConf.to_container(compose("eval", bracketed(words, "run")), resolve=True)
    read_back = eval_config(**{key: composed[key] for key in composed if key not in ("hydra", "defaults")})
    kept = {key for key in values if key not in ("tree", "model")}
    assert {key: getattr(read_back, key) for key in kept} == {key: getattr(given, key) for key in kept}
    assert read_back.runs() == given.runs()
    for key in ("tree", "model"):
        assert {name: getattr(read_back, key)[name] for name in values[key]} == values[key]


def test_the_command_after_a_training_has_its_values_and_no_placement_of_several_processes() -> None:
    model = {"trust_remote_code": False, "placement": "fsdp", "device": "cuda:0"}
    given = eval_config(run="outputs/x", minutes=1.0, model=model, temperature=[0.0], tier=["live"], warmup=2)
    assert command_of(given) == "python eval/run.py run=outputs/x warmup=2 tier=[live]"
    options = {"head": {}, "suffix": {"mode": "tree", "depth": 64}}
    assert command_of(eval_config(run="outputs/x", drafter=options)) == (
        "python eval/run.py run=outputs/x drafter=[head,suffix] drafter.suffix.mode=tree"
    )
