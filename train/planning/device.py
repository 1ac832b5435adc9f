"""The device that a plan is made for: one of conf/device by name, or this machine's."""

import os
from dataclasses import replace
from typing import Any

import torch
from omegaconf import OmegaConf

from heads.common.resolvers import ROOT
from heads.common.typed import typed
from inference.target.config import default_device
from train.config import DeviceConfig

GIB = 2**30
FOLDER = ROOT / "conf" / "device"


def preset(name: str) -> DeviceConfig:
    """Return a device of conf/device."""
    values: Any = OmegaConf.create({})
    for file in ("here", name):
        values = OmegaConf.merge(values, OmegaConf.load(FOLDER / f"{file}.yaml"))
    values.pop("defaults", None)
    return typed(DeviceConfig, values)


def by_driver_name(driver: str) -> DeviceConfig | None:
    """Return the device with the longest `match` within the name that a driver reports; None if there is none."""
    names = sorted(file.stem for file in FOLDER.glob("*.yaml") if file.stem != "here")
    matching = [device for device in map(preset, names) if device.match and device.match in driver]
    return max(matching, key=lambda device: len(device.match or ""), default=None)


def resolved(device: DeviceConfig, requested: str | None) -> DeviceConfig:
    """Return a device with its type and memory filled in: null values are this machine's.

    Args:
        device: the composed configuration.
        requested: the run's `model.device`; None for torch's default device.

    Raises:
        ValueError: `device` and the requested device are of different types.
    """
    kind = torch.device(requested or default_device()).type if device.type is None else device.type
    if requested is not None and torch.device(requested).type != kind:
        raise ValueError(f"device={device.name} is of type {kind}, and model.device={requested} is not: leave one out")
    if kind == "cpu":
        cpu = preset("cpu")
        memory = device.memory_gb or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        base = device if device.type is not None else replace(device, context_gb=cpu.context_gb, slack=cpu.slack)
        return replace(base, type=kind, memory_gb=memory)
    if device.memory_gb is not None:
        return replace(device, type=kind)
    properties = torch.cuda.get_device_properties(requested or "cuda")
    match = by_driver_name(properties.name)
    tflops = device.tflops or (None if match is None else match.tflops)
    return replace(device, type=kind, memory_gb=properties.total_memory / GIB, tflops=tflops, name=properties.name)
