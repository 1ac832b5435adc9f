"""Load a head by speculators' own class, which fills what a file lacks with NaN.

A job on stdin holds `heads`: folders, and `target`. For each the answer on stdout says the class, the tensors that were
never filled, and the error if it refused.
"""

import json
import sys
from typing import Any

from job import answer


def load(folder: str, target: str) -> dict[str, Any]:
    """Return what became of one head."""
    import torch
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.speculators_config.verifier.name_or_path = target  # where the Hub has it, this machine has a folder
    model = SpeculatorModel.from_pretrained(folder, config=config)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    unfilled = [name for name, tensor in tensors.items() if tensor.is_floating_point() and bool(tensor.isnan().any())]
    drafted = getattr(model, "d2t", None)
    return {
        "class": type(model).__name__,
        "unfilled": sorted(unfilled),
        "drafted": None if drafted is None else (drafted + torch.arange(len(drafted))).tolist(),
    }


def main() -> None:
    """Run the job."""
    from importlib.metadata import version

    job = json.load(sys.stdin)
    answer(version("speculators"), job["heads"], lambda folder: load(folder, job["target"]))


if __name__ == "__main__":
    main()
