"""Devices by name. Importing this file imports no torch, so that a GPU can start while torch is imported."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from typing import TYPE_CHECKING

from vitkit.errors import ConfigError

if TYPE_CHECKING:
    import torch

AUTO = "auto"  # the best device of this machine


def find_device(name: str) -> torch.device:
    """Return a device of this machine.

    Args:
        name: `auto`, `cpu`, `cuda`, `mps`, or one of several, such as `cuda:1`.

    Raises:
        ConfigError: there is no such device.
    """
    import torch

    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    here = [kind for kind, count in counts.items() if count]
    if name == AUTO:
        return torch.device(here[0])
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"Expected a device such as auto, cpu, cuda, cuda:1 or mps; got {name!r}.") from error
    if device.type not in here:
        raise ConfigError(f"This machine has no device {name!r}; use --device auto (here: {here[0]}).")
    if (device.index or 0) >= counts[device.type]:
        last = counts[device.type] - 1
        has = f"{device.type}:0 to {device.type}:{last}" if last else f"one, {device.type}"
        raise ConfigError(f"This machine has no device {name!r}; of this kind it has {has}.")
    return device


def start_device(name: str) -> None:
    """Let the first GPU start in a thread if this name means it and torch is not imported yet; else do nothing.

    CUDA takes a quarter of a second to start, and importing torch takes seconds; torch then finds the context ready.
    Nothing here may fail: where CUDA is missing, torch says so when the device is used.

    Args:
        name: as for `find_device`.
    """
    # Of several processes, each has a GPU of its own.
    if "torch" not in sys.modules and name in (AUTO, "cuda", "cuda:0") and "RANK" not in os.environ:
        threading.Thread(target=_start_cuda, daemon=True).start()


def import_torch() -> None:
    """Import torch into a process of the command line, which takes an eighth less time this way.

    An import makes many objects and no garbage. Python would look through them again and again, now and later; not so
    with the collector off, and with these objects left out of later collections. A library must not do that: it would
    keep its caller's garbage.
    """
    if "torch" in sys.modules:
        return
    collecting = gc.isenabled()
    gc.disable()
    try:
        import torch  # noqa: F401

        gc.freeze()
    finally:
        if collecting:
            gc.enable()


def _start_cuda() -> None:
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    except (OSError, AttributeError):  # no driver
        return
