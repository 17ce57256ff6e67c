"""The Triton kernels behind kernels.py, which documents what they compute. Imported only if Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part(at, column, D: tl.constexpr, MASKED: tl.constexpr):
    """Load some columns of a row in fp32; those outside of it are 0."""
    if MASKED:
        x = tl.load(at + column, mask=column < D, other=0.0)
    else:
        x = tl.load(at + column)
    return x.to(tl.float32)


@triton.jit
def put(at, column, x, D: tl.constexpr, MASKED: tl.constexpr):
    """Store some columns of a row."""
    if MASKED:
        tl.store(at + column, x.to(at.dtype.element_ty), mask=column < D)
    else:
        tl.store(at + column, x.to(at.dtype.element_ty))


@triton.jit
def add_norm(a, b, shift, weight, bias, total, out, scales, rows, rows_b, eps, D: tl.constexpr, PARTS: tl.constexpr,
             SUM: tl.constexpr, TO_INT8: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PROGRAMS: tl.constexpr,
             STAGES: tl.constexpr):
    """See kernels.add_norm; a program handles every PROGRAMS-th row and keeps the weights in registers. A row is two
    powers of two wide, because 768 = 512 + 256 leaves no thread idle and 1024 would leave a quarter."""
    MASKED: tl.constexpr = LEFT + RIGHT > D
    left, right = tl.arange(0, LEFT), LEFT + tl.arange(0, RIGHT)
    shift_l, shift_r = part(shift, left, D, False), part(shift, right, D, MASKED)
    weight_l, weight_r = part(weight, left, D, False), part(weight, right, D, MASKED)
    bias_l, bias_r = part(bias, left, D, False), part(bias, right, D, MASKED)
    for row in tl.range(tl.program_id(0), rows, PROGRAMS, num_stages=STAGES):
        at = tl.full([], D, tl.int64) * row
        x, y = part(a + at, left, D, False), part(a + at, right, D, MASKED)
        for i in tl.static_range(PARTS):
            there = tl.full([], D, tl.int64) * (i * rows_b + row % rows_b)
            x += part(b + there, left, D, False)
            y += part(b + there, right, D, MASKED)
        if SUM:
            put(total + at, left, x, D, False)
            put(total + at, right, y, D, MASKED)
        x += shift_l
        y += shift_r
        mean = (tl.sum(x, axis=0) + tl.sum(y, axis=0)) / D
        x, y = x - mean, y - mean
        if MASKED:
            y = tl.where(right < D, y, 0.0)
        inverse = tl.rsqrt((tl.sum(x * x, axis=0) + tl.sum(y * y, axis=0)) / D + eps)
        x, y = x * inverse * weight_l + bias_l, y * inverse * weight_r + bias_r
        if TO_INT8:
            largest = tl.maximum(tl.maximum(tl.max(tl.abs(x), axis=0), tl.max(tl.abs(y), axis=0)), 1e-12)
            tl.store(scales + row, largest * (1 / 127.0))
            # Adding 1.5 x 2^23 rounds a number to an integer, which is then the low byte of its bits: two instructions.
            x = (x * (127.0 / largest) + 12582912.0).to(tl.int32, bitcast=True)
            y = (y * (127.0 / largest) + 12582912.0).to(tl.int32, bitcast=True)
        put(out + at, left, x, D, False)
        put(out + at, right, y, D, MASKED)


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
def gelu(x, APPROXIMATE: tl.constexpr):
    """GELU in its tanh form. The device has an instruction for tanh, off by 2^-11; Triton's interpreter has not."""
    if APPROXIMATE:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x * (0.7978845608 + 0.0356774081 * x * x)],
                                      dtype=tl.float32, is_pure=True, pack=1)
        return 0.5 * x * y + 0.5 * x
    else:
        return x / (1.0 + tl.exp2(-2.302208198 * (x + 0.044715 * x * x * x)))


@triton.jit
def rescaled(total, row, column, bias, scale_a, scale_b, inverse_scale, M, N, GELU: tl.constexpr,
             APPROXIMATE: tl.constexpr, TO_FP8: tl.constexpr):
    """The last step of linear_int8, for any part of a tile."""
    x = total.to(tl.float32) * tl.load(scale_a + row, mask=row < M, other=0.0)[:, None]
    x *= tl.load(scale_b + column, mask=column < N, other=0.0)[None, :]
    x += tl.load(bias + column, mask=column < N, other=0.0)[None, :].to(tl.float32)
    if GELU:
        x = gelu(x, APPROXIMATE)
    if TO_FP8:
        x = tl.minimum(tl.maximum(x * inverse_scale, -448.0), 448.0)
    return x


@triton.jit
def linear_int8(a_at, b_at, out_at, bias, scale_a, scale_b, inverse_scale, M, N, K, GELU: tl.constexpr,
                APPROXIMATE: tl.constexpr, TO_FP8: tl.constexpr, HALVES: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr, GROUP: tl.constexpr):
    """See kernels.linear_int8; persistent programs, each looping over tiles. HALVES stores a tile in two steps, which
    takes half the shared memory."""
    tall, wide, deep = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), tall * wide, PROGRAMS, flatten=True):
        first = tile // (GROUP * wide) * GROUP          # tiles that share rows of `a` run at the same time
        size = tl.minimum(tall - first, GROUP)
        m, n = first + tile % (GROUP * wide) % size, tile % (GROUP * wide) // size
        total = tl.zeros((BM, BN), tl.int32)
        for k in range(deep):
            total = tl.dot(a_at.load([m * BM, k * BK]), b_at.load([n * BN, k * BK]).T, total, out_dtype=tl.int32)
        row = m * BM + tl.arange(0, BM)
        if HALVES:
            left, right = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
            column = n * BN + tl.arange(0, BN // 2)
            x = rescaled(left, row, column, bias, scale_a, scale_b, inverse_scale, M, N, GELU, APPROXIMATE, TO_FP8)
            out_at.store([m * BM, n * BN], x.to(out_at.dtype))
            column += BN // 2
            x = rescaled(right, row, column, bias, scale_a, scale_b, inverse_scale, M, N, GELU, APPROXIMATE, TO_FP8)
            out_at.store([m * BM, n * BN + BN // 2], x.to(out_at.dtype))
        else:
            column = n * BN + tl.arange(0, BN)
            x = rescaled(total, row, column, bias, scale_a, scale_b, inverse_scale, M, N, GELU, APPROXIMATE, TO_FP8)
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
