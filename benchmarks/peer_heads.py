"""Heads that other trainers save, read by ours: a head and a trainer a row, with the largest difference of logits.

    python3 -m venv .peers
    .peers/bin/pip install torch==2.13.0 transformers==5.18.0 accelerate datasets einops ninja nvidia-ml-py omegaconf \
        pillow psutil pulp pydantic regex requests rich scipy torchdata
    .peers/bin/pip install --no-deps specforge==0.2.0 nemo-automodel==0.7.0 angelslim==0.5.0 nvidia-modelopt==0.47.0
    python benchmarks/peer_heads.py --python .peers/bin/python [--peer modelopt ...]

Each head gets random weights and drafts from 64 rows of the bundled target in its trainer's own classes
(peer_builders.py), is saved by them, read by `heads/formats/published`, and drafts again in ours, in fp32. EAGLE-3 has
half of the vocabulary and three depths, EAGLE-3 with norms the whole; a block head has all depths of its block. The
command fails if a head cannot be built or read, or if logits differ by more than `--bound` outside KNOWN.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.peer_builders import LAYERS, PEERS, PRUNED
from heads.base import Features
from heads.formats.published import load_published
from inference.target.target import Target

ROWS = 64
# Differences that are the peer's own: what its training computes and no engine does.
TWICE = "its training norms the state twice, engines and we once"
KNOWN = {
    ("AngelSlim", "EAGLE-3, rope of base 50,000"): "its training has base 10,000 whatever its config.json says",
    ("modelopt", "EAGLE-3"): TWICE,
    ("modelopt", "EAGLE-3, its YaRN"): f"{TWICE}; and it has no YaRN",
}


def given(target: Target, token: Tensor) -> dict[str, Tensor]:
    """Return what the peers read of the target."""
    generator = torch.Generator().manual_seed(1)
    size = target.embeddings.vocab_size
    known = torch.zeros(size, dtype=torch.bool)
    known[torch.randperm(size, generator=generator)[:PRUNED]] = True
    default = [1, target.embeddings.num_layers // 2 - 1, target.embeddings.num_layers - 4]
    fused, joined = (features(target, token, layers).hidden.flatten(2) for layers in (default, LAYERS))
    return {
        "token": token, "fused": fused, "joined": joined, "t2d": known,
        "d2t": known.nonzero()[:, 0] - torch.arange(PRUNED),
        "embedding": target.embeddings.embed(torch.arange(size)).clone(),
        "lm_head": target.embeddings.lm_head_weight().float().clone(),
    }  # fmt: skip


def features(target: Target, token: Tensor, layers: Any) -> Features:
    """Return the target's features of one document."""
    return target.features(token, torch.zeros_like(token), tuple(layers))


@torch.no_grad()
def difference(target: Target, token: Tensor, folder: Path, theirs: Tensor) -> float:
    """Return the largest difference of logits over the rows whose last depth is within the text."""
    head: Any = load_published(folder, target.embeddings).float().eval()
    depths, rows = len(theirs), token.shape[1] - 2 * len(theirs)
    drafts = head.unroll(features(target, token, head.feature_layers), depths)
    ours = torch.stack([head.compute_logits(draft.state, depth)[0] for depth, draft in enumerate(drafts, 1)])
    return float((ours - theirs)[:, :rows].abs().max())


def main() -> None:
    """Build the peers' heads, read them, print the table."""
    parser = argparse.ArgumentParser(description="Heads that other trainers save, read by ours.")
    parser.add_argument("--python", type=Path, required=True, help="of the environment that has the peers")
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--bound", type=float, default=5e-5, help="for the largest difference of logits")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load(str(ROOT / "examples" / "tiny"), "float32", "cpu")
    token = torch.tensor([target.tokenizer(Path(__file__).read_text(encoding="utf-8"))["input_ids"][:ROWS]])
    print("| head | trainer | largest difference of logits | largest logit |\n| --- | --- | ---: | ---: |")
    failed = []
    with tempfile.TemporaryDirectory() as made:
        out = Path(made)
        save_file(given(target, token), out / "states.safetensors")
        for peer in arguments.peer:
            command = [arguments.python, "benchmarks/peer_builders.py", peer, ROOT / "examples" / "tiny", out]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            version = (done.stdout.split() or ["not installed"])[0]
            for head in PEERS[peer][1]:
                logits, largest, size = out / f"{peer} {head}.logits", float("inf"), ""
                if logits.is_file():
                    theirs = load_file(logits)["logits"]
                    try:
                        largest = difference(target, token, out / f"{peer} {head}", theirs)
                        found, size = f"{largest:.0e}", f"{float(theirs.abs().max()):.1f}"
                    except ValueError as error:
                        found = f"not read: {error}"
                else:
                    found = f"not built: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
                if (peer, head) in KNOWN:
                    found += f" ({KNOWN[peer, head]})"
                if largest > arguments.bound and (largest == float("inf") or (peer, head) not in KNOWN):
                    failed.append(f"{peer} {head}")
                print(f"| {head} | {peer} {version} | {found} | {size} |", flush=True)
    if failed:
        sys.exit(f"not built or read, or above {arguments.bound}: {', '.join(failed)}")


if __name__ == "__main__":
    main()
