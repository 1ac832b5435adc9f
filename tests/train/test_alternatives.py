"""What a run says is worth trying beside it: what did better here, else what the documentation names, at its cost."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from heads.common.resolvers import ROOT, register_resolvers
from train.config import run_config
from train.planning import alternatives
from train.planning.alternatives import Outcome, worth_trying
from train.planning.choice import chosen

OWN = Outcome("eagle", "f00d", 1.2, 1.3, 90.0)
BETTER, OTHER = Outcome("mlp", "f00d", 1.6, 1.7, 60.0), Outcome("medusa", "other", 9.0, 9.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ([BETTER, OTHER], "eagle reached 1.20x in 90 s of training; mlp reached 1.60x in 60 s of training of the same"),
        ([OTHER], "eagle reached 1.20x in 90 s of training; docs/heads.md favours mtp, about "),
        ([BETTER._replace(head="mtp", speedup=1.25)], "all engines serve eagle3, about "),
        ([BETTER._replace(head=head, speedup=1.25) for head in ("mtp", "eagle3")], "none of the 3 heads"),
    ],
)
def test_a_run_says_what_is_worth_trying(
    beside: list[Outcome], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = {"own": OWN, **{outcome.head: outcome for outcome in beside}}
    for name in reached:
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").touch()
    monkeypatch.setattr(alternatives, "outcomes", lambda out: iter([reached[out.name]]))
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = run_config(compose("train", ["head=eagle", "data.length=64", f"out={tmp_path / 'own'}"]))
        assert said in str(worth_trying(chosen(run)))
