"""The machine: versions, rates, and what attention costs on shapes that are new."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks.gpu.bench import Bench, Row, bandwidth, once, product_rate, seconds
from benchmarks.h100_estimate import BANDWIDTH, LAUNCH, PRODUCTS, READ
from eval.measures.machine import device_facts
from heads.modules import layers
from heads.modules.layers import grouped_attention
from inference.target.attention import route, varlen_options

FRESH = 8  # shapes
QUERIES, GROUPS, WIDTH = 32, 8, 128  # of an 8B's layer
PLAN = 45.0  # ms that cuDNN takes for the plan of a shape, 20 to 70


def driver() -> str:
    """Return the driver's version, - where there is none."""
    if shutil.which("nvidia-smi") is None:
        return "-"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def installed(name: str) -> str:
    """Return a package's version."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def versions(bench: Bench) -> list[Row]:
    """Return what the machine has, beside what was assumed of it."""
    facts, cuda = device_facts(bench.device, None), torch.backends.cuda
    query = torch.empty(1, QUERIES, 16, WIDTH, dtype=torch.bfloat16, device=bench.device)
    options = varlen_options(bench.device)
    assumed = {"python": "3.12", "torch": "2.11", "transformers": "5.17", "name": "H100"}
    rows: list[Row] = [(key, facts[key], assumed.get(key)) for key in facts]
    rows += [(name, installed(name), None) for name in ("triton", "accelerate", "peft", "nvidia-cudnn-cu13", "pytest")]
    rows += [("driver", driver(), None), ("cuDNN", str(torch.backends.cudnn.version()), "above 9.15")]
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    rows += [(f"{kind} attention allowed", str(getattr(cuda, f"{kind}_sdp_enabled")()), None) for kind in kinds]
    rows.append(("arguments of variable-length attention", ", ".join(sorted(options)) or "-", "scale, window_size"))
    rows.append(("kernel of packed sequences", route(query, query, options), "varlen"))
    return rows


def rates(bench: Bench) -> list[Row]:
    """Return rates of memory and products, and what launches and reads take, beside those that estimates assume."""
    device, one = bench.device, torch.ones(1, device=bench.device)
    rows: list[Row] = [
        ("memory to memory, GB/s", bandwidth(bench) / 1e9, BANDWIDTH / 1e9),
        ("large bf16 product, TFLOP/s", product_rate(bench) / 1e12, PRODUCTS / 1e12),
    ]
    inner, outer = (256, 512) if bench.toy else (4096, 14336)
    weights = [
        torch.randn(outer, inner, dtype=torch.bfloat16, device=device) for _ in range(8)
    ]  # more than caches hold
    for count in (1, 5, 61, 160):
        x = torch.randn(count, inner, dtype=torch.bfloat16, device=device)
        spent = seconds(lambda x=x: [linear(x, weight) for weight in weights], device)
        size = 8 * inner * outer
        bound = max(2 * size / BANDWIDTH, 2 * size * count / PRODUCTS)
        rows.append((f"8 products of {count} rows, us", 1e6 * spent, 1e6 * bound))
    rows.append(("a launch by the host, us", 1e6 * seconds(lambda: [one.add_(1) for _ in range(1000)], device) / 1000,
                 1e6 * LAUNCH))  # fmt: skip
    rows.append(("a read of an idle device, us", 1e6 * seconds(one.item, device, 100), 1e6 * READ))
    return rows


@contextmanager
def with_cudnn(allowed: bool) -> Iterator[None]:
    """Allow cuDNN's attention or not; an engine never does."""
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)


def states(bench: Bench, queries: int, keys: int, groups: int = QUERIES, batch: int = 1) -> list[Tensor]:
    """Return random queries, keys and values of a layer."""
    sizes = (QUERIES, queries), (groups, keys), (groups, keys)
    return [torch.randn(batch, *size, WIDTH, dtype=torch.bfloat16, device=bench.device) for size in sizes]


def fresh_shapes(bench: Bench) -> list[Row]:
    """Return what attention takes on lengths that it never met, and on one that it has, with and without cuDNN."""
    attend: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "1 query": scaled_dot_product_attention,
        "61 queries, a mask": lambda q, k, v: scaled_dot_product_attention(
            q, k, v, attn_mask=q.new_zeros(1, 1, q.shape[2], k.shape[2])
        ),
        "a prompt": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    rows: list[Row] = []
    begin = 64 if bench.toy else 1024
    for allowed in (False, True):
        for i, (name, call) in enumerate(attend.items()):
            spent = []
            for length in range(begin, begin + FRESH):
                keys = length + FRESH * (2 * i + allowed) + 1  # which no other case has
                queries = {"1 query": 1, "a prompt": keys}.get(name, 61)
                inputs = states(bench, queries, keys)
                with with_cudnn(allowed):
                    spent.append([once(lambda call=call, x=inputs: call(*x), bench.device) for _ in range(2)])
            new, again = (1e3 * sum(part) / FRESH for part in zip(*spent, strict=True))
            title = f"{name}, cuDNN {'allowed' if allowed else 'ruled out'}"
            rows += [(f"{title}: new length, ms", new, PLAN if allowed else 0.1), (f"{title}: again, ms", again, 0.1)]
    return rows


def tree_attention(bench: Bench) -> list[Row]:
    """Return what attention over a cache takes, by our kernel (heads/modules/tree_attention.py) and by torch's."""
    rows: list[Row] = []
    for batch, queries, length in [(1, 1, 1024), (1, 61, 1024), (1, 1, 8192), (1, 61, 8192), (32, 5, 1024)]:
        query, key, value = states(bench, queries, length // 16 if bench.toy else length, GROUPS, batch)
        mask = query.new_zeros(batch, 1, queries, key.shape[2])
        call = partial(grouped_attention, query, key, value, mask)
        read = 1e6 * 2 * key.nbytes / BANDWIDTH
        title = f"{batch} x {queries} queries, {length:,} keys"
        rows.append((f"{title}: kernel, us", 1e6 * graphed(call, bench.device), read))
        with patch.object(layers, "masked_kernel", None):
            rows.append((f"{title}: torch, us", 1e6 * graphed(call, bench.device), read))
    return rows


def graphed(call: Callable[[], Any], device: torch.device, times: int = 20) -> float:
    """Return the seconds of a call, launched in a CUDA graph of several where there is one."""
    if device.type != "cuda":
        return seconds(call, device)
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return seconds(graph.replay, device) / times
