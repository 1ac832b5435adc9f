"""What travels to a device machine without network: the packages that its image lacks, and the code's revision.

    python benchmarks/gpu/carry.py [--to carried] [--model SmolLM2-135M-Instruct.Q4_1.gguf]

The folder holds copies of packages of this environment that are Python alone, so they run under another Python too and
nothing is installed there: benchmarks/gpu/run.py puts the folder on the path. REVISION, beside README.md, takes git's
place. A call may carry 64 MiB, so the model's file is cut in two: .smollm2/part-0 travels with the first call, part-1
with the second, and smollm2.py joins them. The image has PROVIDED and what these need; what else training and
evaluation import, they import lazily.
"""

import argparse
import shutil
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu.smollm2 import FOLDER
from eval.measures.machine import revision

PROVIDED = (
    "torch", "transformers", "accelerate", "peft", "numpy", "xxhash", "jaxtyping", "rich", "jinja2", "psutil",
    "tensorboard", "pyarrow", "httpx", "pandas", "pytest", "pytest-xdist", "hypothesis", "setuptools",
)  # fmt: skip
CARRIED = ("hydra-core", "beartype", "gguf")  # beartype: the tests check shapes by it
LEFT_OUT = {"requests"}  # gguf needs it for remote files only


def closure(names: Iterable[str]) -> dict[str, Distribution]:
    """Return installed distributions and all that they need, by their canonical names."""
    waiting, packages = list(names), dict[str, Distribution]()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in packages or name in LEFT_OUT:
            continue
        try:
            packages[name] = distribution(name)
        except PackageNotFoundError:  # a need of another platform's, or of an image's torch alone
            continue
        needs = map(Requirement, packages[name].requires or ())
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return packages


def copy(package: Distribution, to: Path) -> None:
    """Copy a distribution's modules and its metadata into a folder.

    Raises:
        ValueError: it holds compiled code, which no other Python runs.
    """
    for file in package.files or ():
        source = Path(str(package.locate_file(file)))
        if ".." in file.parts or file.suffix == ".pyc" or not source.is_file():
            continue  # scripts
        if file.suffix in (".so", ".pyd"):
            raise ValueError(f"{package.name} is compiled for this Python ({file}): name it among PROVIDED")
        (to / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, to / file)


def carry(to: Path) -> list[str]:
    """Write the folder anew; return the names of what it holds."""
    shutil.rmtree(to, ignore_errors=True)
    provided = closure(PROVIDED)
    packages = {name: package for name, package in closure(CARRIED).items() if name not in provided}
    for package in packages.values():
        copy(package, to)
    return sorted(packages)


def cut(model: Path, to: Path) -> list[Path]:
    """Cut a file into two parts of about one size; return them."""
    content = model.read_bytes()
    half, parts = -(-len(content) // 2), [to / f"part-{i}" for i in range(2)]
    for i, part in enumerate(parts):
        part.write_bytes(content[i * half : (i + 1) * half])
    return parts


def main() -> None:
    """Write the folder, REVISION, and the parts of the model."""
    parser = argparse.ArgumentParser(description="What travels to a device machine without network.")
    parser.add_argument("--to", type=Path, default=ROOT / "carried")
    parser.add_argument("--model", type=Path, help="a file to be cut into .smollm2/part-0 and part-1")
    to, model = (options := parser.parse_args()).to, options.model
    packages, code = carry(to), revision()
    (ROOT / "REVISION").write_text(f"{code['revision']}{' with changes' if code['dirty'] else ''}\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in to.rglob("*") if file.is_file())
    print(f"{to}: {', '.join(packages)}, {size / 2**20:.1f} MiB; REVISION: {code['revision']}")
    for part in cut(model, FOLDER) if model else []:
        print(f"{part}: {part.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
