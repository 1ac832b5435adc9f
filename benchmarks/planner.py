"""What a run takes of memory against its plan, on a CPU; and the plans of all presets.

    python benchmarks/planner.py [--only NAME …] [--folder FOLDER]
    python benchmarks/planner.py --presets

Each configuration trains a few real steps by train/run.py, in a process of its own whose largest resident size the
system tells at its end. Targets are random, with the embedded one's tokenizer. `imports` is a process that imports what
a run imports and ends: a part of what a plan takes as given (conf/device/cpu.yaml).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch
from hydra import compose, initialize_config_dir
from transformers import AutoModelForCausalLM, LlamaConfig

from heads.common.resolvers import register_resolvers
from train.config import run_config
from train.planning.plan import GIB, plan

TINY, MIB = ROOT / "examples" / "tiny", 2**20
BESIDE = 60 * MIB  # tokenizer and data, as conf/device/cpu.yaml counts them
SHAPES = {
    "llama110m": {
        "vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 12, "intermediate_size": 2048, "tie_word_embeddings": True,
    },
    "vocabulary128k": {
        "vocab_size": 128256, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 1536, "tie_word_embeddings": False,
    },
}  # fmt: skip
DRIVER = """
import atexit, pathlib, runpy, sys
sys.path[0] = "."
status = pathlib.Path("/proc/self/status")
atexit.register(lambda: print(*(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__" if len(sys.argv) > 1 else "imported")
"""
LAYERS = "head.feature_layers=[0,2,4]"
SHORT = ["trainer.steps=3", "trainer.eval_prompts=0", "eval.prompts=0", "data.limit=400", "model.device=cpu"]
CONFIGURATIONS: dict[str, tuple[str | None, list[str]]] = {
    "llama110m-eagle": ("llama110m", ["head=eagle", "trainer.batch_tokens=4096", "trainer.micro_tokens=2048"]),
    "vocabulary128k-eagle3": (
        "vocabulary128k", ["head=eagle3", LAYERS, "trainer.batch_tokens=2048", "trainer.micro_tokens=1024"],
    ),
    "vocabulary128k-medusa": (
        "vocabulary128k", ["head=medusa", "head.heads=2", "objective.depths=2", "trainer.batch_tokens=512"],
    ),
    "tiny-eagle": (None, ["head=eagle", "trainer.batch_tokens=16384", "trainer.micro_tokens=16384"]),
    "tiny-eagle3": (None, ["head=eagle3", "trainer.batch_tokens=8192", "trainer.micro_tokens=8192"]),
}  # fmt: skip


def target(name: str, folder: Path) -> Path:
    """Return the folder of a random target, made if it is not there."""
    out = folder / name
    if not (out / "config.json").exists():
        torch.manual_seed(0)
        config = LlamaConfig(bos_token_id=0, eos_token_id=3, pad_token_id=0, **SHAPES[name])
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(out)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            shutil.copy(TINY / file, out / file)
    return out


def peak(words: list[str]) -> int:
    """Run a script of this checkout in a process of its own and return its largest resident size in bytes.

    The process reads it itself: `getrusage` also knows of the process that started it, from before it was another.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    done = subprocess.run([sys.executable, "-c", DRIVER, *words], capture_output=True, text=True, cwd=ROOT, check=False)
    found = re.search(r"^VmHWM:\s+(\d+) kB$", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    return int(found[1]) * 1024


def composed(overrides: list[str]) -> Any:
    """Return a training configuration."""
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return run_config(compose("train", overrides))


def measure(name: str, folder: Path, imports: int) -> tuple[float, float]:
    """Return what a configuration's plan says and what its run took, in MiB; `imports` is what a bare process takes."""
    shape, overrides = CONFIGURATIONS[name]
    path = [] if shape is None else [f"model.path={target(shape, folder)}"]
    words = [*SHORT, *path, *overrides]
    planned = plan(composed([*words, "device=cpu", f"device.context_gb={(imports + BESIDE) / 2**30}"]))["peak_bytes"]
    out = folder / "run"
    taken = peak(["train/run.py", *words, f"out={out}", "overwrite=true"])
    shutil.rmtree(out, ignore_errors=True)
    return planned / MIB, taken / MIB


def memory(names: list[str], folder: Path) -> None:
    """Print plan and measurement of each configuration."""
    imports = peak(["train/run.py"])
    print(f"imports: {imports / MIB:,.0f} MiB\n")
    print("| configuration | plan, MiB | measured, MiB | plan / measured |\n| --- | ---: | ---: | ---: |")
    for name in names:
        planned, taken = measure(name, folder, imports)
        print(f"| {name} | {planned:,.0f} | {taken:,.0f} | {planned / taken:.2f} |", flush=True)


def preset_row(planned: dict[str, Any]) -> str:
    """Return the plan as cells of a Markdown row."""
    devices, device = planned["devices"], planned["device"]
    nodes = len({memory.node for memory in devices})
    fullest = max(devices, key=lambda memory: memory.peak)
    sizes = " / ".join(f"{planned[f'{kind}_parameters'] / 1e9:.2f}" for kind in ("target", "active", "head"))
    extraction = planned.get("gpu_hours_of_extraction")
    apart = "" if extraction is None else f" (+ {extraction:,.0f} of extraction)"
    cells = [
        f"{nodes} x {len(devices) // nodes} {device['name']}",
        sizes,
        f"{fullest.peak / GIB:.1f} of {fullest.capacity / GIB:.1f}",
        "yes" if planned["fits"] else "no",
        f"{planned['gpu_hours']:,.1f}{apart}",
        f"{planned['hours']:,.1f}",
    ]
    return " | ".join(cells)


def presets() -> None:
    """Print the plan of every experiment."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # launchers of more than one node ask for it
    print("| experiment | devices | target / active / head, 10^9 | fullest device, GiB | fits | GPU hours | hours |")
    print("| --- | --- | --- | ---: | --- | ---: | ---: |")
    for file in sorted((ROOT / "conf" / "experiment").glob("*.yaml")):
        found = plan(composed([f"experiment={file.stem}"]))
        print(f"| {file.stem} | {preset_row(found)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", action="store_true", help="the plans of conf/experiment")
    parser.add_argument("--only", nargs="+", default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    parser.add_argument("--folder", type=Path, help="for the targets; a temporary one by default")
    asked = parser.parse_args()
    if asked.presets:
        presets()
    else:
        with tempfile.TemporaryDirectory() as temporary:
            memory(asked.only, asked.folder or Path(temporary))
