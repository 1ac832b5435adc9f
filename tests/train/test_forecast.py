"""A training within a budget: its forecast holds what comes out, its choice follows, and a killed one goes on."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from rich.console import Console

from data.text.filters import Counts
from data.text.masks import Sample
from data.text.prompts import Prompt, TrainingData
from eval.tuning.grid import halves
from heads.common.command import BEST
from heads.common.resolvers import ROOT, register_resolvers
from inference.decode import Settings, autoregress
from inference.verification.sample import GREEDY
from tests import toys
from tests.train import jobs
from train import run as command
from train.checkpoints import format
from train.config import Budget, run_config
from train.forecast import log, text
from train.forecast.command import Bench, check, train_within
from train.forecast.curve import Curve, Prior, forecast, interval
from train.forecast.pilots import PROBE, STATE, Pilots
from train.optim import cooldown_begin, learning_rate, same_rates
from train.run import within_budget

PROMPTS, TOKENS, BOUND = 40, 63.0, 6.0


@pytest.fixture
def composing() -> Iterator[None]:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


def counts_of(tau: float, hard: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return tokens and passes of prompts of which each is so much easier or harder than the others."""
    return np.stack([np.full(len(hard), TOKENS), TOKENS / np.maximum(1, tau * (1 + hard))], -1)


@pytest.mark.parametrize("exponent", [0.2, 1.0])
def test_intervals_hold_what_planted_curves_come_to(exponent: float) -> None:
    rng = np.random.default_rng(0)
    held, errors = [], []
    steps = np.array([25.0, 50.0, 100.0])
    for _ in range(12):
        curves, truth, hard = [], [], rng.normal(0, 0.15, PROMPTS)
        for _ in range(4):
            best, b = rng.uniform(2.5, 4.5), exponent * math.exp(0.4 * rng.normal())
            rise = best - rng.uniform(1.2, 1.6)

            def tau(n: float, best: float = best, rise: float = rise, b: float = b) -> float:
                return 1 + (best - rise * (n / 25) ** -b - 1) * (1 + 0.02 * rng.normal())

            curves.append(Curve(steps, np.stack([counts_of(tau(n), hard) for n in steps]), BOUND))
            other = counts_of(tau(400), rng.normal(0, 0.15, PROMPTS)).sum(0)
            truth.append(other[0] / other[1])
        for (samples,), came in zip(forecast(curves, [[400.0]] * 4, PROMPTS), truth, strict=True):
            middle, low, high = interval(samples)
            held.append(low <= came <= high)
            errors.append(middle / came - 1)
    assert np.mean(held) >= 0.8  # of 48, 90 % are stated: three standard deviations below them
    assert abs(np.mean(errors)) < 0.05


