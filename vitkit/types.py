"""Types that several rooms share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[int, int], None]  # called with (done, total) as work proceeds
Tick = Callable[[int], None]  # called with the number of images finished since the last call
