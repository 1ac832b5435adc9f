"""The Arrow cache among processes: one builds, the others wait, and a dead builder holds nobody up."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast as Tokenizer

from data.config import DataConfig
from data.text import prompts
from data.text.masks import Sample
from data.text.prompts import load_samples
from train.config import LauncherConfig
from train.distributed import launch

ROOT = Path(__file__).resolve().parents[2]


def child(job: Callable[[], Any]) -> Any:
    """Start a process that does a job."""
    process = multiprocessing.get_context("fork").Process(target=job)
    process.start()
    return process


def test_a_builder_that_dies_frees_the_lock_and_the_next_one_builds(
    cached: DataConfig, chat: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = multiprocessing.get_context("fork").Event()
    make = prompts.samples_of

    def hang(*given: Any) -> list[Sample]:
        inside.set()
        signal.pause()
        return make(*given)

    with monkeypatch.context() as patch:
        patch.setattr(prompts, "samples_of", hang)
        builder = child(lambda: load_samples(cached, chat))
    assert inside.wait(60)
    waiting = child(lambda: load_samples(cached, chat))
    left = [path for path in Path(str(cached.cache)).iterdir() if path.suffix == ".new"]
    assert len(left) == 1
    builder.kill()
    waiting.join(60)
    assert waiting.exitcode == 0
    assert not left[0].exists()
    monkeypatch.delattr(prompts, "samples_of")  # nothing is tokenised again
    assert len(load_samples(cached, chat)) == 57


def test_of_many_processes_one_tokenises(
    cached: DataConfig, chat: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = prompts.samples_of

    def noted(*given: Any) -> list[Sample]:
        with (tmp_path / "noted").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return make(*given)

    monkeypatch.setattr(prompts, "samples_of", noted)
    children = [child(lambda: load_samples(cached, chat)) for _ in range(4)]
    for process in children:
        process.join(60)
    assert [process.exitcode for process in children] == [0] * 4
    lines = (tmp_path / "noted").read_text().split()
    assert len(lines) == 57
    assert len(set(lines)) == 1


JOB = """
import json, sys
from pathlib import Path
root, folder, values = sys.argv[1:]
sys.path[0] = root
from accelerate import PartialState
from transformers import AutoTokenizer
from data.text import prompts
from data.batches import Batches, fingerprint, pack
from data.config import DataConfig

state, make = PartialState(cpu=True), prompts.samples_of

def noted(*given):
    with open(f"{folder}/noted", "a") as file:
        print(state.process_index, file=file)
    return make(*given)

prompts.samples_of = noted
config = DataConfig(**json.loads(values))
samples = prompts.load_training(config, AutoTokenizer.from_pretrained(folder), 2).samples
batches = Batches(pack(samples, config.length), 7, 2, 0, state.process_index, state.num_processes)
state.wait_for_everyone()
steps = [len(batches(step)) for step in range(-(-len(batches.packed.token) // 7))]
Path(folder, f"rank{state.process_index}").write_text(json.dumps([fingerprint(samples), steps]))
"""


@pytest.mark.slow
def test_under_accelerate_launch_one_process_tokenises(cached: DataConfig, chat: Tokenizer, tmp_path: Path) -> None:
    chat.save_pretrained(tmp_path)
    script = tmp_path / "job.py"
    script.write_text(JOB)
    launcher = LauncherConfig(2, 1, 0, None, None, "ddp", None)
    words = [sys.executable, "-m", "accelerate.commands.launch"]
    words += launch.command(launcher, str(script), [str(ROOT), str(tmp_path), json.dumps(asdict(cached))])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Counter((tmp_path / "noted").read_text().split()).most_common() in ([("0", 57)], [("1", 57)])
    first, second = ((tmp_path / f"rank{rank}").read_text() for rank in (0, 1))
    assert first == second
