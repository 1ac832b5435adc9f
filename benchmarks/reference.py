"""Ours beside speculators and SpecForge on a CPU: step time, memory, and τ of heads trained on the same tokens.

    pip install --no-deps --target .reference speculators==0.9.0 hs-connectors==0.9.0 loguru==0.7.3 openai jiter \
        pydantic-settings python-dotenv
    python benchmarks/reference.py [--part time memory tau] [--depths 3 5 7] [--seeds 1 2 3] [--specforge FOLDER]
        [--data data.turns=text] [--head mtp …] [--reference speculators …] [--precision bf16] [--tree "chain of 4"]

1. time: a step (draft, loss, gradient, optimiser) at equal depths on one thread, in fp32 or as each trains in bf16:
   SpecForge's weights in bf16 beside fp32 masters, the others under autocast. First with the features given, then with
   the target's forward pass, the same for all. The trainers take the same rows in turn; a ratio of speeds is the median
   over rows of a reference's CPU seconds over the trainer's, with the 5th and 95th percentile.
2. memory: the peak of a step above what stays between steps, in a process of its own.
3. tau: heads as they come, trained on `--tokens` in the same rows and order, the references in fp32, all on what
   `--data` says; τ of our verifier in fp32 at temperature 0. A reference's head is read by `heads/formats/published`,
   and its argmax compared with the reference's own. The tokens and masks that the trainers took must have the same
   fingerprint.

Results are added to `--out`; a head that stands there, with as many tokens of such data, is not trained again.
SpecForge's FOLDER is a checkout, or its wheel unpacked: pip download --no-deps specforge==0.2.0; unzip
specforge-*.whl -d FOLDER.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch
from accelerate.utils import set_seed
from hydra import compose, initialize_config_dir
from torch import Tensor

from benchmarks.references import REFERENCES, SpecForge, documents_of, fingerprint, rows_of
from data.batches import Batch, Batches, pack, token_counts
from data.features.source import FeatureSource, LiveFeatures, MicroBatch
from data.text.prompts import load_training
from eval.measures import metrics
from eval.measures.machine import device_facts, provenance
from heads.base import Features, parameter_count
from heads.common.files import atomic_write
from heads.common.resolvers import register_resolvers
from heads.formats.published import load_published
from heads.formats.store import load_head
from heads.modules.vocab import choose_draft_vocab
from inference.decode import RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.target.target import Target
from inference.verification.sample import GREEDY
from train.build import batches_for, loop_of, values_of
from train.config import RunConfig, run_config
from train.distributed.processes import accelerator_for
from train.start import fit_init, init_head, resolve_init
from train.step import Loss, Stepper

OURS = {
    "eagle3": ["head=eagle3"],
    "eagle3-adamw": ["head=eagle3", "trainer.optimizer=adamw", "trainer.lr=3e-3"],
    "eagle3-shared": ["head=eagle3", "head.lm_head=shared"],
    "mtp": ["head=mtp"],
    "mtp-features": ["head=mtp", "head.feature_layers=[1,11,20]"],
}
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}  # the dtype of each
DATA: list[str] = []  # overrides that hold for all trainers
UNMEASURED = ["trainer.eval_prompts=0", "eval.prompts=0"]
TREES = {"chain of 4": TreeConfig("chain", 4, 0, 0, [], []), "d5k3n12": TreeConfig("dynamic", 5, 3, 12, [], [])}
NEW_TOKENS = 128
UNTIMED = 2  # first steps, in which memory is new
COMPARED = 4  # rows on which a converted head is compared with its reference
MIB = 2**20
Step = Callable[[int], Any]  # of a row's number in the run's order
register_resolvers()


def composed(*overrides: str) -> RunConfig:
    """Return a training configuration that measures nothing on its way."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return run_config(compose("train", ["launcher=inline", *UNMEASURED, *DATA, *overrides]))


