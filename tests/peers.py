"""The real libraries that vitkit is compared with. Import them through here: torchvision's compiled operators do not
load beside a CPU-only torch, so the two that its Python code asks for are declared first."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import pytest
import torch

try:
    _library = torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
except RuntimeError:     # a torchvision whose own operators did load
    pass


def peer(name: str) -> ModuleType:
    """Import a peer library, or skip the test where it is not installed."""
    if importlib.util.find_spec(name.split(".", maxsplit=1)[0]) is None:
        pytest.skip(f"{name} is not installed")
    return importlib.import_module(name)
