"""The whole evaluation on a toy target: both heads in one report, red gates, and the user's mistakes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from eval.config import EvalConfig, eval_config
from eval.live import interleaved
from eval.live.interleaved import hf_generate
from eval.measures.losslessness import Gate, SampledGate, verdict_of
from eval.run import evaluate, main
from eval.setup import folder_for, prepared, remarks_of, replacing, speed_dtype
from heads.common.resolvers import ROOT, register_resolvers
from heads.common.typed import typed
from inference.decode import Generation, Settings
from inference.drafters.registry import SOURCES
from inference.target.config import model_config
from inference.verification.sample import GREEDY
from tests import toys
from tests.eval.small import SIZE, small, words


def test_two_heads_and_plain_decoding_stand_in_one_report(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "medusa" / "tune.json").touch()
    made = evaluate(small(runs, tmp_path, compare=[str(runs / "medusa")], temperature=[0, 1.0]))
    (runs / "medusa" / "tune.json").unlink()
    told = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    named = [(row["drafter"], row["temperature"]) for row in told["rows"]]
    assert named == [(name, t) for t in (0.0, 1.0) for name in ("plain", "eagle", "medusa")]
    assert made.passed
    greedy = {row["drafter"]: row for row in told["rows"][:3]}
    for name in ("eagle", "medusa"):
        assert greedy[name]["lossless"] == {"checked": 2, "identical": 2, "near_tie": 0, "failed": 0}
        assert greedy[name]["tau"] >= 1
        assert greedy[name]["draft_tokens"] > 0
        assert greedy[name]["speedup"] > 0
        assert greedy[name]["speedup_hf"] > 0
        assert greedy[name]["tree"] == toys.TREES["dynamic"].label
    assert (greedy["plain"]["tau"], greedy["plain"]["speedup"], greedy["plain"]["workload"]) == (1, 1, "prompts.jsonl")
    assert [row["speedup_hf"] for row in told["rows"][3:]] == [None] * 3
    assert told["target"]["name"] == "toy"
    assert (told["device"]["dtype"], told["settings"]["gate_dtype"]) == ("float32", "float32")
    written = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "Exact enumeration" in written
    assert {"training", "trees", "answers"} <= told.keys()
    assert {(each["drafter"], each["prompt"]) for each in told["answers"]} == {
        (name, prompt) for name in ("eagle", "medusa") for prompt in ("p0", "p1")
    }
    for row in told["rows"][1:3]:  # the first session's
        tree = told["trees"][row["drafter"]]
        by_depth = [0.0] * len(row["accepted_by_depth"])
        for path, share in zip(tree["paths"], tree["accepted"], strict=True):
            by_depth[len(path) - 1] += share
        assert by_depth == pytest.approx(row["accepted_by_depth"])
        assert tree["steps"] == row["steps"]
    assert "Why not more?" in (tmp_path / "report.html").read_text(encoding="utf-8")
    pairs = [(pair["drafter"], pair["base"], pair["temperature"], pair["prompts"]) for pair in told["paired"]]
    assert pairs == [("medusa", "eagle", t, 2) for t in (0.0, 1.0)]
    difference = greedy["medusa"]["tau"] - greedy["eagle"]["tau"]
    assert told["paired"][0]["tau"]["difference"] == pytest.approx(difference)
    assert [warning[:45] for warning in told["warnings"]] == [
        "the tree of medusa was tuned, that of eagle w",
        "2 prompts of prompts.jsonl are few for a boot",
    ]
    printed = capsys.readouterr()
    assert "medusa against eagle, the same 2 prompts of prompts.jsonl, T=1, batch size 1: τ" in printed.out
    assert str(tmp_path) in printed.out.replace("\n", "")
    assert "NOT LOSSLESS" not in printed.err


def test_the_toy_output_is_varied(runs: Path) -> None:
    assert toys.lively(hf_generate(toys.target(), toys.prompt(0, 12), Settings(24, GREEDY)).tokens)


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every speculative run end in a token that the baseline did not choose."""
    speculate = interleaved.speculate

    def wrong(*args: Any, **kwargs: Any) -> Generation:
        made = speculate(*args, **kwargs)
        made.tokens[-1] = (made.tokens[-1] + 1) % toys.VOCAB
        return made

    monkeypatch.setattr(interleaved, "speculate", wrong)


