"""An estimate of a step on an H100 at the shape of an 8B, from counted operations and bytes: nothing is timed.

    python benchmarks/h100_estimate.py [decoding]
    python benchmarks/h100_estimate.py fusing
    python benchmarks/h100_estimate.py training [OVERRIDES…]

Decoding: operations are those of the static step on the bundled target, whose layers are as an 8B's
(benchmarks/step_counts.py); bytes are those of weights and caches that a step reads. Fusing: the kernels of a layer of
that step, and what fewer of them would save in a captured step; a compiled one has all but the products fused.
Training: EAGLE-3 with a live target, a micro-batch a step, every kernel at its own shape
(benchmarks/training_kernels.py); overrides are those of train/run.py. Every other number is an assumption, given below.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks import training_kernels
from benchmarks.planner import composed
from benchmarks.step_counts import TREES, Launches, batch_of_size, counted, embedded, head_of
from benchmarks.training_kernels import Kernel
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Baseline
from train.planning.plan import plan, preset
from train.planning.shapes import configuration
from train.planning.shapes import head_of as planned_head

BANDWIDTH, PRODUCTS = 2.85e12, 620e12  # bytes/s and bf16 operations/s that an H100 achieves
LAUNCH, KERNEL, READ = 5.5e-6, 2.0e-6, 12e-6  # seconds of a launch by the host, of a small kernel, of a read
LAYERS, WEIGHTS, ENTRY = 32, 15.0e9, 131_072  # Llama-3.1-8B in bf16, its lm_head in it; bytes, of an entry of the cache
HEAD, HEAD_LM = 2 * 243e6, 2 * 32_000 * 4_096  # an EAGLE-3 head and its lm_head, bytes
LARGE, FUSED = 8, 7  # a layer's products and its attention, priced by bytes; small kernels of a compiled layer
CONTEXT = 1024
# The step of ../shared/reference/gpu_path.md, section 3, and what it estimates of it in ms, at 8c134ed and as a goal.
SETTINGS = ["experiment=eagle3_llama8b_8x80", "launcher.num_processes=1"]
SETTINGS += ["trainer.batch_tokens=16384", "trainer.micro_tokens=16384", "trainer.optimizer=adamw"]
TRAINING = {
    training_kernels.TARGET: ("440-470", "360-400"),
    training_kernels.LOSS: ("750-850", "150"),
    training_kernels.PRODUCTS: ("200", "200"),
    training_kernels.ATTEND: ("108", "15-20"),
    training_kernels.SMALL: ("50", "25"),
    training_kernels.OPTIMISER: ("14", "4"),
}


class Cost(NamedTuple):
    """Counts of a step's stages, and how much they read."""

    draft: int
    layer: float
    verify: int
    other: int
    levels: int
    rows: int


def seconds(cost: Cost, batch: int, way: str, context: int = CONTEXT) -> dict[str, float]:
    """Return the seconds of draft, pass and the rest: run by the host, captured, or captured and compiled."""
    small = LAYERS * (FUSED if way == "compiled" else cost.layer - LARGE) + cost.verify
    read = WEIGHTS + batch * (context + cost.rows) * ENTRY
    products = 2 * (WEIGHTS / 2) * batch * cost.rows
    stages = {
        "draft": (cost.draft, cost.levels * (HEAD + HEAD_LM) / BANDWIDTH),
        "verify": (small, max(read / BANDWIDTH, products / PRODUCTS)),
        "other": (cost.other, 0.0),
    }
    spent = {name: kernels * KERNEL + work for name, (kernels, work) in stages.items()}
    if way == "eager":  # the host launches one kernel after another, products too
        launches = {name: kernels for name, (kernels, _) in stages.items()}
        launches["verify"] += LAYERS * LARGE
        spent = {name: max(launches[name] * LAUNCH, device) for name, device in spent.items()}
    return spent | {"other": spent["other"] + READ}


def device_seconds(kernel: Kernel) -> float:
    """Return how long a kernel takes the device: its products or its bytes, whichever is more, and not below KERNEL."""
    return max(KERNEL, kernel.flops / PRODUCTS, kernel.moved / BANDWIDTH)


def step_seconds(kernels: list[Kernel]) -> float:
    """Return the seconds from one read of the host to the next.

    Between them the host launches these kernels one after the other; each begins when it is launched and the one
    before it has ended.
    """
    launched = done = 0.0
    for kernel in kernels:
        launched += LAUNCH
        done = max(done, launched) + device_seconds(kernel)
    return done + READ