class Job:
    """The target, in the precision of the steps that are timed, and the packed sequences that all trainers take."""

    def __init__(self, precision: str = "fp32") -> None:
        self.precision, self.dtype = precision, PRECISIONS[precision]
        self.run = composed("head=eagle3")
        self.target = Target.load(self.run.model.path, self.dtype, "cpu")
        self.samples = load_training(self.run.data, self.target.tokenizer, 0).samples
        self.packed = pack(self.samples, self.run.data.length)
        fused = self.head(self.run, self.target)[0].feature_layers
        self.layers = (*fused, self.target.embeddings.num_layers - 1)  # what engines hand to the references

    def head(self, run: RunConfig, target: Any) -> tuple[Any, RunConfig]:
        """Return a new head of ours, and its run with the head's numbers."""
        set_seed(run.trainer.seed)
        config, init = resolve_init(run.init, run.head, target)
        head: Any = init_head(config, init, target)
        choose_draft_vocab(head, token_counts(self.samples, target.embeddings.vocab_size))
        steps = run.sequences_per_step * run.trainer.steps
        fit_init(head, init, self.target, Batches(self.packed, 1, 1, run.trainer.seed, 0, 1), steps)
        return head, replace(run, head=head.config, init=init)

    def row(self, seed: int, number: int) -> Batch:
        """Return a row by its number in the order of a seed."""
        return Batches(self.packed, 1, 1, seed, 0, 1)(number)[0]

    def reference(self, name: str, depths: int, steps: int, seed: int) -> Any:
        """Return a reference's trainer."""
        return REFERENCES[name](Path(self.run.model.path), depths, steps, seed, getattr(torch, self.dtype))

    def collated(self, reference: Any, target: Any, batch: Batch) -> Any:
        """Return a row as a reference batches it, with the target's features."""
        with torch.no_grad():
            features = target.features(batch.token, batch.document, self.layers)
        return reference.batch(documents_of(batch, features), self.run.data.length)


class Given:
    """The target's features of some rows, computed beforehand."""

    def __init__(self, job: Job, count: int) -> None:
        self.device, self.layers, self.stored = job.target.device, job.layers, dict[bytes, Features]()
        for batch in (job.row(job.run.trainer.seed, number) for number in range(count)):
            with torch.no_grad():
                features = job.target.features(batch.token, batch.document, job.layers)
            self.stored[batch.token.numpy().tobytes()] = features

    def features(self, token: Tensor, document: Tensor, layers: tuple[int, ...]) -> Features:
        """Return the features of a row."""
        features = self.stored[token.numpy().tobytes()]
        return features._replace(hidden=features.hidden[:, :, [self.layers.index(layer) for layer in layers]])


def step_of(job: Job, name: str, depths: int, target: Any, rows: int) -> Step:
    """Return a trainer's step by the number of its row, with features from the target."""
    if name in OURS:
        overrides = [f"model.dtype={job.dtype}", f"trainer.precision={job.precision}", f"objective.depths={depths}"]
        return our_step(job, composed(*OURS[name], *overrides), target)
    reference, seed = job.reference(name, depths, job.run.trainer.steps, 0), job.run.trainer.seed
    if not isinstance(target, Given):
        return lambda number: reference.step(job.collated(reference, target, job.row(seed, number)))
    batches = [job.collated(reference, target, job.row(seed, number)) for number in range(rows)]
    return lambda number: reference.step(batches[number])  # a loader's processes collate while the trainer computes


def our_step(job: Job, run: RunConfig, target: Any) -> Step:
    """Return our step by the number of its row."""
    head, run = job.head(run, job.target)
    accelerator = accelerator_for(run.launcher, run.trainer, run.model)
    source = LiveFeatures(target, Batches(job.packed, 1, 1, run.trainer.seed, 0, 1), head.feature_layers)
    loss = Loss(head, run.objective, compiled=False, autocast=job.precision == "bf16")
    stepper = Stepper(run.trainer, run.launcher, accelerator, loss, source, job.target.embeddings.hidden_size)
    return partial(stepper, halted=lambda: False)


def alternated(steps: dict[str, Step], rows: int) -> dict[str, list[float]]:
    """Return the CPU seconds of the trainers' steps, which they take in turn on the same rows."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rows):
        for name, step in steps.items():
            begin = time.process_time()
            step(number)
            seconds[name].append(time.process_time() - begin)
    return {name: spent[UNTIMED:] for name, spent in seconds.items()}


def ratio(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the median of the ratios of pairs, and their 5th and 95th percentile."""
    cuts = metrics.quantiles([one / other for one, other in zip(above, below, strict=True)])
    return [cuts["p50"], cuts["p5"], cuts["p95"]]


def step_times(job: Job, ours: list[str], references: list[str], depths: int, rows: int) -> list[dict[str, Any]]:
    """Return the time of each trainer's step at a depth and its speed over each reference's, with features given.

    Then those of the step with the target's forward pass.
    """
    results = []
    for target in (Given(job, rows), job.target):
        steps = {name: step_of(job, name, depths, target, rows) for name in [*ours, *references]}
        seconds = alternated(steps, rows)
        for name, spent in seconds.items():
            over = {other: ratio(seconds[other], spent) for other in references if other != name}
            middle, given = metrics.quantiles(spent)["p50"], isinstance(target, Given)
            results.append({"depths": depths, "trainer": name, "given": given, "seconds": middle, "over": over})
    return results


