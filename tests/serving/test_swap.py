"""vLLM on this CPU gets another head by a link and a restart: texts stay, a head that it cannot load goes back."""

import json
import os
import shlex
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from eval.inputs.workloads import load_workload
from inference.target.target import Target
from ops.replace import ReplaceConfig, replace_head, restart
from tests.serving.conftest import command
from tests.serving.engines import ENVIRONMENT, TARGET
from tests.serving.test_endpoint import PATIENCE, SAID, free_port

pytestmark = pytest.mark.serving


class Traffic(threading.Thread):
    """Asks for the same answers again and again, whoever serves; a request that a restart cut off is sent again."""

    def __init__(self, url: str, prompts: list[list[int]]) -> None:
        super().__init__(daemon=True)
        self.url, self.prompts, self.over = url, prompts, threading.Event()
        self.texts: list[set[str]] = [set() for _ in prompts]
        self.count = 0

    def run(self) -> None:
        while not self.over.is_set():
            for prompt, texts in zip(self.prompts, self.texts, strict=True):
                while not self.over.is_set():
                    try:
                        texts.add(self.ask(prompt))
                        self.count += 1
                        break
                    except OSError:
                        time.sleep(0.2)

    def ask(self, prompt: list[int]) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 48, "temperature": 0}
        asked = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            return str(json.load(answer)["choices"][0]["text"])


@pytest.fixture
def config(tmp_path: Path) -> Iterator[ReplaceConfig]:
    port, pid, link = free_port(), tmp_path / "pid", tmp_path / "head"
    words = [str(ENVIRONMENT / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--port", port]
    words += ["--host", "127.0.0.1", "--model", str(TARGET), "--served-model-name", "tiny", *SAID]
    words += ["--shutdown-timeout", "15"]
    speculative = {"method": "eagle", "model": str(link), "num_speculative_tokens": 3}
    words += ["--speculative-config", json.dumps(speculative)]
    # As a service manager does: without --shutdown-timeout vLLM waits for ever for a request that it no longer answers.
    gone = f"for i in $(seq 100); do kill -0 $(cat {pid}) 2>/dev/null || break; sleep 0.2; done"
    stop = f"kill $(cat {pid}) 2>/dev/null; {gone}; kill -9 $(cat {pid}) 2>/dev/null"
    start = f"echo $$ > {pid}; VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 exec {shlex.join(words)}"
    environment = os.environ.pop("PYTHONPATH", None)
    yield ReplaceConfig("", str(link), f"{stop}; {start}", f"http://127.0.0.1:{port}", 3.0 * PATIENCE)
    if environment is not None:
        os.environ["PYTHONPATH"] = environment
    subprocess.run(stop, shell=True, capture_output=True, check=False, timeout=60)


@pytest.mark.slow
def test_vllm_serves_another_head_after_a_restart_and_the_former_one_where_it_cannot_load_that(
    run_of: Callable[[str], Path], tmp_path: Path, config: ReplaceConfig
) -> None:
    old = tmp_path / "tiny-eagle"
    said = [f"run={run_of('eagle')}", "repo=me/tiny-eagle", "format=vllm", "dtype=float32", "dry_run=true"]
    command("train/publish.py", *said, f"out={old}")
    (tmp_path / "head").symlink_to(old)
    restart(config)
    # A head of a minute's training accepts something in its own domain alone.
    prompts = load_workload(str(TARGET / "prompts.jsonl"), Target.load(str(TARGET), "float32", "cpu"), 8)
    traffic = Traffic(config.url, [prompt.token for prompt in prompts])
    traffic.start()
    try:
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "config.json").write_text("{}")
        (tmp_path / "broken" / "model.safetensors").touch()
        with pytest.raises(ValueError, match=f"{old} is served again"):
            replace_head(replace(config, folder=str(tmp_path / "broken")))
        while traffic.count < 20:
            time.sleep(0.2)
        count = traffic.count
        shutil.copytree(old, tmp_path / "same")
        (tmp_path / "same" / "NOTE").write_text("the same weights\n")
        same = replace_head(replace(config, folder=str(tmp_path / "same")))
    finally:
        traffic.over.set()
        traffic.join()
    assert (tmp_path / "head").resolve() == same
    assert count < traffic.count
    assert [len(texts) for texts in traffic.texts] == [1] * len(prompts)
    assert len({text for texts in traffic.texts for text in texts}) > 4
