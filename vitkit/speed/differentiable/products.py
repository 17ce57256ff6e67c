"""Matrix products and the gradients of their inputs and weights, by a library, and in fp8.

Legend: see __init__.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitkit.speed import cublas
from vitkit.speed.choices import pinning
from vitkit.speed.differentiable.launch import LAUNCH
from vitkit.speed.kernels import FP8, FP8_MAX, by_triton, multiply, rows_to_fp8

Context = Any       # torch's own type of a Function's context does not declare the attributes stored in it
Small = tuple[Tensor, Tensor]       # a matrix in fp8 [M, K], and the scales of its rows [M]


class Rounded:
    """Where the backward pass of an AddNorm leaves the gradient of its branch in fp8, for the product before it."""

    small: Small | None = None

    def take(self, dy: Tensor) -> Small:
        """Return the gradient in fp8, rounded here if nobody has done so."""
        small, self.small = self.small, None
        return rows_to_fp8(dy) if small is None else small


def weight_gradient(dy: Tensor, x: Tensor, wanted: bool = True) -> Tensor | None:
    """Return dy^T x in fp32: [M, N], [M, K] -> [N, K]; None if not wanted (a frozen weight)."""
    if not wanted:
        return None
    return torch.mm(dy.mT, x, out_dtype=torch.float32) if dy.is_cuda and dy.dtype != torch.float32 \
        else (dy.mT @ x).float()


def product(x: Tensor, W: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias: [M, K], [N, K] in x's type, [N] or None -> [M, N]."""
    if bias is None:
        return cublas.product(x, W.mT) if pinning() else x @ W.mT
    bias = bias.to(x.dtype)
    return cublas.linear(x, W.mT, bias) if pinning() else torch.addmm(bias, x, W.mT)


def linear(u: Tensor, W: Tensor, bias: Tensor | None, small: Tensor | None, scale: Tensor | None) -> Tensor:
    """Return u W^T + bias, computed in fp8 if u is there in fp8 too, as `small` with the scales of its rows."""
    return product(u, W, bias) if small is None or scale is None else small_product((small, scale), W, bias)


def input_gradient(dy: Tensor, W: Tensor) -> Tensor:
    """Return dy W, the gradient of x in `product`: [M, N], [N, K] -> [M, K]."""
    return cublas.product(dy, W) if pinning() else dy @ W


def small_product(x: Small, W: Tensor, bias: Tensor | None = None, lengths: Tensor | None = None,
                  turned: bool = False) -> Tensor:
    """Return x W^T + bias computed in fp8, or x W if `turned`: [M, N] in W's type.

    Args:
        x: [M, K] in fp8.
        W: [N, K], or [K, N] if turned; rounded to fp8 here.
        bias: [N], or None.
        lengths: [N]; filled with what `bound` needs.
        turned: whether W is to be transposed.
    """
    rows, scale = x
    bias = None if bias is None else bias.to(W.dtype)
    small = columns_to_fp8(W, lengths) if turned else rows_to_fp8(W, lengths)
    return multiply(rows, small, scale[:, None], bias, W.dtype)


def columns_to_fp8(x: Tensor, lengths: Tensor | None = None) -> Small:
    """Transpose and round to fp8 with one scale per row of the result: [M, N] -> [N, M] and the scales [N].

    Args:
        x: any floating-point type.
        lengths: [N]; filled with the sum of absolute values of each column.
    """
    if not by_triton(x):
        return rows_to_fp8(x.mT.contiguous(), lengths)
    import triton

    from vitkit.speed import triton_training

    M, N = x.shape
    out, scale = torch.empty(N, M, device=x.device, dtype=FP8), torch.empty(N, device=x.device)
    lengths, launch = torch.empty_like(scale) if lengths is None else lengths, LAUNCH["columns_to_fp8"]
    triton_training.columns_to_fp8[(triton.cdiv(N, launch["BLOCK"]),)](x, out, scale, lengths, M, N, **launch)
    return out, scale


def bound(scale: Tensor, lengths: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return scales [M] with which the rows of a small product fit into fp8, even after a GELU or its derivative.

    |x w + b| <= max |x| sum |w| + max |b|. A GELU increases nothing; its derivative and rounding add less than a
    quarter. Rows of zeros keep a scale above zero.

    Args:
        scale: [M], scales of x, whose largest value per row is 448 scale.
        lengths: [N], sum |w| of each row of the weight.
        bias: [N], or None.
    """
    rest = lengths.new_full((), 1e-30) if bias is None else bias.float().abs().amax().clamp(min=1e-30) / FP8_MAX
    return torch.addcmul(rest, scale, lengths.amax(), value=1.25)


class Product(torch.autograd.Function):
    """x W^T without a bias."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, rounded: Rounded | None = None) -> Tensor:
        """Map [M, K] and [N, K] to [M, N].

        Args:
            ctx: context of the backward pass.
            x: [M, K].
            weight: [N, K].
            rounded: makes the product for the gradient of x an fp8 one; None for x's own type.
        """
        W = weight.to(x.dtype)
        ctx.save_for_backward(x, W)
        ctx.rounded = rounded
        return product(x, W)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and the weight."""
        x, W = ctx.saved_tensors
        dy = dy.to(x.dtype)
        dx = input_gradient(dy, W) if ctx.rounded is None else small_product(ctx.rounded.take(dy), W, turned=True)
        return dx, weight_gradient(dy, x, ctx.needs_input_grad[1]), None
