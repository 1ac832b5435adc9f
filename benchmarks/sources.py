"""Every drafter on one target, in one report: prepares what a source needs, then runs eval/run.py.

    python benchmarks/sources.py [--steps 400] [--out outputs/sources] [OVERRIDES …]

OVERRIDES are those that train/run.py takes for the target and its text, such as model.path=… data.path=….
Prepared once and kept in --out: an EAGLE and a Medusa head, the streams, a multi-token-prediction module written beside
the target as its checkpoint would carry it, the search for layers to skip, and as an assistant the target's own first
half under its own final norm and lm_head, untrained. --assistant adds a model with another tokenizer, by both ways.
Every command is printed, and can be run by itself.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from safetensors.torch import load_file, save_file

from benchmarks.assisted import truncated
from heads.formats.mtp_layouts import LAYOUTS
from inference.target.target import Target

MODEL_FREE = (
    *("prompt_lookup", "prompt_lookup_hf", "prompt_lookup_vllm", "suffix", "suffix_cold"),
    *("recycling", "recycling80", "lookahead"),
)


def call(script: str, *overrides: str) -> int:
    """Print and run one of the project's commands; return its exit status."""
    command = [sys.executable, str(ROOT / script), *overrides]
    print(f"$ python {script} {shlex.join(overrides)}", flush=True)
    return subprocess.run(command, check=False).returncode


def made(out: Path, script: str, *overrides: str) -> bool:
    """Run a command whose result is `out`, unless it is there; return whether it is there now."""
    if not out.exists():
        call(script, *overrides)
    return out.exists()


def as_checkpoint(head: Path, folder: Path) -> Path:
    """Write a trained module as the checkpoint of a model like Qwen3-Next would carry it."""
    tensors = LAYOUTS["separate"].write(load_file(head / "model.safetensors"), 0, split=False)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def main() -> None:
    """Prepare and measure."""
    parser = argparse.ArgumentParser(description="Every drafter on one target, in one report.")
    parser.add_argument("overrides", nargs="*", help="of the target and its text")
    parser.add_argument("--out", type=Path, default=Path("outputs/sources"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--stream-steps", type=int, default=None, help="of the streams, whose steps take the longest")
    parser.add_argument("--exit-layer", type=int, default=None, help="of early_exit; a fourth of the layers by default")
    parser.add_argument("--assistant", default=None, help="a model with another tokenizer")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--without", nargs="*", default=[], help="sources to leave out")
    asked = parser.parse_args()
    out, own = asked.out, asked.overrides
    path = next((item.split("=", 1)[1] for item in own if item.startswith("model.path=")), str(ROOT / "examples/tiny"))
    target = Target.load(path, "float32")
    layers = target.spec.num_layers
    training = [*own, f"trainer.steps={asked.steps}"]
    quick = ["eval.prompts=2", "eval.repeats=1", "eval.hf=false", "eval.warmup=0"]
    for head in ("eagle", "medusa", "mtp"):
        if not made(out / head, "train/run.py", f"head={head}", f"out={out / head}", *training, *quick):
            sys.exit(2)  # the command has said why
    streaming = [*own, f"trainer.steps={asked.stream_steps or asked.steps}", f"streams.layers={layers // 2}"]
    made(out / "streams", "train/streams.py", f"out={out / 'streams'}", *streaming)
    text = next((item.split("=", 1)[1] for item in own if item.startswith("data.prompts=")), None)
    workload = text or str(out / "eagle" / "prompts.jsonl")
    model = [item for item in own if item.startswith("model")]
    skips = out / "skips.json"
    if not made(skips, "eval/search_skips.py", *model, f"workload={workload}", f"out={skips}"):
        asked.without.append("layer_skip")  # nothing pays to skip on this target
    half = out / "first-half"
    if not half.exists():
        truncated(target, layers // 2, str(half))
    module = as_checkpoint(out / "mtp" / "head", out / "checkpoint")
    sources = {
        **{name: [] for name in MODEL_FREE},
        "assistant": [f"drafter.assistant.model={half}"],
        "mirror": [f"drafter.mirror.assistant.model={half}"],
        "early_exit": [f"drafter.early_exit.exit_layer={asked.exit_layer or max(1, layers // 4)}"],
        "layer_skip": [f"drafter.layer_skip.skips={skips}"],
        "mtp": [f"drafter.mtp.checkpoint={module}"],
        "streams": [f"drafter.streams.run={out / 'streams'}"],
        "hybrid": [],
        "head": [],
    }
    if asked.assistant:
        sources["assistant_tli"] = [f"drafter.assistant_tli.model={asked.assistant}"]
    sources = {name: options for name, options in sources.items() if name not in asked.without}
    sys.exit(
        call(
            "eval/run.py",
            f"drafter=[{','.join(sources)}]",
            f"run={out / 'eagle'}",
            f"compare=[{out / 'medusa'}]",
            f"workload={workload}",
            f"prompts={asked.prompts}",
            f"max_new_tokens={asked.tokens}",
            f"repeats={asked.repeats}",
            "truncate=true",
            f"out={out}",
            *(option for options in sources.values() for option in options),
        )
    )


if __name__ == "__main__":
    main()
