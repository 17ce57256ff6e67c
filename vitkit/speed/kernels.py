"""What the fused engines need that no library call gives: a residual sum, a LayerNorm and a change of type in one pass
over memory; attention over few tokens; a matrix product in 8 bits with bias, GELU and rescaling as its last step. On
CUDA each is a Triton kernel (triton_kernels.py); beside it stands the same mathematics in plain torch, which is what
runs elsewhere and what the kernel is held to.

Legend: M = B T rows of tokens, D width.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


def by_triton(x: Tensor) -> bool:
    """Whether Triton's kernels run on x: on CUDA, and anywhere in Triton's interpreter."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def processors(x: Tensor) -> int:
    """How many multiprocessors the device of x has; the interpreter has one or two."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def to_fp8(x: Tensor, scale: float | Tensor) -> Tensor:
    """x / scale, rounded to 8-bit floating point; what lies beyond its largest number becomes that number."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def flat_patches(x: Tensor, P: int, prefix: int, dtype: torch.dtype) -> Tensor:
    """Patches, flattened, after rows of zeros for the tokens before them: [B, C, H, W] -> [B (prefix + N), C P P].

    Args:
        x: pixels, H and W multiples of P.
        P: side of a patch.
        prefix: tokens before an image's patches.
        dtype: of the result.
    """
    B, C, rows, columns = len(x), x.shape[1], x.shape[2] // P, x.shape[3] // P
    flat = x.new_zeros(B, prefix + rows * columns, C * P * P, dtype=dtype)
    cut = x.view(B, C, rows, P, columns, P).permute(0, 2, 4, 1, 3, 5)  # [B, rows, columns, C, P, P]
    flat[:, prefix:].view(B, rows, columns, C, P, P).copy_(cut)
    return flat.flatten(0, 1)


