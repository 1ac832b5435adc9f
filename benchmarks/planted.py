"""Bugs that a good engineer could commit, planted one at a time: which does a test see?

    python benchmarks/planted.py [NUMBER…]

Each is planted in a copy of the checkout, and the test files that could see it run until one fails. Prints the test
that caught it, or that it survived. About half an hour.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("heads", "inference", "data", "eval", "train", "ops", "tests", "conf", "examples", "pyproject.toml")


class Bug(NamedTuple):
    """A file, what stands in it once, what stands there in its place, and the tests that could see it."""

    file: str
    right: str
    wrong: str
    tests: list[str]


BUGS = [
    Bug(
        "heads/rows.py",
        "+ reach < document.shape[1]",
        "+ reach <= document.shape[1]",
        ["tests/heads/test_rows.py", "tests/train/test_objective.py"],
    ),
    Bug(
        "heads/modules/kv_cache.py",
        "query[..., None] - position < self.window",
        "query[..., None] - position <= self.window",
        ["tests/heads/test_batched.py", "tests/heads/test_heads.py"],
    ),
    Bug(
        "heads/modules/kv_cache.py",
        "newest = slice(-self.ring_size, None)",
        "newest = slice(-self.window, None)",
        ["tests/heads/test_batched.py"],
    ),
    Bug(
        "heads/modules/kv_cache.py",
        "self.length[slot] = self.length[from_slot]",
        "pass",
        ["tests/heads/test_batched.py", "tests/inference/test_batch.py"],
    ),
    Bug(
        "heads/modules/autoregressive.py",
        "position = (last + nodes.depth)[:, None]",
        "position = (last + nodes.depth - 1)[:, None]",
        ["tests/heads/test_heads.py"],
    ),
    Bug(
        "heads/modules/autoregressive.py",
        "for layer in range(len(level.root) // 2):",
        "for layer in range(0):",
        ["tests/heads/test_batched.py"],
    ),
    Bug(
        "inference/drafters/head.py",
        "> 0, new, old))",
        ">= 0, new, old))",
        ["tests/inference/test_batch.py"],
    ),
    Bug(
        "heads/common/rope.py",
        "self.factor * torch.stack",
        "torch.stack",
        ["tests/heads/test_heads.py", "tests/heads/test_export.py"],
    ),
    Bug(
        "inference/verification/sample.py",
        "return torch.where(total > 0, left / total, otherwise)",
        "return torch.where(total > 0, left, otherwise)",
        ["tests/inference/test_enumeration.py", "tests/inference/test_verify.py"],
    ),
    Bug(
        "inference/verification/rules.py",
        "mass / (mass + (1 - self.alpha))",
        "mass / (mass + (1 - self.alpha) * mass)",
        ["tests/inference/test_enumeration.py", "tests/inference/test_verify.py"],
    ),
    Bug(
        "inference/verification/sample.py",
        "inside = best.cumsum(-1) - best < sampling.top_p",
        "inside = best.cumsum(-1) <= sampling.top_p",
        ["tests/inference/test_sample.py"],
    ),
    Bug(
        "inference/verification/rules.py",
        "order = [parents[:node].count(parents[node]) for node in path]",
        "order = [parents[: node + 1].count(parents[node]) for node in path]",
        ["tests/inference/test_device.py", "tests/inference/test_decode.py", "tests/eval/test_extras.py"],
    ),
    Bug(
        "data/batches.py",
        "count = -(-self.sequences_per_step // self.world)  # sequences of",
        "count = self.sequences_per_step // self.world  # rows",
        ["tests/data/test_batches.py"],
    ),
    Bug(
        "data/batches.py",
        "np.add.at(counts, token[mask > 0], 1)",
        "np.add.at(counts, token, 1)",
        ["tests/data/test_batches.py", "tests/heads/test_vocab.py"],
    ),
    Bug(
        "data/text/filters.py",
        "zip(*(words[start:] for",
        "zip(*(words[start:-1] for",
        ["tests/data/test_filters.py"],
    ),
    Bug(
        "data/text/filters.py",
        'if message["role"] != "system"]',
        'if message["role"] == "user"]',
        ["tests/data/test_filters.py"],
    ),
    Bug(
        "eval/live.py",
        "end_to_end=(len(run.tokens), run.prefill_s",
        "end_to_end=(metrics.decoded(run), run.prefill_s",
        ["tests/eval/test_metrics.py", "tests/eval/test_live.py"],
    ),
    Bug(
        "eval/measures/metrics.py",
        "group_ids = range(len(prompts)) if groups is None else groups",
        "group_ids = range(len(prompts))",
        ["tests/eval/test_metrics.py", "tests/eval/test_live.py", "tests/eval/test_workloads.py"],
    ),
    Bug(
        "train/optim.py",
        "return config.lr * (step + 1) / warmup",
        "return config.lr * step / warmup",
        ["tests/train/test_optim.py"],
    ),
    Bug(
        "train/optim.py",
        'if p.ndim < 2], "weight_decay": 0.0}',
        'if p.ndim < 2], "weight_decay": config.weight_decay}',
        ["tests/train/test_optim.py"],
    ),
    Bug(
        "train/objective.py",
        "= noise * 512 / length",
        "= noise * length / 512",
        ["tests/train/test_sampling.py"],
    ),
    Bug(
        "train/losses.py",
        "return weight * kl(x, config) + (1 - weight) * tv(x, config)",
        "return weight * tv(x, config) + (1 - weight) * kl(x, config)",
        ["tests/train/test_losses.py"],
    ),
    Bug(
        "eval/tune.py",
        "one.held_out_tau, step, batch",
        "one.chosen, step, batch",
        ["tests/eval/test_tune.py"],
    ),
    Bug(
        "eval/live.py",
        "served[index].generation.latency_s = time.perf_counter() - begin - when[index]",
        "served[index].generation.latency_s = time.perf_counter() - begin - when[index] - served[index].queue_s",
        ["tests/eval/test_load.py"],
    ),
    Bug(
        "data/text/masks.py",
        "mask[last + 1 : end] = [0] * (end - last - 1)",
        "mask[last:end] = [0] * (end - last)",
        ["tests/data/test_masks.py"],
    ),
    Bug(
        "data/text/masks.py",
        "max_tokens - within[::-1].index(1)",
        "max_tokens - within[::-1].index(1) - 1",
        ["tests/data/test_masks.py", "tests/data/test_masks_options.py", "tests/data/test_prompts.py"],
    ),
    Bug(
        "heads/formats/published/eagle3.py",
        "plan.STATES: plan.as_states(outputs),",
        "plan.STATES: list(outputs),",
        ["tests/heads/test_export.py"],
    ),
    Bug(
        "inference/drafters/prompt_lookup.py",
        "self.after.get(tuple(self.text[-n:]))",
        "self.after.get(tuple(self.text[:n]))",
        ["tests/inference/test_prompt_lookup.py"],
    ),
    Bug(
        "eval/measures/losslessness.py",
        "chi2.sf(value, freedom)",
        "chi2.sf(value, freedom + 1)",
        ["tests/eval/test_sampled.py"],
    ),
    Bug(
        "inference/drafters/recycling.py",
        "self.candidates.update(zip(commit.verified.tree.token.tolist(), top, strict=True))",
        "self.candidates.update(zip(commit.token.tolist(), top, strict=False))",
        ["tests/inference/test_recycling.py"],
    ),
    Bug(
        "heads/block.py",
        "drafted_token(features.token, depth, features.path).gather",
        "drafted_token(features.token, depth).gather",
        ["tests/heads/test_heads.py"],
    ),
    Bug(
        "heads/formats/published/dflash.py",
        "torch.cat([confidence, confidence.new_zeros(1, markov.shape[1])], 1)",
        "torch.cat([confidence.new_zeros(1, markov.shape[1]), confidence], 1)",
        ["tests/heads/test_published.py"],
    ),
    Bug(
        "inference/step.py",
        "groups[params.sampling, params.rule, params.logit_gaps, side",
        "groups[params.sampling, params.logit_gaps, side",
        ["tests/train/test_identity.py"],
    ),
    Bug(
        "inference/drafters/policy.py",
        "(growth.scores().float() * inverse_temperature_of(roots.sampling)).log_softmax(-1)",
        "growth.scores().float().log_softmax(-1)",
        ["tests/inference/test_policy.py"],
    ),
    Bug(
        "data/features/extraction.py",
        "spec, left = store.spec, len(store.missing())",
        "spec, left = store.spec, spec.rows",
        ["tests/data/test_extraction.py"],
    ),
    Bug(
        "train/step.py",
        "row=weight.row * factor, normalizer=weight.normalizer * factor",
        "row=weight.row * factor, normalizer=weight.normalizer",
        ["tests/train/test_rollouts.py"],
    ),
    Bug(
        "train/step.py",
        "/ normalizer[:, None, None]",
        "/ normalizer[:1, None, None]",
        ["tests/train/test_rollouts.py"],
    ),
    Bug(
        "train/optim.py",
        "config.lr, config.betas, fused",
        "config.lr, config.betas[::-1], fused",
        ["tests/train/test_optim.py"],
    ),
    Bug(
        "train/loop.py",
        'better = tau > self.progress["best_tau"]',
        'better = tau >= self.progress["best_tau"]',
        ["tests/train/test_decisions.py"],
    ),
    Bug(
        "heads/formats/lora.py",
        "alpha / rank, factors",
        "1.0, factors",
        ["tests/train/test_publish_adapter.py"],
    ),
    Bug(
        "eval/measures/metrics.py",
        "[(1 - LEVEL) / 2, (1 + LEVEL) / 2]",
        "[(1 - LEVEL), LEVEL]",
        ["tests/eval/test_metrics.py"],
    ),
]


def caught(bug: Bug, copy: Path) -> str | None:
    """Return the first test that fails with a bug, None if none does."""
    file = copy / bug.file
    source = file.read_text(encoding="utf-8")
    if source.count(bug.right) != 1:
        raise ValueError(f"{bug.file}: does not hold {bug.right!r} once; correct BUGS")
    file.write_text(source.replace(bug.right, bug.wrong), encoding="utf-8")
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        for tests in bug.tests:
            done = subprocess.run(
                [*words, tests], cwd=copy, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                lines = done.stdout.splitlines()
                return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])
        return None
    finally:
        file.write_text(source, encoding="utf-8")


def main() -> None:
    """Plant and print."""
    wanted = {int(word) for word in sys.argv[1:]} or set(range(len(BUGS)))
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            kind = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            kind(ROOT / part, Path(folder, part))
        for number, bug in enumerate(BUGS):
            if number in wanted:
                test = caught(bug, Path(folder))
                survived += test is None
                print(number, bug.file, test or f"SURVIVED: {bug.right}  ->  {bug.wrong}", flush=True)
    print(f"{len(wanted) - survived} of {len(wanted)} caught")


if __name__ == "__main__":
    main()
