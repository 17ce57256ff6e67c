"""The Triton kernels behind differentiable/, which documents what they compute. Imported only if Triton is installed.

Sums over rows (gradients of biases and of LayerNorm weights) are written as one partial sum per program and added up
later in a fixed order: atomic additions would make a step differ from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept(at, key, limit):
    """See dropping.kept; `at` are the numbers of the elements, of which the lower 32 bits count."""
    x = at.to(tl.uint32) * 0x9E3779B9 + tl.load(key).to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x ^ tl.load(key + 1).to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x.to(tl.int32, bitcast=True) >= limit


@triton.jit
def drop(x_at, out, key, limit, scale, size, BLOCK: tl.constexpr):
    """Dropout of a tensor with `size` elements; a program handles BLOCK of them."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_at + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, tl.where(kept(at, key, limit), x * scale, 0.0).to(out.dtype.element_ty), mask=at < size)


@triton.jit
def place(row, rank, out, tokens, exists):
    """Return the row of a branch that belongs to a row of the tokens, which is negative where stochastic depth leaves
    out the image; see dropping.Depth."""
    return (tl.load(rank + row // tokens, mask=exists, other=0) - out).to(tl.int64) * tokens + row % tokens


@triton.jit
def factor(row, coin, chance, scale, tokens):
    """Return what stochastic depth multiplies a row of a branch by."""
    dropped = (row < 0) | (row < tokens) & (tl.load(coin) < chance)
    return tl.where(dropped, 0.0, scale)


@triton.jit(do_not_specialize=["before_out", "after_out"])
def norm_forward(z, branch, bias, before, before_out, coin, chance, before_scale, after, after_out, key, limit, scale,
                 weight, shift, total, out, mean_at, rstd_at, small, scales, tokens, D, eps, HAS_BRANCH: tl.constexpr,
                 BEFORE: tl.constexpr, AFTER: tl.constexpr, DROP: tl.constexpr, FP8_TOO: tl.constexpr,
                 WIDTH: tl.constexpr):
    """See differentiable.AddNorm; one program handles one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < D
    at = row * D + column
    x = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        there = row
        if BEFORE:
            there = place(row, before, before_out, tokens, True)
        b_at = there * D + column
        b = tl.load(branch + b_at, mask=inside & (there >= 0), other=0.0).to(tl.float32)
        b += tl.load(bias + column, mask=inside, other=0.0)
        if DROP:
            b = tl.where(kept(b_at, key, limit), b * scale, 0.0)
        if BEFORE:
            b *= factor(there, coin, chance, before_scale, tokens)
        x = (x + b).to(total.dtype.element_ty)
        tl.store(total + at, x, mask=inside)
        x = x.to(tl.float32)                        # statistics of the stored value, which backward reads
    mean = tl.sum(x, axis=0) / D
    centred = tl.where(inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=0) / D + eps)
    y = centred * rstd * tl.load(weight + column, mask=inside, other=0.0)
    y += tl.load(shift + column, mask=inside, other=0.0)
    there = row
    if AFTER:
        there = place(row, after, after_out, tokens, True)
        at = there * D + column
        inside &= there >= 0
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
    if FP8_TOO:
        largest = tl.maximum(tl.max(tl.abs(tl.where(column < D, y, 0.0)), axis=0), 1e-12)
        tl.store(scales + there, largest / 448.0, mask=there >= 0)
        y = tl.minimum(tl.maximum(y * (448.0 / largest), -448.0), 448.0)
        tl.store(small + tl.max_contiguous(at, 8), y.to(small.dtype.element_ty), mask=inside)
    tl.store(mean_at + row, mean)
    tl.store(rstd_at + row, rstd)


@triton.jit(do_not_specialize=["before_out", "after_out"])
def norm_backward(z, du, dz_in, weight, mean_at, rstd_at, before, before_out, coin, chance, before_scale, after,
                  after_out, key, limit, scale, dz, dbranch, small, scales, sums, rows, tokens, D, turns,
                  HAS_DZ: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, DROP: tl.constexpr,
                  FP8_TOO: tl.constexpr, PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """See differentiable.AddNorm; a program handles every PROGRAMS-th row, `turns` in all, and writes sums [3, D]."""
    program = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    w = tl.load(weight + column, mask=column < D, other=0.0)
    of_weight = tl.zeros((WIDTH,), tl.float32)
    of_shift = tl.zeros((WIDTH,), tl.float32)
    of_bias = tl.zeros((WIDTH,), tl.float32)
    for turn in tl.range(0, turns, num_stages=STAGES):
        row = (turn * PROGRAMS + program).to(tl.int64)
        inside = (column < D) & (row < rows)
        at = row * D + column
        x = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
        if AFTER:
            read = place(row, after, after_out, tokens, row < rows)
            g = tl.load(du + read * D + column, mask=inside & (read >= 0), other=0.0).to(tl.float32)
        else:
            g = tl.load(du + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_at + row, mask=row < rows, other=0.0)
        x = tl.where(inside, (x - tl.load(mean_at + row, mask=row < rows, other=0.0)) * rstd, 0.0)
        of_weight += g * x
        of_shift += g
        g *= w
        dx = rstd * (g - tl.sum(g, axis=0) / D - x * (tl.sum(g * x, axis=0) / D))
        if HAS_DZ:
            dx += tl.load(dz_in + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dz + at, dx.to(dz.dtype.element_ty), mask=inside)
        there = row
        if BEFORE:
            there = place(row, before, before_out, tokens, row < rows)
            dx *= factor(there, coin, chance, before_scale, tokens)
            at = there * D + column
            inside &= there >= 0
        if DROP:
            dx = tl.where(kept(at, key, limit), dx * scale, 0.0)
        if BEFORE or DROP:
            tl.store(dbranch + at, dx.to(dbranch.dtype.element_ty), mask=inside)
        dx = tl.where(inside, dx, 0.0)
        of_bias += dx
        if FP8_TOO:
            largest = tl.maximum(tl.max(tl.abs(dx), axis=0), 1e-12)
            tl.store(scales + there, largest / 448.0, mask=(there >= 0) & (row < rows))
            dx = tl.minimum(tl.maximum(dx * (448.0 / largest), -448.0), 448.0)
            tl.store(small + tl.max_contiguous(at, 8), dx.to(small.dtype.element_ty), mask=inside)
    at, wide = program * 3 * D + column, column < D
    tl.store(sums + at, of_weight, mask=wide)
    tl.store(sums + at + D, of_shift, mask=wide)
    tl.store(sums + at + 2 * D, of_bias, mask=wide)


@triton.jit
def phi(x, TANH: tl.constexpr, APPROXIMATE: tl.constexpr):
    """Return (p, slope): GELU(x) = x p and GELU'(x) = p + x slope; p is the normal CDF or its tanh approximation.

    The device has an instruction for tanh, off by 2^-11; Triton's interpreter has not. With one more term, tanh is the
    CDF to 2^-15, for numbers up to 7, beyond which it is 1 whatever its argument is: half as many instructions.
    """
    if APPROXIMATE:
        square = x * x
        if TANH:
            u, slope = 0.7978845608 + 0.0356774081 * square, 0.7978845608 + 0.1070322243 * square
        else:
            square = tl.minimum(square, 50.0)
            u = 0.797480661 + (0.0369836548 - 0.000346257563 * square) * square
            slope = 0.797480661 + (0.1109509644 - 0.001731287815 * square) * square
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x * u], dtype=tl.float32, is_pure=True,
                                      pack=1)
        p = 0.5 * t + 0.5
        slope *= 0.5 - 0.5 * t * t
    elif TANH:
        p = 1.0 / (1.0 + tl.exp2(-2.302208198 * (x + 0.044715 * x * x * x)))
        slope = p * (1.0 - p) * (1.5957691216 + 0.2140644488 * x * x)
    else:       # Abramowitz and Stegun 7.1.26: error at most 1.5e-7; it shares its exponential with the density
        e = tl.exp2(-0.7213475204 * x * x)
        t = 1.0 / (1.0 + 0.2316418882 * tl.abs(x))
        tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t * e
        p = tl.where(x >= 0, 1.0 - 0.5 * tail, 0.5 * tail)
        slope = 0.3989422804 * e
    return p, slope


@triton.jit
def tile(first, column, rows, N, STEP: tl.constexpr):
    """Return row numbers, mask and offsets of STEP rows of a matrix [rows, N], starting at row `first`."""
    row = first + tl.arange(0, STEP)[:, None]
    return row, (row < rows) & (column < N)[None, :], row * N + column[None, :]


@triton.jit
def store_small(x, small, scales, first, column, rows, N, inside, STEP: tl.constexpr):
    """Store a tile in fp8 with the scales of its rows.

    Each thread stores eight numbers, as for bf16: with sixteen, the widest store, the compiler would choose another
    layout and compute everything twice.
    """
    row = first + tl.arange(0, STEP)
    inverse = 1.0 / tl.load(scales + row, mask=row < rows, other=1.0)
    at = tl.max_contiguous(row[:, None] * N + column[None, :], (1, 8))
    tl.store(small + at, (x * inverse[:, None]).to(small.dtype.element_ty), mask=inside)


@triton.jit
def columns_to_fp8(x_at, out, scales, lengths, M, N, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """See differentiable.columns_to_fp8; a program handles BLOCK columns, STEP rows at a time, twice."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.full((STEP, BLOCK), 1e-12, tl.float32)
    length = tl.zeros((STEP, BLOCK), tl.float32)
    for start in range(0, M, STEP):
        _, inside, at = tile(start, column, M, N, STEP)
        x = tl.abs(tl.load(x_at + at, mask=inside, other=0.0).to(tl.float32))
        largest = tl.maximum(largest, x)
        length += x
    top = tl.max(largest, axis=0)
    tl.store(scales + column, top / 448.0, mask=column < N)
    tl.store(lengths + column, tl.sum(length, axis=0), mask=column < N)
    for start in range(0, M, STEP):
        row, inside, at = tile(start, column, M, N, STEP)
        x = tl.load(x_at + at, mask=inside, other=0.0).to(tl.float32) * (448.0 / top)[None, :]
        x = tl.minimum(tl.maximum(x, -448.0), 448.0).to(out.dtype.element_ty)
        tl.store(out + column[None, :] * M + row, x, mask=inside)


@triton.jit
def gelu_forward(h, out, small, scales, key, limit, scale, rows, N, TANH: tl.constexpr, APPROXIMATE: tl.constexpr,
                 DROP: tl.constexpr, FP8_TOO: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Compute GELU elementwise, with dropout if DROP; with FP8_TOO, also store it in fp8."""
    wide = tl.cdiv(N, BLOCK)            # one axis for rows and columns: the others end at 65,535 programs
    column = tl.program_id(0) % wide * BLOCK + tl.arange(0, BLOCK)
    first = (tl.program_id(0) // wide).to(tl.int64) * STEP
    _, inside, at = tile(first, column, rows, N, STEP)
    x = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
    p, _ = phi(x, TANH, APPROXIMATE)
    y = x * p
    if DROP:
        y = tl.where(kept(at, key, limit), y * scale, 0.0)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
    if FP8_TOO:
        store_small(y, small, scales, first, column, rows, N, inside, STEP)


@triton.jit
def gelu_backward(h, gradient, small, scales, sums, key, limit, scale, rows, N, TANH: tl.constexpr,
                  APPROXIMATE: tl.constexpr, DROP: tl.constexpr, FP8_TOO: tl.constexpr, STEP: tl.constexpr,
                  ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Replace the gradient after the GELU and its dropout by the one before them; with FP8_TOO, also store it in fp8.
    A program writes the sums of its ROWS rows."""
    first = tl.program_id(1).to(tl.int64) * ROWS
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((STEP, BLOCK), tl.float32)         # reduced over rows once, at the end: it takes a barrier
    for start in tl.range(0, ROWS, STEP, num_stages=STAGES):
        _, inside, at = tile(first + start, column, rows, N, STEP)
        x = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        p, slope = phi(x, TANH, APPROXIMATE)
        g *= p + x * slope
        if DROP:
            g = tl.where(kept(at, key, limit), g * scale, 0.0)
        tl.store(gradient + at, g.to(gradient.dtype.element_ty), mask=inside)
        if FP8_TOO:
            store_small(g, small, scales, first + start, column, rows, N, inside, STEP)
        total += g
    tl.store(sums + tl.program_id(1) * N + column, tl.sum(total, axis=0), mask=column < N)


@triton.jit
def side_by_side(a, b, c, out, sums, rows, N, STEP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                 STAGES: tl.constexpr):
    """Concatenate a, b, c [rows, N] to [rows, 3 N]; a program writes the sums of its rows."""
    part = tl.program_id(2)
    first = tl.program_id(1).to(tl.int64) * ROWS
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((STEP, BLOCK), tl.float32)         # reduced over rows once, at the end: it takes a barrier
    for start in tl.range(0, ROWS, STEP, num_stages=STAGES):
        row, inside, at = tile(first + start, column, rows, N, STEP)
        if part == 0:
            x = tl.load(a + at, mask=inside, other=0.0)
        elif part == 1:
            x = tl.load(b + at, mask=inside, other=0.0)
        else:
            x = tl.load(c + at, mask=inside, other=0.0)
        tl.store(out + row * (3 * N) + part * N + column[None, :], x, mask=inside)
        total += x.to(tl.float32)
    tl.store(sums + (tl.program_id(1) * 3 + part) * N + column, tl.sum(total, axis=0), mask=column < N)


@triton.jit
def of_keys(start, qkv, dqkv, q, gradient, delta, total, dq, T, width, scale, e, STEP: tl.constexpr):
    """One step of attention_backward: store the gradients of STEP keys and their values; return dq with their share."""
    key = start + tl.arange(0, STEP)
    at_k = key[:, None] * (3 * width) + width + e[None, :]
    k = tl.load(qkv + at_k, mask=(key < T)[:, None], other=0.0)
    v = tl.load(qkv + at_k + width, mask=(key < T)[:, None], other=0.0)
    A = tl.exp2(tl.dot(q, tl.trans(k)) * (scale * 1.4426950409) - total[:, None])
    A = tl.where((key < T)[None, :], A, 0.0)
    dA = tl.dot(gradient, tl.trans(v))
    dS = (A * (dA - delta[:, None])).to(q.dtype)
    dv = tl.dot(tl.trans(gradient), A.to(q.dtype))
    dq = tl.dot(dS, k, dq)
    dk = tl.dot(tl.trans(q), dS) * scale
    turned = key[None, :] * (3 * width) + width + e[:, None]
    tl.store(dqkv + turned, dk.to(dqkv.dtype.element_ty), mask=(key < T)[None, :])
    tl.store(dqkv + turned + width, dv.to(dqkv.dtype.element_ty), mask=(key < T)[None, :])
    return dq


@triton.jit
def attention_backward(qkv, sa, dsa, lse, dqkv, sums, T, width, scale, ROWS: tl.constexpr, STEP: tl.constexpr,
                       REST: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr):
    """See differentiable.Attend; a program handles one head of one image, with all T <= ROWS queries at once and STEP
    keys at a time, after the last REST, and writes the sums over its tokens."""
    head, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    e, row = tl.arange(0, SIZE), tl.arange(0, ROWS)
    qkv += image * T * 3 * width + head * SIZE
    dqkv += image * T * 3 * width + head * SIZE
    sums += image * 3 * width + head * SIZE
    token = image * T * width + head * SIZE + row[:, None] * width + e[None, :]
    inside = (row < T)[:, None]
    gradient = tl.load(dsa + token, mask=inside, other=0.0)
    delta = tl.load(sa + token, mask=inside, other=0.0).to(tl.float32) * gradient.to(tl.float32)
    delta = tl.sum(delta, axis=1)                                                       # = sum_j A_ij dA_ij
    tl.store(sums + width + e, tl.zeros((SIZE,), tl.float32))
    tl.store(sums + 2 * width + e, tl.sum(gradient.to(tl.float32), axis=0))
    lse += (image * tl.num_programs(0) + head) * T + row
    total = tl.load(lse, mask=row < T, other=float("inf")) * 1.4426950409
    q = tl.load(qkv + row[:, None] * (3 * width) + e[None, :], mask=inside, other=0.0)
    dq = tl.zeros((ROWS, SIZE), tl.float32)
    whole = T - T % STEP if REST > 0 else T
    if REST > 0:                                    # first: these keys are loaded together with the queries
        dq = of_keys(whole, qkv, dqkv, q, gradient, delta, total, dq, T, width, scale, e, REST)
    for start in tl.range(0, whole, STEP, num_stages=STAGES):
        dq = of_keys(start, qkv, dqkv, q, gradient, delta, total, dq, T, width, scale, e, STEP)
    dq *= scale
    row = tl.program_id(2) + tl.arange(0, ROWS)     # computed again: in the loop, registers are scarce
    tl.store(dqkv + row[:, None] * (3 * width) + e[None, :], dq.to(dqkv.dtype.element_ty), mask=(row < T)[:, None])
    tl.store(sums + e, tl.sum(dq, axis=0))


@triton.jit
def first_keys(start, q, kv, T, width, size, scale, e, STEP: tl.constexpr):
    """Return STEP keys, their values, their scores times log2 e, and the offsets of the keys and their mask."""
    key = start + tl.arange(0, STEP)
    inside = (key < T)[:, None] & (e < size)[None, :]
    at = key[:, None] * (2 * width) + e[None, :]
    k = tl.load(kv + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(kv + at + width, mask=inside, other=0.0).to(tl.float32)
    score = tl.sum(k * q[None, :], axis=1) * (scale * 1.4426950409)
    return k, v, tl.where(key < T, score, float("-inf")), at, inside


@triton.jit
def first_forward(q, kv, out, lse, T, size, scale, STEP: tl.constexpr, WIDTH: tl.constexpr):
    """See differentiable.AttendFirst; a program handles one head of one image, STEP keys at a time."""
    head, image, e = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, WIDTH)
    width = tl.num_programs(0) * size
    at = image * width + head * size + e
    kv += image * T * 2 * width + head * size
    query = tl.load(q + at, mask=e < size, other=0.0).to(tl.float32)
    largest, total, sa = float("-inf"), 0.0, tl.zeros((WIDTH,), tl.float32)
    for start in range(0, T, STEP):
        _, v, score, _, _ = first_keys(start, query, kv, T, width, size, scale, e, STEP)
        top = tl.maximum(largest, tl.max(score, axis=0))
        A, shrink = tl.exp2(score - top), tl.exp2(largest - top)
        total = total * shrink + tl.sum(A, axis=0)
        sa = sa * shrink + tl.sum(A[:, None] * v, axis=0)
        largest = top
    tl.store(out + at, (sa / total).to(out.dtype.element_ty), mask=e < size)
    tl.store(lse + image * tl.num_programs(0) + head, (largest + tl.log2(total)) * 0.6931471806)


@triton.jit
def first_backward(q, kv, sa, dsa, lse, dq_at, dkv, T, size, scale, STEP: tl.constexpr, WIDTH: tl.constexpr):
    """See differentiable.AttendFirst; a program handles one head of one image, STEP keys at a time."""
    head, image, e = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, WIDTH)
    width = tl.num_programs(0) * size
    at, first = image * width + head * size + e, image * T * 2 * width + head * size
    query = tl.load(q + at, mask=e < size, other=0.0).to(tl.float32)
    gradient = tl.load(dsa + at, mask=e < size, other=0.0).to(tl.float32)
    delta = tl.sum(tl.load(sa + at, mask=e < size, other=0.0).to(tl.float32) * gradient, axis=0)   # = sum_j A_j dA_j
    total = tl.load(lse + image * tl.num_programs(0) + head) * 1.4426950409
    dq = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, T, STEP):
        k, v, score, there, inside = first_keys(start, query, kv + first, T, width, size, scale, e, STEP)
        A = tl.exp2(score - total)
        dS = A * (tl.sum(v * gradient[None, :], axis=1) - delta) * scale
        tl.store(dkv + first + there, (dS[:, None] * query[None, :]).to(dkv.dtype.element_ty), mask=inside)
        tl.store(dkv + first + there + width, (A[:, None] * gradient[None, :]).to(dkv.dtype.element_ty), mask=inside)
        dq += tl.sum(dS[:, None] * k, axis=0)
    tl.store(dq_at + at, dq.to(dq_at.dtype.element_ty), mask=e < size)
