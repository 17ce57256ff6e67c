"""One call that makes a notebook repeatable. Training itself never relies on it: there, randomness is a function of
(seed, epoch, index)."""

from __future__ import annotations

import random

import numpy as np
import torch


def set_seeds(seed: int = 42) -> None:
    """Seed Python, NumPy and torch (all devices).

    Args:
        seed: any whole number.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
