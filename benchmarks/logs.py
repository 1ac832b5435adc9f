"""CPU seconds that reading a log takes, for 100,000 of its records, and how many of them no code of ours could save.

python benchmarks/logs.py LOG [--model FOLDER] [--template FILE.jinja]
Records are read, filtered, rendered, tokenised, masked and written to a cache, as for a training. Below that stand the
tokenizer's own encoding of the same texts and the parsing of the JSON. The tokenizer runs on one thread.
"""

import argparse
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

os.environ["TOKENIZERS_PARALLELISM"] = "false"
ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from hydra import compose, initialize_config_dir

from data.config import DataConfig
from data.text.files import read_file
from data.text.prompts import load_training
from heads.common.resolvers import register_resolvers
from heads.common.typed import typed
from inference.target.loading import load_tokenizer

T = TypeVar("T")
PER = 100_000
SHOWN = 2000  # samples and lines from which the floor is measured


def timed(label: str, count: int, job: Callable[[], T]) -> T:
    """Print the CPU seconds of a job that reads `count` records, for PER of them, and the memory so far."""
    begin = time.process_time()
    result = job()
    seconds = (time.process_time() - begin) / count * PER
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{label}: {seconds:.0f} CPU seconds for {PER:,} records, {memory:.0f} MiB in use at most", flush=True)
    return result


def main() -> None:
    """Print a line for the log and one for each part of the floor."""
    parser = argparse.ArgumentParser(description="What reading a log takes.")
    parser.add_argument("log", type=Path)
    parser.add_argument("--model", default=str(ROOT / "examples" / "tiny"))
    parser.add_argument("--template", type=Path)
    asked = parser.parse_args()
    importlib.import_module("datasets")  # before the clock starts
    tokenizer = load_tokenizer(asked.model, False)
    if asked.template is not None:
        tokenizer.chat_template = asked.template.read_text(encoding="utf-8")
    register_resolvers()
    with TemporaryDirectory() as folder, initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        words = [f"data.path='{asked.log}'", "data.prompts=''", f"data.cache={folder}"]
        config = typed(DataConfig, compose("train", words).data)
        count = sum(1 for _ in read_file(asked.log))
        data = timed("all", count, lambda: load_training(config, tokenizer, 0))
        texts = [str(tokenizer.decode(data.samples[i].token)) for i in range(min(SHOWN, len(data.samples)))]
    encode = tokenizer.backend_tokenizer.encode
    timed("encoding alone", len(texts), lambda: [encode(text, add_special_tokens=False).ids for text in texts])
    lines = asked.log.read_text(encoding="utf-8").splitlines()[:SHOWN]
    timed("parsing alone", len(lines), lambda: [json.loads(line) for line in lines])


if __name__ == "__main__":
    main()
