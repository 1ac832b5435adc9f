"""The doctor on healthy heads in every form, and on faults that only drafting shows."""

import re
from pathlib import Path
from typing import Any

import pytest

from ops.doctor import examine
from ops.examine.finding import OK, UNKNOWN, written
from tests.ops.doctoring import FULL, IDS, Ward, asked, change, faults, rope, turned

FORMS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("eagle3", "vllm", {}), ("eagle3", "vllm", FULL), ("eagle3", "eagle", {}), ("eagle", "vllm", {}),
    ("eagle", "eagle", {}), ("medusa", "vllm", {}), ("medusa", "medusa", {}), ("hydra", "hydra", {}),
    ("block", "dflash", {}), ("eagle3", None, {}), ("eagle", None, {}), ("medusa", None, {}), ("hydra", None, {}),
    ("block", None, {}), ("peagle", "vllm", {}), ("peagle", "speculators", {"embedding": "own"}), ("peagle", None, {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "form", "options"), FORMS)
def test_a_healthy_head_has_no_finding(
    kind: str, form: str | None, options: dict[str, Any], tmp_path: Path, ward: Ward
) -> None:
    folder = ward.published(tmp_path / "head", kind, form, options)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    found = examine(asked(folder, ward.target, True))
    assert [each for each in found if each.verdict != OK] == [], written(found)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_nothing_is_wrong_with_a_head_of_speculators_defaults(tmp_path: Path, ward: Ward) -> None:
    options = {"feature_norm": False, "joint_norm": True, "norm_output": True}
    assert faults(ward.published(tmp_path / "head", "eagle3", "speculators", options), ward.target, True) == []


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "layers": (
        {"config": lambda c: [c.update({IDS: [3, 5, 6]}), c["eagle_config"].update({IDS: [2, 4, 5]})]},
        " is more", "python eval/run.py",
    ),
    "theta": ({"config": rope(rope_theta=1.0)}, " is more", "python eval/run.py"),
    "card": (
        {"report": lambda r: r["rows"][0].update(tau=9.0, tau_ci=[8.5, 9.5])},
        "the card's 9.00 [8.50, 9.50] is more", "python eval/run.py",
    ),
    "random weights": (
        {"tensors": turned("lm_head.weight", lambda w: w.flip(0))}, "next to nothing is accepted",
        "fix what is wrong above",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_files_do_not_show_is_measured(name: str, tmp_path: Path, ward: Ward) -> None:
    edits, says, remedy = FAULTS[name]
    folder = ward.published(tmp_path / "head", "eagle3", "vllm", {})
    change(folder, **edits)
    found = [each for each in faults(folder, ward.target, True) if each.check == "acceptance"]
    assert says in found[0].says
    assert remedy in found[0].remedy
    assert found[0].costs


def test_without_a_card_acceptance_is_measured_and_not_judged(tmp_path: Path, ward: Ward) -> None:
    folder = ward.published(tmp_path / "head", "eagle3", "vllm", {})
    (folder / "report.json").unlink()
    found = {each.check: each for each in examine(asked(folder, ward.target, True))}["acceptance"]
    assert found.verdict == UNKNOWN
    assert re.match(r"τ \d\.\d\d \[.*\] on 3 prompts of prompts.jsonl, tree chain-3; no report.json says", found.says)
