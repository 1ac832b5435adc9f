"""Load heads by SGLang's own classes on a CPU: its wheel's Python files, and stubs for its kernels.

A job on stdin holds `target` and `heads`: folders. For each the answer on stdout says the class that SGLang takes for
it, which tensors it never filled (they are NaN before), and the error if it refused. SGLang itself reports neither.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import stubs
import transformers.image_utils  # asks for torchvision, which is not there, before a stub says that it is
from job import answer

stubs.install()


def load(folder: str) -> dict[str, Any]:
    """Return what became of one head."""
    import torch
    from safetensors.torch import load_file
    from sglang.srt.models.registry import ModelRegistry

    config = transformers.AutoConfig.from_pretrained(folder)
    if config.architectures == ["MiMoForCausalLM"]:
        config.architectures = ["MiMoMTP"]  # as SGLang's model_config does for a draft
    found, _ = ModelRegistry.resolve_model_cls(config.architectures)
    torch.set_default_dtype(config.dtype)
    model = found(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.load_weights(iter(load_file(Path(folder) / "model.safetensors").items()))
    unfilled = [name for name, tensor in model.named_parameters() if bool(tensor.isnan().any())]
    drafted = getattr(model, "hot_token_id", None)
    layers = getattr(model, "layers", [])  # of block heads; others are causal whatever is said
    return {
        "class": found.__name__,
        "unfilled": sorted(unfilled),
        "drafted": None if drafted is None else drafted.tolist(),
        **({"causal": [layer.self_attn.attn_type.name == "DECODER" for layer in layers]} if layers else {}),
    }


def main() -> None:
    """Run the job."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs
    from sglang.version import __version__

    job = json.load(sys.stdin)
    publish(ServerArgs(model_path=job["target"], device="cpu"), role="scheduler", ranks=SpawnRanks(0))
    with tempfile.NamedTemporaryFile() as file:
        init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
        initialize_model_parallel("gloo")
        answer(__version__, job["heads"], load)


if __name__ == "__main__":
    main()
