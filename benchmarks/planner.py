"""What a run takes of memory against its plan, on a CPU; and the plans of all presets.

    python benchmarks/planner.py [--only NAME …] [--folder FOLDER]
    python benchmarks/planner.py --presets

Each configuration trains some real steps by train/run.py, and writes checkpoints between them, in a process of its own
whose largest resident size the system tells at its end. Targets are random but for the embedded one.
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
from train.plan import GIB, Plan, plan
from train.resolve import on_machine, resolve_placement

TINY, MIB = ROOT / "examples" / "tiny", 2**20
SHAPES: dict[str, Any] = {
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
# Long enough for glibc's heap to have grown (train/distributed/processes.py), and for checkpoints beside the training.
SHORT = ["trainer.steps=10", "trainer.save_every=4", "trainer.eval_prompts=0", "eval.prompts=0", "data.limit=400"]
SHORT += ["model.device=cpu", "data.turns=text"]  # every token is trained, as a plan has it
SHORT += ["trainer.precision=bf16", "model.dtype=bfloat16", "launcher.num_processes=1"]
HEADS: dict[str, list[str]] = {
    "eagle": ["head=eagle"],
    "eagle3": ["head=eagle3", "head.feature_layers=[0,2,4]"],
    "medusa": ["head=medusa", "head.heads=2", "objective.depths=2"],
    "mtp": ["head=mtp"],
    "block": ["head=block", "objective.anchors=64"],
}
TOKENS = {  # of a micro-batch
    "tiny": {"eagle": 4096, "eagle3": 4096, "medusa": 4096, "mtp": 4096, "block": 4096},
    "llama110m": {"eagle": 2048, "eagle3": 1024, "medusa": 2048, "mtp": 2048, "block": 2048},
    "vocabulary128k": {"eagle3": 1024, "medusa": 512},
}
CONFIGURATIONS = {f"{shape}-{head}": (shape, head) for shape, heads in TOKENS.items() for head in heads}


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
        return resolve_placement(on_machine(run_config(compose("train", overrides))))


def measure(name: str, folder: Path) -> tuple[float, float]:
    """Return the peak of a configuration's plan and of its run, in MiB."""
    shape, head = CONFIGURATIONS[name]
    path = [] if shape == "tiny" else [f"model.path={target(shape, folder)}"]
    tokens = TOKENS[shape][head]
    words = [*SHORT, *path, *HEADS[head], f"trainer.batch_tokens={2 * tokens}", f"trainer.micro_tokens={tokens}"]
    out = folder / "run"
    taken = peak(["train/run.py", *words, f"out={out}", "overwrite=true"])
    shutil.rmtree(out, ignore_errors=True)
    return plan(composed([*words, "device=cpu"])).memory.peak / MIB, taken / MIB


def memory(names: list[str], folder: Path) -> None:
    """Print plan and measurement of each configuration."""
    print("| configuration | plan, MiB | measured, MiB | plan / measured |\n| --- | ---: | ---: | ---: |")
    for name in names:
        expected, found = measure(name, folder)
        print(f"| {name} | {expected:,.0f} | {found:,.0f} | {expected / found:.2f} |", flush=True)


def preset_row(found: Plan) -> str:
    """Return the plan as cells of a Markdown row."""
    launcher, memory, shape = found.run.launcher, found.memory, found.shape
    numbers = shape.embeddings + shape.inner, shape.active + shape.embeddings, found.cost.whole
    if found.hours is None or found.target_hours is None or memory.capacity is None:
        raise ValueError(f"device={found.run.device.name} has no peak or no memory")
    stored = found.run.features.mode == "stored"
    apart = f" (+ {found.target_hours:,.0f} of extraction)" if stored else ""
    cells = [
        f"{launcher.num_nodes} x {found.run.device.count or launcher.local} {found.run.device.name}",
        " / ".join(f"{number / 1e9:.2f}" for number in numbers),
        f"{memory.peak / GIB:.1f} of {memory.capacity / GIB:.1f}",
        "yes" if found.utilization <= 1 else "no",
        f"{found.hours * launcher.world:,.1f}{apart}",
        f"{found.hours:,.1f}",
    ]
    return " | ".join(cells)


def presets() -> None:
    """Print the plan of every experiment."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # launchers of more than one node ask for it
    print("| experiment | devices | target / active / head, 10^9 | fullest device, GiB | fits | GPU hours | hours |")
    print("| --- | --- | --- | ---: | --- | ---: | ---: |")
    for file in sorted((ROOT / "conf" / "experiment").glob("*.yaml")):
        found = plan(composed(["plan=true", f"experiment={file.stem}"]))
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
