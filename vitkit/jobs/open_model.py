"""Weights, a run or an exported file -> whatever predicts: the one door of predict and eval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vitkit.checkpoints import load
from vitkit.model.classifier import Classifier
from vitkit.speed.exported import is_exported, open_exported


def open_model(
    source: str | Path,
    device: torch.device | str = "cpu",
    *,
    image_size: int | tuple[int, int] | None = None,
    **overrides: Any,
) -> Classifier:
    """Open what predicts.

    Args:
        source: what `vitkit.load` takes, or a file that `vitkit export` wrote (.onnx, .xml).
        device: where weights go; exported files run on the CPU.
        image_size: another size: pixels, or (height, width).
        overrides: `mean` and `std`, in place of what the source says.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: it cannot be changed in that way.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    if is_exported(source):
        return open_exported(source).feed(image_size, **given)
    return load(source, image_size=image_size, **given).to(device)
