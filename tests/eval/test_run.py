"""The whole evaluation on a toy target: both heads in one report, red gates, and the user's mistakes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from eval import live
from eval.config import EvalConfig, eval_config
from eval.measures.losslessness import Gate, SampledGate, verdict_of
from eval.run import evaluate, find_best_tree
from eval.setup import dtype_for, folder_for, prepared
from heads.common.resolvers import ROOT, register_resolvers
from heads.common.typed import typed
from heads.formats.hub import kind_of, sibling_spec
from heads.formats.store import TargetSpec, save_head
from inference.api import loaded
from inference.decode import Generation, RequestParams
from inference.drafters.plain import Baseline
from inference.drafters.registry import DRAFTERS
from inference.target.config import model_config
from tests import toys
from tests.eval.small import SIZE, run_main, small, words
from tests.heads.published import eagle3_authors, publish
from tests.inference.test_run import config as asked
from tests.refusals import refuses


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
    assert "The chi-square test samples" in written
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


def test_a_red_gate_prints_no_speedup_and_exits_with_one(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every speculative run ends in a token that the baseline did not choose."""
    speculate = live.speculate

    def wrong(*args: Any, **kwargs: Any) -> Generation:
        made = speculate(*args, **kwargs)
        if not isinstance(args[1], Baseline):
            made.tokens[-1] = (made.tokens[-1] + 1) % toys.VOCAB
        return made

    monkeypatch.setattr(live, "speculate", wrong)
    assert run_main(f"run={runs / 'eagle'}", f"out={tmp_path}", "dtype=float32", *words(SIZE)) == 1
    printed = capsys.readouterr()
    (line,) = (line for line in printed.err.splitlines() if "LOSSLESS" in line)
    assert line.startswith("NOT LOSSLESS: eagle: 2 of 2 prompts differ")
    assert "withheld" in printed.out
    row = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["rows"][1]
    assert (row["speedup"], row["speedup_ci"], row["speedup_hf"], row["lossless"]["failed"]) == (None, None, None, 2)


def test_a_lossy_rule_is_red_whatever_it_emits(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"rule": "typical", "lossy": True, "temperature": [0, 1.0], "hf": False, "prompts": 1}
    assert not evaluate(small(runs, tmp_path, **given)).passed
    printed = capsys.readouterr()
    assert "NOT LOSSLESS: eagle: its rule is lossy by choice; " in printed.err
    assert printed.out.count("withheld") >= 2
    told = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    rows = [row for row in told["rows"] if row["drafter"] == "eagle"]
    assert [row["rule"] for row in rows] == ["typical (lossy)"] * 2
    assert [row["speedup"] for row in rows] == [None, None]
    assert [row["lossless"]["checked"] for row in rows] == [1, 0], "coupled noise says nothing of a lossy rule"
    assert (told["settings"]["rule"], told["settings"]["lossy"]) == ("typical", True)