def test_an_interval_widens_with_the_distance_and_with_fewer_prompts() -> None:
    hard = np.tile(np.random.default_rng(0).normal(0, 0.2, PROMPTS // 8), 8)

    def widths(prompts: int) -> list[float]:
        curve = Curve(np.array([1.0, 2, 4]), np.stack([counts_of(t, hard[:prompts]) for t in (2, 2.4, 2.7)]), BOUND)
        return [high - low for _, low, high in map(interval, forecast([curve], [[4.0, 8.0, 32.0]], prompts)[0])]

    many, few = widths(PROMPTS), widths(PROMPTS // 8)
    assert many == sorted(many)
    assert all(wide > narrow for wide, narrow in zip(few, many, strict=True))


def test_curves_whose_prompts_are_all_alike_are_fitted() -> None:
    flat = Curve(np.array([1.0, 2.0, 4.0]), np.full((3, 4, 2), [63.0, 63.0]), BOUND)  # nothing was accepted
    steep = Curve(np.array([1.0, 1.1, 4.0]), np.stack([counts_of(t, np.zeros(4)) for t in (1.0, 1.0, 5.9)]), BOUND)
    for prior in (Prior(), Prior(residual=1e-3), Prior(residual=0.2, slope=30.0)):
        still, rising = (samples[0] for samples in forecast([flat, steep], [[64.0]] * 2, 4, prior))
        assert np.isfinite(rising).all()
        assert rising.max() <= BOUND
        assert interval(still)[1] == 1.0


@pytest.mark.parametrize("value", ["0", "-1h", "1x", "nan", "", "1h30", "inf", "0s", True, "1e9999", "-5e15"])
def test_a_budget_that_is_none_is_refused_in_a_line(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^budget is .*: give a time above 0 \(1s, 1min, 1h, 1d\), or a number"
    ) as seen:
        Budget.read(value)
    assert "\n" not in str(seen.value)


def test_budgets_are_read() -> None:
    timed = {"1h": 3600, "90min": 5400, "1.5h": 5400, "20s": 20, "2d": 172800}
    assert {text: Budget.read(text).amount for text in timed} == timed
    assert Budget.read(5e15) == Budget.read("5e15") == Budget.read("5e+15") == Budget(5e15, timed=False)
    assert [str(Budget.read(value)) for value in ("1h", "90s", 5e15)] == ["1 h", "1.5 min", "5e+15 operations"]


@pytest.mark.usefixtures("composing")
def test_settings_of_a_budget_are_refused() -> None:
    for words, message in (
        (["budget=1x"], "budget is '1x'"),
        (["log=a.jsonl"], "log is read by a budget or by the loop"),
        (["budget=1h", "forecast.candidates=[]"], "forecast.candidates is"),
        (["budget=1h", "forecast.candidates=[mlp,mlp]"], "each once"),
    ):
        with pytest.raises(ValueError, match=message):
            run_config(compose("train", words))
    with pytest.raises(ValueError, match=r"head.layers is of one head"):
        command.shared_words(["budget=1h", "head.layers=2"], None)
    with pytest.raises(ValueError, match="both given"):
        command.shared_words(["data.path=b", "log=a"], "a")
    shared = command.shared_words(["budget=1h", "trainer.lr=1", "forecast.share=0.1"], "a b")
    assert shared == ["trainer.lr=1", "data.path='a b'"]


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("head=eagle3", r"give forecast.candidates=\[eagle3\]$"),
        ("trainer.steps=100", "leave it out$"),
        ("trainer.cooldown=0.5", "give forecast.cooldown in its place$"),
        ("trainer.warmup=0.1", "give forecast.warmup, in steps, in its place$"),
    ],
)
def test_what_a_budget_decides_is_refused_where_it_is_given(word: str, instead: str) -> None:
    with pytest.raises(ValueError, match=f"^{word}.*{instead}"):
        command.shared_words(["budget=1h", word], None)


@pytest.mark.usefixtures("composing")
def test_the_head_that_nobody_named_is_no_word_of_a_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["head=mtp", "budget=1h", "plan=true", f"out={tmp_path / 'out'}"]  # as head=best, the default, leaves them
    monkeypatch.setattr("train.distributed.launch.overrides", lambda: words)
    monkeypatch.setattr("train.run.check_plan", lambda _: None)
    monkeypatch.setattr("train.run.budget_plan", lambda *_: "planned")
    monkeypatch.setenv(BEST, "head=best: mtp\n")
    run = run_config(compose("train", words))
    assert within_budget(run) is None
    with pytest.raises(ValueError, match=r"^head=mtp is one head"):
        within_budget(run)


@pytest.mark.usefixtures("composing")
def test_a_rate_is_constant_before_its_cooldown() -> None:
    whole = run_config(compose("train")).trainer
    short = replace(whole, steps=100, warmup=0.1, lr=1.0, min_lr=0.1, cooldown=0.2)
    rates = [learning_rate(step, short) for step in range(100)]
    assert cooldown_begin(short) == 80
    assert set(rates[10:81]) == {1.0}
    assert rates[90] == pytest.approx(0.1 + 0.9 * 0.5)
    longer = replace(short, steps=200, warmup=0.05)
    assert [learning_rate(step, longer) for step in range(80)] == rates[:80]
    schedule = {"steps": 100, "warmup": 0.1, "cooldown": 0.2}
    assert same_rates(longer, schedule, 80)
    assert not same_rates(longer, schedule, 85)
    assert not same_rates(replace(longer, warmup=0.1), schedule, 20)


class Stage:
    """Candidates with planted curves, in place of trainings: what `Pilots` reads of one is written."""

    def __init__(self, out: Path, candidates: dict[str, tuple[float, float, float]], **changed: Any) -> None:
        config = replace(run_config(compose("train")).forecast, candidates=list(candidates), **changed)
        self.planted, self.steps, self.taken = candidates, dict.fromkeys(candidates, 0), 0
        self.pilots = Pilots(out, config, Budget(100_000.0, timed=False), 512, self.train, self.measure)

    def train(self, words: list[str]) -> None:
        """Take the steps that are left, at 2 operations each, and keep their checkpoints as a run does."""
        given = dict(word.partition("=")[::2] for word in words)
        folder, steps = Path(given["out"].strip("'")), int(given["trainer.steps"])
        begin = max(map(format.step_of, format.checkpoints(folder / "checkpoints")), default=0)
        for step in range(begin + 1, steps + 1):
            if step % int(given["trainer.save_every"]) == 0 or step == steps:
                format.folder_of(folder / "checkpoints", step).mkdir(parents=True)
                format.tidy(folder / "checkpoints", int(given.get("trainer.keep", 2)), 0)
        self.taken += steps - begin
        logged = range(0, steps + 1, int(given.get("trainer.log_every", 100)))[1:]
        (folder / "metrics.jsonl").write_text("\n".join(json.dumps({"step": i, "step_seconds": 0.5}) for i in logged))
        (folder / "config.yaml").write_text("init: auto\n")
        (folder / "training.json").write_text(json.dumps({"flops": 2.0 * steps, "steps": steps}))
        self.steps[self.pilots.config.candidates[int(folder.name)]] = steps

    def measure(self, folders: list[Path]) -> list[dict[str, Any]]:
        """Return τ = 1 + best (1 - (steps / 25)^-b / 2) on 20 prompts, a pass costing `cost` tokens."""
        results = []
        for folder in folders:
            words = self.pilots.config.candidates[int(folder.parent.name)]
            best, b, cost = self.planted[words]
            tau = 1 + best * (1 - (self.steps[words] / 25) ** -b / 2)
            head = [[60.0, 60 / tau, cost * 60 / tau]] * 20
            results.append({"head": head, "plain": [[60.0, 60.0]] * 20})
        return results


@pytest.mark.usefixtures("composing")
def test_the_fastest_candidate_is_chosen_and_the_hopeless_are_dropped(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"mtp": (3.0, 0.3, 1.5), "mlp": (1.0, 0.5, 1.4), "eagle": (3.2, 0.3, 4.0)})
    pilots = stage.pilots
    pilots.measured(BOUND, 20)
    choice, every = pilots.choose(BOUND, 20)
    assert choice.words == "mtp"
    assert set(pilots.state["dropped"]) == {"mlp", "eagle"}
    assert pilots.state["spent"] == 2 * stage.taken  # every step counts, and no step of a checkpoint twice
    assert pilots.state["spent"] <= 1.05 * pilots.config.share * 100_000
    points = [point["steps"] for point in pilots.state["points"]["mtp"]]
    assert points == [points[0] * 2**i for i in range(len(points))]
    assert len(points) >= 3
    assert 2 * (pilots.most("mtp") - pilots.stable(points[-1])) == pytest.approx(100_000 - pilots.state["spent"], abs=2)
    pilots.state["spent"] += 10_000  # as a run that is resumed has spent
    assert pilots.choose(BOUND, 20)[0].most == choice.most
    assert {one.words for one in every} == {"mtp", "mlp", "eagle"}
    assert "mtp is trained on" in text.decision(pilots, choice)


