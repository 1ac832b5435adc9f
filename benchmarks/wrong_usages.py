"""Wrong usages of every command: each must end soon, with one line that names the remedy, and leave nothing behind.

    python benchmarks/wrong_usages.py [NUMBER…]

Prints what each ends with. About 5 minutes.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
USAGES = (
    "train/run.py head=eagel", "train/run.py trainer.steps=0", "train/run.py trainer.steps=1.5",
    "train/run.py trainer.lr=fast", "train/run.py data.path=empty", "train/run.py data.path=nothere.jsonl",
    "train/run.py out=/proc/x", "train/run.py model.path=empty",
    "train/run.py head=eagle3 head.feature_layers=[0,99,3]",
    "train/run.py init=nothere", "train/run.py resume=maybe",
    "train/run.py trainer.micro_tokens=100 data.length=512", "train/run.py head=block head.depths=-1",
    "train/run.py name=../../evil", "train/run.py trainer.precision=fp4",
    "train/run.py launcher=fsdp2 launcher.num_processes=0", "train/run.py features=stored features.path=nothere",
    "train/run.py data.path=bad.jsonl out=a", "train/run.py data.path=lists.jsonl out=b",
    "train/run.py objective.losses={tv:-1} out=c", "train/run.py -m head=eagle,nope",
    "train/run.py trainer.trackers=[comet]", "train/run.py model.dtype=float33", "train/streams.py every=0",
    "eval/run.py run=nothere", "eval/run.py", "eval/run.py drafter=prompt_lookup temperature=[-1]",
    "eval/run.py drafter=[prompt_lookup,nope]", "ops/endpoint.py url=ftp://x workload=tiny",
    "eval/run.py model=tiny tier=teacher_forced drafter=prompt_lookup", "eval/run.py drafter=prompt_lookup dtype=int3",
    "eval/run.py drafter=prompt_lookup workload=empty", "eval/run.py drafter=prompt_lookup batch_size=[0]",
    "eval/run.py drafter=prompt_lookup compare=[nothere]", "eval/run.py drafter=prompt_lookup tune=true",
    "inference/run.py run=nothere prompt=hi", "inference/run.py prompt=hi max_new_tokens=-3",
    "inference/run.py prompt=hi rule=wishful", "data/run.py", "data/run.py answers=out.jsonl batch_size=0",
    "data/run.py features=strored", "data/run.py answers=a.jsonl by=notaurl", "train/publish.py run=nothere repo=x/y",
    "train/publish.py repo=x/y", "train/publish.py run=empty repo=bad", "train/convert.py pickle=nothere out=d",
)  # fmt: skip
LONGEST = "90"  # seconds


def main() -> None:
    """Try and print."""
    wanted = {int(word) for word in sys.argv[1:]} or set(range(len(USAGES)))
    right = 0
    for number in sorted(wanted):
        script, *words = USAGES[number].split()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "empty").mkdir()
            Path(folder, "bad.jsonl").write_text('{"messages": 3}\n', encoding="utf-8")
            Path(folder, "lists.jsonl").write_text("[1, 2]\n", encoding="utf-8")
            begin, before = time.perf_counter(), set(Path(folder).rglob("*"))
            done = subprocess.run(
                ["timeout", LONGEST, sys.executable, str(ROOT / script), *words], cwd=folder, stdin=subprocess.DEVNULL,
                env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            lines = [line for line in done.stderr.splitlines() if line.strip() and "it/s]" not in line]  # no progress
            left = sorted(str(path.relative_to(folder)) for path in set(Path(folder).rglob("*")) - before)
        fine = done.returncode in (1, 2) and len(lines) == 1 and lines[0].startswith("error: ") and not left
        right += fine
        verdict = "" if fine else "NOT AS PROMISED, "
        print(f"{number} {USAGES[number]}: {verdict}status {done.returncode} after {time.perf_counter() - begin:.0f} s")
        print(*(f"    {line}" for line in [*(lines[-3:] or [done.stdout[-200:]]), *left]), sep="\n", flush=True)
    print(f"{right} of {len(wanted)} end in one line and leave nothing")


if __name__ == "__main__":
    main()
