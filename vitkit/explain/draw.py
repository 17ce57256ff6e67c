"""Arrays -> pictures. The only file that imports matplotlib, and always without a screen."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure and forget it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", dpi=110)
    plt.close(figure)
    return path


def patches(image: NDArray[np.uint8], cut: NDArray[np.uint8], path: Path, title: str) -> Path:
    """The image, its first row of patches, and the grid of all patches with their numbers.

    Args:
        image: [H, W, C].
        cut: [rows, columns, P, P, C], as `explain.patches.cut` gives it.
        path: where the picture goes.
        title: a line above it.
    """
    rows, columns, P, _, channels = cut.shape
    gap = max(P // 8, 1)
    sheet = np.full((rows * (P + gap) - gap, columns * (P + gap) - gap, channels), 255, np.uint8)
    for r in range(rows):
        for c in range(columns):
            top, left = r * (P + gap), c * (P + gap)
            sheet[top:top + P, left:left + P] = cut[r, c]
    figure, axes = plt.subplot_mosaic([["image", "grid"], ["row", "row"]], figsize=(12, 7),
                                      height_ratios=[6, 1], layout="constrained")
    figure.suptitle(title)
    height, width = image.shape[:2]
    axes["image"].imshow(image)
    axes["image"].set_title(f"image: {height} x {width} x {channels}")
    axes["grid"].imshow(sheet)
    axes["grid"].set_title(f"{rows} x {columns} = {rows * columns} patches of {P} x {P} x {channels} "
                           f"({P * P * channels} numbers each)")
    for r in range(rows):
        for c in range(columns):
            axes["grid"].text(c * (P + gap) + 1, r * (P + gap) + 1, str(r * columns + c + 1), fontsize=5, va="top",
                              color="white", bbox={"facecolor": "black", "alpha": 0.45, "pad": 0.4, "lw": 0})
    axes["row"].imshow(sheet[:P])
    axes["row"].set_title(f"the first row: tokens 1 to {columns}")
    for axis in axes.values():
        axis.set_axis_off()
    return save(figure, path)
