"""What the fused engines need and no library provides: residual sum, LayerNorm and type conversion in one pass over
memory; attention over few tokens; an 8-bit matrix product with bias, GELU and rescaling as its last step. On CUDA each
is a Triton kernel (triton_kernels.py). Each function also has the same mathematics in plain torch, which runs on other
devices and which tests compare the kernel with.

Legend: M = B T rows of tokens, D width.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
CHOOSING = threading.Lock()


def by_triton(x: Tensor) -> bool:
    """Return whether Triton kernels run on x: on CUDA, and on any device in Triton's interpreter."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def run_on(device: torch.device) -> bool:
    """Return whether kernels of ours run on a device: on CUDA with Triton, if the GPU multiplies in bf16. Elsewhere
    plain torch computes the same.
    """
    if device.type != "cuda":
        return True
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def first_of(*backends: SDPBackend) -> Iterator[None]:
    """A context in which torch computes attention by the first of these kernels that takes the tensors.

    The choice holds for the whole process, so one thread at a time makes one, and MATH, which takes everything, should
    be among the kernels: other threads may compute attention meanwhile.
    """
    with CHOOSING:
        settle_order()
        with sdpa_kernel([*backends], set_priority=True):
            yield


@functools.cache
def settle_order() -> None:
    """Let torch settle on an order of its own first. It does so in its first attention on CUDA; if that came inside
    `first_of`, leaving the context would put the order from before it back for good."""
    if torch.cuda.is_available():
        one = torch.zeros(1, 1, 8, 64, device="cuda", dtype=torch.float16)
        F.scaled_dot_product_attention(one, one, one)


