"""The tests on the device, and the losslessness gate on many tokens: in fp32 without a difference, in bf16 near ties.

    python benchmarks/gpu/smoke.py --out OUT [--parts tests gate] [--dtypes float32] [--tokens 100000] [--toy]

1. tests: the whole suite of a machine with an accelerator, which commands take where nobody says otherwise; and
   tests/device, where every head, tree and source decodes and every head trains on the device, in fp32 and in bf16.
2. gate: an EAGLE head of the embedded target, trained here for a minute, and a source that drafts from the text alone
   answer so many of the bundled chats that the baseline writes as many tokens; greedy, in fp32 and again in bf16.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from omegaconf import OmegaConf

from benchmarks.gpu.common import TINY, Asked, Table, arguments, record
from eval.inputs.workloads import load_workload
from eval.measures.losslessness import gate
from heads.common.typed import typed
from heads.formats.store import load_head, read_config
from inference.decode import Settings, speculate
from inference.drafters import registry
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Plain
from inference.drafters.policy import TreeConfig
from inference.protocol import Drafter
from inference.target.target import Target
from inference.verification.sample import GREEDY

CHATS = TINY / "chats.jsonl.xz"
ANSWER = 128  # tokens of an answer at most
TOY_ANSWER, TOY_MEAN = 8, 7
DTYPES = ["float32", "bfloat16"]
MEAN = 40  # tokens of an answer to the bundled chats, a little below their mean
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")


def suite(asked: Asked, processes: int) -> tuple[dict[str, Any], Table]:
    """Run the tests and count how they ended."""
    device = {**os.environ, "HEADSTART_TEST_DEVICE": asked.device.type, "OMP_NUM_THREADS": "1"}
    spread = ["-n", str(processes), "--dist", "loadfile"]
    asks = {"the whole suite": ["-m", "not slow and not serving and not gpu"], "marked gpu": ["-m", "gpu"]}
    if asked.toy:
        asks = {"some of tests/device": ["-m", "gpu", "-k", "chain or cpu", "tests/device"]}
    numbers, rows = {}, []
    for name, words in asks.items():
        command = [sys.executable, "-m", "pytest", "-q", *words, *([] if asked.toy else spread)]
        done = subprocess.run(command, cwd=ROOT, env=device, capture_output=True, text=True, check=False)
        (asked.out / f"{re.sub(r'[ /]', '-', name)}.log").write_text(done.stdout + done.stderr)
        counts = counted(done.stdout)
        numbers[name] = counts | {"status": done.returncode}
        rows.append([name, *(str(counts[kind]) for kind in ("passed", "failed", "skipped"))])
    return numbers, Table("Tests", ["which", "passed", "failed", "skipped"], rows)


def counted(said: str) -> dict[str, int]:
    """Return how many tests ended in which way, by pytest's last line; an error counts as a failure."""
    found = {"passed": 0, "failed": 0, "skipped": 0}
    for count, kind in COUNTS.findall(said.strip().rsplit("\n", 1)[-1]):
        found["failed" if kind == "error" else kind] += int(count)
    return found


def trained(asked: Asked) -> Path:
    """Return the folder of an EAGLE head of the embedded target, trained unless it is there."""
    run = asked.out / "smoke-eagle"
    if not (run / "head").is_dir():
        steps = ["trainer.steps=20", "trainer.eval_prompts=0"] if asked.toy else ["trainer.steps=600"]
        where = [f"model.device={asked.device}", f"out={run}", "overwrite=true", "eval.prompts=0"]
        product("train/run.py", "head=eagle", *steps, *where)
    return run / "head"


def sources(asked: Asked, target: Target, folder: Path) -> dict[str, Drafter]:
    """Return what drafts: the head by the tree that it was saved with, and a source that reads the text alone."""
    head: Any = load_head(folder, target.embeddings, target.spec)
    head = head.to(device=asked.device, dtype=target.dtype).eval()
    tree = typed(TreeConfig, read_config(folder)["tree"])
    options: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "drafter" / "suffix.yaml"))
    return {"eagle": HeadDrafter(head, tree, "eagle"), "suffix": registry.make("suffix", options, target)}


def gates(asked: Asked, tokens: int, dtypes: list[str]) -> tuple[dict[str, Any], Table]:
    """Compare the tokens of a head and a source with the baseline's, in fp32 and in bf16."""
    folder = trained(asked)
    settings = Settings(TOY_ANSWER if asked.toy else ANSWER, GREEDY, gaps=True)
    several, mean = (4, TOY_MEAN) if asked.toy else (32, MEAN)
    numbers: dict[str, Any] = {}
    rows = []
    for dtype in dtypes:
        target = Target.load(str(TINY), dtype, str(asked.device))
        prompts = [each.token for each in load_workload(str(CHATS), target, -(-tokens // mean))]
        names = [str(i) for i in range(len(prompts))]
        plain = speculate(target, Plain(target.device), prompts, settings, batch_size=several)
        written = sum(len(each.tokens) for each in plain)
        for name, source in sources(asked, target, folder).items():
            made = speculate(target, source, prompts, settings, batch_size=several)
            found, passes = gate(plain, made, names, target.dtype), sum(len(each.steps) for each in made)
            tau = sum(len(each.tokens) - 1 for each in made) / passes
            counts = {**found.counts(), "first": None if found.first is None else str(found.first)}
            numbers[f"{name}, {dtype}"] = {**counts, "tokens": written, "asked": tokens, "tau": tau}
            said = [str(counts[kind]) for kind in ("checked", "identical", "near_tie", "failed")]
            rows.append([name, dtype, f"{written:,}", f"{tau:.2f}", *said])
    header = ["source", "dtype", "greedy tokens", "τ", "prompts", "identical", "near ties", "failed"]
    many = f"in batches of {several}: prompts with the baseline's tokens"
    return numbers, Table(f"Losslessness in {' and '.join(dtypes)}, {many}", header, rows)


def product(script: str, *words: str) -> None:
    """Run one of our commands.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    done = subprocess.run([sys.executable, script, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])


def wrong(numbers: dict[str, Any]) -> list[str]:
    """Return the names of what failed: suites with failures or without a test, gates that are red or of too few tokens.

    Args:
        numbers: of the record.
    """
    suites = {name: each["status"] or not each["passed"] for name, each in numbers.get("tests", {}).items()}
    gated = {
        name: each["failed"] or each["tokens"] < each["asked"] for name, each in numbers.items() if name != "tests"
    }
    return [name for name, failed in (suites | gated).items() if failed]


def main() -> None:
    """Run the parts that are asked for and write the record; the status says whether all of it is right."""
    asked, read = arguments(
        "The tests on the device, and the losslessness gate.",
        parts={"nargs": "+", "choices": ["tests", "gate"], "default": ["tests", "gate"]},
        tokens={"type": int, "default": None},
        dtypes={"nargs": "+", "choices": DTYPES, "default": DTYPES},
        processes={"type": int, "default": 8},
    )  # fmt: skip
    numbers: dict[str, Any] = {}
    tables = []
    if "tests" in read.parts:
        numbers["tests"], table = suite(asked, read.processes)
        tables.append(table)
    if "gate" in read.parts:
        tokens = read.tokens or (40 if asked.toy else 100_000)
        found, table = gates(asked, tokens, read.dtypes)
        numbers |= {f"gate: {name}": each for name, each in found.items()}
        tables.append(table)
    record(asked, "smoke", numbers, tables)
    if failed := wrong(numbers):
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
