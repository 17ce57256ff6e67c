"""Prove a conversion: compare both files, as run by the libraries of their dialects, with vitkit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitkit.checkpoints.verify import Comparison, compare
from vitkit.data.samples import sample_photo
from vitkit.errors import CannotExpress, CheckpointError
from vitkit.model.backbone import Backbone, Config


def square_photo(name: str, size: tuple[int, int]) -> Image.Image:
    """The centre square of a sample photo (`china`, `flower`), resized to (height, width)."""
    photo = sample_photo(name)
    side = min(photo.size)
    left, top = (photo.width - side) // 2, (photo.height - side) // 2
    return photo.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))


def photos(config: Config) -> Tensor:
    """Return scikit-learn's two photos as pixels between -1 and 1, with the size and channels that a model takes."""
    images = [np.asarray(square_photo(name, config.image_hw)) for name in ("china", "flower")]
    x = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 127.5 - 1  # [2, 3, H, W]
    return x[:, torch.arange(config.num_channels) % 3]


def prove(model: Backbone, source: str | Path, destination: str | Path, **overrides: Any) -> Iterator[str | Comparison]:
    """Compare the file that was read and the one that was written; yield a heading and the comparisons for each.

    Args:
        model: the converted model.
        source: the file it was loaded from.
        destination: the file it was saved to.
        overrides: the arguments with which the source was loaded.

    Raises:
        CheckpointError: there is a difference that no known property explains.
    """
    model, x, unexplained = model.float(), photos(model.config), False
    for place, arguments in ((source, overrides), (destination, {})):
        if place is source and overrides.get("num_classes") is not None:
            continue  # a new head has no original to compare with
        yield f"{place}, its own library compared with vitkit:"
        try:
            rows = compare(place, model, x, **arguments)
        except (ImportError, CannotExpress) as error:
            yield f"  not compared: {error}"
            continue
        if not rows:
            yield "  not compared: the dialect has no library of its own"
        yield from rows
        unexplained |= any(not row.equal and not row.explanation for row in rows)
    if unexplained:
        raise CheckpointError(
            "The outputs differ from those of the original library, and no known property explains it; "
            "do not use the file that was written."
        )