def attends_by(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether one of torch's kernels takes these tensors, each [B, h, T, d]."""
    with first_of(backend, SDPBackend.MATH):
        return bool(torch._fused_sdp_choice(q, k, v) == backend.value)


def processors(x: Tensor) -> int:
    """Return the number of multiprocessors of the device of x; 2 in the interpreter."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def sum_rows(x: Tensor) -> Tensor:
    """Return the sum of many short rows in fp32: [M, ...] -> [...]; torch takes more than twice as long."""
    if not by_triton(x):
        return x.sum(0)
    import triton

    from vitkit.speed import triton_kernels

    out, launch = torch.empty_like(x[0]), {"ROWS": 256, "BLOCK": 16, "num_warps": 8}
    programs = triton.cdiv(out.numel(), launch["BLOCK"])
    triton_kernels.sum_rows[(programs,)](x, out, len(x), out.numel(), **launch)
    return out


def to_fp8(x: Tensor, scale: float | Tensor) -> Tensor:
    """Return x / scale rounded to fp8 and clamped to its range."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def flat_patches(x: Tensor, P: int, prefix: int, dtype: torch.dtype) -> Tensor:
    """Flatten patches, with rows of zeros for the prefix tokens: [B, C, H, W] -> [B (prefix + N), C P P].

    Args:
        x: pixels, H and W multiples of P.
        P: side of a patch.
        prefix: number of tokens before an image's patches.
        dtype: type of the result.
    """
    B, C, rows, columns = len(x), x.shape[1], x.shape[2] // P, x.shape[3] // P
    flat = x.new_zeros(B, prefix + rows * columns, C * P * P, dtype=dtype)
    cut = x.view(B, C, rows, P, columns, P).permute(0, 2, 4, 1, 3, 5)  # [B, rows, columns, C, P, P]
    flat[:, prefix:].view(B, rows, columns, C, P, P).copy_(cut)
    return flat.flatten(0, 1)


def to_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale rounded to 8-bit integers, with one scale per row.

    Args:
        x: [rows, columns].
        scale: [rows]; filled with the largest absolute value of each row / 127.
    """
    scale.copy_(x.float().abs().amax(1).clamp(min=1e-12) / 127)
    return (x.float() / scale[:, None]).round().to(torch.int8)


def plain_add_norm(
    a: Tensor,
    b: Tensor | None,
    shift: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    total: Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    """Compute `add_norm` in plain torch, in fp32 like the kernel."""
    x = a.float()
    if b is not None:
        parts = b.float().view(-1, len(b) if len(b) <= len(a) else len(a), a.shape[1]).sum(0)
        x = (x.view(-1, *parts.shape) + parts).view(a.shape)
    if total is not None:
        total.copy_(x)
    x = F.layer_norm(x + shift.float(), x.shape[-1:], weight.float(), bias.float(), eps)
    return x.to(a.dtype) if scale is None else to_int8(x, scale)


def add_norm(
    a: Tensor,
    b: Tensor | None,
    shift: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    total: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Return LN(a + b + shift), and optionally store the sum a + b.

    Args:
        a: [M, D]; its rows may be apart from each other if nothing is stored in them.
        b: [R, D], row m of `a` gets b[m % R]; or [S M, D], whose S parts are all added; None adds nothing.
        shift: [D], added before the norm but not to the stored sum.
        weight: [D] of the LayerNorm.
        bias: [D] of the LayerNorm.
        eps: of the LayerNorm.
        total: [M, D]; filled with a + b; may be `a` itself.
        scale: [M]; filled with one scale per row, which makes the result int8 (default: none, the type of `a`).
    """
    if not by_triton(a):
        return plain_add_norm(a, b, shift, weight, bias, eps, total, scale)
    import triton

    from vitkit.speed import triton_kernels

    M, D = a.shape
    R = M if b is None else min(M, len(b))
    out = torch.empty(M, D, device=a.device, dtype=a.dtype if scale is None else torch.int8)
    left = triton.next_power_of_2(D) // 2
    warps, programs, stages = (1, 16 * processors(a), 3) if M >= 4096 else (4, M, 1)
    triton_kernels.add_norm[(min(M, programs),)](
        a,
        b if b is not None else a,
        shift,
        weight,
        bias,
        total if total is not None else a,
        out,
        scale if scale is not None else weight,
        M,
        R,
        eps,
        D=D,
        APART=a.stride(0),
        PARTS=0 if b is None else len(b) // R,
        SUM=total is not None,
        TO_INT8=scale is not None,
        LEFT=left,
        RIGHT=triton.next_power_of_2(D - left),
        PROGRAMS=programs,
        STAGES=stages,
        num_warps=warps,
    )
    return out


def takes_attention(T: int, size: int, dtype: torch.dtype) -> bool:
    """Return whether `attention` has a kernel for T tokens and this head size and type."""
    return T <= 256 and size in (16, 32, 64, 128) and dtype in (torch.bfloat16, torch.float16)


def attention(qkv: Tensor, heads: int, B: int, T: int) -> Tensor:
    """Compute Eqs. 6 and 7 for few tokens without rearranging memory: [B T, 3 h d] -> [B T, h d].

    Args:
        qkv: q, k and v of Eq. 5.
        heads: h.
        B: number of images.
        T: tokens per image.
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


def takes_attention_loop(T: int, size: int, dtype: torch.dtype) -> bool:
    """Return whether `attention_loop` has a kernel for T tokens and this head size and type."""
    return T <= 272 and size in (64, 80) and dtype in (torch.bfloat16, torch.float16)


def attention_loop(qkv: Tensor, heads: int, B: int, T: int, lse: Tensor | None = None) -> Tensor:
    """Compute what `attention` computes, faster for many images: a program reads the keys and values of a head once.

    Tokens and head sizes are cut into powers of two: 197 tokens take 128 + 64 + 16 keys instead of 256, and a head of
    80 takes 64 + 16 instead of 128.

    Args:
        qkv: q, k and v of Eq. 5, [B T, 3 h d].
        heads: h.
        B: number of images.
        T: tokens per image.
        lse: [B, h, T], fp32; filled with log sum_j exp(q_i k_j / sqrt(d)), which the backward pass needs.
    """
    width = qkv.shape[1] // 3
    if not by_triton(qkv):
        if lse is not None:
            q, k, _ = qkv.float().view(B, T, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            lse.copy_((q @ k.mT * q.shape[-1] ** -0.5).logsumexp(-1))
        return attention(qkv, heads, B, T)
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    from vitkit.speed import triton_kernels

    out = torch.empty(B * T, width, device=qkv.device, dtype=qkv.dtype)
    size, queries = width // heads, 64
    main, rest = (size, 0) if size & (size - 1) == 0 else (64, size - 64)
    keys = cut(T)
    sides = [(n, e) for n in (queries, *keys) for e in (main, rest)]
    boxes = [TensorDescriptor.from_tensor(qkv, [n, e]) if n and e else None for n, e in sides]
    triton_kernels.attention_loop[(heads, B)](
        *boxes,
        out,
        out if lse is None else lse,
        T,
        width,
        size**-0.5 * math.log2(math.e),
        BQ=queries,
        A=keys[0],
        B=keys[1],
        C=keys[2],
        MAIN=main,
        REST=rest,
        LOOP=triton.cdiv(T, queries),
        LSE=lse is not None,
        num_warps=4,
        num_stages=2,
        maxnreg=None if lse is None else 168,  # registers, so that three programs still share a multiprocessor
    )
    return out


def cut(T: int) -> tuple[int, int, int]:
    """Return three powers of two, or 0, of at least 16 whose sum covers T: 197 -> 128, 64, 16."""
    left, found = -(-T // 16) * 16, []
    for part in range(3):
        power = 1 << max(left, 0).bit_length() >> 1  # the largest that is not too large
        found.append(power * 2 if part == 2 and power < left else power)
        left -= found[-1]
    return found[0], found[1], found[2]


def linear_int8(
    a: Tensor,
    b: tuple[Tensor, Tensor],
    scale_a: Tensor,
    bias: Tensor,
    dtype: torch.dtype,
    gelu: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return a b^T scale_a scale_b + bias for 8-bit integers, or GELU of that, in one pass.

    Args:
        a: [M, K] int8.
        b: [N, K] int8, and the scales of its rows [N].
        scale_a: [M], scales of the rows of a.
        bias: [N].
        dtype: type of the result without `scale`.
        gelu: whether the result goes through a GELU (tanh form).
        scale: a number makes the result fp8, divided by it.
    """
    matrix, scale_b = b
    if not by_triton(a):
        x = (a.float() @ matrix.float().mT) * (scale_a[:, None] * scale_b) + bias.float()
        x = F.gelu(x, approximate="tanh") if gelu else x
        return x.to(dtype) if scale is None else to_fp8(x, scale)
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    from vitkit.speed import triton_kernels

    (M, K), N = a.shape, len(matrix)
    out = torch.empty(M, N, device=a.device, dtype=dtype if scale is None else FP8)
    # A program of an integer product waits for each step of it, so two share a multiprocessor: one computes, one waits.
    # A tile of 16-bit results is stored in halves, or its memory would leave no room for the second program.
    many = M >= 4096
    (BM, BN, BK), halves = (128, 128, 128) if many else (64, 64, 128), many and out.itemsize > 1
    at, programs = TensorDescriptor.from_tensor, processors(a) * (2 if many else 1)
    triton_kernels.linear_int8[(min(programs, triton.cdiv(M, BM) * triton.cdiv(N, BN)),)](
        at(a, [BM, BK]),
        at(matrix, [BN, BK]),
        at(out, [BM, BN // 2 if halves else BN]),
        bias,
        scale_a,
        scale_b,
        1 / (scale or 1.0),
        M,
        N,
        K,
        GELU=gelu,
        APPROXIMATE=a.is_cuda,
        TO_FP8=scale is not None,
        HALVES=halves,
        BM=BM,
        BN=BN,
        BK=BK,
        PROGRAMS=programs,
        GROUP=8,
        num_warps=4,
        num_stages=3,
    )
    return out


def multiply(a: Tensor, b: tuple[Tensor, Tensor], scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a b^T scale_a scale_b + bias for fp8 matrices.

    Args:
        a: [M, K] fp8.
        b: [N, K] fp8, and the scales of its rows [N].
        scale: [M, 1], scales of the rows of a.
        bias: [N], or None.
        dtype: type of the result.
    """
    matrix, of_b = b
    if a.is_cuda:
        return torch._scaled_mm(a, matrix.mT, scale, of_b[None], bias=bias, out_dtype=dtype, use_fast_accum=True)
    product = (a.float() @ matrix.float().mT) * (scale * of_b)
    return (product if bias is None else product + bias.float()).to(dtype)


def rows_to_fp8(x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round to fp8 with one scale per row: [M, K] -> [M, K] and the scales [M].

    Args:
        x: any floating-point type; the largest absolute value of a row becomes fp8's largest.
        lengths: [M]; filled with the sum of absolute values of each row.
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
