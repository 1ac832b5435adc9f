"""What saving costs a run: blocks of steps with a save and without one, taken in turns.

    python benchmarks/checkpoints.py [--blocks 10] [--steps 8] [OVERRIDES…]

A block with a save begins with it, so that its steps share the machine with the thread that writes. The difference of
the two kinds of block is what one save costs, and its share of a run follows from `trainer.save_every`.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from accelerate.utils import set_seed
from hydra import compose, initialize_config_dir

from data.batches import pack, token_counts
from data.text.prompts import load_training
from heads.common.resolvers import register_resolvers
from heads.modules.vocab import choose_draft_vocab
from inference.target.embeddings_only import load_target
from train import checkpoint
from train.build import batches_for, loop_of, source_for, values_of
from train.config import RunConfig, run_config
from train.distributed.processes import accelerator_for
from train.loop import Loop
from train.start import init_head

register_resolvers()


def prepared(run: RunConfig) -> Loop:
    """Return a run's loop, ready for its first step."""
    accelerator = accelerator_for(run.launcher, run.trainer, run.model)
    set_seed(run.trainer.seed)
    target = load_target(run.model, str(accelerator.device), with_layers=True)
    head: Any = init_head(run.head, run.init, target).to(accelerator.device)
    run = replace(run, head=head.config)
    samples, _, _ = load_training(run.data, target.tokenizer, run.trainer.eval_prompts, run.workload)
    choose_draft_vocab(head, token_counts(samples, target.embeddings.vocab_size))
    batches = batches_for(run.trainer, pack(samples, run.data.length), accelerator)
    source = source_for(run.features, target, head, batches)
    return loop_of(run, accelerator, target, head, source, [], values_of(run), {})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10, help="of each kind")
    parser.add_argument("--steps", type=int, default=8, help="of a block")
    parser.add_argument("overrides", nargs="*")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as out, initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = run_config(compose("train", ["launcher=inline", *words.overrides, f"out={out}"]))
        loop = prepared(run)
        step, seconds = 1, {True: [], False: []}
        loop.train_step(0)
        for block in range(2 * words.blocks):
            begin, saves = time.perf_counter(), block % 4 in (1, 2)  # what comes first takes turns too
            if saves:
                loop.save(step)
            for _ in range(words.steps):
                loop.train_step(step)
                step += 1
            if saves:
                loop.saver.finish()
            seconds[saves].append(time.perf_counter() - begin)
        loop.saver.close()
        loop.tracker.close()
        newest = checkpoint.checkpoints(loop.saver.folder)[-1]
        size = sum(path.stat().st_size for path in newest.iterdir())
    with_save, without = (statistics.median(seconds[saves]) for saves in (True, False))
    of_step, waited = without / words.steps, loop.saver.seconds / words.blocks
    every = run.trainer.save_every
    print(f"a checkpoint of {size / 1e6:.1f} MB, {words.blocks} blocks of {words.steps} steps of each kind, medians")
    print(f"a step {of_step:.3f} s; with a save, {words.steps} steps take {with_save - without:+.3f} s")
    print(f"training waits {waited:.3f} s for each save, the end of the write included where a block is shorter")
    print(f"share of a run with trainer.save_every={every}: {(with_save - without) / (every * of_step):.2%}")
    print(f"waiting alone: {waited / (every * of_step):.2%}")


if __name__ == "__main__":
    main()
