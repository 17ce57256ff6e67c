"""A model, and images of a data set -> the paper's figures with their data beside them."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.data.base import Source, Subset
from vitkit.data.preprocess import preprocess
from vitkit.data.samples import PHOTOS, sample_photo
from vitkit.data.sources import open_splits
from vitkit.errors import DataError, InputError, pick
from vitkit.evaluation.predict import Images
from vitkit.explain.common import Ask, unwrap
from vitkit.explain.plots import PLOTS
from vitkit.model.config import InputSpec


def sample_photos() -> Images:
    """The two photos that come with scikit-learn."""
    return Images([sample_photo(name) for name in PHOTOS])


def some_images(data: str | Path | None, count: int) -> Source:
    """At most `count` images spread evenly over a data set, a folder, or a pattern; without one, the sample photos.

    Args:
        data: what `vitkit.data.open_splits` takes (its held-out part is used where it has one), a folder of images,
            or a pattern.
        count: how many.
    """
    if data is None:
        return sample_photos()
    if count < 1:
        raise InputError(f"Expected at least one image to look at; got --count {count}.")
    try:
        splits = open_splits(data)
        source: Source = splits[next(name for name in ("val", "test", "all", "train") if name in splits)]()
    except DataError:
        if not Path(data).expanduser().exists() and not glob.has_magic(str(data)):
            raise
        source = Images(data)
    if len(source) <= count:
        return source
    return Subset(source, np.linspace(0, len(source) - 1, count).round().astype(int))


def pixels(source: Source, spec: InputSpec, batch: int = 8) -> Iterator[Tensor]:
    """Batches [B, C, H, W] of a source, read when they are asked for."""
    for start in range(0, len(source), batch):
        numbers = range(start, min(start + batch, len(source)))
        yield torch.stack([preprocess(source.read(i)[0], spec, source.names[i]) for i in numbers])


def figures(
    model: nn.Module, source: Source, out: Path, *, only: Iterable[str] | None = None, ask: Ask | None = None
) -> Iterator[tuple[str, list[Path]]]:
    """Write plots and their data: PNG and SVG, .npz and .csv.

    Args:
        model: a ViT, compiled or plain.
        source: images for the plots that need them; one image is the first.
        out: folder.
        only: rows of PLOTS; when not given, all that need the model alone or many images.
        ask: what a user chose.

    Yields:
        Name of each plot, and the files that were written.
    """
    spec = unwrap(model).input_spec
    wanted = list(only) if only else [name for name, plot in PLOTS.items() if plot.needs != "image"]
    for name in wanted:
        pick(PLOTS, name, "plot")
    for name in wanted:
        plot = PLOTS[name]
        yield name, plot.write(plot.arrays(model, pixels(source, spec), ask or Ask()), out / name)
