"""What the measurements of this folder share: how they are asked, their clock, the device's own limits, their record.

Each script measures one thing, on an accelerator or, with --toy, at a size at which a CPU shows that it runs. What it
found goes to OUT/NAME.json; report.py draws benchmarks/gpu.md of the records.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from eval.measures.machine import device_facts, provenance, synchronize
from heads.common.resolvers import ROOT
from inference.target.config import DTYPES, default_device
from inference.target.target import Target

TINY = ROOT / "examples" / "tiny"
# Llama-3.1-8B's config.json, and what has its parts at a size for a CPU.
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
TOY = LLAMA_8B | {
    "vocab_size": 2048, "hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 256, "max_position_embeddings": 2048,
}  # fmt: skip
MOVED = 1 << 30  # bytes that the bandwidth is measured with on a device


@dataclass(frozen=True)
class Asked:
    """What every script is asked: on which device, at toy size or not, and where its record goes."""

    device: torch.device
    toy: bool
    out: Path

    @property
    def shape(self) -> dict[str, Any]:
        """The shape of the target with random weights."""
        return TOY if self.toy else LLAMA_8B


@dataclass(frozen=True)
class Table:
    """A table for reading."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A figure, as vega-lite specifies it; `name` is its file's without the ending."""

    name: str
    caption: str
    spec: Mapping[str, Any]


def arguments(about: str, **more: dict[str, Any]) -> tuple[Asked, argparse.Namespace]:
    """Read the command line.

    Args:
        about: what the script measures.
        more: further options by their names, with what argparse wants to know of them.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"), help="folder of the records")
    parser.add_argument("--toy", action="store_true", help="a size for a CPU, of which no figure means anything")
    parser.add_argument("--device", default=default_device())
    for name, said in more.items():
        parser.add_argument(f"--{name}", **said)
    read = parser.parse_args()
    if torch.device(read.device).type == "cpu" and not read.toy:
        parser.error("there is no accelerator; --toy runs everything on a CPU, at a size of which no figure means much")
    read.out.mkdir(parents=True, exist_ok=True)
    return Asked(torch.device(read.device), read.toy, read.out), read


def record(
    asked: Asked, name: str, numbers: Mapping[str, Any], tables: Sequence[Table], figures: Sequence[Figure] = ()
) -> None:
    """Write what was found to OUT/NAME.json, whole or not at all, and print the tables.

    What an earlier call of the same commit on the same device found stays, but for what this one found anew: a script
    may be run part by part.

    Args:
        asked: by `arguments`.
        name: the script's.
        numbers: everything that was measured, by its name.
        tables: what of it benchmarks/gpu.md shows.
        figures: likewise.
    """
    told = {
        "name": name,
        "toy": asked.toy,
        "device": device_facts(asked.device, None),
        "provenance": provenance() | {"command": shlex.join(["python", *map(portable, sys.argv)])},
        "numbers": dict(numbers),
        "tables": [asdict(each) for each in tables],
        "figures": [asdict(each) for each in figures],
    }
    file = asked.out / f"{name}.json"
    if file.is_file():
        told = merged(json.loads(file.read_text(encoding="utf-8")), told)
    draft = asked.out / f".{name}.json.new"
    draft.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, file)
    for table in tables:
        print(f"\n{table.caption}")
        for row in (table.header, *table.rows):
            print("  ".join(f"{cell:>14}" for cell in row), flush=True)


def portable(word: str) -> str:
    """Return a word of a command without this machine's folders."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name.upper()


def merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return a record with what an earlier one has beside it, if both are of one commit, device and size."""
    if not same(before, now):
        return now
    kept = {"numbers": before["numbers"] | now["numbers"]}
    for part, key in (("tables", "caption"), ("figures", "name")):
        found = {each[key]: each for each in before[part]} | {each[key]: each for each in now[part]}
        kept[part] = list(found.values())
    return now | kept


def same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two records are of one commit, which is known, of one device and size."""
    keys = ("revision", "dirty")
    alike = all(before["provenance"][key] == now["provenance"][key] for key in keys)
    alike = alike and now["provenance"]["revision"] is not None
    return alike and before["toy"] == now["toy"] and before["device"]["name"] == now["device"]["name"]


def earlier(asked: Asked, name: str) -> dict[str, Any]:
    """Return the numbers of the record that `record` would add to, none if it would begin a new one."""
    file = asked.out / f"{name}.json"
    if not file.is_file():
        return {}
    before = json.loads(file.read_text(encoding="utf-8"))
    now = {"toy": asked.toy, "device": device_facts(asked.device, None), "provenance": provenance()}
    return before["numbers"] if same(before, now) else {}


def seconds(call: Callable[[], Any], device: torch.device, repeats: int = 20, warm: int = 3) -> float:
    """Return the median seconds of a call, until the device has done its work."""
    spent = []
    for i in range(warm + repeats):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        if i >= warm:
            spent.append(time.perf_counter() - begin)
    return statistics.median(spent)


def bandwidth(asked: Asked) -> float:
    """Return the bytes a second that the device moves from its memory to its memory, read and written ones counted."""
    source = torch.ones((MOVED >> (6 if asked.toy else 0)) // 2, dtype=torch.bfloat16, device=asked.device)
    sink = torch.empty_like(source)
    return 2 * 2 * len(source) / seconds(lambda: sink.copy_(source), asked.device)


def product_rate(asked: Asked, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the operations a second of a large square matrix product on random values, two for each multiply-add."""
    size = 512 if asked.toy else 8192
    left, right = (torch.randn(size, size, device=asked.device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: left @ right, asked.device)


def random_target(asked: Asked, dtype: str = "bfloat16", **shape: Any) -> Target:
    """Return a target of random weights with the embedded target's tokenizer, which never ends its answers."""
    torch.manual_seed(0)
    config = LlamaConfig(**asked.shape | shape, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[dtype])  # 8B weights are drawn where and as they stay, never in fp32 on the host
    try:
        with asked.device:
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    finally:
        torch.set_default_dtype(before)
    target = Target(model.to(asked.device), AutoTokenizer.from_pretrained(str(TINY)), "random")
    target.eos = frozenset()
    return target


def weight_bytes(target: Target) -> int:
    """Return the bytes of weights that a pass over few tokens reads: all but the embedding's table, if it is apart."""
    model: Any = target.model
    parameters = {id(each): each for each in model.parameters()}
    apart = model.get_input_embeddings().weight is not model.get_output_embeddings().weight
    skipped = {id(model.get_input_embeddings().weight)} if apart else set()
    return sum(each.numel() * each.element_size() for key, each in parameters.items() if key not in skipped)
