"""Seed all global generators, to make a notebook repeatable. vitkit's own training does not use them."""

from __future__ import annotations

import random

import numpy as np
import torch


def set_seeds(seed: int = 42) -> None:
    """Seed Python, NumPy and torch (all devices).

    Args:
        seed: any whole number (default: 42).
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
