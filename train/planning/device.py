"""The device that a plan is made for: of conf/device by name, or this machine's."""

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


def named(name: str) -> DeviceConfig:
    """Return what conf/device says of a device."""
    given: Any = OmegaConf.create({})
    for part in ("here", name):
        given = OmegaConf.merge(given, OmegaConf.load(FOLDER / f"{part}.yaml"))
    given.pop("defaults", None)
    return typed(DeviceConfig, given)


def known(driver: str) -> DeviceConfig | None:
    """Return the device whose `match` is in a name that a driver gives, the longest of them; None if there is none."""
    files = sorted(file.stem for file in FOLDER.glob("*.yaml") if file.stem != "here")
    found = [device for device in map(named, files) if device.match and device.match in driver]
    return max(found, key=lambda device: len(device.match or ""), default=None)


def settled(device: DeviceConfig, wanted: str | None) -> DeviceConfig:
    """Return a device whose type and memory are known: what is null is this machine's.

    Args:
        device: as composed.
        wanted: the torch device that the run asks for; None for its default.

    Raises:
        ValueError: `device` is a GPU, and the run asks for the CPU.
    """
    kind = torch.device(wanted or default_device()).type if device.type is None else device.type
    if wanted is not None and torch.device(wanted).type != kind:
        raise ValueError(f"device={device.name} is of type {kind}, and model.device={wanted} is not: leave one out")
    if kind == "cpu":
        own = named("cpu")
        memory = device.memory_gb or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        base = device if device.type is not None else replace(device, context_gb=own.context_gb, slack=own.slack)
        return replace(base, type=kind, memory_gb=memory)
    if device.memory_gb is not None:
        return replace(device, type=kind)
    facts = torch.cuda.get_device_properties(wanted or "cuda")
    there = known(facts.name)
    tflops = device.tflops or (None if there is None else there.tflops)
    return replace(device, type=kind, memory_gb=facts.total_memory / GIB, tflops=tflops, name=facts.name)
