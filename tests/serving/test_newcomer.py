"""What a newcomer does: publish a head, read its card, and serve it from the Hub by the card's own words.

The Hub is the one of the tests. The head goes there once, in the form that all engines of EAGLE-3 read; vLLM and plain
transformers, in an environment without headstart, fetch it by its name.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from eval.inputs.workloads import load_workload
from inference.target.target import Target
from tests import families
from tests.serving.conftest import command
from tests.serving.engines import TARGET, asked
from tests.train.hub_server import TOKEN, Hub

pytestmark = pytest.mark.serving
REPO = "me/tiny-eagle3"


def test_a_head_goes_to_the_hub_and_is_served_from_there(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    run, target = run_of("eagle3"), Target.load(str(TARGET), "float32", "cpu")
    prompts = [prompt.token for prompt in load_workload(str(TARGET / "prompts.jsonl"), target, 4)]
    command("eval/run.py", f"run={run}", "prompts=4", "max_new_tokens=48", "repeats=1", "tier=live", "dtype=float32")
    with Hub() as hub:
        access = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
        access["HF_HOME"] = str(tmp_path / "hub")
        said = command(
            "train/publish.py", f"run={run}", f"repo={REPO}", "format=vllm", "dtype=float32", "tag=v1", **access
        )
        assert "downloaded again and equal in every file and tensor; τ " in said
        assert hub.repos[REPO].private
        card = hub.repos[REPO].files["README.md"].decode()
        report = json.loads((run / "report.json").read_text())
        (row,) = [row for row in report["rows"] if row["drafter"] == "eagle3"]
        assert f"{row['tau']:.2f} [{row['tau_ci'][0]:.2f}, {row['tau_ci'][1]:.2f}]" in card
        line = next(line for line in card.splitlines() if "--speculative-config" in line)
        words = shlex.split(line)
        assert words[:2] == ["vllm", "serve"]
        speculative = json.loads(words[words.index("--speculative-config") + 1])
        assert speculative["model"] == REPO
        job = {"target": str(TARGET), "prompts": prompts, "tokens": 64}
        access["HF_HOME"] = str(tmp_path / "engine")  # nothing is there yet
        served = asked("serve_vllm.py", {**job, "speculative": speculative}, hub=access)
        assert served["tokens"] == [families.generated(target, prompt, 64) for prompt in prompts]
        assert served["accepted_tokens"] > 0.1 * served["draft_tokens"]
        said = next(line for line in card.splitlines() if line.startswith("python eval/run.py"))
        said = said.replace("path/to/tiny", str(TARGET)).replace("my_log.jsonl", str(TARGET / "prompts.jsonl"))
        few = ["prompts=4", "max_new_tokens=48", "repeats=1", "tier=live", "hf=false", f"out={tmp_path / 'again'}"]
        command(*shlex.split(said)[1:], *few, **access)
    again = json.loads((tmp_path / "again" / "report.json").read_text())
    assert [row["lossless"]["failed"] for row in again["rows"] if row["drafter"] == "eagle3"] == [0]
