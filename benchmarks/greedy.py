"""Greedy tokens of the recurrent toys against `generate`, in fp32: each drafter that drafts for such targets.

    python benchmarks/greedy.py [--families NAME …] [--prompts N] [--out benchmarks/history.md]

The toys are those of tests/families.py. transformers writes a prompt's text once, and every source drafts it; the
losslessness check of reports compares the two, and counts near ties by themselves. `erring` drafts the text itself,
wrong from a random place on, so that most passes take a part of a chain back: random heads are seldom right.

With --out the table takes the place of what stands between the marks of that file.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import transformers

from benchmarks.targets import replace
from eval.measures.losslessness import COUNTS, Gate, first_divergence, gate, in_words
from inference.decode import Generation, RequestParams, speculate
from inference.drafters.head import HeadDrafter, MtpDrafter
from inference.drafters.hybrid import Hybrid
from inference.protocol import Drafter
from inference.target.target import Target
from inference.verification.sample import GREEDY
from tests import assistants, families, toys
from tests.families import Erring, own_module
from tests.inference import model_free
from tests.inference.test_mirror import mirror

MARKS = "<!-- benchmarks/greedy.py -->", "<!-- end of greedy.py -->"
TOKENS, CHAIN = 128, assistants.CHAIN
RECURRENT = [name for name, family in families.FAMILIES.items() if family.recurrent]
Make = Callable[[Target, str], Drafter]


def mtp(target: Target, folder: str) -> Drafter:
    """Return the source that runs a module made of the toy's last layer."""
    own_module(target, Path(folder) / target.name / "model.safetensors")
    return MtpDrafter(MtpDrafter.Config(f"{folder}/{target.name}", CHAIN), target, "mtp")


def toy_drafter(name: str, target: Target) -> HeadDrafter:
    """Return a toy head as a drafter of chains."""
    head: Any = toys.head(name, target)
    return HeadDrafter(head, CHAIN, name)


def hybrid(target: Target, _: str) -> Drafter:
    """Return a head beside a suffix tree, which drafts often."""
    return Hybrid(
        Hybrid.Config(0.1, 0.1, {}), toy_drafter("eagle", target), model_free.make("suffix", target), "hybrid"
    )


SOURCES: dict[str, Make] = {
    **{f"head={name}": lambda target, _, name=name: toy_drafter(name, target) for name in toys.HEAD_CONFIGS},
    **{name: lambda target, _, name=name: model_free.make(name, target) for name in model_free.NAMES},
    "hybrid": hybrid,
    "mtp": mtp,
    "assistant": lambda target, folder: assistants.assistant(f"{folder}/assistant", target),
    "mirror": lambda target, folder: mirror(f"{folder}/assistant", target, 3, dtype="float32"),
}


class Checked(NamedTuple):
    """A family's texts drafted by one source, beside those of transformers."""

    family: str
    tokens: int
    steps: int
    accepted: int
    gate: Gate


def written(target: Target, prompt: list[int]) -> Generation:
    """Return the greedy text as transformers writes it, with its logit gaps."""
    generate: Any = target.model.generate
    token = torch.tensor([prompt])
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = generate(token, attention_mask=torch.ones_like(token), max_new_tokens=TOKENS, **options)
    best = torch.stack(out.logits)[:, 0].float().topk(2).values
    return Generation(out.sequences[0, len(prompt) :].tolist(), logit_gaps=(best[:, 0] - best[:, 1]).tolist())


def checked(target: Target, drafted: list[Generation], texts: list[Generation]) -> Checked:
    """Return the comparison of drafted texts; behind a difference nothing is compared."""
    verdict = gate(texts, drafted, [str(index) for index in range(len(texts))], target.dtype)
    parted = [first_divergence(text, one, "") for text, one in zip(texts, drafted, strict=True)]
    tokens = sum(TOKENS if where is None else where.position for where in parted)
    steps = [step for one in drafted for step in one.steps]
    return Checked(target.name, tokens, len(steps), sum(step.accepted for step in steps), verdict)


def measured(name: str, count: int, folder: str) -> dict[str, Checked | str]:
    """Return each source's comparison on a family, or the reason why it is refused."""
    target, settings = families.target(name), RequestParams(TOKENS, GREEDY, logit_gaps=True)
    prompts = [toys.prompt(seed, 5 + seed % 20) for seed in range(count)]
    texts = [written(target, prompt) for prompt in prompts]

    def compared(drafters: Iterable[Drafter]) -> Checked:
        pairs = zip(drafters, prompts, strict=True)
        return checked(target, [speculate(target, drafter, prompt, settings) for drafter, prompt in pairs], texts)

    results: dict[str, Checked | str] = {"erring": compared(Erring(text.tokens) for text in texts)}
    for source, make in SOURCES.items():
        try:
            results[source] = compared([make(target, folder)] * count)
        except ValueError as error:
            results[source] = str(error)
    return results


def line(source: str, checks: Sequence[Checked]) -> str:
    """Return the table's line of a source, over all families that it drafts for."""
    tokens, steps, accepted = (sum(getattr(one, key) for one in checks) for key in ("tokens", "steps", "accepted"))
    counts = {key: sum(one.gate.counts()[key] for one in checks) for key in COUNTS}
    names = len({one.family for one in checks})
    return f"| {source} | {names} | {tokens:,} | {1 + accepted / steps:.2f} | {in_words(counts)} |"


def table(results: dict[str, list[Checked]]) -> str:
    """Return a line for each source, and one for all."""
    lines = [line(f"`{source}`", checks) for source, checks in results.items()]
    head = ["| source | families | tokens | τ | texts identical |", "|" + " --- |" * 5]
    return "\n".join([*head, *lines, line("all", [one for checks in results.values() for one in checks])])


def main() -> None:
    """Run the families; print what failed or was refused, and the table after each."""
    parser = argparse.ArgumentParser(description="Greedy tokens of the recurrent toys against `generate`.")
    parser.add_argument("--families", nargs="*", default=RECURRENT)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results: dict[str, list[Checked]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        assistants.save(families.target("llama").model, toys.tokenizer(), Path(folder) / "assistant")
        for name in asked.families:
            for source, one in measured(name, asked.prompts, folder).items():
                if isinstance(one, str):
                    print(f"{name}, {source}: refused, {one}")
                    continue
                results[source].append(one)
                for where in (*filter(None, [one.gate.first]), *one.gate.ties):
                    print(f"{name}, {source}: {where}")
            print(f"{name}\n{table(results)}", flush=True)
            if asked.out is not None:
                replace(asked.out, MARKS, table(results))


if __name__ == "__main__":
    main()
