"""What a decoding batch takes of memory beside what it says before: MB of keys and values, planned and measured.

    python benchmarks/batch_memory.py --batch 32 [--device cpu] [--entries 2048]

A random target and an EAGLE-3 head, of widths at which keys and values outweigh all else. Half of the requests are
short and make way for others, so that a copy or growth in mid-run would show. Each size wants a process of its own.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eval.measures.machine import peak_memory
from heads import HEADS, head_config
from inference.batch import batch_of
from inference.decode import RequestParams
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.target.target import Target
from inference.verification.sample import GREEDY

SHAPE: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 256, "max_position_embeddings": 8192, "eos_token_id": None,
}  # fmt: skip
MB = 10**6


def resident(device: torch.device) -> int:
    """Return the bytes that are taken at the moment."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def main() -> None:
    """Decode a while and print."""
    parser = argparse.ArgumentParser(description="What a decoding batch takes of memory, planned and measured.")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--entries", type=int, default=2048)
    asked = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(asked.device)
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE))
    target = Target(model.to(device), AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny"), "random")
    values = yaml.safe_load((ROOT / "conf" / "head" / "eagle3.yaml").read_text(encoding="utf-8"))
    del values["training"]
    config = head_config(values | {"length": 512, "draft_vocab": None, "feature_layers": [0, 1, 2]})
    head = HEADS["eagle3"](config, target.embeddings).to(device).eval()
    drafter = HeadDrafter(head, TreeConfig("dynamic", 4, 4, 16, [], []), "eagle3")
    prompts = [list(range(1, 9 + number % 24)) for number in range(2 * asked.batch)]
    most = asked.entries - 64
    requests = [
        (prompt, RequestParams(12 if i % 2 else most - len(prompt), GREEDY)) for i, prompt in enumerate(prompts)
    ]
    batch = batch_of(target, drafter, asked.batch, requests)
    before, waiting = resident(device), list(enumerate(requests))
    for _ in range(3 * asked.batch + 20):
        if waiting and batch.free:
            batch.admit(waiting[0][0], *waiting.pop(0)[1])
        else:
            batch.step()
        batch.release()
    planned, peak = batch.nbytes.total() / MB, (peak_memory(device) - before) / MB
    print(f"batch {asked.batch}, planned and measured MB: {planned:.1f} {peak:.1f}")


if __name__ == "__main__":
    main()
