"""Workloads by name and by path, and what is wrong with the others."""

from pathlib import Path

import pytest

from data.prompts import Prompt
from eval import workloads
from eval.workloads import load_workload, short_name
from tests.eval.stubs import StubTarget


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the reading of prompts; return the paths that were asked for."""
    paths: list[str] = []

    def load(path: str, tokenizer: object, limit: int | None) -> list[Prompt]:
        paths.append(path)
        return [Prompt(f"p{i}", list(range(i)), "code") for i in (3, 60, 5)]

    monkeypatch.setattr(workloads, "load_prompts", load)
    return paths


def test_a_name_is_a_bundled_file(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    load_workload("tiny", StubTarget(), 1)
    assert asked == [str(Path(workloads.__file__).parents[1] / "examples" / "tiny" / "prompts.jsonl")]


def test_a_file_and_a_hub_name_go_through(asked: list[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("")
    load_workload(str(file), StubTarget(), 1)
    load_workload("me/prompts", StubTarget(), 1)
    assert asked == [str(file), "me/prompts"]


def test_an_unknown_name_lists_the_known_ones(asked: list[str]) -> None:
    with pytest.raises(ValueError, match=r"nonesuch.*tiny"):
        load_workload("nonesuch", StubTarget(), 1)
    assert asked == []


def test_a_prompt_without_room_is_named(asked: list[str]) -> None:
    with pytest.raises(ValueError, match=r"p60: 60 tokens.*64.*56") as error:
        load_workload("tiny", StubTarget(), 3)
    assert "\n" not in str(error.value)
    assert [prompt.id for prompt in load_workload("tiny", StubTarget(), 1)] == ["p3"]


def test_truncation_keeps_the_end(asked: list[str]) -> None:
    prompts = load_workload("tiny", StubTarget(), 3, truncate=True)
    assert [len(prompt.token) for prompt in prompts] == [3, 56, 5]
    assert prompts[1].token[-1] == 59


def test_no_prompts_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "load_prompts", lambda *_: [])
    with pytest.raises(ValueError, match="no prompts"):
        load_workload("tiny", StubTarget(), 3)


def test_short_names_show_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("")
    assert short_name(str(file)) == "mine.jsonl"
    assert short_name(str(workloads.WORKLOADS["tiny"])) == short_name("tiny") == "tiny"
    assert short_name("me/prompts") == "me/prompts"