def to_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Each row of x / scale, rounded to 8-bit integers; `scale` [rows] is filled with what makes them fit.

    Args:
        x: [rows, columns].
        scale: takes the largest of each row / 127.
    """
    scale.copy_(x.float().abs().amax(1).clamp(min=1e-12) / 127)
    return (x.float() / scale[:, None] + 0.5).floor().to(torch.int8)


def plain_add_norm(
    a: Tensor,
    b: Tensor | None,
    shift: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    total: Tensor | None,
    scale: float | Tensor | None,
) -> Tensor:
    """`add_norm` in plain torch, computed in fp32 as the kernel does."""
    x = a.float()
    if b is not None:
        parts = b.float().view(-1, len(b) if len(b) <= len(a) else len(a), a.shape[1]).sum(0)
        x = (x.view(-1, *parts.shape) + parts).view(a.shape)
    if total is not None:
        total.copy_(x)
    x = F.layer_norm(x + shift.float(), x.shape[-1:], weight.float(), bias.float(), eps)
    if isinstance(scale, Tensor):
        return to_int8(x, scale)
    return x.to(a.dtype) if scale is None else to_fp8(x, scale)


def add_norm(
    a: Tensor,
    b: Tensor | None,
    shift: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    total: Tensor | None = None,
    scale: float | Tensor | None = None,
    **launch: Any,
) -> Tensor:
    """LN(a + b + shift), and the sum a + b on the side.

    Args:
        a: [M, D].
        b: [R, D], added to the rows of `a` in turn (row m gets b[m % R]); or [S M, D], all S parts of which are added;
            None adds nothing.
        shift: [D], added before the norm but not to the sum.
        weight: [D] of the LayerNorm.
        bias: [D] of the LayerNorm.
        eps: of the LayerNorm.
        total: [M, D], takes a + b; may be `a` itself.
        scale: a number makes the result fp8 of LN(...) / scale; a tensor [M] takes a scale for each row and makes the
            result int8.
        launch: rows and warps of one program, for measurements.
    """
    if not by_triton(a):
        return plain_add_norm(a, b, shift, weight, bias, eps, total, scale)
    import triton

    from vitkit.speed import triton_kernels

    M, D = a.shape
    R = M if b is None else min(M, len(b))
    of_rows = isinstance(scale, Tensor)
    dtype = a.dtype if scale is None else torch.int8 if of_rows else FP8
    out = torch.empty(M, D, device=a.device, dtype=dtype)
    rows, warps = launch.get("rows", 1), launch.get("warps", 1 if M >= 4096 and b is None and D <= 1024 else 4)
    triton_kernels.add_norm[(triton.cdiv(M, rows),)](
        a,
        b if b is not None else a,
        shift,
        weight,
        bias,
        total if total is not None else a,
        out,
        scale if of_rows else weight,
        M,
        R,
        D,
        eps,
        1 / scale if isinstance(scale, float) else 1.0,
        PARTS=0 if b is None else len(b) // R,
        SUM=total is not None,
        TO_FP8=dtype == FP8,
        TO_INT8=of_rows,
        ROWS=rows,
        WIDTH=triton.next_power_of_2(D),
        num_warps=warps,
    )
    return out


def takes_attention(T: int, size: int, dtype: torch.dtype) -> bool:
    """Whether `attention` has a kernel for T tokens and heads of this size."""
    return T <= 256 and size in (16, 32, 64, 128) and dtype in (torch.bfloat16, torch.float16)


def attention(qkv: Tensor, heads: int, B: int, T: int) -> Tensor:
    """Eqs. 6 and 7 for few tokens, read and written where they lie: [B T, 3 h d] -> [B T, h d].

    Args:
        qkv: q, k and v of Eq. 5.
        heads: h.
        B: images.
        T: tokens of an image.
    """
    width = qkv.shape[1] // 3
    if not by_triton(qkv):
        q, k, v = qkv.view(B, T, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)  # 3 x [B, h, T, d]
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B * T, width)
    import triton

    from vitkit.speed import triton_kernels

    out = torch.empty(B * T, width, device=qkv.device, dtype=qkv.dtype)
    size, queries = width // heads, 32 if B == 1 else 64
    triton_kernels.attention[(heads, triton.cdiv(T, queries), B)](
        qkv, out, T, width, size**-0.5, BQ=queries, BT=max(16, triton.next_power_of_2(T)), SIZE=size, num_warps=4
    )
    return out


def linear_int8(
    a: Tensor, b: tuple[Tensor, Tensor], scale_a: Tensor, bias: Tensor, dtype: torch.dtype, scale: float | None = None
) -> Tensor:
    """a b^T scale_a scale_b + bias of 8-bit integers; with a scale, GELU(that) / scale in fp8, all in one pass.

    Args:
        a: [M, K] int8.
        b: [N, K] int8, and the scales of its rows [N].
        scale_a: [M], of the rows of a.
        bias: [N].
        dtype: of a result without a scale.
        scale: of the result, which is then the first layer of an MLP.
    """
    matrix, scale_b = b
    if not by_triton(a):
        x = (a.float() @ matrix.float().mT) * (scale_a[:, None] * scale_b) + bias.float()
        return x.to(dtype) if scale is None else to_fp8(F.gelu(x, approximate="tanh"), scale)
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    from vitkit.speed import triton_kernels

    (M, K), N = a.shape, len(matrix)
    out = torch.empty(M, N, device=a.device, dtype=dtype if scale is None else FP8)
    BM, BN, BK = (128, 256, 128) if M >= 4096 else (64, 64, 128)
    at, programs = TensorDescriptor.from_tensor, processors(a)
    triton_kernels.linear_int8[(min(programs, triton.cdiv(M, BM) * triton.cdiv(N, BN)),)](
        at(a, [BM, BK]),
        at(matrix, [BN, BK]),
        at(out, [BM, BN]),
        bias,
        scale_a,
        scale_b,
        1 / (scale or 1.0),
        M,
        N,
        K,
        GELU=scale is not None,
        BM=BM,
        BN=BN,
        BK=BK,
        PROGRAMS=programs,
        GROUP=8,
        num_warps=8 if M >= 4096 else 4,
        num_stages=4 if out.dtype == FP8 else 3,
    )  # a wider result takes more of the shared memory
    return out


def multiply(a: Tensor, b: tuple[Tensor, Tensor], scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a b^T scale_a scale_b + bias, of fp8 matrices.

    Args:
        a: [M, K] fp8.
        b: [N, K] fp8, and the scales of its rows [N].
        scale: [M, 1], of the rows of a.
        bias: [N], or None.
        dtype: of the result.
    """
    matrix, of_b = b
    if a.is_cuda:
        return torch._scaled_mm(a, matrix.mT, scale, of_b[None], bias=bias, out_dtype=dtype, use_fast_accum=True)
    product = (a.float() @ matrix.float().mT) * (scale * of_b)
    return (product if bias is None else product + bias.float()).to(dtype)


def rows_to_fp8(x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x / scale in fp8, the scales of its rows): [M, K] -> [M, K], [M].

    Args:
        x: any floating-point type; a row's largest number becomes fp8's largest.
        lengths: [M], takes the sum of the sizes of each row's numbers.
    """
    if not by_triton(x):
        if lengths is not None:
            lengths.copy_(x.float().abs().sum(1))
        scale = x.float().abs().amax(1).clamp(min=1e-12) / FP8_MAX
        return to_fp8(x, scale[:, None]), scale
    import triton

    from vitkit.speed import triton_kernels

    M, K = x.shape
    out, scale = torch.empty(M, K, device=x.device, dtype=FP8), torch.empty(M, device=x.device)
    triton_kernels.rows_to_fp8[(M,)](
        x,
        out,
        scale,
        lengths if lengths is not None else scale,
        K,
        LENGTHS=lengths is not None,
        WIDTH=triton.next_power_of_2(K),
        num_warps=4 if K > 1024 else 1,
    )
    return out, scale
