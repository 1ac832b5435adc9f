"""A compiled pass is the pass that it was compiled from, whatever its size and whichever way it is padded.

Compiled by dynamo alone: its graph is run as it is, operation by operation. What inductor makes of it is a slow test.
"""

import contextlib
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from eval.run import evaluate
from inference import step
from inference.decode import Generation, RequestParams, speculate
from inference.drafters.plain import Baseline
from inference.protocol import Drafter
from inference.target import attention, compiled
from inference.target.cache import BatchLayer, BatchPass
from inference.target.compiled import Compiled
from inference.target.model import LayerOutputs, TargetModel
from inference.target.target import Target
from inference.verification.sample import GREEDY, Sampling
from tests import toys
from tests.eval.small import runs, small
from tests.inference import model_free

__all__ = ["runs"]  # a fixture

DOUBLE = torch.float64
LENGTHS = (7, 3, 19, 1)


@pytest.fixture(autouse=True)
def dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile with the eager backend what the tests' shape checks, which dynamo cannot trace, are taken off from."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    for owner in (compiled, attention, Compiled, Target, TargetModel, LayerOutputs, BatchLayer, BatchPass):
        for name, value in list(vars(owner).items()):
            if isinstance(value, property):
                monkeypatch.setattr(owner, name, property(inspect.unwrap(value.fget)))
            elif inspect.isgeneratorfunction(inspect.unwrap(value)):
                continue  # of a context manager
            elif isinstance(value, types.FunctionType) and inspect.unwrap(value) is not value:
                monkeypatch.setattr(owner, name, inspect.unwrap(value))
    transformers.AttentionInterface.register(attention.GROUPED, attention.attend_in_groups)  # to be there afterwards
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, attention.GROUPED, attention.attend_in_groups)
    torch._dynamo.utils.counters.clear()
    with torch.inference_mode():  # which is taken off too
        yield
    torch._dynamo.reset()


def as_it_is(stage: Any, _: str) -> Any:
    """Return a step's stage uncompiled, for the shape checks in it; tests/inference/step_graph.py compiles stages."""
    return stage


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_features_of_compiled_layers_are_those_of_the_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of packed documents and of rows that are one, whose attention differs; alike layers share their graphs."""
    target = toys.target(name, DOUBLE)
    token = torch.tensor([toys.prompt(1, 16), toys.prompt(2, 16)])
    packed = torch.zeros(2, 16, dtype=torch.long)
    packed[0, 9:], packed[1, 12:] = 1, -1
    documents = [packed, torch.zeros_like(packed), packed.flip(0)]
    expected = [target.features(token, document, (0, 2)) for document in documents]
    forwards = target.compiled_forwards()
    own = target.decoder_layers[1].forward
    monkeypatch.setitem(vars(target.decoder_layers[1]), "forward", own)  # as accelerate gives a layer one
    for document, features in zip(documents, expected, strict=True):
        with forwards():
            found = target.features(token, document, (0, 2))
        torch.testing.assert_close(found.hidden, features.hidden, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.last_hidden, features.last_hidden, rtol=1e-12, atol=1e-12)
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 5, "each layer had its own"
    with pytest.raises(RuntimeError, match="as it was"), forwards():
        raise RuntimeError("as it was")
    ours = [vars(layer).get("forward") for layer in target.decoder_layers]
    assert ours == [None, own, None], "other passes run as they are"


def test_layers_of_experts_run_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    target = toys.target(next(iter(toys.ROUTED)))
    assert target.compiled_forwards() is contextlib.nullcontext
    assert "trainer.compile leaves its layers as they are" in caplog.text


def decoded(target: Target, sources: dict[str, Drafter], sampling: Sampling) -> dict[str, list[Generation]]:
    prompts = [toys.prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    settings = [RequestParams(10 + 3 * seed, sampling, seed=seed) for seed in range(len(prompts))]
    made = {
        name: [speculate(target, each, *one) for one in zip(prompts, settings, strict=True)]
        for name, each in sources.items()
    }
    batch = {f"{name} x3": speculate(target, each, prompts, settings, batch_size=3) for name, each in sources.items()}
    return made | batch


def all_tokens(made: dict[str, list[Generation]]) -> dict[str, list[list[int]]]:
    return {name: [one.tokens for one in each] for name, each in made.items()}


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "llama", "gemma2", "gpt2"])
def test_compiled_decoding_writes_the_same(name: str) -> None:
    target = toys.target(name, DOUBLE)
    sources: dict[str, Drafter] = {
        "plain": Baseline(target.device),
        "eagle": toys.drafter("eagle", target, "dynamic"),
        "lookahead": model_free.make("lookahead", target),
    }
    if name == "llama":  # whose drafting passes stay uncompiled
        sources["early_exit"] = model_free.make("early_exit", target, exit_layer=1)
    before = decoded(target, sources, GREEDY)
    assert graphs() == 0
    target.compiled = Compiled(target)
    after = decoded(target, sources, GREEDY)
    target.compiled = None
    assert all_tokens(after) == all_tokens(before)
    assert any(map(toys.lively, all_tokens(before)["plain"])) or name.startswith("gemma")
    accepted = [step.accepted for one in after["eagle"] for step in one.steps]
    assert accepted == [step.accepted for one in before["eagle"] for step in one.steps]
    assert 4 <= graphs() <= 8  # one sequence or several, one token or more; several slots or the last one of several


def test_a_target_that_takes_no_mask_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.target("llama", DOUBLE)
    monkeypatch.setattr(target, "takes_trees", False)
    with pytest.raises(ValueError, match=r"llama: its attention ignores custom masks.*engine\.compile=false"):
        target.compile()


def test_what_cannot_be_compiled_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    target = toys.target("llama", DOUBLE)
    monkeypatch.setattr(target, "compiled", Compiled(target))
    with pytest.raises(ValueError, match=r"llama: torch.compile fails on its passes .*no C\+\+ compiler.*false$"):
        speculate(target, Baseline(target.device), toys.prompt(1), RequestParams(4, GREEDY))


@pytest.mark.slow
def test_a_compiled_evaluation_passes_the_gate_and_says_so(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "compiled", as_it_is)
    engine = {"compile": True, "compile_drafts": False}
    made = evaluate(small(runs, tmp_path, engine=engine, batch_size=[1, 2], hf=False))
    assert graphs() > 0
    assert made.passed
    assert sorted(made.gates) == ["eagle", "eagle x2", "plain", "plain x2"]
    assert "engine compiled" in (tmp_path / "report.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_inductor_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    monkeypatch.setattr(step, "compiled", as_it_is)
    target = toys.target("llama", DOUBLE)
    sources: dict[str, Drafter] = {"plain": Baseline(target.device), "eagle": toys.drafter("eagle", target, "dynamic")}
    before = decoded(target, sources, GREEDY)
    target.compile()
    after = decoded(target, sources, GREEDY)
    target.compiled = None
    assert all_tokens(after) == all_tokens(before)
