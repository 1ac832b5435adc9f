"""What is refused by its configuration is refused at once: before the libraries that take seconds to import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from heads.common.resolvers import ROOT

# Together they take more CPU time than torch and the rest of a refused command.
SLOW = ("datasets", "deepspeed", "peft", "pandas", "scipy.optimize", "vl_convert", "wandb",
        "torch._dynamo", "torch.distributed.fsdp", "transformers.modeling_utils",
        "transformers.models.auto.configuration_auto")  # fmt: skip
LOADED = f"""
import atexit, json, runpy, sys
slow, sys.argv = {SLOW!r}, sys.argv[1:]
atexit.register(lambda: print(json.dumps([name for name in slow if name in sys.modules])))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("train/run.py", ["trainer.lr=nan"], "trainer.lr is nan"),
        ("train/run.py", ["data.path=/missing.jsonl"], "/missing.jsonl"),
        ("eval/run.py", ["run=/missing"], "/missing"),
        ("inference/run.py", ["run=/missing", "prompt=a"], "/missing"),
        ("data/run.py", ["answers=/missing/answers.jsonl", "data.path=/missing.jsonl"], "/missing"),
        ("train/publish.py", ["run=/missing", "repo=me/x"], "/missing"),
    ],
)
def test_a_refusal_waits_for_no_slow_import(script: str, words: list[str], said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOADED, str(ROOT / script), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert said in done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
