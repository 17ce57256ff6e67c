"""An image as the model meets it: cut into patches (Eq. 1), as arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitkit.errors import InputError


def cut(image: NDArray[np.uint8], patch_size: int) -> NDArray[np.uint8]:
    """Cut an image into patches.

    Args:
        image: [H, W, C]; both sides are multiples of the patch.
        patch_size: P.

    Returns:
        [H / P, W / P, P, P, C]: patch [r, c] is row r, column c of the grid.
    """
    height, width, channels = image.shape
    P = patch_size
    if height % P or width % P:
        raise InputError(f"Expected an image whose sides are multiples of the patch size {P}; got {height} x {width}. "
                         f"Resize it to {max(height // P, 1) * P} x {max(width // P, 1) * P}.")
    return image.reshape(height // P, P, width // P, P, channels).swapaxes(1, 2)
