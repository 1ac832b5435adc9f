"""OpenVINO GenAI on this CPU: with heads of ours its text is what it is without, and its passes are as many as ours.

One head is converted with its target by publishing, the others by the commands that publishing says.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.inputs.workloads import load_workload
from heads.formats.hub import load_found
from inference.decode import RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.target.target import Target
from inference.verification.sample import GREEDY
from tests import families
from tests.serving.conftest import SAID, command
from tests.serving.engines import ENVIRONMENT, TARGET, asked
from tests.serving.test_llama import PLAIN, chain

pytestmark = pytest.mark.serving
INTEL = ENVIRONMENT / "intel"
PATH = f"{INTEL / 'bin'}:/usr/bin:/bin"
TOKENS = 96
WHOLE = ["eagle3", "head.feature_norm=false", "head.norm_output=false", "head.draft_vocab=null"]
PRUNED, DFLASH = ["eagle3", *PLAIN], ["block", *SAID["dflash"]]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(str(TARGET), "float32", "cpu")


@pytest.fixture(scope="module")
def texts(target: Target) -> list[tuple[list[int], list[int]]]:
    """Return prompts and their answers without a head."""
    prompts = [prompt.token for prompt in load_workload(str(TARGET / "prompts.jsonl"), target, 16)]
    return [(prompt, families.generated(target, prompt, TOKENS)) for prompt in prompts]


@pytest.fixture(scope="module")
def converted(run_with: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return what converts the head of a run; the folder has `target` too if `converter` is at hand."""
    root = tmp_path_factory.mktemp("openvino")

    def convert(words: list[str], converter: bool = False) -> Path:
        out = root / "-".join(words).replace("=", "-")
        if not out.exists():
            said = [f"run={run_with(*words)}", "repo=me/tiny", "format=openvino", "dtype=float32", "dry_run=true"]
            path = PATH if converter else "/usr/bin:/bin"
            printed = command("train/publish.py", *said, f"out={out}", PATH=path, HF_HUB_OFFLINE="1")
            todo = [line for line in printed.splitlines() if line.startswith(("optimum-cli", "sed"))]
            assert len(todo) == (0 if converter else 3 - (words is DFLASH))
            for line in (each for each in todo if not each.endswith("/target")):
                environment = {"HOME": str(root), "PATH": PATH, "HF_HUB_OFFLINE": "1"}
                subprocess.run(["/bin/bash", "-c", line], check=True, capture_output=True, env=environment)
        return out

    return convert


@pytest.mark.parametrize(
    ("words", "depth", "branching", "nodes"),
    [(WHOLE, 3, 0, 3), (WHOLE, 3, 2, 6), (WHOLE, 4, 3, 12), (PRUNED, 3, 0, 3), (DFLASH, 6, 0, 6)],
)  # of DFlash the whole block, whose slots see each other
def test_openvino_writes_the_same_text_in_as_many_passes(
    words: list[str], depth: int, branching: int, nodes: int, target: Target,
    texts: list[tuple[list[int], list[int]]], converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    drafted, options = chain(depth), {"num_assistant_tokens": nodes}
    if branching:
        drafted = TreeConfig("dynamic", depth, branching, nodes, [], [])
        options |= {"tree_depth": depth, "branching_factor": branching}
    models, folder = Path(f"{converted(WHOLE, True)}-openvino"), converted(words, words is WHOLE)
    job: dict[str, Any] = {"target": str(models / "target"), "prompts": [prompt for prompt, _ in texts]}
    job |= {"head": f"{folder}-openvino/head", "tokens": TOKENS, "options": options}
    served = asked("serve_openvino.py", job, environment=INTEL)
    assert served["tokens"] == [answer for _, answer in texts]
    head: Any = load_found(folder, target.embeddings, target.spec)
    drafter = HeadDrafter(head.float(), drafted, "head")
    # OpenVINO ranks a tree's nodes by the head's own probabilities.
    monkeypatch.setattr("inference.protocol.GREEDY_INVERSE_TEMPERATURE", 1.0)
    made = [speculate(target, drafter, prompt, RequestParams(TOKENS, GREEDY)) for prompt, _ in texts]
    steps = sum(len(each.steps) for each in made)
    committed = sum(step.committed for each in made for step in each.steps)
    print(f"{words[0]}, {options}: {served['passes']} passes = {steps} + {len(texts)}, τ {committed / steps:.2f}")
    assert served["passes"] == steps + len(texts)
    assert committed > 1.2 * steps
