"""Write a published head's pickle as safetensors, once, in a child process; nothing else here reads pickles.

    python train/convert.py pickle=OWNER/NAME out=FOLDER

An ordinary unpickler calls whatever the file names. torch's restricted one knows how to make tensors and plain
containers and refuses the rest; here it also runs in a child process without the tokens of the environment and with
bounded memory, and only the safetensors that the child writes are looked at.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # the checkout's root instead of train/, so that its files shadow no module
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from omegaconf import DictConfig

from heads.common.command import command
from heads.common.errors import one_line
from heads.common.files import replacing
from heads.common.redact import SECRET_NAME
from heads.common.typed import typed
from heads.formats.hub import REPO, downloaded
from heads.formats.published.files import PICKLED
from heads.formats.store import CONFIG, WEIGHTS
from heads.formats.weights import header

CHILD = """
import json, resource, sys, zipfile
pickle, out, most = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_AS, (int(most), int(most)))
import torch
from safetensors.torch import save_file
held = torch.load(pickle, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(pickle))
if not isinstance(held, dict) or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in held.items()):
    sys.exit("not a mapping of names to tensors")
save_file({name: tensor.detach().contiguous().clone() for name, tensor in held.items()}, out, metadata={"format": "pt"})
"""
SPARE = 32 << 30  # bytes of address space beside the tensors: Python, torch and its libraries
MEMORY_FACTOR = 4  # times the file: mapped, made contiguous, written
LONGEST = 1800  # seconds


def find_pickle(name: str) -> Path:
    """Return a head's pickle: a file, a folder's, or OWNER/NAME's on the Hub, downloaded; refuse where none is."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if not path.is_dir() and REPO.fullmatch(name):
        path = downloaded(name, [CONFIG, *PICKLED])
    files = [path / name for name in PICKLED if (path / name).is_file()]
    if not files:
        raise ValueError(f"pickle={name}: no such file, nor a folder or repository with one of {', '.join(PICKLED)}")
    return files[0]


def convert(pickle: Path, out: Path) -> Path:
    """Write a folder with the pickle's tensors as safetensors and the config.json beside it: whole, or not at all.

    Raises:
        ValueError: the folder is there, or the pickle is damaged or holds more than tensors.
    """
    if out.exists():
        raise ValueError(f"out={out}: is there already; name another folder")
    with replacing(out) as new:
        file = new / WEIGHTS
        env = {name: value for name, value in os.environ.items() if not SECRET_NAME.fullmatch(name)}
        most = SPARE + MEMORY_FACTOR * pickle.stat().st_size
        words = [sys.executable, "-c", CHILD, str(pickle.resolve()), str(file.resolve()), str(most)]
        try:
            done = subprocess.run(
                words, env=env, cwd=file.parent, capture_output=True, text=True, timeout=LONGEST, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{pickle}: not converted within {LONGEST} s; find it as safetensors") from error
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
            message = next((line for line in lines if "Error" in line), lines[-1])
            reason = one_line(ValueError(message.split(". ")[0]))[:300]
            raise ValueError(f"{pickle}: damaged, or holds more than tensors ({reason}); find it as safetensors")
        header(new / WEIGHTS)
        if (pickle.parent / CONFIG).is_file():
            shutil.copyfile(pickle.parent / CONFIG, new / CONFIG)
    return out


@dataclass(frozen=True)
class ConvertConfig:
    """conf/convert.yaml."""

    pickle: str
    out: str


@command("convert")
def main(cfg: DictConfig) -> None:
    """Run the command."""
    config = typed(ConvertConfig, cfg)
    out = convert(find_pickle(config.pickle), Path(config.out).expanduser())
    print(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


if __name__ == "__main__":
    main()
