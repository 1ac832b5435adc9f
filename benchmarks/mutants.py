"""Mutation testing (mutmut) of the code that every result rests on: which small change of it does no test see?

    python benchmarks/mutants.py [--every N] [--again] [GROUP…]

Every N-th mutant by the hash of its name is run, N = 1 runs all. Results are kept in mutants/GROUP, so that a run that
was stopped goes on; `--again` also runs again what survived or had no test. Prints the survivors and a row a group.
mutmut's settings are in pyproject.toml. Mutants of strings are left out; mutmut itself leaves out decorated functions
and tables of a module.
"""

import argparse
import hashlib
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("heads", "inference", "data", "eval", "train", "ops", "tests", "conf", "examples", "pyproject.toml")
MEMORY = 12 * 2**30  # bytes of address space: a mutant that asks for more is killed
VERIFICATION = ("verify", "tree", "sample", "device")
FORMATS = ("published", "export", "gguf")
UNSEEN = re.compile(
    r",? *\b(?:device|strict)=[\w.()]+|, *(?=\))|(?:(?<=sum\()|(?<=max\()|(?<=ean\()|(?<=her\()|(?<=ape\[))[-+](?=1\b)"
)
GROUPS = {  # modules, and the test files that see them within seconds
    "rows": (["heads/rows.py"], ["heads/test_rows.py"]),
    "masks": (
        ["data/text/masks.py"],
        [f"data/test_{name}.py" for name in ("masks", "masks_options", "exact", "bad_records")],
    ),
    "objective": (["train/objective.py", "train/losses.py"], ["train/test_losses.py", "train/test_objective.py"]),
    "verification": (["inference/verification/*.py"], [f"inference/test_{name}.py" for name in VERIFICATION]),
    "metrics": (["eval/measures/metrics.py"], ["eval/test_metrics.py"]),
    "formats": (
        ["heads/formats/published/*.py", "heads/formats/published/plan.py"],
        [f"heads/test_{name}.py" for name in FORMATS],
    ),
    "resume": (["train/checkpoint.py"], ["train/test_checkpoint.py", "train/test_identity.py"]),
}


def is_sampled(mutant: str, every: int) -> bool:
    """Whether a mutant is one of every `every`-th."""
    return int(hashlib.sha256(mutant.encode()).hexdigest(), 16) % every == 0


def is_unseen(diff: str) -> bool:
    """Whether only `device=`, here the CPU, `strict=` of zip, a caller's guard, or the axis of a matrix differs."""
    lines = [UNSEEN.sub("", line[1:]) for line in diff.splitlines() if re.match(r"[-+](?![-+]{2} )", line)]
    return len(lines) == 2 and lines[0] == lines[1]


def run(group: str, every: int, again: bool) -> None:
    """Run a group's mutants in its own folder, which is the current one."""
    import mutmut.__main__ as mutmut
    from mutmut.configuration import config
    from mutmut.mutation import mutators

    settings = config()
    settings.only_mutate, tests = GROUPS[group]
    settings.pytest_add_cli_args_test_selection = [f"tests/{name}" for name in tests]
    mutators.mutation_operators[:] = [
        each for each in mutators.mutation_operators if each[1] is not mutators.operator_string
    ]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    if again:
        Path("mutants/mutmut-stats.json").unlink(missing_ok=True)  # which tests see what, as it was before they changed
    collect = mutmut.collect_source_file_mutation_data

    def sampled(**arguments: Any) -> Any:
        mutants, files = collect(**arguments)
        kept = [(file, name, None if again and code in (0, 33) else code) for file, name, code in mutants]
        return [each for each in kept if is_sampled(each[1], every)], files

    mutmut.collect_source_file_mutation_data = sampled
    mutmut._run((), 1)
    codes = {name: file.exit_code_by_key[name] for file, name, _ in sampled(mutant_names=())[0]}
    statuses = {name: mutmut.status_by_exit_code[code] for name, code in codes.items()}
    for name in [name for name, status in statuses.items() if status in ("survived", "no tests")]:
        diff = mutmut.get_diff_for_mutant(name)
        if is_unseen(diff):
            statuses[name] = "not to be seen here"
        else:
            print(f"{name}: {statuses[name]}\n{diff}\n")
    counts = {status: sum(each == status for each in statuses.values()) for status in sorted(set(statuses.values()))}
    print(f"| {group} | {len(statuses)} | {', '.join(f'{count} {status}' for status, count in counts.items())} |")


def main() -> None:
    """Run the groups that are named, or all, each in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("groups", nargs="*", choices=[[], *GROUPS])
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        return run(arguments.groups[0], arguments.every, arguments.again)
    for group in arguments.groups or GROUPS:
        folder = ROOT / "mutants" / group
        folder.mkdir(parents=True, exist_ok=True)
        for name in SOURCES:
            if not (folder / name).exists():
                (folder / name).symlink_to(ROOT / name)
        options = [f"--every={arguments.every}", *["--again"] * arguments.again]
        subprocess.run([sys.executable, __file__, group, "--here", *options], cwd=folder, check=True)
    return None


if __name__ == "__main__":
    main()
