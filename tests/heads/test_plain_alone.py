"""A published head runs where this package is not, from a folder and from the Hub: every import of ours is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from heads import HEADS
from tests import toys
from tests.heads import exporting
from tests.heads.shipped import published, shipped
from tests.train.hub_server import TOKEN, Hub, Repo

SCRIPT = """
import importlib.abc, json, sys

REFUSED = {"heads", "inference", "data", "eval", "train", "tests", "jaxtyping", "omegaconf", "hydra"}

class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in REFUSED:
            raise ImportError(name + " is not here")

sys.meta_path.insert(0, Refusing())
import torch
from transformers import AutoModelForCausalLM

asked = {"max_new_tokens": 16, "do_sample": False}
found = {}
for target, folders in json.load(open("asked.json")).items():
    model = AutoModelForCausalLM.from_pretrained(target)
    ids = torch.tensor([[1, 5, 9, 30, 2]])
    plain = model.generate(ids, **asked)
    for name in folders:
        try:
            more = {"custom_generate": name, "trust_remote_code": True, "return_dict_in_generate": True}
            out = model.generate(ids, **asked, **more)
            found[name] = [torch.equal(out.sequences, plain), out.passes]
        except ValueError as error:
            found[name] = str(error)
ours = sorted(name for name in sys.modules if name.split(".")[0] in ("heads", "inference"))
print(json.dumps({"found": found, "ours": ours}))
"""
KINDS = ("eagle3", *(kind for kind in HEADS if kind != "eagle3"))
FORMS = {("eagle3", "vllm"): {"feature_layers": [1, 3, 4]}, ("medusa", "medusa"): {}, ("eagle", "eagle"): {}}


def saved(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def run_alone(folder: Path, asked: dict[str, list[str]], env: dict[str, str]) -> dict[str, Any]:
    """Generate where nothing of ours can be imported.

    Args:
        folder: where it runs, and keeps its caches.
        asked: heads by the folder of their target.
        env: further environment.

    Returns:
        For each head whether the tokens are those without it, and how many passes there were; or the error's line.
    """
    (folder / "asked.json").write_text(json.dumps(asked))
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | env
    env |= {"HF_HOME": str(folder / "hf"), "HF_MODULES_CACHE": str(folder / "modules"), "NO_PROXY": "127.0.0.1"}
    words = [sys.executable, "-I", "-c", SCRIPT]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["ours"] == []
    found: dict[str, Any] = said["found"]
    return found


@pytest.mark.slow
def test_it_runs_alone(tmp_path: Path) -> None:
    toy, deep = toys.target(), exporting.target()
    own = [published(tmp_path / kind / "head", toys.head(kind, toy), toy) for kind in KINDS]
    other = published(tmp_path / "other" / "head", exporting.made("medusa"), deep)  # of the same name and code
    forms = [
        shipped(exporting.exported(exporting.made(kind, **options), form, tmp_path / "forms" / form))
        for (kind, form), options in FORMS.items()
    ]
    near = "./mlp/head/"  # as one writes it
    asked = {
        saved(toy.model, tmp_path / "toy"): [*map(str, own), near, "me/toy", str(other)],
        saved(deep.model, tmp_path / "deep"): [str(folder) for folder in forms],
    }
    with Hub() as hub:
        hub.repos["me/toy"] = Repo(private=True)
        files = {str(path.relative_to(own[1])): path.read_bytes() for path in own[1].rglob("*.*")}
        commit = hub.repos["me/toy"].commit(files)
        env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        found = run_alone(tmp_path, asked, env)
    assert "made for another model, deep: its num_layers is not that of" in found.pop(str(other))
    assert len(found) == len(KINDS) + 2 + len(FORMS)
    assert any(commit in path.parts for path in (tmp_path / "modules").rglob("generate.py"))
    assert all(same and passes > 0 for same, passes in found.values()), found
