"""Find the sub-layers to skip when a target drafts for itself, on the user's own prompts, for drafter=layer_skip.

python eval/search_skips.py model.path=/my/model workload=my_prompts.jsonl out=skips.json
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: the checkout's root, or `import heads` would fail
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from dataclasses import dataclass

from omegaconf import DictConfig

from eval.inputs.workloads import load_workload
from heads.common.command import command
from heads.common.progress import progress
from heads.common.typed import typed
from inference.decode import Generation, RequestParams, autoregress, speculate
from inference.drafters.contrib.layer_skip import (
    FORMAT,
    LayerSkip,
    SearchSettings,
    SkipFile,
    record,
    save_skips,
    search,
)
from inference.target.config import ModelConfig
from inference.target.placement import check_alone
from inference.target.target import Target
from inference.verification.sample import GREEDY


@dataclass(frozen=True)
class JobConfig:
    """conf/search.yaml."""

    model: ModelConfig
    out: str | None
    workload: str | None
    prompts: int
    max_new_tokens: int
    search: SearchSettings


def find(job: JobConfig) -> Path:
    """Search, time the result on the same prompts, print it, write and return its file; refuse if no skip is faster."""
    model = job.model
    workload = job.workload or model.prompts
    if not workload:
        raise ValueError("workload is missing: give a name, a file or a Hub data set")
    check_alone(model.where, "this search")
    target = Target.of(model)
    prompts = [prompt.token for prompt in load_workload(workload, target, job.prompts)]
    settings = RequestParams(job.max_new_tokens, GREEDY)
    plain = [autoregress(target, prompt, settings) for prompt in progress(prompts, "the baseline")]
    texts = [record(target, prompt, run.tokens) for prompt, run in zip(prompts, plain, strict=True)]
    skips, rating = search(target.parts, texts, job.search)
    if not skips.attention and not skips.mlp:
        raise ValueError(f"{target.name}: no set of skipped sub-layers rates above the baseline; use another drafter")
    path = Path(job.out).expanduser() if job.out else Path("outputs") / f"{model.name}-skips.json"

    results = {"predicted_tau": rating.tau, "predicted_speedup": rating.speed, "draft_cost": rating.cost}

    def write() -> None:
        settings = (list(skips.attention), list(skips.mlp), rating.depth, job.search.stop)
        save_skips(path, SkipFile(FORMAT, target.spec, *settings, results))

    write()
    drafter = LayerSkip(LayerSkip.Config(str(path), None, None), target, "layer_skip")
    drafted = [speculate(target, drafter, prompt, settings) for prompt in progress(prompts, "decoding")]
    results |= measured(plain, drafted)
    write()
    layers = len(target.decoder_layers)
    print(f"{path}: without {len(skips.attention)} attention and {len(skips.mlp)} MLP sub-layers of {layers} each")
    print("\n".join(f"  {name}: {value:.4g}" for name, value in results.items()))
    return path


def measured(plain: list[Generation], drafted: list[Generation]) -> dict[str, float]:
    """Return tokens per pass and tokens per second of one decoding: an order of magnitude."""
    tokens, plain_tokens = (sum(len(run.tokens) - 1 for run in runs) for runs in (drafted, plain))
    return {
        "measured_tau": tokens / sum(len(run.steps) for run in drafted),
        "tokens_per_second": tokens / sum(run.decode_s for run in drafted),
        "plain_tokens_per_second": plain_tokens / sum(run.decode_s for run in plain),
    }


@command("search")
def main(cfg: DictConfig) -> None:
    """Run the command."""
    find(typed(JobConfig, cfg))


if __name__ == "__main__":
    main()
