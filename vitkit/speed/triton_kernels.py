"""The Triton kernels behind kernels.py, which documents what they compute. Imported only if Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm(a, b, shift, weight, bias, total, out, scales, rows, rows_b, D, eps, inverse_scale,
             PARTS: tl.constexpr, SUM: tl.constexpr, TO_FP8: tl.constexpr, TO_INT8: tl.constexpr, ROWS: tl.constexpr,
             WIDTH: tl.constexpr):
    """See kernels.add_norm; one program handles ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < D)
    x = tl.load(a + row * D + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        x += tl.load(b + (part * rows_b + row % rows_b) * D + column, mask=inside, other=0.0).to(tl.float32)
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
    if TO_INT8:
        largest = tl.maximum(tl.max(tl.where(wide, tl.abs(y), 0.0), axis=1, keep_dims=True), 1e-12)
        tl.store(scales + row, largest / 127.0, mask=row < rows)
        y = tl.floor(y * (127.0 / largest) + 0.5)
    tl.store(out + row * D + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def attention(qkv, out, T, width, scale, BQ: tl.constexpr, BT: tl.constexpr, SIZE: tl.constexpr):
    """See kernels.attention; one program handles BQ queries of a head, with all T <= BT keys at once."""
    head, image = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row, key, e = tl.program_id(1) * BQ + tl.arange(0, BQ), tl.arange(0, BT), tl.arange(0, SIZE)
    base = qkv + image * T * 3 * width + head * SIZE
    q = tl.load(base + row[:, None] * (3 * width) + e[None, :], mask=(row < T)[:, None], other=0.0)
    k = tl.load(base + width + key[None, :] * (3 * width) + e[:, None], mask=(key < T)[None, :], other=0.0)
    v = tl.load(base + 2 * width + key[:, None] * (3 * width) + e[None, :], mask=(key < T)[:, None], other=0.0)
    A = tl.where((key < T)[None, :], tl.dot(q, k) * (scale * 1.4426950409), float("-inf"))
    A = tl.exp2(A - tl.max(A, axis=1)[:, None])
    sa = tl.dot(A.to(v.dtype), v) / tl.sum(A, axis=1)[:, None]
    tl.store(out + (image * T + row)[:, None] * width + head * SIZE + e[None, :], sa.to(out.dtype.element_ty),
             mask=(row < T)[:, None])


@triton.jit
def linear_int8(a_at, b_at, out_at, bias, scale_a, scale_b, inverse_scale, M, N, K, GELU: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr, GROUP: tl.constexpr):
    """See kernels.linear_int8; persistent programs, each looping over tiles."""
    tall, wide, deep = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), tall * wide, PROGRAMS, flatten=True):
        first = tile // (GROUP * wide) * GROUP          # tiles that share rows of `a` run at the same time
        size = tl.minimum(tall - first, GROUP)
        m, n = first + tile % (GROUP * wide) % size, tile % (GROUP * wide) // size
        total = tl.zeros((BM, BN), tl.int32)
        for k in range(deep):
            total = tl.dot(a_at.load([m * BM, k * BK]), b_at.load([n * BN, k * BK]).T, total, out_dtype=tl.int32)
        row, column = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
        x = total.to(tl.float32) * tl.load(scale_a + row, mask=row < M, other=0.0)[:, None]
        x *= tl.load(scale_b + column, mask=column < N, other=0.0)[None, :]
        x += tl.load(bias + column, mask=column < N, other=0.0)[None, :].to(tl.float32)
        if GELU:
            x = x / (1.0 + tl.exp2(-2.302208198 * (x + 0.044715 * x * x * x)))       # tanh approximation
            x = tl.minimum(tl.maximum(x * inverse_scale, -448.0), 448.0)
        out_at.store([m * BM, n * BN], x.to(out_at.dtype))


@triton.jit
def rows_to_fp8(x_at, out, scales, lengths, K, LENGTHS: tl.constexpr, WIDTH: tl.constexpr):
    """See kernels.rows_to_fp8; one program handles one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    x = tl.load(x_at + row * K + column, mask=column < K, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12)
    tl.store(scales + row, largest / 448.0)
    if LENGTHS:
        tl.store(lengths + row, tl.sum(tl.abs(x), axis=0))
    x = tl.minimum(tl.maximum(x * (448.0 / largest), -448.0), 448.0)
    tl.store(out + row * K + column, x.to(out.dtype.element_ty), mask=column < K)
