"""A head with its draft vocabulary, beside the same weights drafting all tokens, and beside no head.

    python benchmarks/draft_vocab.py MODEL HEAD PROMPTS [NEW_TOKENS]

HEAD shares the target's lm_head; it drafts chains. The three answer each prompt greedily, one after the other.
"""

import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from eval.inputs.workloads import load_workload
from eval.measures.metrics import acceptance, decoding, paired_interval, speed
from heads.modules.vocab import DraftLmHead
from inference.api import load
from inference.decode import Generation, RequestParams, speculate
from inference.drafters.plain import Baseline
from inference.verification.sample import GREEDY


def main(model: str, folder: str, prompts: str, new_tokens: int) -> None:
    """Measure and print."""
    target, pruned = load(folder, f"model.path={model}", "tree=chain")
    whole: Any = load(folder, "tree=chain", target=target)[1]
    whole.head.vocab = None
    whole.head.lm_head = DraftLmHead(target.embeddings, "shared", None)
    drafters = {"none": Baseline(target.device), "draft vocabulary": pruned, "all tokens": whole}
    runs: dict[str, list[Generation]] = {name: [] for name in drafters}
    for prompt in load_workload(prompts, target, limit=1000):
        for name, drafter in drafters.items():
            runs[name].append(speculate(target, drafter, prompt.token, RequestParams(new_tokens, GREEDY)))
    for name, several in runs.items():
        steps = [step for run in several for step in run.steps]
        low, high = paired_interval(decoding(several), decoding(runs["none"]), seed=0) or (0.0, 0.0)
        print(
            f"{name:17} τ {acceptance(several).tau:.2f}, {speed(decoding(several)):.2f} tokens/s, "
            f"{low:.2f} to {high:.2f} times none's, "
            f"draft {1e3 * sum(step.draft_s for step in steps) / len(steps):.1f} ms a step, "
            f"texts equal: {[run.tokens for run in several] == [run.tokens for run in runs['none']]}"
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]) if len(sys.argv) > 4 else 64)
