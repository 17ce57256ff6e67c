"""Exported tiny models, each written once a test run: the exporters take seconds."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

from tests.model.test_vit import tiny
from vitkit import ViT
from vitkit.speed.exported import export

NAMES = ("pizza", "steak", "sushi", 'a "quoted" <name> & é', "five")


def need() -> None:
    for name in ("onnx", "onnxruntime", "onnxscript", "openvino", "nncf"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'vitkit[export]'")


def model(**changes: object) -> ViT:
    """A tiny model, the same every time, with class names that files must escape."""
    torch.manual_seed(1)
    found = tiny(**changes)
    found.input_spec = dataclasses.replace(found.input_spec, class_names=NAMES[: found.config.num_classes])
    return found


def write(folder: Path, name: str, to: str, merge: int = 0, **changes: object) -> tuple[ViT, Path]:
    need()
    path, plain = folder / name, model(**changes)
    pixels = torch.randn(6, plain.config.num_channels, *plain.config.image_hw)
    export(plain, to, path, merge=merge, pixels=[pixels])
    return plain, path
