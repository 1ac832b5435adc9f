"""A placed target: its device, embeddings, fingerprint and process group."""

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, distributed, nn
from torch.nn import functional

from heads.base import to_device
from heads.common.target_config import read_target_config
from heads.formats.weights import FEW, digest
from inference.target.checkpoint import fingerprint, fingerprint_on_disk
from inference.target.embeddings import TargetEmbeddings
from inference.target.placement import TENSOR_PARALLEL, Placement, mesh

Rows = Callable[[Tensor, Tensor, Tensor], Any]


class Placed(NamedTuple):
    """A placed target."""

    device: torch.device  # of features, embeddings and tokens; layers may be elsewhere
    embeddings: TargetEmbeddings  # not sharded, on that device
    fingerprint: str  # of the weights, the same under every placement
    group: distributed.ProcessGroup | None  # this process's tensor-parallel group; None without one
    needs_all_ranks: bool  # whether every pass takes all processes


def on_one_device(model: "transformers.PreTrainedModel", name: str) -> Placed:
    """Return a placed model that is on one device."""
    return Placed(model.device, TargetEmbeddings(model), fingerprint(model, name), None, needs_all_ranks=False)


def placed(
    model: "transformers.PreTrainedModel", where: Placement, path: str, device: torch.device, trust: bool
) -> Placed:
    """Return a placed model that transformers has distributed; every process calls it if passes take all of them.

    Raises:
        ValueError: sharding was asked for and nothing is sharded.
    """
    if where.needs_all_ranks and where.group_size > 1 and not any(map(_is_sharded, model.parameters())):
        raise ValueError(
            f"model.placement={where.placement}: transformers has no plan to cut {path} up; choose another"
        )
    config = read_target_config(path, trust)
    embeddings, digest_of_target = _embeddings(model, config, device, trust), _fingerprint(model, path)
    group = None
    if where.placement == TENSOR_PARALLEL and where.group_size > 1:
        group = mesh(where.group_size, device)["tp"].get_group()
    if where.needs_all_ranks:
        # The first call makes a module the FSDP root; later the decoder stack is called directly.
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    return Placed(device, embeddings, digest_of_target, group, needs_all_ranks=where.needs_all_ranks)


def whole(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's full parameters, gathered from the processes or fetched from offloading.

    Every process must call it for the same modules in the same order.
    """
    from accelerate.utils import align_module_device

    # It warns that weights of a 2-d mesh are gathered in two steps, as intended.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for prefix, submodule in module.named_modules():
        with align_module_device(submodule):
            for name, value in list(submodule.named_parameters(recurse=False)):
                full = value.full_tensor() if _is_sharded(value) else value
                yield f"{prefix}.{name}".lstrip("."), full.detach()


def _fingerprint(model: "transformers.PreTrainedModel", path: str) -> str:
    """Return the fingerprint from the checkpoint's files, or if their names differ from the weights."""
    if getattr(model, "hf_quantizer", None) is not None:
        return fingerprint(model, path)
    try:
        return fingerprint_on_disk(model, path)
    except (OSError, ValueError, KeyError, SafetensorError):
        names = {name for name, _ in model.named_parameters()}
        return digest({name: value.flatten()[:FEW].clone() for name, value in whole(model) if name in names})


def _embeddings(
    model: "transformers.PreTrainedModel", config: Any, device: torch.device, trust: bool
) -> TargetEmbeddings:
    """Return the model's embeddings, or full copies on the device if they are sharded or elsewhere."""
    originals = [model.get_input_embeddings(), model.get_output_embeddings()]
    if all(_is_here(module, device) for module in originals):
        return TargetEmbeddings(model)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    skeleton.tie_weights()
    copies = [skeleton.get_input_embeddings(), skeleton.get_output_embeddings()]
    tied = copies[0].weight is copies[1].weight
    for source, copy in zip(originals, copies, strict=True):
        for name, value in whole(source):
            copied = value if _is_here(source, device) else value.to(device, copy=True)
            setattr(copy, name, nn.Parameter(copied, requires_grad=False))
        for name, buffer in source.named_buffers():
            setattr(copy, name, buffer.to(device))
    if tied:
        copies[1].weight = copies[0].weight
    return TargetEmbeddings(skeleton.eval())


def _is_here(module: nn.Module, device: torch.device) -> bool:
    """Return whether all of a module is on a device, not sharded."""
    return all(not _is_sharded(parameter) and parameter.device == device for parameter in module.parameters())


def _is_sharded(weight: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(weight, DTensor)


def by_turns(group: distributed.ProcessGroup, run: Rows, token: Tensor, document: Tensor) -> Any:
    """Run this process's packed sequences through passes that take all processes of a group.

    Each process of the group has its own sequences (data parallelism of the head). In turn, all of them run one
    process's sequences, and that process keeps the result. So no work is done twice, and no process holds more than one
    turn's features besides its own. `run` takes tokens and documents "B T", and the documents on the host; B and T may
    differ by process. The host waits twice, for the shapes and for the documents, however large the group is.
    """
    mine, own_result = distributed.get_rank(group), None
    shape = to_device(torch.tensor(token.shape), token.device)
    shapes = torch.stack(_gathered(group, shape)).tolist()
    sizes = [rows * length for rows, length in shapes]
    padded = functional.pad(torch.stack([token, document]).flatten(1), (0, max(sizes) - token.numel()))
    turns = torch.stack(_gathered(group, padded))
    on_host = turns[:, 1].cpu()
    for turn, (size, form) in enumerate(zip(sizes, shapes, strict=True)):
        token, document = turns[turn, :, :size].unflatten(1, form)
        result = run(token, document, on_host[turn, :size].view(form))
        if turn == mine:
            own_result = result
        del result  # else it would take memory during the next turn
    return own_result


def _gathered(group: distributed.ProcessGroup, x: Tensor) -> list[Tensor]:
    """Return every process's tensor; all have one shape."""
    gathered = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(gathered, x.contiguous(), group=group)
    return gathered
