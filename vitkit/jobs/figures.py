"""A model and the images of a data set -> the paper's figures, with their data."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.data.base import Source, Subset
from vitkit.data.preprocess import preprocess
from vitkit.data.samples import PHOTOS, sample_photo
from vitkit.data.sources import open_splits
from vitkit.errors import DataError, InputError, pick
from vitkit.evaluation.predict import Given, Images
from vitkit.explanations import draw
from vitkit.explanations.common import Arrays, PlotOptions, unwrap, unwrap_any
from vitkit.explanations.plots import PLOTS
from vitkit.model.config import InputSpec
from vitkit.types import Plotted

log = logging.getLogger("vitkit")


@dataclass(frozen=True, kw_only=True)
class Drawing(Plotted):
    """One plot of a model.

    Args:
        name: a key of PLOTS.
        arrays: the numbers that it shows.
    """

    name: str
    arrays: Arrays

    @property
    def title(self) -> str:
        """What it shows."""
        return PLOTS[self.name].title

    @property
    def caption(self) -> str:
        """What to look at, and what it means."""
        return PLOTS[self.name].caption

    def plot(self) -> draw.Figure:
        """Draw the numbers."""
        return PLOTS[self.name].draw(self.arrays)

    def __repr__(self) -> str:
        return f"{self.title}. {self.caption}"


def sample_photos() -> Images:
    """Return the two photos that come with scikit-learn."""
    return Images([sample_photo(name) for name in PHOTOS])


def some_images(data: str | Path | None, count: int) -> Source:
    """Return at most `count` images, spread evenly over the data.

    Args:
        data: anything that `vitkit.data.open_splits` accepts (a validation or test split is preferred), a folder of
            images, or a glob pattern (default: the two sample photos).
        count: maximum number of images.
    """
    if data is None:
        return sample_photos()
    if count < 1:
        raise InputError(f"Expected at least one image; got --count {count}.")
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
    """Read and yield batches [B, C, H, W] of a source one by one."""
    for start in range(0, len(source), batch):
        numbers = range(start, min(start + batch, len(source)))
        yield torch.stack([preprocess(source.read(i)[0], spec, source.names[i]) for i in numbers])


def figures(
    model: nn.Module,
    source: Source,
    out: Path,
    *,
    only: Iterable[str] | None = None,
    options: PlotOptions | None = None,
) -> Iterator[tuple[str, list[Path]]]:
    """Write plots as PNG and SVG, and their data as .npz and .csv.

    Args:
        model: a ViT, compiled or plain.
        source: images for the plots that need them; plots of a single image use the first.
        out: folder to write to.
        only: names of PLOTS (default: all that need the model alone or many images and can be made for this model).
        options: see PlotOptions.

    Yields:
        The name of each plot, and the files written.
    """
    spec = unwrap(model).input_spec
    wanted = list(only) if only else [name for name, plot in PLOTS.items() if plot.needs != "image"]
    if not only and (left := [name for name in wanted if not PLOTS[name].fits(model)]):
        wanted = [name for name in wanted if name not in left]
        log.warning("%s left out: this model does not have what they show.", ", ".join(left))
    for name in wanted:
        pick(PLOTS, name, "plot")
    for name in wanted:
        plot = PLOTS[name]
        yield name, plot.write(plot.arrays(model, pixels(source, spec), options or PlotOptions()), out / name)


def plot(
    model: nn.Module,
    name: str,
    images: Given | Iterable[Given] | None = None,
    *,
    count: int = 128,
    options: PlotOptions | None = None,
) -> Drawing:
    """Make one plot of a model.

    Args:
        model: a ViT or a ResNet, compiled or plain.
        name: a key of PLOTS.
        images: anything that `vitkit.predict` accepts, or the name of a data set; a plot of a single image uses the
            first one (default: the two sample photos).
        count: maximum number of images from a data set or a folder (default: 128).
        options: see PlotOptions.
    """
    wanted, inner = pick(PLOTS, name, "plot"), unwrap_any(model)
    if not wanted.fits(model):
        raise InputError(
            f"This model does not have what the plot {name!r} shows ({wanted.title}). Choose another plot."
        )
    source = some_images(images, count) if images is None or isinstance(images, str | Path) else Images(images)
    return Drawing(name=name, arrays=wanted.arrays(model, pixels(source, inner.input_spec), options or PlotOptions()))
