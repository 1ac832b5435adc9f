"""Let the target answer the training prompts, or look at the loss mask.

`python data/run.py model.path=… data.path=… answers=answers.jsonl`, or the same with `inspect=5`; the other overrides
stand in conf/data.yaml.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import hydra
from omegaconf import DictConfig
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.answers import AnswerSettings, write_answers
from data.config import DataConfig
from data.inspection import show, write_page
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
        answers: the file that the target's answers are appended to; null: none.
        inspect: samples to show with their loss masks.
        inspect_html: a page to write them to as well; null: none.
        limit: prompts to answer at most, or samples that the figures below the shown ones cover.
        batch_size: prompts answered at once; the rest is AnswerSettings'.
    """

    model: Any
    data: Any
    answers: str | None
    inspect: int
    inspect_html: str | None
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
        run(typed(JobConfig, cfg), typed(DataConfig, cfg.data))


def run(job: JobConfig, config: DataConfig) -> None:
    """Show samples, write answers, or both."""
    if job.inspect_html is not None and job.inspect < 1:
        raise ValueError(f"inspect_html={job.inspect_html}: shows the samples of inspect=N; give inspect=5 as well")
    if job.answers is None and job.inspect < 1:
        raise ValueError("nothing to do: give answers=FILE.jsonl, or inspect=N to see N samples with their loss masks")
    if job.inspect > 0:
        tokenizer = _load_tokenizer(job.model["path"], job.model["trust_remote_code"])
        samples = list(load_samples(config, tokenizer, max(job.inspect, job.limit or 0)))
        show(samples, job.inspect, config.length, tokenizer, Console())
        if job.inspect_html is not None:
            write_page(samples, job.inspect, tokenizer, Path(job.inspect_html))
            print(f"{job.inspect_html}: the same samples as a page")
    if job.answers is not None:
        answer(job, config, Path(job.answers))


if __name__ == "__main__":
    main()
