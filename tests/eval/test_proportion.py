"""An evaluation in proportion to its minutes: what it leaves out, in which order, and what it keeps."""

from types import SimpleNamespace

import pytest

from eval import sessions
from eval.config import eval_config
from eval.sessions import FLOOR, in_proportion

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
