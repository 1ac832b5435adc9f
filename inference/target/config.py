"""The target's configuration (conf/model), and its dtype and device on this machine."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from heads.common.typed import Count, Json, OneOf, Positive, typed
from inference.target.loading import AS_IT_IS, METHODS, note_dtype
from inference.target.placement import AUTO, OFFLOADS, PLACEMENTS, REPLICATE, Placement

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
NamedDtype = Annotated[str, OneOf(tuple(DTYPES))]
Dtype = Annotated[str, OneOf(("auto", *DTYPES))]
# Defaults for a target without a file in conf/model, which a published head or a caller names.
DEFAULTS: Json = {
    "name": "", "path": "", "dtype": "auto", "quantize": None, "adapter": None, "device": None,
    "placement": "replicate", "tensor_parallel": None, "devices": None, "offload": "cpu", "memory_gb": None,
    "trust_remote_code": False, "sibling": False, "data": "", "split": "", "prompts": "", "shape": None,
}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """The target's configuration, with its default data and prompts; conf/model/tiny.yaml explains the keys."""

    name: str
    path: str
    dtype: Dtype
    quantize: Annotated[str, OneOf((AS_IT_IS, *METHODS))] | None
    adapter: str | None
    device: str | None
    placement: Annotated[str, OneOf((AUTO, *PLACEMENTS))]
    tensor_parallel: Count | None
    devices: list[int] | None
    offload: Annotated[str, OneOf(OFFLOADS)]
    memory_gb: Positive | None
    trust_remote_code: bool
    sibling: bool
    data: str
    split: str
    prompts: str
    shape: Json | None

    def __post_init__(self) -> None:
        if self.devices is not None and (not self.devices or len({*self.devices}) < len(self.devices)):
            raise ValueError(f"model.devices is {self.devices}: give different numbers of devices, or null for all")

    @property
    def placed(self) -> Placement:
        """The target's placement."""
        kind = REPLICATE if self.placement == AUTO else self.placement
        return Placement(kind, self.tensor_parallel, self.devices, self.offload, self.memory_gb)

    @property
    def as_saved(self) -> bool:
        """Whether the weights are the checkpoint's: not quantised while loading, and without an adapter."""
        return self.quantize in (None, AS_IT_IS) and self.adapter in (None, AS_IT_IS)


def model_config(**given: Any) -> ModelConfig:
    """Return a target's configuration with these values, where None takes the default; refuse unknown keys."""
    return typed(ModelConfig, DEFAULTS | {key: value for key, value in given.items() if value is not None}, "model")


def default_device() -> str:
    """Return the accelerator if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_named(name: str | None) -> torch.device:
    """Return a device by its name; None is the accelerator if there is one. Refuse a device that torch does not see.

    A GPU gets an index, by default the current GPU's. CUDA is not initialised, so a process may still fork.
    """
    try:
        device = torch.device(name or default_device())
    except RuntimeError:
        raise ValueError(f"model.device is {name!r}: give cpu, cuda or cuda:N, or null") from None
    here = torch.accelerator.current_accelerator()
    if device.type not in ("cpu", "cuda", here.type if here else "cpu"):
        raise ValueError(f"model.device is {name!r}, which this machine has not: give cpu, or null for what there is")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(
            f"model.device is {name}, and torch sees {count} accelerators on this machine: give cpu, or null for "
            "what there is"
        )
    if device == torch.device("cuda"):  # a CPU has no index
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
    return device


def use_device(name: str | None) -> torch.device:
    """Return the device of `device_named`, and make it the current GPU: accelerate uses that in a single process."""
    device = device_named(name)
    if device.type == "cuda" and name != "cuda" and name is not None:
        torch.cuda.set_device(device)
    return device


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return bf16 on devices that multiply it natively, else fp32; a GPU that is not here, as in a plan, does."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if device.type != "cpu":
        return torch.bfloat16
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return torch.bfloat16 if able.get("amx_bf16") or able.get("avx512_bf16") else torch.float32


def dtype_named(name: str, device: torch.device, path: str, trust_remote_code: bool) -> torch.dtype:
    """Return a dtype by its name; "auto" is the fast one, with a note if the checkpoint's differs.

    Raises:
        ValueError: an unknown name; or with auto, no model loads from the path.
    """
    if name == "auto":
        fast = fast_dtype(device)
        note_dtype(path, trust_remote_code, fast)
        return fast
    if name not in DTYPES:
        raise ValueError(f"model.dtype is {name!r}: choose auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]
