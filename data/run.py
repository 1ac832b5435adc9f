"""The data command: let the target answer the training prompts, show loss masks, or extract features.

`python data/run.py model.path=… data.path=… answers=answers.jsonl`, or the same with `inspect=5`, or with
`features=stored features.path=FOLDER head=…`; the other overrides are in conf/data.yaml. Under `accelerate launch` or
torchrun the processes share the work.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from itertools import groupby
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from accelerate import PartialState
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data.answers.chats import Answerer, AnswerSettings
from data.answers.client import Client, Endpoint, EndpointConfig, check_url
from data.answers.engine import Engine, check_drafter, drafter_of
from data.answers.files import Work, Worker, source_of, write_answers
from data.batches import fingerprint, pack
from data.config import DataConfig
from data.features.extraction import Layers, extract_features
from data.features.source import FeaturesConfig
from data.text.masks import Sample, counts_line
from data.text.prompts import load_training, records_to_answer
from data.text.sources import check_source
from heads import best_line, head_config, with_head
from heads.base import HeadConfig
from heads.common.command import command
from heads.common.files import check_writable
from heads.common.progress import print_above_bars
from heads.common.typed import Count, Json, Number, typed
from heads.common.untrusted import visible
from inference.target.config import ModelConfig, device_named
from inference.target.loading import load_tokenizer
from inference.target.placement import check_single_process
from inference.target.target import Target

PATIENCE = timedelta(days=30)  # maximum wait for the other processes' answers
JSON_LINES = (".jsonl", ".json")  # endings of files that data.path can read


@dataclass(frozen=True)
class JobConfig(AnswerSettings):
    """The configuration of a call; conf/data.yaml explains the keys. `head` is None if no features are extracted."""

    model: ModelConfig
    data: DataConfig
    features: FeaturesConfig
    head: HeadConfig | None
    layers: list[int] | None
    workload: str | None
    answers: str | None
    by: str
    run: str | None
    drafter: Json
    tree: Json
    endpoint: EndpointConfig
    inspect: Number
    limit: Count | None
    batch_size: Count

    def __post_init__(self) -> None:
        """Refuse a `by` that is neither "engine" nor a URL."""
        if self.by != "engine":
            check_url("by", self.by)

    def settings(self) -> AnswerSettings:
        """Return the sampling settings of the target's answers."""
        return AnswerSettings(**{field.name: getattr(self, field.name) for field in fields(AnswerSettings)})


def answer(job: JobConfig, out: Path) -> None:
    """Write the target's answers to the training prompts and print their number."""
    settings = job.settings()
    state = PartialState(cpu=job.model.device == "cpu", timeout=PATIENCE)
    work = Work(
        records_to_answer(job.data, job.limit),
        source_of(job.data),
        settings,
        job.batch_size if job.by == "engine" else job.endpoint.concurrency,
        {"model": job.model.path} | {key: getattr(job, key) for key in ("by", "run", "drafter", "batch_size")},
    )
    worker = Worker(state.process_index, state.num_processes, state.wait_for_everyone)
    answerer: Answerer
    if job.by == "engine":
        check_single_process(job.model.placed, "writing answers")
        target = Target.of(job.model)
        answerer = Engine(target, drafter_of(job.drafter, job.run, job.tree, target), settings, job.batch_size)
    else:
        client = Client(job.by, job.endpoint, os.environ.get(job.endpoint.api_key_env))
        answerer = Endpoint(client, load_tokenizer(job.model.path, job.model.trust_remote_code), settings)
    meta = write_answers(work, answerer, out, worker)
    if meta is not None:
        counts = meta["counts"]
        summary = f"{counts['answers']} answers in {counts['chats']} of {counts['prompts']} chats"
        again = "; run the same command again for those that failed" if counts["failed"] else ""
        print(f"{out}: {summary}; train on them with data.path={out}{again}")
    if torch.distributed.is_initialized():
        state.destroy_process_group()


def check(job: JobConfig) -> None:
    """Refuse contradictory options, bad data, outputs and drafters, before anything is loaded."""
    if job.answers is None and job.inspect < 1 and job.head is None:
        raise ValueError(
            "nothing to do: give answers=FILE.jsonl, or inspect=N to see N samples with their loss masks, or "
            "features=stored features.path=FOLDER to extract features"
        )
    if job.features.mode == "engine":
        raise ValueError("features=engine feeds a training: give features=stored")
    for name in job.data.paths:
        check_source(name, job.data.split)
    if job.data.prompts:
        check_source(job.data.prompts)
    if job.features.path is not None:
        check_writable(Path(job.features.path), "features.path")
    if job.answers is not None:
        if Path(job.answers).suffix not in JSON_LINES:
            raise ValueError(f"answers={job.answers}: is JSON Lines; give a name that ends in .jsonl or .json")
        check_writable(Path(job.answers).parent, "answers")
        if job.by == "engine":
            device_named(job.model.device)
            check_drafter(job.drafter, job.run, job.tree)


def show(samples: Sequence[Sample], count: int, length: int, tokenizer: PreTrainedTokenizerBase, out: Console) -> None:
    """Print the first `count` samples with their trained tokens highlighted, and the share of trained tokens."""
    for sample in samples[:count]:
        out.rule(Text(visible(f"{sample.id}: {coverage([sample])}")))
        brackets = not out.is_terminal
        text = Text()
        end, shown = 0, ""
        for on, run in groupby(sample.loss_mask):
            end += len(list(run))
            whole = str(tokenizer.decode(sample.token[:end]))  # tokens may share a character or space at their edge
            string, shown = visible(whole[len(shown) :]), whole
            text.append(f"⟦{string}⟧" if on and brackets else string, style="bold green" if on else "dim")
        out.print(text)
    filled = sum(len(sample.token) for sample in samples) / pack(samples, length).token.numel()
    out.rule(f"{len(samples)} samples: {coverage(samples)}")
    out.print(f"rows of {length} tokens are {filled:.1%} full; fingerprint {fingerprint(samples)}")


def coverage(samples: Sequence[Sample]) -> str:
    """Describe how many tokens are trained on."""
    trained, tokens = sum(sum(sample.loss_mask) for sample in samples), sum(len(sample.loss_mask) for sample in samples)
    return f"{trained} of {tokens} tokens trained on ({trained / tokens:.1%})"


@command("data")
def main(cfg: DictConfig) -> None:
    """Run the command on its configuration."""
    extracts = cfg.features.mode != "live"
    named, head = cfg, None
    if extracts:
        named = with_head(cfg)
        head = head_config(named.head)
    job = typed(JobConfig, named, built_fields={"head": head})
    check(job)
    if extracts and (best := best_line(cfg)):
        print_above_bars(best)
    run(job)


def run(job: JobConfig) -> None:
    """Show samples, write answers, or extract features, as configured."""
    if job.inspect > 0:
        tokenizer = load_tokenizer(job.model.path, job.model.trust_remote_code)
        most = max(job.inspect, job.limit or 0)
        limited = replace(job.data, limit=min(most, job.data.limit or most), cache=None)
        data, out = load_training(limited, tokenizer, 0), Console()
        show(data.samples, job.inspect, job.data.length, tokenizer, out)
        out.print(f"records by shape: {counts_line(data.counts.shapes)}; {data.counts.held_out} held out")
    if job.answers is not None:
        answer(job, Path(job.answers))
    if job.head is not None:
        extract_features(job.model, job.data, job.features, Layers(job.head, job.layers), job.workload, print)


if __name__ == "__main__":
    main()
