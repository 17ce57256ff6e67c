"""What the fused engines need that no library call gives: a residual sum, a LayerNorm and a change of type in one pass
over memory; attention over few tokens; a matrix product in fp8 with GELU and rescaling as its last step. On CUDA each
is a Triton kernel (triton_kernels.py); beside it stands the same mathematics in plain torch, which is what runs
elsewhere and what the kernel is held to.

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


def to_fp8(x: Tensor, scale: float) -> Tensor:
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
    cut = x.view(B, C, rows, P, columns, P).permute(0, 2, 4, 1, 3, 5)                     # [B, rows, columns, C, P, P]
    flat[:, prefix:].view(B, rows, columns, C, P, P).copy_(cut)
    return flat.flatten(0, 1)


def plain_add_norm(a: Tensor, b: Tensor | None, shift: Tensor, weight: Tensor, bias: Tensor, eps: float,
                   total: Tensor | None, scale: float | None) -> Tensor:
    """`add_norm` in plain torch, computed in fp32 as the kernel does."""
    x = a.float()
    if b is not None:
        parts = b.float().view(-1, len(b) if len(b) <= len(a) else len(a), a.shape[1]).sum(0)
        x = (x.view(-1, *parts.shape) + parts).view(a.shape)
    if total is not None:
        total.copy_(x)
    x = F.layer_norm(x + shift.float(), x.shape[-1:], weight.float(), bias.float(), eps)
    return x.to(a.dtype) if scale is None else to_fp8(x, scale)


def add_norm(a: Tensor, b: Tensor | None, shift: Tensor, weight: Tensor, bias: Tensor, eps: float,
             total: Tensor | None = None, scale: float | None = None, **launch: Any) -> Tensor:
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
        scale: where given, the result is fp8 of LN(...) / scale.
        launch: rows and warps of one program, for measurements.
    """
    if not by_triton(a):
        return plain_add_norm(a, b, shift, weight, bias, eps, total, scale)
    import triton

    from vitkit.speed import triton_kernels

    M, D = a.shape
    R = M if b is None else min(M, len(b))
    out = torch.empty(M, D, device=a.device, dtype=a.dtype if scale is None else FP8)
    rows = launch.get("rows", 1)
    triton_kernels.add_norm[(triton.cdiv(M, rows),)](
        a, b if b is not None else a, shift, weight, bias, total if total is not None else a, out, M,
        R, D, eps, 1.0 if scale is None else 1 / scale, PARTS=0 if b is None else len(b) // R,
        SUM=total is not None, TO_FP8=scale is not None, ROWS=rows, WIDTH=triton.next_power_of_2(D),
        num_warps=launch.get("warps", 1 if M >= 4096 and b is None and D <= 1024 else 4))
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
        q, k, v = qkv.view(B, T, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)           # 3 x [B, h, T, d]
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B * T, width)
    import triton

    from vitkit.speed import triton_kernels

    out = torch.empty(B * T, width, device=qkv.device, dtype=qkv.dtype)
    size, queries = width // heads, 32 if B == 1 else 64
    triton_kernels.attention[(heads, triton.cdiv(T, queries), B)](
        qkv, out, T, width, size ** -0.5, BQ=queries, BT=max(16, triton.next_power_of_2(T)), SIZE=size, num_warps=4)
    return out


def mlp_fp8(a: Tensor, b: Tensor, scale_a: float, scale_b: Tensor, bias: Tensor, scale: float) -> Tensor:
    """GELU(a b^T scale_a scale_b + bias) / scale in fp8: the first layer of an MLP in one pass.

    Args:
        a: [M, K] fp8.
        b: [N, K] fp8.
        scale_a: of a.
        scale_b: [N], of the rows of b.
        bias: [N].
        scale: of the result.
    """
    if not by_triton(a):
        x = (a.float() @ b.float().mT) * (scale_a * scale_b) + bias.float()
        return to_fp8(F.gelu(x, approximate="tanh"), scale)
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    from vitkit.speed import triton_kernels

    (M, K), N = a.shape, len(b)
    out = torch.empty(M, N, device=a.device, dtype=FP8)
    BM, BN, BK = (128, 256, 128) if M >= 4096 else (64, 64, 128)
    at = TensorDescriptor.from_tensor
    programs = processors(a)
    triton_kernels.mlp_fp8[(min(programs, triton.cdiv(M, BM) * triton.cdiv(N, BN)),)](
        at(a, [BM, BK]), at(b, [BN, BK]), at(out, [BM, BN]), bias, scale_b, scale_a, 1 / scale, M, N, K, BM=BM, BN=BN,
        BK=BK, PROGRAMS=programs, GROUP=8, num_warps=8 if M >= 4096 else 4, num_stages=4)
    return out