def resident(key: str) -> int:
    """Return this process's memory in bytes, by its key in Linux's status file."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def peak(step: Step, rows: int) -> int:
    """Return the peak bytes of steps above those that a process holds between steps, caches emptied."""
    for number in range(UNTIMED):
        step(number)
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    for number in range(UNTIMED, rows):
        step(number)
    return resident("VmHWM") - before


def peaks(names: list[str], depths: int, words: list[str]) -> list[dict[str, Any]]:
    """Return the peak of each trainer's step at a depth, each in a process of its own."""
    results = []
    for name in names:
        command = [sys.executable, __file__, *words, "--peak", name, "--depths", str(depths)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        results.append({"depths": depths, "trainer": name, "bytes": int(done.stdout.split()[-1])})
    return results


class Recorded:
    """A source of features that records the fingerprints of the rows that are trained."""

    def __init__(self, source: FeatureSource) -> None:
        self.source, self.batches, self.stall, self.close = source, source.batches, source.stall, source.close
        self.rows: list[str] = []

    def __call__(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step."""
        micro_batches = self.source(step)
        for batch in (micro.batch for micro in micro_batches):
            documents = rows_of(batch.document)
            self.rows.append(fingerprint((batch.token[0, row][1:], batch.loss_mask[0, row][1:]) for row in documents))
        return micro_batches


def train_ours(job: Job, name: str, seed: int, steps: int, out: Path) -> dict[str, Any]:
    """Train a head of ours as it comes, a packed sequence a step."""
    overrides = [f"trainer.steps={steps}", f"trainer.batch_tokens={job.run.data.length}", f"trainer.seed={seed}"]
    run = composed(*OURS[name], *overrides, f"out={out}")
    target = Target.of(run.model, device="cpu")
    head, run = job.head(run, target)
    accelerator = accelerator_for(run.launcher, run.trainer, run.model)
    source = Recorded(LiveFeatures(target, batches_for(run.trainer, job.packed, accelerator), head.feature_layers))
    loop_of(run, accelerator, target, head, source, [], values_of(run), {}).train()
    head = load_head(out / "head", job.target.embeddings, target.spec)
    return {"head": head, "rows": source.rows, "parameters": parameter_count(head)}


def train_theirs(job: Job, name: str, seed: int, steps: int, out: Path) -> dict[str, Any]:
    """Train a reference's head as it comes, and read it as one of ours."""
    reference, rows = job.reference(name, REFERENCES[name].depths, steps, seed), []
    for number in range(steps):
        batch = job.collated(reference, job.target, job.row(seed, number))
        rows.append(fingerprint(reference.trained(batch)))
        reference.step(batch)
    reference.save(out / "head")
    head: Any = load_published(out / "head", job.target.embeddings)
    others = [job.row(seed, number) for number in range(steps, steps + COMPARED)]
    same = [sum(counts) for counts in zip(*(agreement(job, reference, head, row) for row in others), strict=True)]
    return {"head": head, "rows": rows, "parameters": parameter_count(reference.model), "same_argmax": same}


@torch.no_grad()
def agreement(job: Job, reference: Any, head: Any, batch: Batch) -> tuple[int, int]:
    """Return the drafts of a row whose argmax is the same in a reference and in its converted head, and all its drafts.

    A draft of depth d counts where its d tokens stand in the row's document.
    """
    theirs = reference.logits(job.collated(reference, job.target, batch))
    drafts = head.unroll(job.target.features(batch.token, batch.document, head.feature_layers), len(theirs))
    same = compared = 0
    for depth, (draft, documents) in enumerate(zip(drafts, theirs, strict=True), 1):
        best = head.compute_logits(draft.state, depth)[0].argmax(-1)
        for row, logits in zip(rows_of(batch.document), documents, strict=True):
            ours = best[row][:-depth]
            same += int((ours == logits.argmax(-1)[: len(ours)]).sum())
            compared += len(ours)
    return same, compared


def passes(job: Job, head: Any, tree: TreeConfig) -> list[list[float]]:
    """Return the tokens and the target passes of each held-out prompt's answer, decoded greedily."""
    drafter = HeadDrafter(head.float().eval(), tree, tree.kind)
    prompts = load_training(job.run.data, job.target.tokenizer, job.run.data.held_out).held_out
    runs = [speculate(job.target, drafter, prompt.token, RequestParams(NEW_TOKENS, GREEDY)) for prompt in prompts]
    return [[counts.tokens, counts.steps] for counts in map(metrics.passes, runs)]


def trained(job: Job, name: str, seed: int, tokens: int) -> dict[str, Any]:
    """Train and measure a head."""
    begin, steps = time.process_time(), tokens // job.run.data.length
    train = train_ours if name in OURS else train_theirs
    with tempfile.TemporaryDirectory() as folder:
        result = train(job, name, seed, steps, Path(folder))
    head, rows = result.pop("head"), result.pop("rows")
    result |= {"name": name, "seed": seed, "tokens": tokens, "train_seconds": time.process_time() - begin}
    result["rows"] = sha256("".join(rows).encode()).hexdigest()
    return {**result, "passes": {tree: passes(job, head, config) for tree, config in TREES.items()}}


def check_rows(heads: Iterable[dict[str, Any]]) -> None:
    """Refuse heads of one seed that were not trained on the same rows."""
    rows: dict[int, dict[str, str]] = {}
    for head in heads:
        rows.setdefault(head["seed"], {})[head["name"]] = head["rows"]
    for seed, named in rows.items():
        if len(set(named.values())) > 1:
            raise ValueError(f"seed {seed}: the heads were trained on different rows: {named}")


def tau(heads: list[dict[str, Any]], tree: str) -> tuple[float, tuple[float, float] | None]:
    """Return the τ of one trainer's heads of all seeds, pooled, and its interval over prompts."""
    counts = [
        metrics.SpecDecodingStats(tokens, steps, None, 0, ())
        for head in heads
        for tokens, steps in head["passes"][tree]
    ]
    value = metrics.pool(counts).tau
    assert value is not None
    return value, metrics.pooled_interval(counts, 0, prompt_numbers(heads, tree))


def prompt_numbers(heads: list[dict[str, Any]], tree: str) -> list[int]:
    """Return each count's prompt, by which seeds are resampled together."""
    return [number for head in heads for number in range(len(head["passes"][tree]))]


def paired(heads: list[dict[str, Any]], base: list[dict[str, Any]], tree: str) -> str:
    """Return the ratio of two trainers' τ on the seeds that both have, with its interval over prompts."""
    seeds = sorted({head["seed"] for head in heads} & {head["seed"] for head in base})
    both = [[head for seed in seeds for head in some if head["seed"] == seed] for some in (heads, base)]
    ours, theirs = ([tuple(pair) for head in some for pair in head["passes"][tree]] for some in both)
    value = metrics.speed_ratio(ours, theirs)
    interval = metrics.paired_interval(ours, theirs, 0, prompt_numbers(both[0], tree))
    return "-" if value is None else spread(value, *(interval or ()))


def spread(value: float, *interval: float) -> str:
    """Return a number with its interval, for reading."""
    return f"{value:.2f}" + (f" [{', '.join(f'{end:.2f}' for end in interval)}]" if interval else "")


def markdown(header: list[str], rows: list[list[Any]]) -> str:
    """Return a table, its first column to the left."""
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (header, ruler, *rows)) + "\n"


def time_table(results: list[dict[str, Any]], references: list[str], length: int) -> str:
    """Return the table of speeds, a trainer and depth a row, the target's forward pass left out and then included."""
    header, rows = ["trainer", "depths"], dict[tuple[str, int], list[str]]()
    for what in ("tokens/s", "with the target"):
        header += [what, *(f"over {name}" for name in references)]
    for result in results:
        row = rows.setdefault((result["trainer"], result["depths"]), [])
        over = [spread(*result["over"][name]) if name in result["over"] else "" for name in references]
        row += [f"{length / result['seconds']:,.0f}", *over]
    return markdown(header, [[*key, *row] for key, row in rows.items()])


def memory_table(results: list[dict[str, Any]]) -> str:
    """Return the table of peaks, a column for each depth."""
    depths = sorted({result["depths"] for result in results})
    by_name = {(result["trainer"], result["depths"]): f"{result['bytes'] / MIB:.0f}" for result in results}
    names = dict.fromkeys(result["trainer"] for result in results)
    header = ["trainer", *(f"MiB, {depth} depths" for depth in depths)]
    return markdown(header, [[name, *(by_name.get((name, depth), "") for depth in depths)] for name in names])


def tau_table(heads: list[dict[str, Any]], base: str) -> str:
    """Return the table of τ, with each trainer's over that of a reference, paired over prompts."""
    header = ["trainer", "seeds", "parameters", *(f"τ, {tree}" for tree in TREES)]
    header += [*(f"{tree}, over {base}" for tree in TREES), "CPU s", "argmax after conversion"]
    named: dict[str, list[dict[str, Any]]] = {}
    for head in heads:
        named.setdefault(head["name"], []).append(head)
    rows = []
    for name, some in named.items():
        values = [spread(value, *(interval or ())) for value, interval in (tau(some, tree) for tree in TREES)]
        over = [paired(some, named[base], tree) if base in named and name != base else "" for tree in TREES]
        seconds = sum(head["train_seconds"] for head in some) / len(some)
        same = [sum(counts) for counts in zip(*(head.get("same_argmax", ()) for head in some), strict=True)]
        equal = "{:,} of {:,}".format(*same) if same else ""
        rows.append([name, len(some), f"{some[0]['parameters']:,}", *values, *over, f"{seconds:.0f}", equal])
    return markdown(header, rows)


def parsed() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description="Ours beside speculators and SpecForge.")
    parser.add_argument("--part", nargs="+", choices=("time", "memory", "tau"), default=["time", "memory", "tau"])
    parser.add_argument("--head", nargs="+", choices=OURS, default=list(OURS), help="of ours")
    parser.add_argument("--depths", type=int, nargs="+", default=[3, 5, 7], help="of time and memory")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="of time and memory")
    parser.add_argument("--rows", type=int, default=24, help="of time, a step each")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of tau")
    parser.add_argument("--tokens", type=int, default=409_600, help="that each head is trained on for tau")
    parser.add_argument("--tree", nargs="+", choices=TREES, default=list(TREES), help="of tau")
    parser.add_argument("--data", nargs="+", default=[], help="overrides of data for all trainers")
    parser.add_argument("--reference", nargs="*", choices=REFERENCES, help="of the others; left out: all that are here")
    parser.add_argument(
        "--specforge", default="", help="the folder that holds SpecForge's package; without it left out"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/reference.json"))
    parser.add_argument("--peak", help=argparse.SUPPRESS)  # the trainer that a process of its own measures
    return parser.parse_args()


def main() -> None:
    """Measure the parts, print their tables, write the results."""
    arguments = parsed()
    SpecForge.source = arguments.specforge
    DATA.extend(arguments.data)
    for tree in TREES.keys() - arguments.tree:
        del TREES[tree]
    references = [name for name in REFERENCES if name != "SpecForge" or arguments.specforge]
    if arguments.reference is not None:
        references = [name for name in references if name in arguments.reference]
    torch.set_num_threads(1)
    job = Job(arguments.precision)
    if arguments.peak:
        rows = 4 * UNTIMED
        print(peak(step_of(job, arguments.peak, arguments.depths[0], Given(job, rows), rows), rows))
        return
    if "tau" in arguments.part and arguments.precision != "fp32":
        sys.exit("--part tau: its verifier and the references compute in fp32; leave --precision out")
    stored = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"heads": []}
    stored |= {"machine": device_facts(torch.device("cpu"), None), **provenance(), "precision": arguments.precision}
    if "time" in arguments.part:
        rows, length = arguments.rows + UNTIMED, job.run.data.length
        by_depth = [step_times(job, arguments.head, references, depth, rows) for depth in arguments.depths]
        stored["time"] = [*chain(*by_depth)]
        print(time_table(stored["time"], references, length), flush=True)
    if "memory" in arguments.part:
        words = ["--specforge", arguments.specforge, "--precision", arguments.precision]
        words += ["--data", *DATA] if DATA else []
        by_depth = [peaks([*arguments.head, *references], depth, words) for depth in arguments.depths]
        stored["memory"] = [*chain(*by_depth)]
        print(memory_table(stored["memory"]), flush=True)
    if "tau" in arguments.part:
        wanted = [(name, seed) for seed in arguments.seeds for name in [*references, *arguments.head]]
        add_heads(job, stored, wanted, arguments)
    write(arguments.out, stored)


def add_heads(job: Job, stored: dict[str, Any], wanted: list[tuple[str, int]], arguments: argparse.Namespace) -> None:
    """Train and measure the heads that are missing, write each when it is done, and print the table."""
    for name, seed in wanted:
        known = [(head["name"], head["seed"], head["tokens"], head.get("data", [])) for head in stored["heads"]]
        if (name, seed, arguments.tokens, DATA) not in known:
            stored["heads"].append({**trained(job, name, seed, arguments.tokens), "data": DATA})
            write(arguments.out, stored)
    heads = [h for h in stored["heads"] if (h["tokens"], h.get("data", [])) == (arguments.tokens, DATA)]
    check_rows(heads)
    print(tau_table(heads, "speculators"))


def write(path: Path, stored: dict[str, Any]) -> None:
    """Write the results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, (json.dumps(stored, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
