"""What the fused engine needs that no library call gives: a residual sum, a LayerNorm and a change of type in one pass
over memory. Each is a Triton kernel, and beside it the same mathematics in plain torch, which is what runs without a
CUDA device and what the tests hold the kernel to.

Legend: M = B T rows of tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:      # no CUDA build of torch: the plain versions serve
    triton = None

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """x / scale, rounded to 8-bit floating point; what lies beyond its largest number becomes that number."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def plain_add_norm(a: Tensor, b: Tensor | None, shift: Tensor, weight: Tensor, bias: Tensor, eps: float,
                   total: Tensor | None, scale: float | None) -> Tensor:
    """`add_norm` in plain torch, computed in fp32 as the kernel does."""
    x = a.float()
    if b is not None:
        x = (x.view(-1, *b.shape) + b.float()).view(a.shape)
    if total is not None:
        total.copy_(x)
    x = F.layer_norm(x + shift.float(), x.shape[-1:], weight.float(), bias.float(), eps)
    return x.to(a.dtype) if scale is None else to_fp8(x, scale)


def plain_gelu(x: Tensor, scale: float) -> Tensor:
    """`gelu_fp8` in plain torch."""
    return to_fp8(F.gelu(x.float()), scale)


if triton is not None:

    @triton.jit
    def _add_norm(a, b, shift, weight, bias, total, out, rows, rows_b, D, eps, inverse_scale,  # type: ignore[no-untyped-def]
                  HAS_B: tl.constexpr, SUM: tl.constexpr, TO_FP8: tl.constexpr, ROWS: tl.constexpr,
                  WIDTH: tl.constexpr):
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, WIDTH)[None, :]
        inside = (row < rows) & (column < D)
        x = tl.load(a + row * D + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_B:
            x += tl.load(b + (row % rows_b) * D + column, mask=inside, other=0.0).to(tl.float32)
        if SUM:
            tl.store(total + row * D + column, x.to(total.dtype.element_ty), mask=inside)
        wide = column < D
        x += tl.load(shift + column, mask=wide, other=0.0).to(tl.float32)
        mean = tl.sum(tl.where(wide, x, 0.0), axis=1, keep_dims=True) / D
        centred = tl.where(wide, x - mean, 0.0)
        variance = tl.sum(centred * centred, axis=1, keep_dims=True) / D
        y = centred * tl.rsqrt(variance + eps) * tl.load(weight + column, mask=wide, other=0.0).to(tl.float32)
        y += tl.load(bias + column, mask=wide, other=0.0).to(tl.float32)
        if TO_FP8:
            y = tl.minimum(tl.maximum(y * inverse_scale, -448.0), 448.0)
        tl.store(out + row * D + column, y.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _gelu_fp8(x, out, count, inverse_scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476)) * inverse_scale
        tl.store(out + at, tl.minimum(tl.maximum(v, -448.0), 448.0).to(out.dtype.element_ty), mask=inside)


def add_norm(a: Tensor, b: Tensor | None, shift: Tensor, weight: Tensor, bias: Tensor, eps: float,
             total: Tensor | None = None, scale: float | None = None, **launch: Any) -> Tensor:
    """LN(a + b + shift), and the sum a + b on the side.

    Args:
        a: [M, D].
        b: [R, D], added to the rows of `a` in turn (row m gets b[m % R]); None adds nothing.
        shift: [D], added before the norm but not to the sum.
        weight: [D] of the LayerNorm.
        bias: [D] of the LayerNorm.
        eps: of the LayerNorm.
        total: [M, D], takes a + b; may be `a` itself.
        scale: where given, the result is fp8 of LN(...) / scale.
        launch: rows and warps of one program, for measurements.
    """
    if triton is None or not a.is_cuda:
        return plain_add_norm(a, b, shift, weight, bias, eps, total, scale)
    M, D = a.shape
    out = torch.empty(M, D, device=a.device, dtype=a.dtype if scale is None else FP8)
    rows = launch.get("rows", 4 if M >= 4096 else 1)
    _add_norm[(triton.cdiv(M, rows),)](
        a, b if b is not None else a, shift, weight, bias, total if total is not None else a, out, M,
        M if b is None else len(b), D, eps, 1.0 if scale is None else 1 / scale, HAS_B=b is not None,
        SUM=total is not None, TO_FP8=scale is not None, ROWS=rows, WIDTH=triton.next_power_of_2(D),
        num_warps=launch.get("warps", 4))
    return out


def gelu_fp8(x: Tensor, scale: float) -> Tensor:
    """GELU(x) / scale in fp8.

    Args:
        x: any shape, contiguous.
        scale: of the result.
    """
    if triton is None or not x.is_cuda:
        return plain_gelu(x, scale)
    out = torch.empty_like(x, dtype=FP8)
    _gelu_fp8[(triton.cdiv(x.numel(), 4096),)](x, out, x.numel(), 1 / scale, BLOCK=4096, num_warps=8)
    return out