@pytest.mark.usefixtures("composing")
def test_the_checkpoint_before_a_long_cooldown_is_there_to_go_on_from(tmp_path: Path) -> None:
    pilots = (stage := Stage(tmp_path, {"mlp": (2.0, 0.2, 1.2)}, cooldown=0.6)).pilots
    pilots.measured(BOUND, 20)
    steps = [point["steps"] for point in pilots.state["points"]["mlp"]]
    again = sum(map(pilots.stable, steps[:-1]))  # steps that are in a checkpoint, and not taken again
    assert stage.taken == PROBE + sum(steps) - again
    choice, _ = pilots.choose(BOUND, 20)
    pilots.hand_over(choice)
    (checkpoint,) = format.checkpoints(tmp_path / "checkpoints")
    assert format.step_of(checkpoint) == pilots.stable(steps[-1])


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize("status", [1, 2, 143])
def test_a_candidate_whose_processes_refuse_is_left_out_and_one_that_is_stopped_stops_all(
    status: int, tmp_path: Path
) -> None:
    pilots = Stage(tmp_path, {"mlp": (2.0, 0.2, 1.2), "eagle": (2.0, 0.2, 1.2)}).pilots
    train = pilots.train

    def launched(words: list[str]) -> None:
        if "head=eagle" in words:
            raise SystemExit(status)
        train(words)

    pilots.train = launched
    if status == 143:
        with pytest.raises(SystemExit):
            pilots.measured(BOUND, 20)
        return
    pilots.measured(BOUND, 20)
    assert pilots.state["left_out"] == {"eagle": f"its processes ended with status {status}, see above"}
    assert [*pilots.state["points"]] == ["mlp"]


