"""What the pieces share: the device, the target of random weights, clocks, and the few calls that CUDA alone has."""

import gc
import gzip
import json
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from benchmarks.gpu.traces import OWN, STEP, digest
from heads import HEADS
from heads.common.resolvers import ROOT
from inference.request import clock
from inference.target.target import Target

Row = tuple[str, Any, Any]  # what, measured, estimate
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
PROFILED = 3  # steps


@dataclass
class Bench:
    """The device, whether sizes are a toy's, and folders: of what pieces make, of a target's text, of what is kept."""

    device: torch.device
    toy: bool
    work: Path
    text: Path | None = None
    out: Path = Path()
    compiled: Any = None  # the target's passes, once they are compiled
    pair: Any = None  # a real target with the drafter of its head (smollm2.py)

    @property
    def shape(self) -> dict[str, Any]:
        """The shape of the target with random weights."""
        return TOY if self.toy else LLAMA_8B

    @cached_property
    def target(self) -> Target:
        """A target of random weights with the bundled target's tokenizer, which never ends its answers."""
        torch.manual_seed(0)
        ends = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
        # Of larger weights rounding in bf16 grows with every layer.
        config = LlamaConfig(**self.shape, **ends, initializer_range=0.01)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # the weights are drawn where and as they stay, never in fp32
        try:
            with torch.inference_mode(False), self.device:  # it may be trained with, whoever asks first
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        finally:
            torch.set_default_dtype(before)
        target = Target(model.to(self.device), AutoTokenizer.from_pretrained(str(TINY)), "random")
        target.eos = frozenset()
        return target

    @cached_property
    def folder(self) -> Path:
        """The folder of the target's config.json, which is all that a training's plan reads."""
        folder = self.work / "shape"
        LlamaConfig(**self.shape, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(folder)
        return folder

    @cached_property
    def head(self) -> Any:
        """An EAGLE-3 head of random weights, otherwise as `conf/head` has it, in the target's dtype."""
        from benchmarks.training import composed

        torch.manual_seed(1)
        config = composed("head=eagle3", f"model.path={self.folder}", "data.length=2048").head
        with torch.inference_mode(False):
            head: Any = HEADS["eagle3"](config, self.target.embeddings).to(self.target.device, self.target.dtype)
        return head.eval().requires_grad_(False)

    def drop(self) -> None:
        """Leave the target's memory to others."""
        self.compiled = self.pair = None
        for name in ("head", "target"):
            vars(self).pop(name, None)
        self.free()

    def free(self) -> None:
        """Give back memory that nobody holds.

        Raises:
            RuntimeError: the device is lost, and with it this process.
        """
        gc.collect()  # target and compiled passes know each other
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


def seconds(call: Callable[[], Any], device: torch.device, repeats: int = 20, warm: int = 3) -> float:
    """Return the median seconds of a call, until the device has done its work."""
    return statistics.median([once(call, device) for _ in range(warm + repeats)][warm:])


def once(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call, until the device has done its work."""
    begin = clock(device)
    call()
    return clock(device) - begin


def bandwidth(bench: Bench) -> float:
    """Return the bytes a second that the device moves from its memory to its memory, read and written ones counted."""
    source = torch.ones((MOVED >> (6 if bench.toy else 0)) // 2, dtype=torch.bfloat16, device=bench.device)
    sink = torch.empty_like(source)
    return 2 * 2 * len(source) / seconds(lambda: sink.copy_(source), bench.device)


def product_rate(bench: Bench) -> float:
    """Return the operations per second of a large square bf16 product on random values, two for each multiply-add."""
    size = 512 if bench.toy else 8192
    left, right = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: left @ right, bench.device)


def waits(call: Callable[[], Any], device: torch.device) -> int | None:
    """Return how often a call makes the host wait for the device; None where nothing says so."""
    if device.type != "cuda":
        call()
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def profiled(call: Callable[[], Any], device: torch.device, file: Path) -> dict[str, Any]:
    """Profile a step that was taken before; write the trace, and return what it says (traces.py)."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities):  # what the profiler itself does once is no part of a step
        call()
    with profile(activities=activities) as trace:
        for _ in range(PROFILED):
            with record_function(STEP):
                call()
                with record_function(OWN):  # the measurement waits here, not the step
                    clock(device)
    trace.export_chrome_trace(str(file))
    with gzip.open(file, "rt", encoding="utf-8") as events:
        return digest(json.load(events)["traceEvents"])