def test_a_red_gate_prints_no_speedup_and_exits_with_one(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch)
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        overrides = [f"run={runs / 'eagle'}", f"out={tmp_path}", "dtype=float32"]
        overrides += words(SIZE)
        config = compose("eval", overrides)
    with pytest.raises(SystemExit) as exit_:
        main.__wrapped__(config)
    assert exit_.value.code == 1
    printed = capsys.readouterr()
    (line,) = (line for line in printed.err.splitlines() if "LOSSLESS" in line)
    assert line.startswith("NOT LOSSLESS: eagle: 2 of 2 prompts differ")
    assert "withheld" in printed.out
    row = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["rows"][1]
    assert (row["speedup"], row["speedup_ci"], row["speedup_hf"], row["lossless"]["failed"]) == (None, None, None, 2)


def test_a_lossy_rule_is_red_whatever_it_emits(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        overrides = [f"run={runs / 'eagle'}", f"out={tmp_path}", "dtype=float32", "rule=typical", "lossy=true"]
        config = compose("eval", overrides + words(SIZE) + ["temperature=[0,1]"])
    with pytest.raises(SystemExit) as exit_:
        main.__wrapped__(config)
    assert exit_.value.code == 1
    printed = capsys.readouterr()
    assert "NOT LOSSLESS: eagle: its rule is lossy by choice; " in printed.err
    assert printed.out.count("withheld") >= 2
    told = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    rows = [row for row in told["rows"] if row["drafter"] == "eagle"]
    assert [row["rule"] for row in rows] == ["typical (lossy)"] * 2
    assert [row["speedup"] for row in rows] == [None, None]
    assert [row["lossless"]["checked"] for row in rows] == [2, 0], "coupled noise says nothing of a lossy rule"
    assert (told["settings"]["rule"], told["settings"]["lossy"]) == ("typical", True)


def test_the_gate_runs_with_the_rule_and_the_rows_name_it(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    speculate = interleaved.speculate

    def noted(*args: Any, settings: Settings) -> Generation:
        asked.append((settings.rule, settings.sampling))
        return speculate(*args, settings=settings)

    monkeypatch.setattr(interleaved, "speculate", noted)
    values = {"rule": "coupled", "temperature": [0, 1.0], "repetition_penalty": 1.3, "min_p": 0.01, "prompts": 1}
    made = evaluate(small(runs, tmp_path, hf=False, **values))
    assert made.passed
    assert [row.rule for row in made.rows] == ["none", "greedy", "none", "coupled"]
    assert {rule for rule, _ in asked} == {"coupled"}
    assert {(s.temperature, s.min_p, s.repetition_penalty) for _, s in asked} == {(0.0, 0.01, 1.3), (1.0, 0.01, 1.3)}


def test_each_temperature_and_each_workload_has_its_own_check(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the time is that of the dtype asked for, whatever the check's."""
    first, *others = (runs / "prompts.jsonl").read_text().splitlines()
    names, told = ["one.jsonl", "other.jsonl", "third.jsonl"], list[int]()
    for name, lines in zip(names, ([first], others[1:], others[:1]), strict=True):
        (tmp_path / name).write_text("\n".join(lines))

    def sampled(setup: Any, _: float, tests: int, __: Any) -> list[SampledGate]:
        told.append(tests)
        temperature = setup.settings.sampling.temperature
        verdicts = ["identical", "failed" if temperature == 1 else "identical", "near_tie"]
        return [SampledGate(name, temperature, verdict_of(verdicts, [], []), None, "none") for name in setup.drafters]

    def greedy(_: Any, __: Any, ids: list[str], dtype: Any) -> Gate:
        assert (ids, dtype) == (["p0", "p2", "p1"], torch.float64)
        return verdict_of(["identical", "near_tie", "identical"], [], [])

    monkeypatch.setattr("eval.gates.sampled_gates", sampled)
    monkeypatch.setattr("eval.gates.gate", greedy)
    given = {"temperature": [0, 1.0, 0.5], "hf": False, "gate_dtype": "float64"}
    made = evaluate(small(runs, tmp_path, **given, workload=[str(tmp_path / name) for name in names]))
    assert made.device["dtype"] == "float32"
    assert told == [2, 2]
    rows = {(row.workload, row.temperature): row for row in made.rows if row.drafter == "eagle"}
    counts = {
        t: [tuple(rows[name, t].lossless[key] for key in ("identical", "near_tie", "failed")) for name in names]
        for t in (0.0, 1.0, 0.5)
    }
    same, tie, wrong = (1, 0, 0), (0, 1, 0), (0, 0, 1)
    assert counts == {0.0: [same, tie, same], 1.0: [same, wrong, tie], 0.5: [same, same, tie]}
    assert all((rows[name, t].speedup is None) == (t == 1.0) for t in (0.0, 1.0, 0.5) for name in names)


def test_plain_decoding_alone_needs_no_head(runs: Path, tmp_path: Path) -> None:
    values = {"drafter": {"plain": {}}, "run": None, "model": {"path": str(runs / "target"), "device": "cpu"}}
    made = evaluate(small(runs, tmp_path, workload=str(runs / "prompts.jsonl"), batch_size=[1, 2], **values))
    assert [(row.drafter, row.batch_size) for row in made.rows] == [("plain", 1), ("plain", 2)]
    assert list(made.gates) == ["plain", "plain x2"]
    assert made.passed
    assert made.target["name"] == "target"


def test_heads_of_which_some_are_tuned_are_named(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, target = small(runs, tmp_path, compare=[str(runs / "medusa")]), toys.target()
    for tuned, remarks in (((), 0), (("eagle",), 1), (("eagle", "medusa"), 0)):
        monkeypatch.setattr("eval.setup.is_tuned", lambda head, tuned=tuned: head.parent.name in tuned)
        assert len(remarks_of(config, target)) == remarks
        assert remarks_of(replace(config, tree={"nodes": 5}), target) == []


def test_a_tree_is_the_heads_own_but_for_what_is_given(runs: Path, tmp_path: Path) -> None:
    made = evaluate(small(runs, tmp_path, tree={"nodes": 5, "depth": None}, prompts=1, hf=False))
    assert made.rows[1].tree == "dynamic-d4k3n5"
    assert made.rows[1].tau_ci is None  # a single prompt


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"drafter": {"oracle": {}}}, "no source is called 'oracle'"),
        ({"run": None}, "model.path"),
        ({"run": "nonesuch"}, "nonesuch"),
        ({"compare": ["nonesuch"]}, "nonesuch"),
        ({"workload": "nonesuch"}, "tiny"),
        ({"tree": {"kind": "bush"}}, "tree.kind"),
        ({"tree": {"bushes": 3}}, "bushes"),
        ({"model": {"path": "/nonesuch"}}, "/nonesuch"),
        ({"rule": "best"}, "traversal"),
        ({"rule": "typical"}, "lossy=true"),
        ({"rule": "block"}, "tree=chain"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_a_mistake_is_named_in_one_line(runs: Path, tmp_path: Path, values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as error:
        evaluate(small(runs, tmp_path, **values))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": [1, 2.5]}, "batch_size"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": []}, "temperature"),
        ({"temperature": [0, -1]}, "temperature"),
        ({"prompts": 0}, "prompts is 0"),
        ({"repeats": 0}, "repeats is 0"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"gate_dtype": "auto"}, "gate_dtype is 'auto'"),
        ({"gate_tv": 0.0}, "gate_tv is 0.0"),
        ({"gate_tv": 0.25}, "gate_tv is 0.25: give a number below 0.25"),
        ({"turns": "last"}, "turns is 'last'"),
        ({"workload": [3]}, "workload is"),
        ({"run": [3]}, "run is"),
        ({"promts": 3}, "promts"),
        ({"hf": "maybe"}, "hf"),
    ],
)
def test_a_bad_value_is_refused_before_anything_is_loaded(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as error:
        eval_config(**values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"drafter": {"plain": {}}, "workload": "/nowhere/log.jsonl"}, "/nowhere/log.jsonl"),
        ({"drafter": {"plain": {}}, "out": "/dev/null/report"}, "out=/dev/null/report: cannot be written"),
        ({"drafter": {"oracle": {}}}, "no source is called 'oracle'"),
        ({"drafter": {"suffix": {"depht": 1}}}, "drafter.suffix.depht is not a known key"),
        ({"run": "/nowhere/run", "drafter": {"head": {}}}, "/nowhere/run: no such folder"),
        ({"drafter": {"plain": {}}, "model": {"device": "cuda:99"}}, "model.device is cuda:99, and torch sees"),
        ({"drafter": {"plain": {}}, "model": {"path": "/nowhere/target"}}, "model.path=/nowhere/target: no causal LM"),
    ],
)
def test_a_mistake_is_named_before_the_target_is_loaded(
    values: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.run.load_target", lambda *_: pytest.fail("the target is loaded"))
    tiny = {"path": str(ROOT / "examples" / "tiny"), "device": "cpu"}
    with pytest.raises(ValueError, match=named) as error:
        evaluate(eval_config(**{"workload": "tiny", **values, "model": tiny | values.get("model", {})}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("batch", [1, [1]])
def test_numbers_and_lists_of_them(batch: Any) -> None:
    config = eval_config(temperature=[0, 0.7], batch_size=batch, run=["a", "b"])
    assert config.temperatures() == [0.0, 0.7]
    assert config.runs() == ["a", "b"]
    assert eval_config(temperature=1).temperatures() == [1.0]
    assert eval_config(run="a").runs() == ["a"]


def test_hydra_and_plain_yaml_give_the_same_values() -> None:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        assert typed(EvalConfig, compose("eval")) == eval_config()
        chosen = typed(EvalConfig, compose("eval", ["model=tiny", "tree=chain", "tree.depth=6", "run=[a,b]"]))
    assert chosen.model["name"] == "tiny"
    assert (chosen.tree["kind"], chosen.tree["depth"]) == ("chain", 6)
    assert chosen.runs() == ["a", "b"]


def test_speed_is_measured_in_the_dtype_that_was_asked_for() -> None:
    cpu = torch.device("cpu")
    assert speed_dtype(eval_config(dtype="float16"), model_config(dtype="bfloat16"), cpu) == "float16"
    assert speed_dtype(eval_config(), model_config(dtype="bfloat16"), cpu) == "bfloat16"
    assert speed_dtype(eval_config(), model_config(), torch.device("cuda")) == "bfloat16"


def test_the_report_goes_to_the_run_or_where_it_was_told(tmp_path: Path) -> None:
    assert folder_for(None, [str(tmp_path)], ["head"]) == tmp_path
    assert folder_for("there", [str(tmp_path)], ["head"]) == Path("there")
    assert folder_for(None, ["me/mine"], ["head"]) == Path("outputs/mine")
    assert folder_for(None, [], ["suffix", "plain"]) == Path("outputs/suffix-plain")


def test_of_several_processes_one_says_what_is_evaluated(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, lines in ((0, 1), (1, 0)):
        monkeypatch.setenv("RANK", str(rank))
        prepared(small(runs, tmp_path))
        assert capsys.readouterr().err.count("evaluation on ") == lines


def test_a_report_that_is_replaced_is_announced(tmp_path: Path) -> None:
    assert replacing(tmp_path) == ""
    (tmp_path / "report.json").write_text("{}")
    assert replacing(tmp_path) == ", in place of the report there; out=FOLDER writes elsewhere"


def test_every_source_has_its_options_and_every_option_its_source() -> None:
    register_resolvers()
    names = {file.stem for file in (ROOT / "conf" / "drafter").glob("*.yaml")}
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = {name: compose("eval", [f"drafter={name}"]).drafter for name in names}
    assert all(list(options) == [name] for name, options in composed.items())
    sources = {options[name].get("source", name) for name, options in composed.items()}
    assert sources == {"head", "plain", "hybrid", *SOURCES}


def test_the_script_runs_from_anywhere_and_fails_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "eval" / "run.py"), "drafter=oracle"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "drafter=oracle is not there" in done.stderr
    assert "plain" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_batches_have_rows_and_gates_of_their_own(runs: Path, tmp_path: Path) -> None:
    report = evaluate(small(runs, tmp_path, batch_size=[1, 3]))
    rows = {(row.drafter, row.batch_size): row for row in report.rows}
    assert list(rows) == [(name, size) for size in (1, 3) for name in ("plain", "eagle")]
    assert {"plain x3", "eagle", "eagle x3"} <= set(report.gates)
    assert report.passed
    alone, batched = rows["eagle", 1], rows["eagle", 3]
    assert (alone.tokens, alone.steps) == (batched.tokens, batched.steps)
    assert (batched.latency_s or 0) > 0
    assert "| eagle x3 |" in (tmp_path / "report.md").read_text(encoding="utf-8")