@pytest.mark.usefixtures("composing")
def test_a_probe_says_what_a_step_takes_however_seldom_a_run_logs(tmp_path: Path) -> None:
    pilots = Stage(tmp_path, {"mlp": (2.0, 0.2, 1.2)}).pilots  # whose runs log every 100th step
    assert pilots.probe("mlp") is None
    assert pilots.state["cost"]["mlp"]["seconds"] == 0.5


@pytest.mark.usefixtures("composing")
def test_a_training_stops_where_more_is_not_worth_it(tmp_path: Path) -> None:
    flat, steep = (Stage(tmp_path / name, {"mlp": (2.0, b, 1.2)}) for name, b in (("flat", 2.5), ("steep", 0.2)))
    for stage in (flat, steep):
        stage.pilots.measured(BOUND, 20)
    choice, _ = flat.pilots.choose(BOUND, 20)
    assert choice.steps < choice.most / 2
    assert interval(choice.gain)[0] - 1 <= flat.pilots.config.worth
    assert "and is not spent" in text.decision(flat.pilots, choice)
    longer, _ = steep.pilots.choose(BOUND, 20)
    assert longer.steps > 1.5 * choice.steps


@pytest.mark.usefixtures("composing")
def test_nothing_is_trained_that_would_be_slower(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"mlp": (1.0, 1.0, 4.0)})
    stage.pilots.measured(BOUND, 20)
    choice, _ = stage.pilots.choose(BOUND, 20)
    assert not stage.pilots.pays(choice)
    assert "no candidate would be 1 times as fast as the target alone" in text.decision(stage.pilots, choice)


@pytest.mark.usefixtures("composing")
def test_a_hand_over_that_was_killed_goes_on(tmp_path: Path) -> None:
    pilots = Stage(tmp_path, {"mlp": (2.0, 2.5, 1.2)}).pilots
    pilots.measured(BOUND, 20)
    choice, _ = pilots.choose(BOUND, 20)
    begin = pilots.stable(pilots.state["points"]["mlp"][-1]["steps"])
    name = format.folder_of(Path(), begin).name
    (tmp_path / "checkpoints" / f"{format.PARTIAL}{name}").mkdir(parents=True)
    pilots.hand_over(choice)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [name]
    assert (tmp_path / "metrics.jsonl").is_file()
    assert (tmp_path / "config.yaml").is_file()


