"""In a batch: sources that draft with the target itself, or with riders through other layers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from inference.decode import Generation, Settings, speculate
from inference.drafters.mtp import MtpDrafter
from inference.protocol import Drafter
from inference.target.target import Target
from inference.verification.sample import GREEDY, Sampling
from tests import assistants, toys
from tests.inference import streaming, test_mtp, test_self_law

MAKE: dict[str, Callable[[Target, Path], Drafter]] = {
    "early_exit": lambda target, folder: test_self_law.early_exit(target, folder, "tree"),
    "layer_skip": lambda target, folder: test_self_law.layer_skip(target, folder, "0.3"),
    "streams": lambda _, __: streaming.source(toys.TREES["dynamic"]),
    "tli": lambda target, folder: assistants.assistant(
        near(target, folder), target, match="tli", tree=toys.TREES["sampled"]
    ),
    "mtp": lambda target, _: MtpDrafter(MtpDrafter.Config(None, toys.TREES["dynamic"]), target, "mtp"),
}


def near(target: Target, folder: Path) -> str:
    model = assistants.noisy(target.model, 0.02)
    return assistants.save(model, assistants.words([f"w{i}" for i in range(toys.VOCAB)]), folder / "near")


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0, 1.0)], ids=["T0", "T1"])
@pytest.mark.parametrize("name", MAKE)
def test_each_request_is_decoded_as_if_alone(tmp_path: Path, name: str, sampling: Sampling) -> None:
    target = toys.target()
    if name == "mtp":
        target = Target.load(str(test_mtp.save(tmp_path, "behind")), "float32", "cpu")
    prompts = [toys.prompt(seed, length) for seed, length in enumerate((7, 3, 11, 5))]
    settings = [Settings(8 + 5 * (seed % 3), sampling, seed=seed) for seed in range(len(prompts))]
    source = MAKE[name](target, tmp_path)
    alone = [speculate(target, source, *one) for one in zip(prompts, settings, strict=True)]
    made = speculate(target, source, prompts, settings, batch_size=3)
    assert [one.tokens for one in made] == [one.tokens for one in alone]
    assert list(map(drafts, made)) == list(map(drafts, alone))
    assert sum(drafted for one in made for drafted, _ in drafts(one)) > 0


def drafts(made: Generation) -> list[tuple[int, int]]:
    return [(step.drafted, step.accepted) for step in made.steps]
