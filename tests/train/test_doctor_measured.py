"""The doctor on healthy heads in every form, and on faults that only drafting shows: it finds what is there alone."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.train.doctoring import (
    FULL,
    IDS,
    Ward,
    asked,
    change,
    examine,
    faults,
    rope,
    turned,
)
from train.release.doctor.finding import OK, UNKNOWN, written
from train.release.doctor.trials import MOVES

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
    """Its joint norm makes the toy's neighbouring layers too alike to tell, which is no fault."""
    options = {"feature_norm": False, "joint_norm": True, "norm_output": True}
    assert faults(ward.published(tmp_path / "head", "eagle3", "speculators", options), ward.target, True) == []


TRAINED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str, str]] = {
    "layers +1": (
        {}, {"config": lambda c: [c.update({IDS: [3, 5, 6]}), c["eagle_config"].update({IDS: [2, 4, 5]})]},
        "layers, measured", "layers -1 accept more", f"set {IDS} to [2, 4, 5] and eagle_config.{IDS} to [1, 3, 4]",
    ),
    "layers -1": (
        {}, {"config": lambda c: [c.update({IDS: [1, 3, 4]}), c["eagle_config"].update({IDS: [0, 2, 3]})]},
        "layers, measured", "layers +1 accept more", f"set {IDS} to [2, 4, 5] and eagle_config.{IDS} to [1, 3, 4]",
    ),
    "tokens": (
        {"unshifted": True}, {}, "tokens, measured", "own row accepts more", "shift the tokens by one in its trainer",
    ),
    "positions": (
        {"by": MOVES["one further"]}, {}, "positions, measured", "rows one further accept more", "at t + d - 1",
    ),
    "theta": (
        {}, {"config": rope(rope_theta=5e5)}, "rope, measured", "theta 10000 accepts more than theta 500000",
        'set "rope_theta": 10000 and "rope_scaling": null',
    ),
    "scaling": (
        {}, {"config": rope(rope_scaling={"rope_type": "linear", "factor": 4.0})}, "rope, measured",
        "theta 10000 accepts more than theta 10000 scaled", '"rope_scaling": null',
    ),
    "card": (
        {}, {"report": lambda r: r["rows"][0].update(tau=9.0, tau_ci=[8.5, 9.5])}, "acceptance",
        "the card's 9.00 [8.50, 9.50] is more", "python eval/run.py",
    ),
    "random weights": (
        {}, {"tensors": turned("lm_head.weight", lambda w: w.flip(0))}, "acceptance", "next to nothing is accepted",
        "fix what is wrong above",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
def test_a_fault_that_files_do_not_show_is_measured(name: str, tmp_path: Path, ward: Ward) -> None:
    faulty, edits, check, says, remedy = TRAINED[name]
    folder = ward.published(tmp_path / "head", "eagle3", "vllm", {}, **faulty)
    change(folder, **edits)
    found = [each for each in faults(folder, ward.target, True) if each.check == check]
    assert says in found[0].says
    assert remedy in found[0].remedy
    assert found[0].costs


def test_tau_is_measured_with_modelopts_scaling_and_without(tmp_path: Path, ward: Ward) -> None:
    folder = ward.published(tmp_path / "head", "eagle3", "vllm", {})
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    change(folder, config=rope(rope_scaling=yarn))
    found = {each.check: each for each in examine(asked(folder, ward.target, True))}
    assert "NVIDIA modelopt adds this scaling" in found["rope"].says
    measured = found["rope, measured"]
    both = re.search(r"τ ([\d.]+) \[.*\] at theta 10000 scaled by .*; τ ([\d.]+) \[.*\] at theta 10000$", measured.says)
    assert both
    assert f"τ {both[1]} [" in found["acceptance"].says
    assert measured.verdict == UNKNOWN, "in texts as short as the toy's the scaling moves too little to tell"


def test_what_is_measured_says_both_shares(tmp_path: Path, ward: Ward) -> None:
    folder = ward.published(tmp_path / "head", "eagle3", "vllm", {}, unshifted=True)
    (found,) = [each for each in faults(folder, ward.target, True) if each.check == "tokens, measured"]
    shares = re.search(r"(\d+)% of 342 drafts right, as declared (\d+)%", found.says)
    assert shares
    assert int(shares[1]) > 80
    assert int(shares[2]) < 40
