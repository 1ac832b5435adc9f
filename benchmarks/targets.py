"""Which families of targets are served, and how: the table of docs/targets.md, each cell from a run on a toy.

    python benchmarks/targets.py [--families NAME …] [--heads HEAD …] [--prompts N] [--out docs/targets.md]

A toy has the family's own configuration class and random weights (tests/families.py), is written to a folder and loaded
as any checkpoint is. Its greedy text is compared with `generate`: drafted as chains that go wrong somewhere, as trees,
in a batch, and compiled (traced by dynamo, without inductor). Packed features are compared with each document's alone,
all in fp64. A module for multi-token prediction is made of the toy's last layer. The heads are trained for a few
steps by train/run.py's own function, whose losslessness check must pass, and an EAGLE-3 head is exported and read back.

With --out the table of the families that were run takes the place of what stands between the marks of that file.
"""

import argparse
import contextlib
import functools
import io
import logging
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch
import transformers
from hydra import compose, initialize_config_dir
from transformers import AutoModelForCausalLM

from heads import HEADS
from heads.common.files import atomic_write
from heads.common.resolvers import register_resolvers
from heads.formats.published import load_published
from heads.formats.published.export import TargetFacts, export
from inference.decode import RequestParams, speculate
from inference.drafters.head import MtpDrafter
from inference.drafters.plain import Baseline
from inference.target import compiled
from inference.target.target import Target
from inference.verification.sample import GREEDY
from tests import drafting, families, toys
from tests.families import Erring, generated, in_double, own_module
from tests.inference.test_decode import Oracle
from tests.train import jobs
from train import sweep
from train.resolve import resolve
from train.run import train

MARKS = "<!-- benchmarks/targets.py -->", "<!-- end -->"
TOKENS = 48
HEADS_TRAINED = ("eagle", "eagle3", "medusa", "mtp")
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "speculators": "speculators"}
COLUMNS = (
    "family",
    "chain",
    "tree",
    "batch",
    "compiled",
    "packed",
    "MTP module",
    "heads trained",
    "EAGLE-3 for",
)
REFUSED = "refused"


class Toy:
    """A family's toy: loaded from its folder, with prompts and what `generate` makes of them."""

    def __init__(self, name: str, folder: Path, count: int) -> None:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(families.config(name)).save_pretrained(folder)
        toys.tokenizer().save_pretrained(folder)
        self.name, self.folder = name, folder
        self.target = Target.load(str(folder), "float32", "cpu")
        self.prompts = [toys.prompt(seed, 5 + seed) for seed in range(count)]
        self.texts = [generated(self.target, prompt, TOKENS) for prompt in self.prompts]
        self.settings = RequestParams(TOKENS, GREEDY)

    def differing(self, make: Callable[[list[int]], Any]) -> str:
        """Return how many tokens of the prompts' texts differ from `generate`'s, drafted by what is made of a text."""
        made = [
            speculate(self.target, make(text), prompt, self.settings).tokens
            for prompt, text in zip(self.prompts, self.texts, strict=True)
        ]
        return counted(made, self.texts)

    def chain(self) -> str:
        """Draft chains that are wrong from somewhere on."""
        return self.differing(Erring)

    def tree(self) -> str:
        """Draft a chain with a wrong sibling."""
        return self.differing(lambda text: Oracle(text, 4))

    def batch(self) -> str:
        """Decode side by side."""
        plain = Baseline(self.target.device)
        made = speculate(self.target, plain, self.prompts, self.settings, batch_size=len(self.prompts))
        return counted([one.tokens for one in made], self.texts)

    def compiled(self) -> str:
        """Decode by compiled passes."""
        target = Target.load(str(self.folder), "float32", "cpu")
        with mock.patch.object(compiled, "BACKEND", "eager"):
            target.compile()
            found = speculate(target, Oracle(self.texts[0], 4), self.prompts[0], self.settings).tokens
        torch._dynamo.reset()
        return counted([found], self.texts[:1])

    def packed(self) -> str:
        """Return by how much packed features differ from each document's alone, all computed in fp64."""
        with in_double():
            target = families.target.__wrapped__(self.name, torch.float64)
            token = torch.tensor([toys.prompt(2, 24), toys.prompt(3, 24)])
            document = torch.tensor([[0] * 5 + [1] * 16 + [2] * 3, [0] * 24])
            packed, most = target.features(token, document, (0, 1)), 0.0
            for row, number in ((0, 0), (0, 1), (0, 2), (1, 0)):
                here = document[row] == number
                alone = token[row, here][None]
                out = target.run(alone, torch.arange(alone.shape[1])[None], None, None, (0, 1))
                for found, expected in ((packed.hidden, out.hidden), (packed.last_hidden, out.last_hidden)):
                    most = max(most, float((found[row, here] - expected[0]).abs().max()))
        return f"{'own rows, ' * (target.recurrence is not None)}{most:.0e}"

    def mtp(self) -> str:
        """Draft chains with a module made of the last layer."""
        own_module(self.target, self.folder / "mtp" / "model.safetensors")
        config = MtpDrafter.Config(str(self.folder / "mtp"), toys.TREES["chain"])
        return self.differing(lambda _: MtpDrafter(config, self.target, "mtp"))

    def trained(self, names: Sequence[str]) -> str:
        """Train heads for a few steps and check that they are lossless; return their names."""
        text, tokenizer = self.folder / "text.txt", toys.tokenizer()
        tokenizer.eos_token = "w39"  # some classes add one that the toy does not know
        tokenizer.save_pretrained(self.folder)
        words = random.Random(0)
        lines = [" ".join(f"w{words.randrange(toys.VOCAB)}" for _ in range(30)) for _ in range(60)]
        text.write_text("\n".join(lines) + "\n")
        for name in names:
            layers = ["head.feature_layers=[0,1,2]"] if name == "eagle3" else []
            overrides = [f"model.path={self.folder}", f"data.path={text}", *jobs.QUICK, "trainer.steps=2", *layers]
            job([*overrides, f"head={name}", f"out={self.folder / name}", "trainer.eval_prompts=0"])
        return ", ".join(names)

    def exports(self) -> str:
        """Write an EAGLE-3 head for each engine and read it back; return those whose logits are the same."""
        config = {"name": "eagle3", **toys.HEAD_CONFIGS["eagle3"], "length": None, "feature_layers": [0, 1]}
        torch.manual_seed(2)
        kind: Any = HEADS["eagle3"]
        head = kind(kind.Config(**config), self.target.embeddings)
        head.vocab.choose(torch.arange(toys.VOCAB))
        head.requires_grad_(False)
        good, why = [], ""
        for form, engine in ENGINES.items():
            folder = self.folder / form
            served = TargetFacts(f"me/{self.name}", self.target.model.config.to_dict(), torch.float32, 3)
            try:
                export(head, form, served, folder)
                again: Any = load_published(folder, self.target.embeddings)
            except ValueError as error:
                why = str(error)
                continue
            token = torch.tensor(toys.prompt(4, 10))
            rows = self.target.features(token[None, :-1], torch.zeros(1, 9).long(), (0, 1))
            levels = [drafting.extend(one, None, rows, token[1:])[1] for one in (head, again.float())]
            if torch.allclose(levels[0].logits, levels[1].logits, atol=1e-4):
                good.append(engine)
        return "all" if len(good) == len(ENGINES) else ", ".join(good) or f"{REFUSED}: {why}"


