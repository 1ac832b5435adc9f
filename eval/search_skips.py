"""Find the sub-layers to skip when a target drafts for itself, on the user's own prompts, for drafter=layer_skip.

python eval/search_skips.py model.path=/my/model workload=my_prompts.jsonl out=skips.json
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout's root replaces the script's folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from dataclasses import dataclass

from omegaconf import DictConfig

from eval.inputs.workloads import load_workload
from heads.common.command import command
from heads.common.progress import progress
from heads.common.typed import Count, NewTokens, typed
from inference.decode import RequestParams, autoregress
from inference.drafters.contrib.layer_skip import FORMAT, SearchSettings, SkipFile, recorded, save_skips, search
from inference.target.config import ModelConfig
from inference.target.placement import check_single_process
from inference.target.target import Target
from inference.verification.sample import GREEDY


@dataclass(frozen=True)
class JobConfig:
    """The type of conf/search.yaml."""

    model: ModelConfig
    out: str | None
    workload: str | None
    prompts: Count
    max_new_tokens: NewTokens
    search: SearchSettings


def find(job: JobConfig) -> Path:
    """Search, print the result, and write and return its file; refuse if no skip is faster."""
    model = job.model
    workload = job.workload or model.prompts
    if not workload:
        raise ValueError("workload is missing: give a name, a file or a Hub data set")
    check_single_process(model.placed, "this search")
    target = Target.of(model)
    prompts = [prompt.token for prompt in load_workload(workload, target, job.prompts)]
    params = RequestParams(job.max_new_tokens, GREEDY)
    texts = [
        recorded(target, prompt, autoregress(target, prompt, params).tokens)
        for prompt in progress(prompts, "the baseline")
    ]
    skips, rating = search(target, texts, job.search)
    if not skips.attention and not skips.mlp:
        raise ValueError(f"{target.name}: no set of skipped sub-layers rates above the baseline; use another drafter")
    path = Path(job.out).expanduser() if job.out else Path("outputs") / f"{model.name}-skips.json"
    results = {"predicted_tau": rating.tau, "predicted_speedup": rating.speed, "draft_cost": rating.cost}
    save_skips(path, SkipFile(FORMAT, target.spec, list(skips.attention), list(skips.mlp), rating.depth, 0.0, results))
    layers = len(target.decoder_layers)
    print(f"{path}: without {len(skips.attention)} attention and {len(skips.mlp)} MLP sub-layers of {layers} each")
    print("\n".join(f"  {name}: {value:.4g}" for name, value in results.items()))
    print(f"measured by: python eval/run.py model.path={model.path} drafter=layer_skip drafter.layer_skip.skips={path}")
    return path


@command("search")
def main(cfg: DictConfig) -> None:
    """Run the command."""
    find(typed(JobConfig, cfg))


if __name__ == "__main__":
    main()
