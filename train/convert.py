"""Write a published head's pickle as safetensors, once; nothing else here reads pickles.

python train/convert.py pickle=OWNER/NAME out=FOLDER
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # the checkout's root instead of train/, so that its files shadow no module
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from omegaconf import DictConfig

from heads.common.command import command
from heads.common.typed import typed
from heads.formats.pickles import convert, find_pickle


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
