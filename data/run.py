"""Let the target answer the training prompts, look at the loss mask, or extract features.

`python data/run.py model.path=… data.path=… answers=answers.jsonl`, or the same with `inspect=3`, or with
`features=stored features.path=FOLDER head=…`; the other overrides stand in conf/data.yaml.
"""

import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.answers import AnswerSettings, write_answers
from data.batches import fingerprint, pack
from data.config import DataConfig
from data.extraction import Layers, extract_features
from data.features import FeaturesConfig
from data.masks import Sample
from data.prompts import load_samples, training_prompts
from heads.errors import user_errors
from heads.resolvers import register_resolvers
from heads.typed import typed
from inference.target import Target

register_resolvers()


@dataclass(frozen=True)
class JobConfig:
    """One call, as conf/data.yaml composes it.

    Attributes:
        model: the target; its path, dtype, quantize, adapter, device and trust_remote_code are read here.
        data: a DataConfig.
        features: a FeaturesConfig; with features=stored the features are extracted.
        head, objective: whose feature layers are extracted; the objective is not read.
        layers: the feature layers, in place of the head's; null: the head's.
        vllm_prompts: the file to write the packed documents' tokens to, for vLLM; null: none.
        answers: the file that the target's answers are appended to; null: none.
        inspect: samples to show with their loss masks.
        limit: prompts to answer at most, or samples that the figures below the shown ones cover.
        batch_size: prompts answered at once; the rest is AnswerSettings'.
    """

    model: Any
    data: Any
    features: Any
    head: Any
    objective: Any
    layers: list[int] | None
    vllm_prompts: str | None
    answers: str | None
    inspect: int
    limit: int | None
    batch_size: int
    temperature: float
    top_p: float
    max_new_tokens: int
    keep_unfinished: bool
    seed: int


def answer(job: JobConfig, config: DataConfig, out: Path) -> None:
    """Write the target's answers to the training prompts and say how many there are."""
    settings = AnswerSettings(job.temperature, job.top_p, job.max_new_tokens, job.keep_unfinished, job.seed)
    model = job.model
    how = model["trust_remote_code"], model.get("quantize"), model.get("adapter")
    target = Target.load(model["path"], model["dtype"], model["device"], *how)
    prompts = training_prompts(config, target.tokenizer, job.limit)
    written = write_answers(target, prompts, settings, out, job.batch_size)
    print(f"{out}: {written.answers} answers added to {len(prompts)} prompts; train on them with data.path={out}")


def show(samples: list[Sample], count: int, length: int, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    """Print the first `count` samples, what is trained on standing out, and how much that is of each and of all."""
    for sample in samples[:count]:
        console.rule(f"{sample.id}: {_coverage([sample])}")
        console.print(_coloured(sample, tokenizer, marks=not console.is_terminal))
    filled = sum(len(sample.token) for sample in samples) / pack(samples, length).token.numel()
    console.rule(f"{len(samples)} samples: {_coverage(samples)}")
    console.print(f"rows of {length} tokens are {filled:.1%} full; fingerprint {fingerprint(samples)}")


def _coverage(samples: list[Sample]) -> str:
    trained, tokens = sum(sum(sample.mask) for sample in samples), sum(len(sample.mask) for sample in samples)
    return f"{trained} of {tokens} tokens trained on ({trained / tokens:.1%})"


def _coloured(sample: Sample, tokenizer: PreTrainedTokenizerBase, marks: bool) -> Text:
    """Return the sample's text; `marks` puts brackets around what is trained on, where colours cannot be seen."""
    text = Text()
    for on, pairs in groupby(zip(sample.mask, sample.token, strict=True), key=lambda pair: pair[0]):
        part = str(tokenizer.decode([token for _, token in pairs]))
        text.append(f"⟦{part}⟧" if on and marks else part, style="bold green" if on else "dim")
    return text


def _load_tokenizer(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"model.path={path}: no tokenizer loads from there ({reason})") from error
    return tokenizer


@hydra.main(version_base="1.3", config_path="../conf", config_name="data")
def main(cfg: DictConfig) -> None:
    """Do what `answers` and `inspect` ask for."""
    with user_errors():
        run(typed(JobConfig, cfg), typed(DataConfig, cfg.data), typed(FeaturesConfig, cfg.features))


def run(job: JobConfig, config: DataConfig, features: FeaturesConfig) -> None:
    """Show samples, write answers, extract features, or several of these."""
    extracting = features.mode != "live" or job.vllm_prompts is not None
    if job.answers is None and job.inspect < 1 and not extracting:
        raise ValueError(
            "nothing to do: give answers=FILE.jsonl, or inspect=N to see N samples with their loss masks, or "
            "features=stored features.path=FOLDER to extract features"
        )
    if job.inspect > 0:
        tokenizer = _load_tokenizer(job.model["path"], job.model["trust_remote_code"])
        samples = load_samples(config, tokenizer, max(job.inspect, job.limit or 0))
        show(samples, job.inspect, config.length, tokenizer, Console())
    if job.answers is not None:
        answer(job, config, Path(job.answers))
    if extracting:
        extract_features(job.model, config, features, Layers(job.head, job.layers), job.vllm_prompts, print)


if __name__ == "__main__":
    main()