def job(overrides: list[str]) -> None:
    """Run a training job in this process; its check, if it fails, ends the process."""
    configured = initialize_config_dir(str(ROOT / "conf"), version_base="1.3")
    # A sweep's note, which no command asks for here, needs one.
    with contextlib.redirect_stdout(io.StringIO()), mock.patch.object(sweep, "note"), configured:
        train(resolve(compose("train", overrides)))


def counted(made: Sequence[list[int]], expected: Sequence[list[int]]) -> str:
    """Return how many tokens were compared, or how many of them differ."""
    pairs = [(a, b) for one, other in zip(made, expected, strict=True) for a, b in zip(one, other, strict=True)]
    differ = sum(a != b for a, b in pairs)
    return f"{differ} of {len(pairs)} DIFFER" if differ else "exact"


def cell(run: Callable[[], str]) -> str:
    """Return what a run found, or the reason of a refusal in one line; any other error ends the benchmark."""
    try:
        return run()
    except ValueError as error:
        return f"{REFUSED}: {error}"


def measured(name: str, heads: Sequence[str], count: int) -> list[str]:
    """Return the cells of a family."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            toy = Toy(name, Path(folder), count)
        except ValueError as error:
            return [name, f"{REFUSED}: {error}".replace(f"{folder} ", "its class ")]
        runs = (toy.chain, toy.tree, toy.batch, toy.compiled, toy.packed, toy.mtp)
        cells = [cell(run) for run in (*runs, lambda: toy.trained(heads), toy.exports)]
        architecture = f" ({toy.target.architecture})"
        names = {f"{folder}: ": "", architecture: "", f"a layer of {folder}": "its last layer"}
        return [name, *(functools.reduce(lambda said, one: said.replace(*one), names.items(), text) for text in cells)]


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return the table in Markdown; a refusal is short there, and its reason stands below."""
    notes: list[str] = []

    def short(found: str) -> str:
        if not found.startswith(REFUSED):
            return found
        if found not in notes:
            notes.append(found)
        return f"no ({1 + notes.index(found)})"

    rows = [[f"`{name}`", *map(short, cells), *[""] * (len(COLUMNS) - 1 - len(cells))] for name, *cells in lines]
    head = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    body = [f"| {' | '.join(row)} |" for row in rows]
    reasons = [f"{1 + i}. {note.removeprefix(REFUSED + ': ')}" for i, note in enumerate(notes)]
    return "\n".join([*head, *body, "", *reasons])


def replace(file: Path, marks: tuple[str, str], text: str) -> None:
    """Put a text in the place of what stands between two marks of a file."""
    before, begin, rest = file.read_text().partition(marks[0])
    _, end, after = rest.partition(marks[1])
    atomic_write(file, f"{before}{begin}\n{text}\n{end}{after}".encode())


def main() -> None:
    """Run the families; print each and write the table."""
    parser = argparse.ArgumentParser(description="Which families of targets are served, and how.")
    parser.add_argument("--families", nargs="*", default=list(families.FAMILIES))
    parser.add_argument("--heads", nargs="*", default=HEADS_TRAINED)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    register_resolvers()
    lines = []
    for name in asked.families:
        lines.append(measured(name, asked.heads, asked.prompts))
        print(" | ".join(lines[-1]), flush=True)
        if asked.out is not None:
            replace(asked.out, MARKS, table(lines))


if __name__ == "__main__":
    main()
