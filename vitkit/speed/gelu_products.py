"""The matrix products around an MLP's GELU in training, by a kernel for Hopper GPUs (gelu_products.cu).

The forward product stores GELU(h) and, instead of h, the derivative GELU'(h) in 8 bits, which is all that the backward
pass needs: a quarter less to write, half as much to read, and nothing to compute again.

Legend: M rows of tokens, a product is [M, K] [K, N].
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from vitkit.speed import cublas
from vitkit.speed.choices import busy_milliseconds, fastest, run_number
from vitkit.speed.hopper import BOX, Kernel, available, compiles, tensor_map, wgmma
from vitkit.speed.kernels import processors, sum_rows

ROWS, COLUMNS, DEPTH = 128, 128, 64  # a tile, and the depth of a part of it in shared memory
STAGES = 6  # parts in shared memory
SHARED = STAGES * (ROWS + COLUMNS) * DEPTH * 2 + 2 * ROWS * BOX * 2 + 128  # bytes: parts, two boxes, barriers
CLUSTER = 2  # multiprocessors that share a tile of W
SUMS = 4  # sums of columns that a tile has: one per warp
OWN = 16  # rows that a warp stores at once
Pair = Callable[..., tuple[Tensor, Tensor]]
Results = tuple[Tensor, Tensor, Tensor]
_faster: dict[tuple[str, torch.device, int], bool] = {}


def takes(x: Tensor, W: Tensor, tanh: bool | None = None) -> bool:
    """Return whether the kernel computes this product: many rows in bf16 on Hopper, in whole tiles but for the rows.

    Args:
        x: [M, K].
        W: [K, N], rows or columns contiguous.
        tanh: for the forward product, whether GELU is the tanh approximation; None for the backward one (the default).
    """
    K, N = W.shape
    whole = x.dtype == torch.bfloat16 and not (K % DEPTH or N % COLUMNS)
    return whole and cublas.takes(x, W) and available(x.device) and compiles(_kernel, x.device, tanh, W.stride(0) == 1)


def faster(u: Tensor, W1: Tensor, b1: Tensor, W2: Tensor, tanh: bool, activate: Pair, derive: Pair) -> bool:
    """Return whether the kernel is faster than a library, forward and backward together; a run times both once.

    Args:
        u: [M, K].
        W1: [N, K], the MLP's first weight.
        b1: [N], its bias.
        W2: [K, N], the MLP's second weight.
        tanh: whether GELU is the tanh approximation.
        activate: (u, W1, b1, tanh) -> GELU(h), h by the library.
        derive: (dy, W2, h, tanh) -> dh and its sums by the library.
    """
    if not (takes(u, W1.mT, tanh) and takes(u, W2)):
        return False
    what = f"GELU between products {len(u)} x {' x '.join(map(str, W1.mT.shape))}, {u.dtype}"
    key = what, u.device, run_number()
    if key not in _faster:

        def library() -> Results:
            g, h = activate(u, W1, b1, tanh)
            return g, *derive(u, W2, h, tanh)

        def ours() -> Results:
            g, slopes = linear_gelu(u, W1.mT, b1, tanh)
            return g, *product_dgelu(u, W2, slopes)

        ways = {"library": library}
        with contextlib.suppress(RuntimeError):  # the driver may refuse to launch it
            if all(map(cublas.same, ours(), library())):
                ways["ours"] = ours
        _faster[key] = fastest(what, ways, busy_milliseconds) == "ours"
    return _faster[key]


def linear_gelu(x: Tensor, W: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Return GELU(h), h = x W + bias, and GELU'(h) in 8 bits, in an order that `product_dgelu` knows.

    Args:
        x: [M, K].
        W: [K, N], rows or columns contiguous.
        bias: [N].
        tanh: whether GELU is the tanh approximation.
    """
    g = x.new_empty(len(x), W.shape[1])
    slopes = torch.empty(CLUSTER * _pairs(x), W.shape[1] // COLUMNS, ROWS, COLUMNS, device=x.device, dtype=torch.uint8)
    _launch(x, W, g, bias.contiguous(), slopes, tanh)
    return g, slopes


def product_dgelu(x: Tensor, W: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Return dh = x W times GELU'(h), and the sums of that over the rows in fp32.

    Args:
        x: [M, K], the gradient of the layer after the GELU.
        W: [K, N], its weight, rows or columns contiguous.
        slopes: GELU'(h), from `linear_gelu` for as many rows and columns.
    """
    dh = x.new_empty(len(x), W.shape[1])
    sums = torch.empty(CLUSTER * SUMS * _pairs(x), W.shape[1], device=x.device)
    _launch(x, W, dh, sums, slopes)
    return dh, sum_rows(sums)


def _pairs(x: Tensor) -> int:
    """Return the number of pairs of tiles that cover the rows of x."""
    return -(-len(x) // (CLUSTER * ROWS))


def _launch(x: Tensor, W: Tensor, out: Tensor, other: Tensor, slopes: Tensor, tanh: bool | None = None) -> None:
    """Start the kernel; `tanh` is None in the backward pass."""
    columns = W.stride(0) == 1
    pairs, tiles = _pairs(x), W.shape[1] // COLUMNS
    maps = tensor_map(x, ROWS), tensor_map(W.mT if columns else W, BOX), tensor_map(out, OWN)
    blocks = CLUSTER * min(processors(x) // CLUSTER, pairs * tiles)
    _kernel(x.device, tanh, columns)(blocks, *maps, other, slopes, pairs, tiles, len(W) // DEPTH)


@functools.cache
def _kernel(device: torch.device, tanh: bool | None, columns: bool) -> Kernel:
    names = ["COLUMNS"] * columns + ["FORWARD"] * (tanh is not None) + ["TANH"] * bool(tanh)
    parts = [*(f"#define {name}" for name in names), wgmma("mma", COLUMNS, turn_b=not columns)]
    return Kernel(Path(__file__).with_name("gelu_products.cu"), device, SHARED, parts)
