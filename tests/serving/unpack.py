"""Unpack the newest engines' wheels without their binaries: unpack.py WHEELS FOLDER.

Of `vllm-0.33.0-….whl` comes FOLDER/vllm, which as PYTHONPATH stands before any other vLLM.
"""

import sys
import zipfile
from pathlib import Path


def main(wheels: Path, folder: Path) -> None:
    """Unpack every wheel in a folder."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not name.endswith(".so")]
            archive.extractall(folder / wheel.name.split("-")[0], names)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
