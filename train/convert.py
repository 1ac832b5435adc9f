"""Convert a published head's pickle to safetensors; nothing else in this repository reads pickles.

    python train/convert.py pickle=OWNER/NAME out=FOLDER

An ordinary unpickler calls any function that the file names. torch's restricted one (`weights_only`) makes only tensors
and plain containers.
"""

import shutil
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # the checkout's root replaces train/, whose files could shadow modules
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from omegaconf import DictConfig
from safetensors.torch import save_file
from torch import Tensor

from heads.common.command import command
from heads.common.errors import one_line
from heads.common.files import replacing
from heads.common.typed import typed
from heads.formats.hub import REPO, downloaded
from heads.formats.published.files import PICKLED
from heads.formats.store import CONFIG, WEIGHTS
from heads.formats.weights import header


def find_pickle(name: str) -> Path:
    """Return a head's pickle: a file, or the one in a folder or in OWNER/NAME on the Hub; refuse a missing one."""
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
    """Write a folder with the pickle's tensors and config.json, atomically; refuse more than tensors."""
    if out.exists():
        raise ValueError(f"out={out}: is there already; name another folder")
    try:
        held = torch.load(pickle, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(pickle))
    except Exception as error:  # a damaged file may cause any error
        reason = one_line(error).split(". ")[0][:300]
        raise ValueError(f"{pickle}: damaged, or holds more than tensors ({reason}); find it as safetensors") from error
    if not isinstance(held, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in held.items()):
        raise ValueError(f"{pickle}: not a mapping of names to tensors; find it as safetensors")
    with replacing(out) as new:
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in held.items()}
        save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        header(new / WEIGHTS)
        if (pickle.parent / CONFIG).is_file():
            shutil.copyfile(pickle.parent / CONFIG, new / CONFIG)
    return out


@dataclass(frozen=True)
class ConvertConfig:
    """The type of conf/convert.yaml."""

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
