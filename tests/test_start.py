"""What is refused by its configuration is refused at once: before the libraries that take seconds to import."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from heads.common.resolvers import ROOT

# Together they take more CPU time than torch and the rest of a refused command.
SLOW = ("datasets", "deepspeed", "peft", "pandas", "scipy.optimize", "vl_convert", "wandb",
        "torch._dynamo", "torch.distributed.fsdp", "transformers.modeling_utils",
        "transformers.models.auto.configuration_auto")  # fmt: skip
NOWHERE = "neither here nor downloaded before, and http://127.0.0.1:9 cannot be reached"
LOADED = f"""
import atexit, json, runpy, sys
slow, sys.argv = {SLOW!r}, sys.argv[1:]
atexit.register(lambda: print(json.dumps([name for name in slow if name in sys.modules])))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def ran(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without a network, and list its slow imports at the end."""
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(folder)}
    command = [sys.executable, "-c", LOADED, *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        pytest.param("train/publish.py", ["run=/missing", "repo=me/x"], "/missing", marks=pytest.mark.slow),
        ("train/run.py", ["model.path=org/model"], NOWHERE),
        pytest.param("train/run.py", ["data.path=org/set"], NOWHERE, marks=pytest.mark.slow),
        ("eval/run.py", ["run=org/head"], NOWHERE),
        pytest.param("inference/run.py", ["run=org/head", "prompt=a"], NOWHERE, marks=pytest.mark.slow),
        pytest.param("data/run.py", ["data.path=org/set", "inspect=1"], NOWHERE, marks=pytest.mark.slow),
        pytest.param("ops/doctor.py", ["run=org/head"], NOWHERE, marks=pytest.mark.slow),
    ],
)
def test_a_refusal_waits_for_no_slow_import(script: str, words: list[str], said: str, tmp_path: Path) -> None:
    done = ran([str(ROOT / script), *words], tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_the_plan_of_a_preset_waits_for_no_slow_import(tmp_path: Path) -> None:
    done = ran([str(ROOT / "train/run.py"), "experiment=eagle3_llama70b_2x8x80", "plan=true"], tmp_path)
    assert "70,553,706,496" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize("words", [["--help"], ["-sc", "query=bash"]])
def test_the_command_lists_and_completes_without_torch(words: list[str]) -> None:
    code = "import sys; from train.package.command import main; main(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "train" in done.stdout
