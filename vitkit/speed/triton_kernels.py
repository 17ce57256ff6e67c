"""The Triton kernels behind kernels.py, which documents what they compute. Imported only if Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_rows(x, out, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """See kernels.sum_rows; a program sums BLOCK columns, ROWS rows at a time."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)
        total += tl.load(x + row.to(tl.int64)[:, None] * columns + column, mask=inside, other=0.0)
    tl.store(out + column, tl.sum(total, axis=0), mask=column < columns)


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
def add_norm(a, b, shift, weight, bias, total, out, scales, rows, rows_b, eps, D: tl.constexpr, APART: tl.constexpr,
             PARTS: tl.constexpr, SUM: tl.constexpr, TO_INT8: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
             PROGRAMS: tl.constexpr, STAGES: tl.constexpr):
    """See kernels.add_norm; a program handles every PROGRAMS-th row and keeps the weights in registers. A row is two
    powers of two wide, because 768 = 512 + 256 leaves no thread idle and 1024 would leave a quarter."""
    MASKED: tl.constexpr = LEFT + RIGHT > D
    left, right = tl.arange(0, LEFT), LEFT + tl.arange(0, RIGHT)
    shift_l, shift_r = part(shift, left, D, False), part(shift, right, D, MASKED)
    weight_l, weight_r = part(weight, left, D, False), part(weight, right, D, MASKED)
    bias_l, bias_r = part(bias, left, D, False), part(bias, right, D, MASKED)
    for row in tl.range(tl.program_id(0), rows, PROGRAMS, num_stages=STAGES):
        at = tl.full([], D, tl.int64) * row
        source = a + tl.full([], APART, tl.int64) * row
        x, y = part(source, left, D, False), part(source, right, D, MASKED)
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
def values(v_at, row, column, first, T, KEYS: tl.constexpr, LAST: tl.constexpr):
    """v of some keys. Rows beyond the image's tokens are another image's and must not matter, even if they are NaN."""
    v = v_at.load([row + first, column])
    if LAST:
        v = tl.where((first + tl.arange(0, KEYS) < T)[:, None], v, 0.0)
    return v


@triton.jit
def masked(S, first, T, KEYS: tl.constexpr, LAST: tl.constexpr):
    """Scores of some keys, of which the last may be beyond the image's tokens."""
    if LAST:
        S = tl.where((first + tl.arange(0, KEYS) < T)[None, :], S, float("-inf"))
    return S


@triton.jit
def attention_loop(q_at, q_rest_at, a_at, a_rest_at, b_at, b_rest_at, c_at, c_rest_at, out, lse, T, width,
                   scale, BQ: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, MAIN: tl.constexpr,
                   REST: tl.constexpr, LOOP: tl.constexpr, LSE: tl.constexpr):
    """See kernels.attention_loop; a program handles a head of an image, BQ queries at a time, with all keys at once,
    which it loads once. The keys are in up to three parts, A + B + C >= T, and a head in two, MAIN + REST: each a power
    of two. Results are stored in halves, or their shared memory would leave no room for a third program on a
    multiprocessor."""
    head, image = tl.program_id(0), tl.program_id(1)
    row, column = image * T, head * (MAIN + REST)
    of_k, of_v = width + column, 2 * width + column
    k_a, v_a = a_at.load([row, of_k]), values(a_at, row, of_v, 0, T, A, B == 0)
    if REST > 0:
        kr_a, vr_a = a_rest_at.load([row, of_k + MAIN]), values(a_rest_at, row, of_v + MAIN, 0, T, A, B == 0)
    if B > 0:
        k_b, v_b = b_at.load([row + A, of_k]), values(b_at, row, of_v, A, T, B, C == 0)
        if REST > 0:
            kr_b, vr_b = b_rest_at.load([row + A, of_k + MAIN]), values(b_rest_at, row, of_v + MAIN, A, T, B, C == 0)
    if C > 0:
        k_c, v_c = c_at.load([row + A + B, of_k]), values(c_at, row, of_v, A + B, T, C, True)
        if REST > 0:
            kr_c = c_rest_at.load([row + A + B, of_k + MAIN])
            vr_c = values(c_rest_at, row, of_v + MAIN, A + B, T, C, True)
    for i in range(LOOP):
        q = q_at.load([row + i * BQ, column])
        S_a = tl.dot(q, k_a.T)
        if REST > 0:
            q_rest = q_rest_at.load([row + i * BQ, column + MAIN])
            S_a = tl.dot(q_rest, kr_a.T, S_a)
        S_a = masked(S_a, 0, T, A, B == 0)
        top = tl.max(S_a, axis=1)
        if B > 0:
            S_b = tl.dot(q, k_b.T)
            if REST > 0:
                S_b = tl.dot(q_rest, kr_b.T, S_b)
            S_b = masked(S_b, A, T, B, C == 0)
            top = tl.maximum(top, tl.max(S_b, axis=1))
        if C > 0:
            S_c = tl.dot(q, k_c.T)
            if REST > 0:
                S_c = tl.dot(q_rest, kr_c.T, S_c)
            S_c = masked(S_c, A + B, T, C, True)
            top = tl.maximum(top, tl.max(S_c, axis=1))
        top *= scale
        P_a = tl.exp2(S_a * scale - top[:, None])
        total = tl.sum(P_a, axis=1)
        o = tl.dot(P_a.to(v_a.dtype), v_a)
        if REST > 0:
            o_rest = tl.dot(P_a.to(v_a.dtype), vr_a)
        if B > 0:
            P_b = tl.exp2(S_b * scale - top[:, None])
            total += tl.sum(P_b, axis=1)
            o = tl.dot(P_b.to(v_b.dtype), v_b, o)
            if REST > 0:
                o_rest = tl.dot(P_b.to(v_b.dtype), vr_b, o_rest)
        if C > 0:
            P_c = tl.exp2(S_c * scale - top[:, None])
            total += tl.sum(P_c, axis=1)
            o = tl.dot(P_c.to(v_c.dtype), v_c, o)
            if REST > 0:
                o_rest = tl.dot(P_c.to(v_c.dtype), vr_c, o_rest)
        query = i * BQ + tl.arange(0, BQ)
        at = out + (row + query).to(tl.int64)[:, None] * width + column
        inside, e = (query < T)[:, None], tl.arange(0, MAIN // 2)[None, :]
        left, right = tl.split(tl.permute(tl.reshape(o / total[:, None], (BQ, 2, MAIN // 2)), (0, 2, 1)))
        tl.store(at + e, left.to(out.dtype.element_ty), mask=inside)
        tl.store(at + MAIN // 2 + e, right.to(out.dtype.element_ty), mask=inside)
        if REST > 0:
            tl.store(at + MAIN + tl.arange(0, REST)[None, :], (o_rest / total[:, None]).to(out.dtype.element_ty),
                     mask=inside)
        if LSE:
            at = lse + (image * tl.num_programs(0) + head) * T + query
            tl.store(at, (top + tl.log2(total)) * 0.6931471806, mask=query < T)


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
