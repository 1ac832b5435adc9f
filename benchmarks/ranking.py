"""What greedy decoding gains by comparing the nodes of different parents under sharpened draft probabilities.

python benchmarks/ranking.py RUN… [--sharpness 1 2 3] [--trees dynamic:5:3:12 best_first:16:0:64] [--prompts 41]
A tree is its kind, depth, top_k and nodes. For every run and tree τ by the verifier, in fp32 at temperature 0, of as
many of the bundled target's held-out prompts, 64 tokens each; 1 compares by the head's own probabilities.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from hydra import compose, initialize_config_dir

import inference.protocol
from data.text.prompts import load_training
from eval.measures import metrics
from heads.common.resolvers import register_resolvers
from heads.formats.store import load_head
from inference.decode import RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.target.target import Target
from inference.verification.sample import GREEDY
from train.config import run_config

TREES = ("dynamic:5:3:12", "dynamic:8:2:24", "dynamic:6:10:48", "best_first:16:0:64")
NEW_TOKENS = 64


def main() -> None:
    """Print a line a run and tree."""
    parser = argparse.ArgumentParser(description="What sharpened draft probabilities gain greedy decoding.")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--sharpness", type=float, nargs="+", default=[1.0, 2.0, 3.0])
    parser.add_argument("--trees", nargs="+", default=TREES)
    parser.add_argument("--prompts", type=int, default=41)
    asked = parser.parse_args()
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = run_config(compose("train", ["launcher=inline"]))
    target = Target.load(run.model.path, "float32", "cpu")
    prompts = [prompt.token for prompt in load_training(run.data, target.tokenizer, asked.prompts).held_out]
    for folder in asked.runs:
        head: Any = load_head(folder / "head", target.embeddings, target.spec)
        for words in asked.trees:
            kind, depth, top_k, nodes = words.split(":")
            tree = TreeConfig(kind, int(depth), int(top_k), int(nodes), [], [])
            drafter = HeadDrafter(head, tree, folder.name)
            taus = []
            for sharpness in asked.sharpness:
                inference.protocol.GREEDY_INVERSE_TEMPERATURE = sharpness
                runs = [speculate(target, drafter, prompt, RequestParams(NEW_TOKENS, GREEDY)) for prompt in prompts]
                taus.append(f"{sharpness:g}: {metrics.acceptance(runs).tau:.2f}")
            print(folder.name, words, *taus, flush=True)


if __name__ == "__main__":
    main()
