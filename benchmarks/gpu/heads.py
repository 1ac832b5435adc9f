"""Every head that exists, on one target: the same answers, features and tokens, then tau and speedup side by side.

    python benchmarks/gpu/heads.py --out DIR [--target DIR/target] [--only HEAD …] [--minutes 9]

All by the product's own commands:

1. the target of benchmarks/gpu/target.py answers its training prompts (data/run.py);
2. its features of all packed rows are extracted once, of every layer that a head reads (data/run.py); --features live
   leaves that out, and every training computes them;
3. each head trains on the same rows in the same order (train/run.py);
4. all heads are measured in one session a workload (eval/run.py), compiled where there is an accelerator, under the
   device's default tree. Goals are judged on code at temperature 0.

No piece of work begins once --minutes have passed, and what is still at work then is stopped; the same command goes on
there. What is finished is not done again. What failed is told in the record, and the status is then 1.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.gpu.common import Asked, arguments, product_rate, record
from benchmarks.gpu.head_tables import figures_of, goals, measured, tables_of, training_facts
from benchmarks.gpu.text import KINDS
from benchmarks.training import composed
from heads import HEADS
from heads.common.resolvers import ROOT
from inference.target.embeddings_only import EmbeddingsOnly

GRACE = 45  # seconds that a stopped training has for its checkpoint
NOT_LOSSLESS = 1  # an evaluation's status where a gate is red: the report is there all the same
TOY_HEADS = ("eagle", "medusa")


@dataclass(frozen=True)
class Sizes:
    """How much of everything.

    Attributes:
        steps, batch: of every head's training, and tokens in a step.
        length: of a packed row.
        answers, answer_tokens: prompts that the target answers, and tokens of an answer at most.
        heat: the temperature of the answers.
        prompts, tokens: of a workload, and of an answer that is measured.
        gate_tv: what the sampled gate reveals.
    """

    steps: int
    batch: int
    length: int
    answers: int
    answer_tokens: int
    heat: float
    prompts: int
    tokens: int
    gate_tv: float


FULL = Sizes(1500, 8192, 512, 8000, 192, 0.5, 12, 128, 0.02)
SMALL = Sizes(4, 256, 128, 24, 24, 0.0, 2, 12, 0.3)


class Session:
    """One call of this script: what it may still take, and the pieces of work that it does or leaves.

    Attributes:
        left: pieces that are not finished, in words.
        failed: pieces that ended with an error, and its status.
    """

    def __init__(self, minutes: float) -> None:
        self.minutes, self.end = minutes, time.monotonic() + minutes * 60
        self.left: list[str] = []
        self.failed: dict[str, int] = {}

    def run(self, piece: str, words: Sequence[str], share: float = 0.0, fine: Sequence[int] = (0,)) -> bool:
        """Run a command; return whether it came to its end.

        Args:
            piece: what it does, in words.
            words: the command, without Python.
            share: of the minutes, that must be left for a piece that cannot go on where it was stopped.
            fine: statuses that are no error.
        """
        remaining = self.end - time.monotonic()
        if remaining <= share * self.minutes * 60:
            self.left.append(piece)
            return False
        print(f"\n{piece}: python {' '.join(words)}", flush=True)
        work = subprocess.Popen([sys.executable, *words], cwd=ROOT)
        try:
            status = work.wait(remaining)
        except subprocess.TimeoutExpired:
            self.left.append(piece)
            stop(work)
            return False
        if status not in fine:
            self.failed[piece] = status
        return status in fine


def stop(work: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, then end it."""
    work.send_signal(signal.SIGTERM)
    try:
        work.wait(GRACE)
    except subprocess.TimeoutExpired:
        work.kill()
        work.wait()


