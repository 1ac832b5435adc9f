"""What an assistant cannot be, said in one line."""

from pathlib import Path
from typing import Any

import pytest

from inference.decode import Settings, autoregress, speculate
from inference.target.target import Target
from inference.verification.sample import GREEDY
from tests import assistants, families, toys


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target itself."""
    return assistants.save(toys.target().model, toys.tokenizer(), tmp_path_factory.mktemp("twin"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"match": "slem"}, "drafter.assistant.match is 'slem': choose one of same, tli"),
        ({"schedule": "linear"}, "drafter.assistant.schedule is 'linear': choose constant, heuristic"),
        ({"confidence": 1.5}, "drafter.assistant.confidence is 1.5"),
        ({"tree": toys.TREES["dynamic"], "confidence": 0.3}, "drafter.assistant.tree.kind is 'dynamic'.*confidence=0"),
        ({"tree": toys.TREES["static"], "schedule": "heuristic"}, "schedule=constant"),
        ({"device": "cuda:77"}, "drafter.assistant.device is 'cuda:77'"),
        ({"device": "elsewhere"}, "drafter.assistant.device is 'elsewhere'"),
        ({"dtype": "int3"}, "drafter.assistant.*int3"),
        ({"model": "/nonesuch"}, "drafter.assistant.model=/nonesuch"),
    ],
)
def test_a_bad_value_is_named_in_one_line(clone: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as error:
        assistants.assistant(changes.pop("model", clone), toys.target(), **changes)
    assert "\n" not in str(error.value)


def test_another_tokenizer_is_named_with_the_ways_out(tmp_path: Path) -> None:
    names = [f"w{i}" for i in range(toys.VOCAB)]
    other = assistants.words([*names[:7], names[8], names[7], *names[9:]])
    path = assistants.save(toys.target().model, other, tmp_path)
    with pytest.raises(ValueError, match=r"token 'w7' is 7 .* and 8 .*use match=tli") as error:
        assistants.assistant(path, toys.target())
    assert "\n" not in str(error.value)


def test_a_tree_needs_an_attention_that_takes_one(clone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Target.load.__func__

    def without(cls: type[Target], *values: Any) -> Target:
        made: Target = load(cls, *values)
        made.takes_trees = False
        return made

    monkeypatch.setattr(Target, "load", classmethod(without))
    with pytest.raises(ValueError, match=r"drafter.assistant.tree.kind is 'sampled'.*tree.kind=chain"):
        assistants.assistant(clone, toys.target(), tree=toys.TREES["sampled"])
    source = assistants.assistant(clone, toys.target())
    made = speculate(toys.target(), source, toys.prompt(0), Settings(12, GREEDY))
    assert made.tokens == autoregress(toys.target(), toys.prompt(0), Settings(12, GREEDY)).tokens


@pytest.mark.gpu
@pytest.mark.parametrize("match", ["same", "tli"])
def test_an_assistant_on_another_device_drafts_the_same(clone: str, match: str) -> None:
    target, settings = Target.load(clone, "float32", "cuda"), Settings(12, GREEDY)
    drafted = []
    for device in ("cpu", "cuda"):
        source = assistants.assistant(clone, target, match=match, device=device)
        made = speculate(target, source, toys.prompt(0), settings)
        assert made.tokens == autoregress(target, toys.prompt(0), settings).tokens
        drafted.append([step.accepted for step in made.steps])
    assert drafted[0] == drafted[1]
    assert sum(drafted[0]) > 0


def test_an_assistant_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    path = assistants.save(families.target("lfm2").model, toys.tokenizer(), tmp_path)
    with pytest.raises(ValueError, match=r"drafter\.assistant\.model=.* state of one path .*choose another one$"):
        assistants.assistant(path, toys.target())
