"""What the page shows before the model is loaded: for each example, the answers, norms and attention, in few bytes."""

from __future__ import annotations

import gzip

import numpy as np
import torch
from torch import Tensor

from vitkit.explore.graph import OUTPUTS, Explored
from vitkit.types import Array


@torch.inference_mode()
def compute(graph: Explored, pixels: Tensor) -> dict[str, Array]:
    """Return the outputs of a graph for one image with nothing erased.

    Args:
        graph: the graph, in fp32 on the CPU.
        pixels: [1, C, H, W], normalised.
    """
    keep = torch.ones(graph.model.config.num_patches)
    return {name: value.numpy() for name, value in zip(OUTPUTS, graph(pixels, keep), strict=True)}


def packed(found: dict[str, Array]) -> bytes:
    """Return a result as `page/result.js: Stored` reads it, compressed.

    Float32: lens [L + 1, K], the norm of each state [L + 1, T], the largest attention of each row [L, h, T]. Then the
    attention [L, h, T, T] in 8 bits, as the square root of its share of that largest one, because most are small.

    Args:
        found: the result of `compute`.
    """
    attention = found["attention"]
    most = attention.max(-1, keepdims=True)
    small = np.rint(np.sqrt(attention / most) * 255).astype(np.uint8)
    parts = [found["lens"], np.linalg.norm(found["states"], axis=-1), most]
    return gzip.compress(b"".join(part.astype("<f4").tobytes() for part in parts) + small.tobytes(), 9, mtime=0)