@pytest.mark.usefixtures("composing")
def test_a_plan_of_a_budget_trains_nothing_however_it_is_spelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["budget=1h", "plan=True", f"out={tmp_path / 'out'}"]
    monkeypatch.setattr("train.distributed.launch.overrides", lambda: words)
    monkeypatch.setattr("train.run.check_plan", lambda _: None)
    monkeypatch.setattr("train.run.budget_plan", lambda *_: "planned")
    assert within_budget(run_config(compose("train", words))) is None
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize(
    ("budget", "device", "said"),
    [
        ("1h", "here", "at an assumed 40% of "),
        ("1e15", "here", " on one"),
        ("1h", "here device.tflops=2", "of 2 TFLOP/s"),
        ("1h", "cpu", "hours are not known: device=cpu has no peak; give device.tflops"),
    ],
)
def test_a_plan_of_a_budget_says_its_rate(
    budget: str, device: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["head=mlp", "model.device=cpu", "trainer=debug", f"budget={budget}", *f"device={device}".split()]
    run = run_config(compose("train", words))
    Console(width=200).print(command.budget_plan(run, {"mlp": run}))
    printed = capsys.readouterr().out
    assert said in printed
    assert (" - " in printed) == ("not known" in printed)


@pytest.mark.usefixtures("composing")
def test_a_budget_that_is_too_small_says_what_would_do(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"mlp": (1.0, 1.0, 1.0)})
    stage.pilots.budget = Budget(100.0, timed=False)
    with pytest.raises(ValueError, match=r"too small for 3 short trainings of 1 candidates: about 9\d\d operations"):
        stage.pilots.measured(BOUND, 20)


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize("flops", [2.293e10, 2.534e10, 2.714e10, 3.244e10])
@pytest.mark.parametrize("small", ["1e3", "1s"])
def test_the_budget_that_a_refusal_names_is_enough_for_every_candidate(
    small: str, flops: float, tmp_path: Path
) -> None:
    pilots = Stage(tmp_path, {"mlp": (1.0, 1.0, 1.0), "eagle": (1.0, 1.0, 1.0)}).pilots
    pilots.state["cost"] = {"mlp": {"seconds": 0.1, "flops": flops}, "eagle": {"seconds": 0.117, "flops": 3 * flops}}
    pilots.state["call"] = {"mlp": 0.3, "eagle": 0.4}
    pilots.budget = Budget.read(small)
    with pytest.raises(ValueError, match=r"with overwrite=true$") as seen:
        pilots.first(["mlp", "eagle"])
    (advised,) = re.findall(r"about (\S+(?: s| min| h)?)", str(seen.value))
    pilots.budget = Budget.read(advised)
    assert min(pilots.first(["mlp", "eagle"]).values()) >= 25


def test_prompts_that_are_answered_with_one_token_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = toys.target(), [toys.prompt(i) for i in range(10)]
    first = [autoregress(target, prompt, Settings(2, GREEDY)).tokens[0] for prompt in prompts]
    samples = [Sample("a", toys.prompt(0, 20), [1] * 20)]
    data = TrainingData(samples, [Prompt(str(i), prompt, "") for i, prompt in enumerate(prompts)], Counts())
    monkeypatch.setattr("train.forecast.command.load_training", lambda *_: data)
    monkeypatch.setattr(Bench, "target", lambda _: target)
    settings = {"data": {"length": 20}, "forecast": {"prompts": 10, "tokens": 4}, "trainer": {"seed": 0}}
    run = SimpleNamespace(workload=None, **{key: SimpleNamespace(**values) for key, values in settings.items()})
    monkeypatch.setattr(target, "eos", frozenset(first[:2]))
    answered = [prompt for prompt, token in zip(prompts, first, strict=True) if token not in first[:2]]
    assert 4 <= len(answered) < 10
    state = (bench := Bench(run)).examined()
    assert bench.halves == halves(answered)
    assert state["log"]["others"] == len(answered[1::2])
    again = Bench(run)  # as of a forecast that goes on
    again.answered = json.loads(json.dumps(state))["answered"]
    again.measure([])
    assert again.halves == bench.halves
    monkeypatch.setattr(target, "eos", frozenset(first))
    with pytest.raises(ValueError, match=r"^the target answers 10 of 10 held-out prompts with one token, .*: raise"):
        Bench(run).examined()


