"""The MLP: two products with a GELU between them.

Legend: see __init__.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitkit.speed import cublas, gelu_products
from vitkit.speed.choices import pinning
from vitkit.speed.differentiable.launch import LAUNCH
from vitkit.speed.differentiable.products import (
    Context,
    Rounded,
    bound,
    input_gradient,
    product,
    small_product,
    weight_gradient,
)
from vitkit.speed.dropping import Dropout, dropout_arguments
from vitkit.speed.kernels import FP8, by_triton, sum_rows, to_fp8


class MLP(torch.autograd.Function):
    """dropout(GELU(u W_1 + b_1)) W_2: both layers of an MLP; AddNorm adds the second bias."""

    @staticmethod
    def forward(ctx: Context, u: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, tanh: bool,
                drop: Dropout | None = None, rounded: Rounded | None = None, small: Tensor | None = None,
                scale: Tensor | None = None) -> Tensor:
        """Map [M, D] to [M, D].

        Args:
            ctx: context of the backward pass.
            u: [M, D].
            weight1: [H, D].
            bias1: [H].
            weight2: [D, H].
            tanh: whether GELU is the tanh approximation.
            drop: dropout after the GELU; None for none.
            rounded: where the gradient of the result is found in fp8; used with `small` only.
            small: u in fp8, to run the products in fp8; None for u's own type.
            scale: [M], scales of `small`.
        """
        W1, W2 = weight1.to(u.dtype), weight2.to(u.dtype)
        inner = scales = None
        ctx.ours = False
        if small is None or scale is None:
            b1 = bias1.to(u.dtype)
            ctx.ours = drop is None and pinning() and gelu_products.faster(u, W1, b1, W2, tanh, MLP.activate,
                                                                           MLP.derive)
            g, h = gelu_products.linear_gelu(u, W1.mT, b1, tanh) if ctx.ours else MLP.activate(u, W1, b1, tanh, drop)
        else:
            lengths = torch.empty(len(weight1), device=u.device)
            h, scales = small_product((small, scale), W1, bias1, lengths), bound(scale, lengths, bias1)
            scales = scales if drop is None else scales * max(drop.scale, 1.0)
            g, inner = gelu(h, tanh, drop, scales)
        ctx.save_for_backward(u, h, g, W1, W2)
        ctx.tanh, ctx.drop, ctx.fp8, ctx.rounded = tanh, drop, scales is not None, rounded or Rounded()
        return product(g, W2) if inner is None or scales is None else small_product((inner, scales), W2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of u, both weights and the first bias."""
        (u, h, g, W1, W2), drop = ctx.saved_tensors, ctx.drop
        dy = dy.to(u.dtype).contiguous()
        inner = scales = None
        if ctx.fp8:
            small, lengths = ctx.rounded.take(dy), torch.empty(h.shape[1], device=u.device)
            dh, scales = small_product(small, W2, None, lengths, turned=True), bound(small[1], lengths)
            scales = scales if drop is None else scales * max(drop.scale, 1.0)
            dh, of_bias, inner = gelu_gradient(dh, h, ctx.tanh, drop, scales)
        elif ctx.ours:
            dh, of_bias = gelu_products.product_dgelu(dy, W2, h)
        else:
            dh, of_bias = MLP.derive(dy, W2, h, ctx.tanh, drop)
        if inner is None or scales is None:
            du = input_gradient(dh, W1)
        else:
            du = small_product((inner, scales), W1, turned=True)
        return (du, weight_gradient(dh, u, ctx.needs_input_grad[1]), of_bias,
                weight_gradient(dy, g, ctx.needs_input_grad[3]), None, None, None, None, None)

    @staticmethod
    def activate(u: Tensor, W1: Tensor, b1: Tensor, tanh: bool, drop: Dropout | None = None) -> tuple[Tensor, Tensor]:
        """Return g, which is GELU(h) after dropout, and h = u W_1^T + b_1, by a library."""

        def apart(u: Tensor) -> tuple[Tensor, Tensor]:
            h = product(u, W1, b1)
            return gelu(h, tanh, drop)[0], h

        return cublas.linear_gelu(u, W1.mT, b1, apart) if drop is None and pinning() else apart(u)

    @staticmethod
    def derive(dy: Tensor, W2: Tensor, h: Tensor, tanh: bool, drop: Dropout | None = None) -> tuple[Tensor, Tensor]:
        """Return the gradient of h if that of g W_2^T is dy, and its sums over the rows, by a library."""

        def apart(dy: Tensor) -> tuple[Tensor, Tensor]:
            return gelu_gradient(input_gradient(dy, W2), h, tanh, drop)[:2]

        return cublas.product_dgelu(dy, W2, h, apart) if drop is None and pinning() else apart(dy)


def gelu(h: Tensor, tanh: bool, drop: Dropout | None, scales: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return GELU(h) after dropout, and that in fp8 if there are scales.

    Args:
        h: [M, N].
        tanh: whether GELU is the tanh approximation.
        drop: dropout of the result; None for none.
        scales: [M], of the rows in fp8; None for no fp8.
    """
    M, N = h.shape
    inner = torch.empty_like(h, dtype=FP8) if scales is not None else None
    if by_triton(h):
        import triton

        from vitkit.speed import triton_training

        g, launch = torch.empty_like(h), dict(LAUNCH["gelu_forward"])
        launch["BLOCK"] = block = min(launch["BLOCK"], triton.next_power_of_2(N))
        triton_training.gelu_forward[(triton.cdiv(N, block) * triton.cdiv(M, launch["STEP"]),)](
            h, g, inner if inner is not None else g, scales if scales is not None else g,
            *dropout_arguments(drop, g), M, N, TANH=tanh, APPROXIMATE=g.is_cuda, DROP=drop is not None,
            FP8_TOO=inner is not None, **launch)
        return g, inner
    g = F.gelu(h, approximate="tanh" if tanh else "none")
    g = g if drop is None else drop(g).to(g.dtype)
    if inner is not None and scales is not None:
        inner.copy_(to_fp8(g, scales[:, None]))
    return g, inner


def gelu_gradient(dg: Tensor, h: Tensor, tanh: bool, drop: Dropout | None,
                  scales: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradient of h in `gelu`, its sums over the rows in fp32, and it in fp8 if there are scales.

    Args:
        dg: [M, N], the gradient of the result; may be overwritten.
        h: [M, N].
        tanh: see `gelu`.
        drop: see `gelu`.
        scales: [M], of the gradient's rows in fp8; None for no fp8.
    """
    M, N = h.shape
    inner = torch.empty_like(dg, dtype=FP8) if scales is not None else None
    if by_triton(h):
        import triton

        from vitkit.speed import triton_training

        launch = dict(LAUNCH["gelu_backward"])
        launch["BLOCK"] = block = min(launch["BLOCK"], triton.next_power_of_2(N))
        sums = torch.empty(chunks := triton.cdiv(M, launch["ROWS"]), N, device=h.device)
        triton_training.gelu_backward[(triton.cdiv(N, block), chunks)](
            h, dg, inner if inner is not None else dg, scales if scales is not None else sums, sums,
            *dropout_arguments(drop, sums), M, N, TANH=tanh, APPROXIMATE=h.is_cuda, DROP=drop is not None,
            FP8_TOO=inner is not None, **launch)
        return dg, sum_rows(sums), inner
    dg = dg if drop is None else drop(dg).to(dg.dtype)
    dh = torch.ops.aten.gelu_backward(dg, h, approximate="tanh" if tanh else "none")
    if inner is not None and scales is not None:
        inner.copy_(to_fp8(dh, scales[:, None]))
    return dh, dh.float().sum(0), inner
