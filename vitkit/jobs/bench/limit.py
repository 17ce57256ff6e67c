"""The hardware's limit for a model: the matrix products of its dense layers and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from vitkit import cpu_products
from vitkit.cuda_capture import capture, warm_up
from vitkit.jobs.bench.turns import Run
from vitkit.model.config import ViTConfig

LIMIT = "matrix products alone"


def product(x: Tensor, W: Tensor, out: Tensor) -> None:
    """Compute x W^T by the library that is the faster one here: [M, K], [N, K] -> [M, N].

    Args:
        x: see above.
        W: see above.
        out: memory for the result, where the library takes some.
    """
    if cpu_products.takes(x, W):
        cpu_products.linear(x, W)
    else:
        torch.mm(x, W.mT, out=out)


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
    sides = [(D, 3 * D), (D, D), (D, H), (H, D)]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device, dtype=dtype)

    x = {n: matrix(M, n) for n in {D, H, 3 * D}}
    W = [matrix(m, n) for n, m in sides]
    dW = [torch.empty_like(w) for w in W]
    y = {n: torch.empty_like(x[n]) for n in x}

    @torch.no_grad()
    def run() -> None:
        for _layer in range(c.num_hidden_layers):
            for (n, m), w, dw in zip(sides, W, dW, strict=True):
                product(x[n], w, y[m])  # forward
                if backward:
                    product(x[m], w.mT, y[n])  # gradient of the layer's input
                    product(x[m].mT, x[n].mT, dw)  # gradient of its weights

    return run if device.type == "cpu" else graphed(run)


def graphed(run: Run) -> Run:
    """Return the same work as one CUDA graph: for a few images, launching kernels takes longer than running them."""
    warm_up(run)
    graph, _ = capture(run)

    def replay(_kept: Run = run) -> None:  # a graph does not keep its input tensors alive
        graph.replay()

    return replay
