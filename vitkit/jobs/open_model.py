"""Open weights, a run or an exported file as a classifier; `predict` and `eval` start here."""

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
    """Open a classifier.

    Args:
        source: as for `vitkit.load`, or a file written by `vitkit export` (.onnx, .xml).
        device: where the weights go (default: the CPU); exported files always run on the CPU.
        image_size: another size in pixels, or (height, width) (default: the model's own).
        overrides: `mean` and `std` in place of the model's own.

    Raises:
        CheckpointError: the source cannot be read.
        ConfigError: the source cannot be changed in this way.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    if is_exported(source):
        return open_exported(source).feed(image_size, **given)
    return load(source, image_size=image_size, **given).to(device)