def test_the_gate_runs_with_the_rule_and_the_rows_name_it(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    speculate = live.speculate

    def noted(*args: Any, params: RequestParams, **kwargs: Any) -> Any:
        asked.append((params.rule, params.sampling))
        return speculate(*args, params=params, **kwargs)

    monkeypatch.setattr(live, "speculate", noted)
    values = {"rule": "coupled", "temperature": [0, 1.0], "repetition_penalty": 1.3, "min_p": 0.01, "prompts": 1}
    made = evaluate(small(runs, tmp_path, hf=False, tree={"nodes": 5, "depth": None}, **values))
    assert made.passed
    assert {(row.tree, row.tau_ci) for row in made.rows[1::2]} == {("dynamic-d4k3n5", None)}, "of a single prompt"
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
        temperature = setup.params.sampling.temperature
        verdicts = ["identical", "failed" if temperature == 1 else "identical", "near_tie"]
        return [SampledGate(name, temperature, verdict_of(verdicts, [], []), None, "none") for name in setup.drafters]

    def greedy(_: Any, __: Any, ids: list[str], dtype: Any) -> Gate:
        assert (ids, dtype) == (["p0", "p2", "p1"], torch.float64)
        return verdict_of(["identical", "near_tie", "identical"], [], [])

    monkeypatch.setattr("eval.gates.sampled_gates", sampled)
    monkeypatch.setattr("eval.measures.losslessness.gate", greedy)
    given = {"temperature": [0, 1.0, 0.5], "hf": False, "gate_dtype": "float64", "max_new_tokens": 4}
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


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"run": None}, "model.path"),
        ({"compare": ["nonesuch"]}, "nonesuch"),
        ({"tree": {"kind": "bush"}}, "tree.kind"),
        ({"tree": {"bushes": 3}}, "bushes"),
        ({"rule": "best"}, "traversal"),
        ({"rule": "typical"}, "lossy=true"),
        ({"rule": "block"}, "tree=chain"),
        ({"min_p": 2.0}, "min_p"),
    ],
)
def test_a_mistake_is_named_in_one_line(runs: Path, tmp_path: Path, values: dict[str, Any], named: str) -> None:
    refuses(named, lambda: evaluate(small(runs, tmp_path, **values)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": [1, 2.5]}, "batch_size"),
        ({"request_rate": 0}, "request_rate is 0.0: give a number above 0"),
        ({"request_rate": [None, "fast"]}, r"request_rate\[1\]: 'fast' is not"),
        ({"request_rate": float("inf")}, "request_rate is inf"),
        ({"temperature": "hot"}, "temperature: 'hot' is not a number"),
        ({"temperature": []}, "temperature"),
        ({"temperature": [0, -1]}, "temperature"),
        ({"prompts": 0}, "prompts is 0"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"gate_tv": 0.0}, "gate_tv is 0.0"),
        ({"gate_tv": 0.25}, "gate_tv is 0.25: give a number below 0.25"),
        ({"turns": "last"}, "turns is 'last'"),
        ({"promts": 3}, "promts"),
    ],
)
def test_a_bad_value_is_refused_before_anything_is_loaded(values: dict[str, Any], named: str) -> None:
    refuses(named, eval_config, **values)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"drafter": {"plain": {}}, "workload": "/nowhere/log.jsonl"}, "/nowhere/log.jsonl"),
        ({"drafter": {"plain": {}}, "out": "/dev/null/report"}, "out=/dev/null/report: cannot be written"),
        ({"drafter": {"oracle": {}}}, "no drafter is called 'oracle'"),
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
    refuses(named, evaluate, eval_config(**{"workload": "tiny", **values, "model": tiny | values.get("model", {})}))


def test_hydra_and_plain_yaml_give_the_same_values() -> None:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        assert typed(EvalConfig, compose("eval")) == eval_config()
        chosen = typed(EvalConfig, compose("eval", ["model=tiny", "tree=chain", "tree.depth=6", "run=[a,b]"]))
    assert chosen.model["name"] == "tiny"
    assert (chosen.tree["kind"], chosen.tree["depth"]) == ("chain", 6)
    assert chosen.runs() == ["a", "b"]
    assert (chosen.temperature, chosen.batch_size, chosen.request_rate) == ([0.0], [1], [None])
    several = eval_config(temperature=[0, 0.7], batch_size=[2], request_rate=[None, 2], run="a")
    assert (several.temperature, several.batch_size, several.request_rate) == ([0.0, 0.7], [2], [None, 2.0])
    assert several.runs() == ["a"]


def test_speed_is_measured_in_the_dtype_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[torch.dtype] = []
    monkeypatch.setattr("eval.setup.note_dtype", lambda _, __, dtype: said.append(dtype))
    monkeypatch.setattr("eval.setup.device_named", lambda _: torch.device("cuda"))
    assert dtype_for(eval_config(dtype="float16"), model_config(dtype="bfloat16")) == "float16"
    assert dtype_for(eval_config(), model_config(dtype="bfloat16")) == "bfloat16"
    assert said == []
    assert dtype_for(eval_config(), model_config()) == "bfloat16"
    assert said == [torch.bfloat16]


def test_the_report_goes_to_the_run_or_where_it_was_told(tmp_path: Path) -> None:
    assert folder_for(None, [str(tmp_path)], ["head"]) == tmp_path
    assert folder_for("there", [str(tmp_path)], ["head"]) == Path("there")
    assert folder_for(None, ["me/mine"], ["head"]) == Path("outputs/mine")
    assert folder_for(None, [], ["suffix", "plain"]) == Path("outputs/suffix-plain")
    for name in ("head", "mine"):  # a head's own folder, which may be in git
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    assert folder_for(None, [str(tmp_path / "head")], ["head"]) == Path("outputs") / tmp_path.name
    assert folder_for(None, [str(tmp_path / "mine")], ["head"]) == Path("outputs/mine")


