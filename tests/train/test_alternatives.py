"""What a run says is worth trying beside it: what did better here, else what the documentation names, at its cost."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from heads.common.resolvers import ROOT, register_resolvers
from train.config import run_config
from train.planning import alternatives
from train.planning.alternatives import Outcome, worth_trying
from train.planning.choice import chosen

OWN = Outcome("eagle", "f00d", 1.2, 1.3, 90.0, 100)
BETTER, OTHER = Outcome("mlp", "f00d", 1.6, 1.7, 60.0, 100), Outcome("medusa", "other", 9.0, 9.0, 1.0, 100)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beside", "favoured", "said"),
    [
        (
            [BETTER, OTHER],
            "mtp",
            "eagle reached 1.20x in 90 s of training; mlp (which no serving engine loads) reached 1.60x in 60 s of",
        ),
        (
            [OTHER],
            "mtp",
            "eagle reached 1.20x in 90 s of training\nworth trying: head=mtp, which docs/heads.md favours, about ",
        ),
        ([OTHER], "mlp", "90 s of training\nworth trying: head=eagle3, which most engines serve, about "),
        ([BETTER._replace(head="mtp", speedup=1.25)], "mtp", "head=eagle3, which most engines serve, about "),
        ([BETTER._replace(head=head, speedup=1.25) for head in ("mtp", "eagle3")], "mtp", "none of the 3 heads"),
    ],
)
def test_a_run_says_what_is_worth_trying(
    beside: list[Outcome], favoured: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = {"own": OWN, **{outcome.head: outcome for outcome in beside}}
    for name in reached:
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").touch()
    monkeypatch.setattr(alternatives, "outcomes", lambda out: iter([reached[out.name]]))
    monkeypatch.setattr(alternatives, "best_head", lambda *_: (favoured, ""))
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = run_config(compose("train", ["head=eagle", "data.length=64", f"out={tmp_path / 'own'}"]))
        line = str(worth_trying(chosen(run)))
        assert said in line
        assert line.endswith(f"suffix, which needs no training: python eval/run.py run={run.out} drafter=[head,suffix]")


@pytest.mark.slow
def test_another_head_is_priced_at_all_steps_although_patience_ended_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = chosen(run_config(compose("train", ["head=eagle", "data.length=64", f"out={tmp_path / 'own'}"])))
        costs = []
        for steps in (run.trainer.steps, run.trainer.steps // 4):
            stopped = OWN._replace(seconds=0.5 * steps, steps=steps)
            monkeypatch.setattr(alternatives, "outcomes", lambda _, stopped=stopped: iter([stopped]))
            costs.append(str(worth_trying(run)).split("about ")[1])
    assert costs[0] == costs[1]
