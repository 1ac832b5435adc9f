"""The card of a target that target.py made: what it is, what it read, its losses, its prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from eval.report.render import grid

POINTS = 10  # of the loss curve, in a table


def size_rows(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the target is and what its training took."""
    shape = numbers["shape"]
    rows = [
        ("shape", f"Llama, {shape['layers']} layers of width {shape['width']}, {shape['heads']} query and "
                  f"{shape['kv_heads']} key-value heads, vocabulary {shape['vocab']:,}, context {shape['context']:,}"),
        ("parameters", f"{numbers['parameters'] / 1e6:.1f} M"),
        ("text", f"{numbers['stream'] / 1e6:.1f} M tokens"),
        ("seen", f"{numbers['tokens_seen'] / 1e6:.1f} M tokens, {numbers['tokens_seen'] / numbers['stream']:.1f} times "
                 f"the text, in {numbers['minutes']:g} minutes"),
    ]  # fmt: skip
    for layers, speed in numbers["speed"].items():
        rows.append(
            (
                f"training at {layers} layers",
                f"{speed['tokens_per_second']:,.0f} tokens/s, {speed['mfu']:.1%} of a large product's rate",
            )
        )
    rows.append(("peak memory", f"{numbers['peak_memory_bytes'] / 2**30:.2f} GiB"))
    return rows


def loss_rows(numbers: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for every kind of held-out text."""
    return [
        [
            kind, f"{each['chats']}", f"{each['tokens']:,}", f"{each['nats_per_token']:.3f}",
            f"{each['perplexity']:.2f}", f"{each['bits_per_byte']:.3f}",
        ]
        for kind, each in numbers["kinds"].items()
    ]  # fmt: skip


def curve_rows(curve: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return about POINTS rows of the loss curve, the last point among them."""
    step = max(1, len(curve) // POINTS)
    some = [*curve[step - 1 : -1 : step], *curve[-1:]]
    return [[f"{each['layers']}", f"{each['tokens'] / 1e6:.2f} M", f"{each['loss']:.3f}"] for each in some]


LOSS_HEADER = ("held-out", "chats", "tokens", "nats/token", "perplexity", "bits/byte")
CURVE_HEADER = ("layers", "tokens", "loss")


def passed_over(kind: str, each: Mapping[str, Any]) -> str:
    """Return what became of the candidates for a workload."""
    anyway = f"; {each['kept_anyway']} of these stayed, for want of others" if each["kept_anyway"] else ""
    return (
        f"- `{kind}.jsonl`: {each['prompts']} prompts; passed over, since the greedy answer repeats itself: "
        f"{each['loops']}, since it ends within a line or so: {each['short']}{anyway}"
    )


def card(numbers: Mapping[str, Any], name: str) -> str:
    """Return the target's README.md."""
    kinds = numbers["kinds"]
    read = [
        [r["source"], r["kind"], *(f"{r[k]:,}" for k in ("chats", "held_out", "characters"))] for r in numbers["read"]
    ]
    lines = [
        f"# {name}", "",
        "A small causal language model, trained for minutes so that draft heads have something to draft for. It knows",
        "the forms of its text and little of the meaning.", "",
        grid(("", ""), size_rows(numbers)), "",
        "Chats are `<|user|>` question `<|end|><|assistant|>` answer `<|end|>`; the template is in the tokenizer. Of",
        "code the question is a function's signature and docstring, of prose a passage's opening.", "",
        "## Text", "",
        grid(("source", "kind", "chats", "held out", "characters"), read), "",
        "## Loss", "",
        "On held-out chats, over what is answered:", "",
        grid(LOSS_HEADER, loss_rows(numbers)), "",
        "While it was trained, of single steps:", "",
        grid(CURVE_HEADER, curve_rows(numbers["curve"])), "",
        "## Prompts", "",
        "Never trained on. A target that loops makes any drafter look good, so prompts are chosen by its greedy",
        "answers.", "",
        *(passed_over(kind, each) for kind, each in kinds.items()), "",
        "## Samples, greedy", "",
    ]  # fmt: skip
    for kind, each in kinds.items():
        sample = each["sample"]
        lines += [f"{kind}, asked:", "", *quoted(sample["prompt"]), "", "answered:", "", *quoted(sample["answer"]), ""]
    return "\n".join(lines)


def quoted(text: str) -> list[str]:
    """Return a text's lines as a block of code, whatever stands in it."""
    return [f"    {line}" for line in text.splitlines()] or ["    "]
