"""A served endpoint measured like a local one: vLLM's server with a head of ours and without, in fp32 on this CPU."""

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.serving.conftest import command
from tests.serving.engines import ENVIRONMENT, TARGET

pytestmark = pytest.mark.serving
SAID = ("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-num-seqs", "4")
PATIENCE = 900  # seconds until a server answers, on a busy machine too


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextmanager
def server(log: Path, *said: str) -> Iterator[str]:
    """Give the URL of a vLLM server until the block ends."""
    port = free_port()
    words = [str(ENVIRONMENT / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--port", port]
    words += ["--host", "127.0.0.1", "--model", str(TARGET), "--served-model-name", "tiny", *SAID, *said]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with running(log, words, environment, port) as url:
        yield url


@contextmanager
def running(log: Path, words: list[str], environment: dict[str, str], port: str) -> Iterator[str]:
    """Run a server, and give its URL from its first answer until the block ends."""
    with log.open("w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
            while not answers(url):
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < until, log.read_text()[-4000:]
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_a_real_server_is_measured_as_the_verifier_measures(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    head = tmp_path / "tiny-eagle3"
    said = [f"run={run_of('eagle3')}", "repo=me/tiny-eagle3", "format=vllm", "dtype=float32", "dry_run=true"]
    command("train/publish.py", *said, f"out={head}")
    speculative = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    asked = [f"workload={TARGET / 'prompts.jsonl'}", "prompts=8", "max_new_tokens=64", "repeats=1"]
    with ExitStack() as stack:
        drafting = stack.enter_context(server(tmp_path / "drafting.log", "--speculative-config", speculative))
        plain = stack.enter_context(server(tmp_path / "plain.log"))
        command("ops/endpoint.py", f"url={drafting}", f"baseline={plain}", *asked, f"out={tmp_path / 'served'}")
    tree = ["tree=chain", "tree.depth=3", "dtype=float32", "tier=live", f"model.path={TARGET}"]
    command("eval/run.py", f"run={head}", *tree, *asked, f"out={tmp_path / 'here'}")
    rows = {}
    for where, name in (("served", "endpoint"), ("here", "eagle3")):
        report = json.loads((tmp_path / where / "report.json").read_text())
        (rows[where],) = [row for row in report["rows"] if row["drafter"] == name]
    print({where: (row["tau"], row["tau_ci"], row["accepted_by_depth"]) for where, row in rows.items()})
    assert rows["served"]["lossless"] == {"checked": 8, "identical": 8, "near_tie": 0, "failed": 0}
    served, here = rows["served"], rows["here"]
    assert served["steps"] == pytest.approx(here["steps"], rel=0.02)
    # vLLM counts what it accepts behind the end of an answer: less than a draft for each.
    assert 0 <= (served["tau"] - here["tau"]) * here["steps"] <= 8 * 3
