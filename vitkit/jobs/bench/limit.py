"""A limit for a model: the matrix products of its dense layers and nothing else.

On a CPU, torch computes them by the library that `cpu-fused` uses. Fewer bits or another runtime can exceed the limit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitkit.cpu_products import linear
from vitkit.cuda_capture import capture, warm_up
from vitkit.jobs.bench.turns import Run
from vitkit.model.config import ViTConfig

LIMIT = "matrix products alone"


def products(c: ViTConfig, batch: int, device: torch.device, dtype: torch.dtype, *, backward: bool = False) -> Run:
    """Return a function that computes the products of one batch.

    Args:
        c: the architecture.
        batch: number of images.
        device: where to compute.
        dtype: type of the matrices.
        backward: also compute the two products that give each layer's gradients.
    """
    M, D, H = batch * (c.num_prefix_tokens + c.num_patches), c.hidden_size, c.intermediate_size

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device, dtype=dtype)

    x = {n: matrix(M, n) for n in {D, H, 3 * D}}
    layers = [(x[n], matrix(m, n), x[m]) for n, m in ((D, 3 * D), (D, D), (D, H), (H, D))]

    def run() -> None:
        for _block in range(c.num_hidden_layers):
            for u, W, dy in layers:
                linear(u, W)  # forward
                if backward:
                    linear(dy, W.mT)  # gradient of the layer's input
                    linear(dy.mT, u.mT)  # gradient of its weights

    return run if device.type == "cpu" else graphed(run)


def graphed(run: Run) -> Run:
    """Return the same work as one CUDA graph: for a few images, launching kernels takes longer than running them."""
    warm_up(run)
    graph, _ = capture(run)

    def replay(_kept: Run = run) -> None:  # a graph does not keep its input tensors alive
        graph.replay()

    return replay