def training_table(kernels: list[Kernel], tokens: int) -> list[str]:
    """Return the estimate of a step that trains on so many tokens, as lines of a Markdown table."""
    lines = [
        "| part | launches | GB | TFLOP | ms | before, ms | goal, ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for part, (before, goal) in TRAINING.items():
        mine = [kernel for kernel in kernels if kernel.part == part]
        spent = sum(map(device_seconds, mine))
        sizes = sum(kernel.moved for kernel in mine) / 1e9, sum(kernel.flops for kernel in mine) / 1e12
        cells = f"{len(mine):,} | {sizes[0]:,.0f} | {sizes[1]:,.1f} | {1e3 * spent:,.0f} | {before} | {goal}"
        lines.append(f"| {part} | {cells} |")
    step, busy = step_seconds(kernels), sum(map(device_seconds, kernels))
    lines.append(f"| device idle |  |  |  | {1e3 * (step - busy):,.1f} | 30-60 | 5 |")
    flops = sum(kernel.flops for kernel in kernels)
    used = f"{tokens / step:,.0f} tokens/s, MFU {flops / step / (1e12 * (preset('h100').tflops or 1)):.0%}"
    moved = sum(kernel.moved for kernel in kernels) / 1e9
    lines.append(
        f"| **step** | {len(kernels):,} | {moved:,.0f} | {flops / 1e12:,.1f} | **{1e3 * step:,.0f}: {used}** | "
        "1,650-1,750: 9,500 tokens/s, 27% | 800: 20,000 tokens/s, 56% |"
    )
    given = step_seconds([kernel for kernel in kernels if kernel.part != training_kernels.TARGET])
    return [*lines, f"| features given |  |  |  | {1e3 * given:,.0f}: {tokens / given:,.0f} tokens/s |  |  |"]


def training(overrides: list[str]) -> None:
    """Count and print a training step."""
    run = composed([*SETTINGS, *overrides])
    job = training_kernels.Job(run, configuration(run.model).get_text_config(), plan(run).micro_batch_size)
    head, _ = planned_head(run, job.config)
    step, update = training_kernels.head_kernels(job)
    target = training_kernels.target_kernels(configuration(run.model), job, head.feature_layers, run.data.length)
    print("\n".join(training_table([*update, *target, *step], job.rows * run.data.length)))


class Kinds(Launches):
    """Counts the operations of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one."""
        self.kinds[func.overloadpacket.__name__] += not func.is_view
        return super().__torch_dispatch__(func, types, args, kwargs)


def fusing() -> None:
    """Count a layer's kernels by kind, and print what each fusion saves in a captured step, at any batch size."""
    target = embedded()
    hidden = torch.zeros(1, 1, target.config.hidden_size)
    layer: Any = target.model.model.layers[0]
    rotation = target.model.model.rotary_emb(hidden, torch.zeros(1, 1, dtype=torch.long))
    counts = {}
    for name, module, arguments in (
        ("norm", layer.input_layernorm, (hidden,)), ("mlp", layer.mlp, (hidden,)),
        ("attention", layer.self_attn, (hidden, rotation, None)),
    ):  # fmt: skip
        with torch.inference_mode(), Kinds() as launches:
            module(*arguments)
        counts[name] = launches.kinds
    both = counts["attention"] + counts["mlp"]
    rotations = sum(counts["attention"][kind] for kind in ("mul", "neg", "cat", "add"))
    print(f"{'':48}{'kernels a layer':>17}{'fewer':>7}{'ms a step':>11}")
    for what, now, then in (
        ("q, k, v as one product, gate and up as one", both["linear"], both["linear"] - 3),
        ("norms as one kernel each (torch.rms_norm)", 2 * counts["norm"].total(), 2),
        ("rotations of queries and keys as one kernel", rotations, 1),
        ("gate's activation and its product as one", counts["mlp"]["silu"] + counts["mlp"]["mul"], 1),
    ):
        print(f"{what:48}{now:17}{now - then:7}{1e3 * LAYERS * (now - then) * KERNEL:11.2f}")


def decoding() -> None:
    """Count and print a decoding step."""
    target = embedded()
    depth = target.config.num_hidden_layers
    head = head_of("eagle3", target)
    cases = [("plain", 1, None, 1.0), ("dynamic, depth 5, 60 nodes", 1, 61, 4.0), ("plain", 32, None, 1.0)]
    cases += [("chain of 4", 32, 5, 2.8)]
    print(f"{'':30}{'batch':>6}{'way':>10}{'draft':>8}{'verify':>8}{'other':>7}{'ms':>8}{'tokens/s':>10}{'at tau':>8}")
    for name, batch, rows, tau in cases:
        source = Baseline(target.device) if rows is None else HeadDrafter(head, TREES[name], name)
        parts, _ = counted(batch_of_size(target, source, 1))
        layer = (parts["verify"] - 12) / depth  # 12 operations of a pass belong to no layer
        levels = 0 if rows is None else TREES[name].depth + 1
        cost = Cost(parts["draft"], layer, 12, parts["other"], levels, rows or 1)
        for way in ("eager", "captured", "compiled"):
            spent = seconds(cost, batch, way)
            whole = sum(spent.values())
            figures = "".join(
                f"{1e3 * spent[kind]:{width}.2f}" for kind, width in (("draft", 8), ("verify", 8), ("other", 7))
            )
            print(f"{name:30}{batch:6}{way:>10}{figures}{1e3 * whole:8.2f}{batch * tau / whole:10,.0f}{tau:8}")


if __name__ == "__main__":
    kind, *words = sys.argv[1:] or ["decoding"]
    if kind == "training":
        training(words)
    else:
        {"decoding": decoding, "fusing": fusing}[kind]()