def test_a_log_is_counted() -> None:
    tokens = list(range(24))
    samples = [Sample("a", tokens, [1] * 24), Sample("b", tokens, [1] * 24), Sample("c", [*range(30, 39)], [1] * 9)]
    numbers = log.statistics(samples, Counts(duplicates=3, trained=57))
    assert numbers["repeated"] == pytest.approx(17 / 36)  # windows of 8 tokens: the second sample's, of 17 + 17 + 2
    assert (numbers["samples"], numbers["tokens"], numbers["lengths"][1]) == (3, 57, 24)


def test_the_targets_entropy_is_that_of_its_distribution() -> None:
    target, tokens = toys.target(), toys.prompt(0, 20)
    seen = log.certainty(target, [Sample("a", tokens, [0] * 10 + [1] * 10)], 20, 4, 0)
    output = target.model(torch.tensor([tokens])).logits[0, 9:19].log_softmax(-1)
    assert seen["entropy"] == pytest.approx(float(-(output.exp() * output).sum(-1).mean()), rel=1e-4)
    assert seen["greedy"] == pytest.approx(float((output.argmax(-1) == torch.tensor(tokens[10:])).float().mean()))
    assert 0 < seen["entropy"] < math.log(toys.VOCAB)


@pytest.mark.slow
@pytest.mark.usefixtures("composing")
def test_a_budget_is_spent_and_a_killed_run_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [word for word in jobs.make(tmp_path) if not word.startswith(("data.held_out", "eval.prompts"))]
    words += [f"out={tmp_path / 'out'}", "data.held_out=8", "eval.prompts=0", "name=toy", "trainer.batch_tokens=64"]
    mine = ["budget=1e9", "forecast.candidates=[medusa,mlp]", "forecast.warmup=2", "forecast.prompts=8",
            "forecast.tokens=8", "forecast.least=0"]  # fmt: skip
    run = run_config(compose("train", [*words, *mine]))
    trained: list[str] = []

    def train(more: list[str]) -> None:
        if len(trained) == 5:
            raise SystemExit(143)
        trained.append(" ".join(more))
        command.ordinary([*words, *more])

    with pytest.raises(SystemExit):
        train_within(run, train)
    with pytest.raises(ValueError, match="holds a forecast already"):
        check(run)
    again = replace(run, resume=True)
    check(again)
    with pytest.raises(ValueError, match="is of budget="):
        train_within(replace(again, budget=Budget(1e7, timed=False)), train)
    done, trained = trained, []
    train_within(again, train)
    state = json.loads(Path(run.out, STATE).read_text())
    assert not set(done[:4]) & set(trained)  # what was measured is not trained again
    assert all(len(points) >= 3 for points in state["points"].values())
    spent = json.loads(Path(run.out, "training.json").read_text())
    best = Path(run.out, "head", "config.json").read_text()
    assert spent["steps"] > 0
    assert "medusa" in best or "mlp" in best
    printed, warned = capfd.readouterr()
    assert "no longer bit for bit" not in printed + warned  # a run that is lengthened is as if it had been so long
    for line in ("log: 120 requests", "what training to 1e+09 operations would bring", "is trained on", "came out: τ"):
        assert line in printed
