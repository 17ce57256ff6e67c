"""The Triton kernel behind adamw.py. Imported only if Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chosen(those, which, COUNT: tl.constexpr):
    """Return one of several addresses; all of them are multiples of 16."""
    found = those[0].to(tl.int64)
    for i in tl.static_range(1, COUNT):
        found = tl.where(which == i, those[i].to(tl.int64), found)
    return tl.multiple_of(found.to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def update(p_at, g_at, m_at, v_at, at, inside, scale, keep, rate, root, rest1, rest2, eps):
    """Update the weights at some places, and their moments."""
    g = tl.load(g_at + at, mask=inside) * scale
    m = tl.load(m_at + at, mask=inside)
    v = tl.load(v_at + at, mask=inside)
    p = tl.load(p_at + at, mask=inside) * keep
    m += rest1 * (g - m)
    v += rest2 * (g * g - v)
    p -= rate * m / (tl.sqrt(v) * root + eps)
    tl.store(m_at + at, m, mask=inside)
    tl.store(v_at + at, v, mask=inside)
    tl.store(p_at + at, p, mask=inside)


@triton.jit
def adamw(weights, gradients, first, second, step_at, lr_at, scale_at, broken_at, size, decay, rest1, rest2, eps,
          LOG1: tl.constexpr, LOG2: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
          TURNS: tl.constexpr):  # fmt: skip
    """See adamw.OnePassAdamW; a program handles TURNS BLOCK elements of one of up to COUNT weights of equal size.

    LOG1 and LOG2 are the binary logarithms of AdamW's betas, rest1 and rest2 what the betas lack to 1.
    """
    which = tl.program_id(1)
    p_at, g_at = chosen(weights, which, COUNT), chosen(gradients, which, COUNT)
    m_at, v_at = chosen(first, which, COUNT), chosen(second, which, COUNT)
    start = tl.program_id(0).to(tl.int64) * (TURNS * BLOCK)
    if tl.load(broken_at) == 0.0:
        step, lr, scale = tl.load(step_at).to(tl.float64), tl.load(lr_at), tl.load(scale_at)
        keep = 1.0 - lr * decay
        rate = lr / (1.0 - tl.exp2(step * LOG1)).to(tl.float32)
        root = 1.0 / tl.sqrt((1.0 - tl.exp2(step * LOG2)).to(tl.float32))
        if start + TURNS * BLOCK <= size:  # without a mask, loads and stores are wide
            for turn in tl.static_range(TURNS):
                at = start + turn * BLOCK + tl.arange(0, BLOCK)
                update(p_at, g_at, m_at, v_at, at, None, scale, keep, rate, root, rest1, rest2, eps)
        else:
            for turn in tl.static_range(TURNS):
                at = start + turn * BLOCK + tl.arange(0, BLOCK)
                update(p_at, g_at, m_at, v_at, at, at < size, scale, keep, rate, root, rest1, rest2, eps)