def test_a_report_that_is_replaced_is_announced(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"to {tmp_path}, in place of the report there; out=FOLDER writes elsewhere"
    for announced in (False, True):
        prepared(small(runs, tmp_path))
        assert (line in capsys.readouterr().err) == announced
        (tmp_path / "report.json").write_text("{}")


def test_every_source_has_its_options_and_every_option_its_source() -> None:
    files = sorted((ROOT / "conf" / "drafter").glob("*.yaml"))
    assert all(file.read_text(encoding="utf-8").startswith(f"# @package drafter.{file.stem}\n") for file in files)
    assert {OmegaConf.load(file).get("source", file.stem) for file in files} == {"head", "plain", "hybrid", *DRAFTERS}


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


@pytest.mark.slow
def test_workloads_and_categories_have_rows_of_their_own(runs: Path, tmp_path: Path) -> None:
    kinds = [{"id": f"{kind}{i}", "category": kind, "turns": [f"w{i} w2", "w4"]} for kind in "ab" for i in (1, 2)]
    (tmp_path / "kinds.jsonl").write_text("\n".join(map(json.dumps, kinds)), encoding="utf-8")
    workloads = [str(tmp_path / "kinds.jsonl"), str(runs / "prompts.jsonl")]
    values = {"workload": workloads, "turns": "all", "hf": False, "temperature": [0, 1.0], "warmup": 1, "gate_tv": 0.1}
    assert evaluate(small(runs, tmp_path, **values)).passed
    told = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    rows = {(row["workload"], row["temperature"]): row for row in told["rows"] if row["drafter"] == "eagle"}
    whole, parts = "kinds.jsonl", ("kinds.jsonl/a", "kinds.jsonl/b")
    assert list(rows) == [
        *((name, t) for t in (0.0, 1.0) for name in (whole, *parts)),
        *(("prompts.jsonl", t) for t in (0.0, 1.0)),
    ]
    for t in (0.0, 1.0):
        assert [rows[part, t]["category"] for part in parts] == ["a", "b"]
        assert [rows[name, t]["prompts"] for name in (whole, *parts, "prompts.jsonl")] == [4, 2, 2, 2]
        assert [rows[name, t]["lossless"]["identical"] for name in (whole, *parts, "prompts.jsonl")] == [4, 2, 2, 2]
        assert rows[whole, t]["tokens"] == sum(rows[part, t]["tokens"] for part in parts)
        assert rows[whole, t]["whole_speedup"] > 0
        quantiles = {"tau", "tokens_per_second", "user_tokens_per_second", "latency_s", "speedup"}
        assert set(rows[whole, t]["by_request"]) == quantiles
    (drawn,) = told["settings"]["sampled_gate"]
    assert (drawn["drafter"], drawn["temperature"], drawn["coupled"]["identical"]) == ("eagle", 1.0, 6)
    assert drawn["distribution"]["control_p"] < drawn["distribution"]["alpha"]
    assert told["settings"]["warmup_prompts"] == "further ones"
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| eagle, kinds.jsonl |" in text
    assert "broken control caught" in text


def test_a_red_draw_withholds_the_speedup_of_its_temperature_alone(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.measures.losslessness.p_value", lambda *_: 0.5)  # of the broken control too
    made = evaluate(small(runs, tmp_path, hf=False, temperature=[0, 1.0], gate_tv=0.1, seed=3))
    assert not made.passed
    assert "broken control NOT caught" in made.failures()[0]
    assert [row.speedup is None for row in made.rows if row.drafter == "eagle"] == [False, True]
    assert [row.whole_speedup is None for row in made.rows if row.drafter == "eagle"] == [False, True]


TREE = asdict(toys.TREES["dynamic"])


@pytest.fixture(scope="module")
def folder(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a published head and one of our own."""
    target = toys.target()
    folder = tmp_path_factory.mktemp("published")
    _, tensors, config = eagle3_authors()
    publish(folder / "theirs", tensors, config, "model.safetensors")
    save_head(folder / "ours" / "head", toys.head("eagle3", target), target.spec, TREE)
    return folder


@pytest.fixture
def config(runs: Path, folder: Path) -> Callable[..., EvalConfig]:
    model = {"path": str(runs / "target"), "device": "cpu"}
    given = {"run": str(folder / "theirs"), "model": model, "workload": str(runs / "prompts.jsonl"), "tree": TREE}
    return lambda **values: small(runs, folder / "report", **(given | {"hf": False} | values))


def test_it_stands_in_a_report_beside_our_own(folder: Path, config: Any) -> None:
    theirs, ours = str(folder / "theirs"), str(folder / "ours")
    report = evaluate(config(compare=[ours]))
    assert report.passed
    assert [row.drafter for row in report.rows] == ["plain", f"eagle3 {theirs}", f"eagle3 {ours}"]
    assert kind_of(folder / "theirs") == "eagle3"


def test_what_it_does_not_say_is_asked_for_in_one_line(folder: Path, config: Any) -> None:
    with pytest.raises(
        ValueError, match=r"theirs: a head in an engine's format brings no tree: give tree=chain"
    ) as error:
        evaluate(config(tree=dict.fromkeys(TREE)))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"^model\.path is missing"):
        evaluate(config(model={"path": None}))
    with pytest.raises(ValueError, match=r"theirs: tune=true writes the tree into the head"):
        find_best_tree(config(tune=True))


def sibling(folder: Path, runs: Path, **changed: Any) -> Path:
    """Write the runs' toy target with its weights moved a little, as a fine-tune moves them."""
    shutil.copytree(runs / "target", folder)
    if changed:
        model = AutoModelForCausalLM.from_config(toys.ARCHITECTURES["llama"].__class__(**toys.SIZES | changed))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * weight.std() * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder


def test_a_sibling_takes_the_heads_fingerprint_and_nothing_else(tmp_path: Path, caplog: Any) -> None:
    target = toys.target()
    save_head(tmp_path, toys.head("medusa", target), target.spec, {})
    tuned = replace(target.spec, name="tuned", fingerprint="another")
    assert sibling_spec(tmp_path, tuned, "drafts for") == replace(tuned, fingerprint=target.spec.fingerprint)
    assert f"made for the weights of {target.spec}; it drafts for those of tuned" in caplog.text
    caplog.clear()
    assert sibling_spec(tmp_path, target.spec, "drafts for") is target.spec
    assert not caplog.text
    assert isinstance(tuned, TargetSpec)


@pytest.mark.slow
def test_a_head_of_a_sibling_is_measured_with_a_warning(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = sibling(tmp_path / "tuned", runs)
    run = tmp_path / "eagle"
    shutil.copytree(runs / "eagle", run)
    model = {"path": str(tuned), "prompts": str(runs / "prompts.jsonl")}
    how = replace(small(runs, tmp_path / "out"), run=str(run), model=model)
    with pytest.raises(ValueError, match=r"made for another target.*model\.sibling=true") as refused:
        evaluate(how)
    assert "\n" not in str(refused.value)
    report = evaluate(replace(how, model=model | {"sibling": True}))
    assert report.passed
    (line,) = report.extras["warnings"]
    name = json.loads((run / "head" / "config.json").read_text())["target"]["name"]
    assert line == f"eagle was made for {name} and is measured on {tuned}"
    assert f"compare with care: {line}" in capsys.readouterr().err
    assert line in (tmp_path / "out" / "report.md").read_text()
    evaluate(replace(how, model=model | {"sibling": True}, out=None))
    assert (run / "tuned" / "report.json").exists()

    for size, what in (({"vocab_size": 48}, "vocabulary"), ({"hidden_size": 64}, "width")):
        other = sibling(tmp_path / what, runs, **size)
        with pytest.raises(ValueError, match=f"made for another target, .*: its {what} is") as refused:
            evaluate(replace(how, model={**model, "path": str(other), "sibling": True}))
        assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_sibling_decodes(runs: Path, tmp_path: Path) -> None:
    words = [f"run={runs / 'eagle'}", f"model.path={sibling(tmp_path / 'tuned', runs)}", "model.dtype=float32"]
    with pytest.raises(ValueError, match="made for another target"):
        loaded(asked(*words))
    assert loaded(asked(*words, "model.sibling=true"))[1].name == "head"
