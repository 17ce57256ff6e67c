"""Types that several rooms share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[int, int], None]  # called with (done, total) as work proceeds
Tick = Callable[[int], None]  # called with the number of images finished since the last call


class Plotted:
    """A result that a notebook shows as a picture: subclasses have `plot()`, which returns a figure of `draw`."""

    def plot(self) -> Any:
        """Draw the result."""
        raise AssertionError(f"{type(self).__name__} has no plot")

    def _repr_png_(self) -> bytes:
        shown: bytes = self.plot()._repr_png_()
        return shown
