"""llama.cpp's server on this CPU: its text with heads of ours is what it is without, and it accepts what we accept.

A head's file is written by us, and by llama.cpp's own converter from the same published folder: they are the same.
"""

import json
import os
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
from gguf import GGUFReader

from eval.inputs.workloads import load_workload
from heads.formats.hub import load_found, resolve_head
from inference.decode import RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.target.target import Target
from inference.verification.sample import GREEDY
from tests.serving.conftest import SAID, command
from tests.serving.engines import ENVIRONMENT, HERE, TARGET
from tests.serving.test_endpoint import PATIENCE, free_port, running

pytestmark = pytest.mark.serving
SOURCES = ENVIRONMENT / "llama"
TOKENS, COUNT = 64, 32
PLAIN = ["head.feature_norm=false", "head.norm_output=false", "head.draft_vocab=1024"]
# by llama.cpp's type: kind, options, tokens drafted
HEADS = {
    "draft-eagle3": ("eagle3", PLAIN, 3),
    "draft-dspark": ("block", [], 5),
    "draft-dflash": ("block", SAID["dflash"], 6),  # its whole block, whose slots see each other
}


def converted(out: Path, folder: Path, *words: str) -> Path:
    """Return the file that llama.cpp's own converter writes."""
    script = [str(ENVIRONMENT / "bin" / "python"), str(HERE / "convert_llama.py"), str(SOURCES), str(folder)]
    done = subprocess.run(
        [*script, "--outfile", str(out), "--outtype", "f32", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("target") / "tiny.gguf", TARGET)


@pytest.fixture(scope="module", params=HEADS)
def published(
    request: pytest.FixtureRequest,
    target: Path,
    run_with: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Path]:
    """Return llama.cpp's type of a head and its folder, written as it would be published for llama.cpp."""
    kind, options, _ = HEADS[request.param]
    out = tmp_path_factory.mktemp("llama") / f"tiny-{kind}"
    said = [f"run={run_with(kind, *options)}", f"repo=me/tiny-{kind}", "format=gguf", f"gguf={target}"]
    command("train/publish.py", *said, "dtype=float32", "dry_run=true", f"out={out}")
    return request.param, out


def test_our_file_is_that_of_llama_cpps_own_converter(
    target: Path, published: tuple[str, Path], tmp_path: Path
) -> None:
    _, folder = published
    theirs = GGUFReader(converted(tmp_path / "theirs.gguf", folder, "--target-model-dir", str(TARGET)))
    ours = GGUFReader(folder / "head.gguf")
    ignored = ("GGUF.kv_count", "general.")
    for name, field in theirs.fields.items():
        if not name.startswith(ignored) or name == "general.architecture":
            assert (ours.fields[name].contents(), ours.fields[name].types) == (field.contents(), field.types), name
    wanted, written = ({tensor.name: tensor for tensor in file.tensors} for file in (theirs, ours))
    assert wanted.keys() == written.keys()
    for name, tensor in wanted.items():
        assert tensor.tensor_type == written[name].tensor_type
        assert numpy.array_equal(tensor.data, written[name].data), name


@contextmanager
def server(log: Path, model: Path, *said: str) -> Iterator[str]:
    """Give the URL of a llama.cpp server with keys and values in fp32 until the block ends."""
    port = free_port()
    words = [str(ENVIRONMENT / "llama-server"), "-m", str(model), "--host", "127.0.0.1", "--port", port, "--metrics"]
    words += ["-t", "1", "-c", "512", "--parallel", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32", *said]
    with running(log, words, dict(os.environ), port) as url:
        yield url


def drafting(method: str, folder: Path) -> list[str]:
    said = ["-md", str(folder / "head.gguf"), "--spec-type", method, "-td", "1"]
    said += ["--spec-draft-n-max", str(HEADS[method][-1])]
    return [*said, "-ctkd", "f32", "-ctvd", "f32"]


def served(url: str, prompts: list[list[int]]) -> list[list[int]]:
    """Return the answers' tokens."""
    found = []
    for prompt in prompts:
        job = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        request = urllib.request.Request(f"{url}/completion", json.dumps(job).encode())
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            found.append(json.load(answer)["tokens"])
    return found


def counted(url: str) -> dict[str, int]:
    """Return the server's counters of speculation, those of a position by `per_pos 0` and so on."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE) as page:
        lines = [line.split() for line in page.read().decode().splitlines() if line.startswith("llamacpp:spec_decode")]
    return {name.removeprefix("llamacpp:spec_decode_num_"): int(value) for name, value in lines}


def chain(depth: int) -> TreeConfig:
    return TreeConfig(kind="chain", depth=depth, top_k=0, nodes=0, paths=[], widths=[])


def accepted_by_us(
    target: Target, drafter: HeadDrafter, prompts: list[list[int]], texts: list[list[int]], depth: int
) -> list[int]:
    """Return the accepted tokens of each of our passes up to an answer's end, which llama.cpp does not count itself."""
    found = []
    for prompt, text in zip(prompts, texts, strict=True):
        made = speculate(target, drafter, prompt, RequestParams(len(text) + depth + 1, GREEDY))
        assert made.tokens[: len(text)] == text
        written = 1
        for step in made.steps:
            if written < len(text):
                found.append(min(step.accepted, len(text) - 1 - written))
                written += step.committed
    return found


def check_counts(kind: str, counts: dict[str, int], steps: list[int], depth: int) -> None:
    """Compare llama.cpp's counters with the accepted tokens of our passes."""
    mine, theirs = (1 + total / count for total, count in (
        (sum(steps), len(steps)), (counts["accepted_tokens_total"], counts["drafts_total"]),
    ))  # fmt: skip
    print(f"{kind}: {theirs:.3f} tokens per pass in llama.cpp, {mine:.3f} in our verifier")
    assert mine > 1.2  # a head that is never accepted would prove nothing
    assert theirs == pytest.approx(mine, rel=0.02)
    assert counts["drafts_total"] == pytest.approx(len(steps), rel=0.02)
    for position in range(depth):
        accepted = counts[f'accepted_tokens_per_pos_total{{position="{position}"}}']
        assert accepted == pytest.approx(sum(count > position for count in steps), abs=0.02 * len(steps))


@pytest.fixture(scope="module")
def ours() -> Target:
    loaded = Target.load(str(TARGET), "float32", "cpu")
    loaded.eos = frozenset()
    return loaded


@pytest.fixture(scope="module")
def plain_answers(
    ours: Target, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts, and what llama.cpp answers without drafts."""
    prompts = [prompt.token for prompt in load_workload(str(TARGET / "prompts.jsonl"), ours, COUNT)]
    with server(tmp_path_factory.mktemp("plain") / "log", target) as url:
        plain = served(url, prompts)
    assert sum(map(len, plain)) >= 1000
    return prompts, plain


def test_llama_cpp_writes_the_same_text_and_accepts_what_we_accept(
    ours: Target,
    target: Path,
    published: tuple[str, Path],
    plain_answers: tuple[list[list[int]], list[list[int]]],
    tmp_path: Path,
) -> None:
    method, folder = published
    prompts, plain = plain_answers
    with server(tmp_path / "drafting.log", target, *drafting(method, folder)) as url:
        assert served(url, prompts) == plain
        counts = counted(url)
    head: Any = load_found(resolve_head(str(folder)), ours.embeddings, ours.spec)
    depth = HEADS[method][-1]
    drafter = HeadDrafter(head.float(), chain(depth), method)
    check_counts(method, counts, accepted_by_us(ours, drafter, prompts, plain, depth), depth)


@pytest.mark.parametrize("published", ["draft-eagle3", "draft-dspark"], indirect=True)
def test_a_server_of_llama_cpp_is_measured_as_an_endpoint(
    target: Path, published: tuple[str, Path], tmp_path: Path
) -> None:
    method, folder = published
    asked = [f"workload={TARGET / 'prompts.jsonl'}", "prompts=8", "max_new_tokens=64", "repeats=1"]
    with ExitStack() as stack:
        fast = stack.enter_context(server(tmp_path / "drafting.log", target, *drafting(method, folder)))
        plain = stack.enter_context(server(tmp_path / "plain.log", target))
        command("ops/endpoint.py", f"url={fast}", f"baseline={plain}", *asked, f"out={tmp_path / 'served'}")
    report = json.loads((tmp_path / "served" / "report.json").read_text())
    (row,) = [row for row in report["rows"] if row["drafter"] == "endpoint"]
    assert row["lossless"] == {"checked": 8, "identical": 8, "near_tie": 0, "failed": 0}
    assert row["tau"] > 1.2
    assert row["speedup"] is not None