class Work:
    """The pieces of work, in folders under `out`.

    Args:
        asked: by `arguments`.
        target: the target's folder.
        features: stored or live.
    """

    def __init__(self, asked: Asked, target: Path, features: str) -> None:
        self.asked, self.target, self.features = asked, target, features
        self.out = asked.out.resolve() / "heads"
        self.sizes = SMALL if asked.toy else FULL
        self.answers, self.store = self.out / "answers.jsonl", self.out / "features"
        kinds = [kind for kind in KINDS if (target / f"{kind}.jsonl").is_file()]
        # On a device a session of its own each, which a call has time for.
        self.workloads = [kinds] if asked.toy else [[kind] for kind in kinds]
        self.data = [
            f"model.path={target}", f"model.device={asked.device}", f"data.prompts={target / 'prompts.jsonl'}",
            f"data.length={self.sizes.length}", f"data.cache={self.out / 'cache'}",
        ]  # fmt: skip

    def answer(self, session: Session) -> bool:
        """Let the target answer the training prompts."""
        batch = 8 if self.asked.toy else 256
        words = [
            "data/run.py", *self.data, f"answers={self.answers}", f"data.path={self.target / 'train_prompts.jsonl'}",
            f"limit={self.sizes.answers}", f"max_new_tokens={self.sizes.answer_tokens}",
            f"temperature={self.sizes.heat}", "keep_unfinished=true", f"batch_size={batch}",
        ]  # fmt: skip
        return self.answers.exists() or session.run("the target's answers", words)

    def extract(self, session: Session) -> bool:
        """Extract the features of every layer that a head reads."""
        done = self.out / "features.done"
        if self.features == "live" or done.exists():
            return True
        layers = ",".join(map(str, self.layers()))
        words = [
            "data/run.py", *self.data, f"data.path={self.answers}", "features=stored", f"features.path={self.store}",
            f"layers=[{layers}]", f"features.micro_rows={8 if self.asked.toy else 64}",
        ]  # fmt: skip
        if not session.run("features", words):
            return False
        done.touch()
        return True

    def layers(self) -> list[int]:
        """Return the target's layers that any head reads."""
        embeddings = EmbeddingsOnly.load(str(self.target), "auto", "cpu", False).embeddings
        runs = [composed(f"head={name}", f"model.path={self.target}", f"data.path={self.answers}") for name in HEADS]
        return sorted({i for run in runs for i in HEADS[run.head.name](run.head, embeddings).feature_layers})

    def train(self, name: str, session: Session) -> bool:
        """Train a head, or go on with it."""
        folder, sizes = self.out / name, self.sizes
        if self.trained(name):
            return True
        stored = ["features=stored", f"features.path={self.store}", "features.prefetch=8"]
        words = [
            "train/run.py", f"head={name}", f"name={name}", f"out={folder}", *self.data, f"data.path={self.answers}",
            *(stored if self.features == "stored" else []), f"trainer.steps={sizes.steps}",
            f"trainer.batch_tokens={sizes.batch}", f"trainer.micro_tokens={sizes.batch}",
            f"trainer.eval_every={sizes.steps}", f"trainer.save_every={max(1, sizes.steps // 3)}",
            "trainer.eval_prompts=0", "eval.prompts=0",
            f"resume={'true' if (folder / 'config.yaml').exists() else 'false'}",
        ]  # fmt: skip
        return session.run(name, words)

    def trained(self, name: str) -> bool:
        """Whether a head is trained.

        Raises:
            SystemExit: for another number of tokens than the others.
        """
        file = self.out / name / "training.json"
        if not file.exists():
            return False
        took, wanted = json.loads(file.read_text())["tokens"], self.sizes.steps * self.sizes.batch
        if took != wanted:
            raise SystemExit(
                f"{file}: {took} tokens, and {wanted} are asked for; remove the folder, or give another --out"
            )
        return True

    def report_of(self, workloads: Sequence[str]) -> Path:
        """Return the folder of the report on workloads that share a session."""
        return self.out / "eval" / "-".join(workloads)

    def measure(self, names: Sequence[str], workloads: Sequence[str], session: Session) -> bool:
        """Measure all trained heads in one session, unless a report has them."""
        sizes, folder = self.sizes, self.report_of(workloads)
        if set(names) <= reported(folder):
            return True
        runs = ",".join(str(self.out / name) for name in names)
        files = ",".join(str(self.target / f"{workload}.jsonl") for workload in workloads)
        compiled = self.asked.device.type == "cuda"
        words = [
            "eval/run.py", f"run=[{runs}]", f"workload=[{files}]", "temperature=[0,1]",
            "tier=live", "hf=false", f"engine.compile={'true' if compiled else 'false'}", f"prompts={sizes.prompts}",
            f"max_new_tokens={sizes.tokens}", "repeats=1", "warmup=2", f"gate_tv={sizes.gate_tv}", f"out={folder}",
            f"model.device={self.asked.device}",
        ]  # fmt: skip
        return session.run(f"{', '.join(workloads)} with {', '.join(names)}", words, share=0.5, fine=(0, NOT_LOSSLESS))


def reported(folder: Path) -> set[str]:
    """Return the heads that a folder's report has."""
    file = folder / "report.json"
    return {row["drafter"] for row in json.loads(file.read_text())["rows"]} if file.exists() else set()


def main() -> None:
    """Do what is missing, tell what is there."""
    asked, said = arguments(
        __doc__,
        target={"type": Path, "help": "made by target.py; OUT/target unless it is given"},
        only={"nargs": "+", "choices": list(HEADS), "help": "these heads alone"},
        minutes={"type": float, "default": 9.0, "help": "after which nothing begins and nothing goes on"},
        features={"choices": ("stored", "live"), "default": "stored"},
    )
    target = (said.target or asked.out / "target").resolve()
    if not (target / "train_prompts.jsonl").exists() or not (target / "prompts.jsonl").exists():
        raise SystemExit(f"{target}: holds no finished target; make one by benchmarks/gpu/target.py --out {asked.out}")
    names = said.only or (list(TOY_HEADS) if asked.toy else list(HEADS))
    work, session = Work(asked, target, said.features), Session(said.minutes)
    work.out.mkdir(parents=True, exist_ok=True)
    if work.answer(session) and work.extract(session):
        trained = [name for name in names if work.train(name, session)]
        for workloads in work.workloads if trained else ():
            work.measure(trained, workloads, session)
    told = numbers_of(work, session)
    record(asked, "heads", told, tables_of(told), figures_of(told))
    if session.left:
        print(f"not finished: {'; '.join(session.left)}. The same command goes on there.")
    if session.failed:
        raise SystemExit(1)


def numbers_of(work: Work, session: Session) -> dict[str, Any]:
    """Return everything that is known by now, of earlier calls too."""
    rate = product_rate(work.asked)
    trained = {name: training_facts(work.out / name, rate) for name in HEADS if work.trained(name)}
    files = [work.report_of(workloads) / "report.json" for workloads in work.workloads]
    rows = [row for file in files if file.exists() for row in measured(json.loads(file.read_text(encoding="utf-8")))]
    return {
        "sizes": vars(work.sizes), "features": work.features, "product_rate": rate, "trained": trained,
        "goals": goals(rows), "measured": rows, "left": session.left, "failed": session.failed,
    }  # fmt: skip


if __name__ == "__main__":
    main()
