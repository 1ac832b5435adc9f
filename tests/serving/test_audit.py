"""What the audit says of real engines on this CPU.

vLLM 0.32's build for CPUs divides the logits of sampled passes by memory that nobody wrote (docs/audit.md), and the
audit says so. With that one function patched, by a plugin of vLLM's, nothing else is found in servers with drafts.
An audit takes minutes here: all are slow, `pytest -m "serving and slow" tests/serving/test_audit.py`.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ops.audit import JSON, main
from tests.eval.small import run_command
from tests.serving.conftest import command
from tests.serving.engines import TARGET
from tests.serving.test_endpoint import server
from tests.serving.test_llama import converted
from tests.serving.test_llama import server as llama_server

pytestmark = pytest.mark.serving
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
LLAMA_NGRAM = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "4"]
TOKENS = {"eagle3": 3, "medusa": 4, "mtp": 3}
OVERRIDES = {"mtp": ["--hf-overrides", json.dumps({"num_nextn_predict_layers": 1})]}
SMALL = [
    "prompts=6",
    "max_new_tokens=40",
    "concurrency=[1,4]",
    "samples=24",
    "borders=[256]",
    "minutes=60",
]
SAMPLED = {"sampling", "sampling_top_p"}
PLUGIN = '''
import torch


def expanded(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)))


def install():
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expanded
'''  # fmt: skip


def audit(out: Path, audited: str, baseline: str, *words: str) -> Any:
    """Audit a server; return audit.json."""
    assert run_command(main, "ops/audit", f"url={audited}", f"baseline={baseline}", f"out={out}", *SMALL, *words) in (
        0,
        1,
    )
    record = json.loads((out / JSON).read_text(encoding="utf-8"))
    print([(f["check"], f["status"], f["summary"]) for f in record["findings"] if f["status"] != "passed"])
    print(record["verdict"], record["requests"], record["minutes"], record["findings"][-1]["summary"])
    return record


def failed(record: Any) -> set[str]:
    return {finding["check"] for finding in record["findings"] if finding["status"] == "failed"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server(tmp_path_factory.mktemp("plain") / "log") as url:
        yield url


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder from which vLLM loads the plugin."""
    folder = tmp_path_factory.mktemp("patched")
    (folder / "mend_expansion.py").write_text(PLUGIN, encoding="utf-8")
    about = folder / "mend_expansion-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: patch-expansion\nVersion: 1\n", encoding="utf-8")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nmend = mend_expansion:install\n", encoding="utf-8")
    return folder


@pytest.fixture
def speculative(run_of: Callable[[str], Path], tmp_path: Path) -> Callable[[str], list[str]]:
    """Return a server's words for a method of drafting."""

    def words(method: str) -> list[str]:
        if method == "ngram":
            return ["--speculative-config", json.dumps(NGRAM)]
        out = tmp_path / f"tiny-{method}"
        job = [f"run={run_of(method)}", f"repo=me/tiny-{method}", "format=vllm", "dtype=float32", "dry_run=true"]
        command("train/publish.py", *job, f"out={out}")
        config = {"method": method, "model": str(out), "num_speculative_tokens": TOKENS[method]}
        return ["--speculative-config", json.dumps(config), *OVERRIDES.get(method, [])]

    return words


@pytest.mark.slow
def test_vllm_samples_from_memory_that_nobody_wrote(
    plain: str, speculative: Callable[[str], list[str]], tmp_path: Path
) -> None:
    with server(tmp_path / "ngram.log", *speculative("ngram")) as url:
        record = audit(tmp_path, url, plain)
    assert failed(record) - {"choices"} == SAMPLED  # a seed gives another answer where that memory holds other values
    assert record["verdict"]["fault"] == "distribution"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", *TOKENS])
def test_nothing_else_is_wrong_with_vllm(
    method: str, plain: str, patched: Path, speculative: Callable[[str], list[str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    words = speculative(method)
    monkeypatch.setenv("PYTHONPATH", str(patched))
    with server(tmp_path / "drafting.log", *words) as url:
        record = audit(tmp_path, url, plain)
    assert failed(record) == set()
    assert record["findings"][-1]["figures"]["drafts"] > 0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Give the URLs of llama.cpp's server with drafts and without."""
    folder = tmp_path_factory.mktemp("llama")
    file = converted(folder / "tiny.gguf", TARGET)
    with llama_server(folder / "drafting.log", file, *LLAMA_NGRAM) as fast, llama_server(folder / "log", file) as url:
        yield fast, url


@pytest.mark.slow
def test_llama_cpp_gives_logprobs_of_0_and_ends_early_at_the_end_of_its_context(
    llama: tuple[str, str], tmp_path: Path
) -> None:
    record = audit(tmp_path, *llama)
    assert failed(record) == {"logprobs", "prefix_cache"}
    assert record["verdict"]["fault"] == "limit"  # the answers behind a prefix reach the end, of 512 tokens
