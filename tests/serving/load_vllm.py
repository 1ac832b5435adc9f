"""Load heads by the newest vLLM's own classes, without running it: its wheel's Python files suffice for that on a CPU.

A job on stdin holds `target`, and `heads`: folder, method, tokens a draft,
overrides of the target's config.json and a schedule by batch size. For each head the answer on stdout says what
vLLM takes it for, which tensors it never filled (they are NaN before), and the error if it refused.
"""

import json
import os
import sys
import tempfile
from typing import Any

from job import answer

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_USE_V2_MODEL_RUNNER": "1",  # the default wherever there is Triton
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def load(
    target: str,
    folder: str,
    method: str,
    tokens: int,
    overrides: dict[str, Any] | None = None,
    schedule: list[list[int]] | None = None,
) -> dict[str, Any]:
    """Return what became of one head."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    said = {"method": method, "model": folder, "num_speculative_tokens": tokens}
    said |= {"num_speculative_tokens_per_batch_size": schedule} if schedule else {}
    args = EngineArgs(
        model=target, dtype="float32", enforce_eager=True, speculative_config=said, hf_overrides=overrides or {}
    )
    config = args.create_engine_config()
    draft = config.speculative_config.draft_model_config
    with set_current_vllm_config(config):
        model = initialize_model(vllm_config=config, model_config=draft)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.fill_(float("nan"))
        DefaultModelLoader(config.load_config).load_weights(model, draft)
    unfilled = [name for name, tensor in model.named_parameters() if bool(tensor.isnan().any())]
    found = {"class": type(model).__name__, "unfilled": sorted(unfilled)}
    if schedule:
        lookup = config.speculative_config.num_speculative_tokens_per_batch_size
        found["drafted"] = build_dynamic_sd_schedule_lookup(lookup, 64, tokens)
    return found | ({"causal": model.get_draft_attn_causal()} if method in ("dflash", "dspark") else {})


def main() -> None:
    """Run the job."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.version import __version__

    job = json.load(sys.stdin)
    with tempfile.NamedTemporaryFile() as file, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
        initialize_model_parallel(1, 1)
        answer(__version__, job["heads"], lambda head: load(job["target"], **head))


if __name__ == "__main__":
    main()
