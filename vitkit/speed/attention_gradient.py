"""The backward pass of attention by a kernel for Hopper GPUs (attention_gradient.cu)."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path

import torch
from torch import Tensor

from vitkit.speed.hopper import BOX, Kernel, available, compiles, tensor_map, wgmma
from vitkit.speed.kernels import processors, sum_rows

SIZE = BOX  # of a head
LEAST, MOST = 129, 208  # tokens; more do not fit into shared memory, fewer waste more than half of each product
WARPS, HELPERS = 8, 3  # that write sums of dq, and of dO
OWN = 16  # rows that a warp stores at once
WIDEST = 80  # queries of a part; registers do not suffice for more


def takes(T: int, size: int, device: torch.device) -> bool:
    """Return whether the kernel computes heads of this size with T tokens on a device."""
    fits = size == SIZE and LEAST <= T <= MOST and device.type == "cuda"
    return fits and available(device) and compiles(_kernel, device, T)


def attention_gradient(qkv: Tensor, sa: Tensor, dsa: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of qkv, and its sums over all tokens in fp32.

    Args:
        qkv: q, k and v of Eq. 5, [B T, 3 h d], bf16.
        sa: the heads' outputs (Eq. 7), [B T, h d].
        dsa: their gradient.
        lse: [B, h, T], see kernels.attention_loop.
    """
    (B, heads, T), width = lse.shape, sa.shape[1]
    dqkv = torch.empty_like(qkv)
    of_q, of_v = (torch.empty(B * count, width, device=qkv.device) for count in (WARPS, HELPERS))
    tokens = padded(T)
    maps = [tensor_map(x.view(B, T, -1), rows) for x, rows in ((qkv, tokens), (dsa, tokens), (dqkv, OWN))]
    scale = SIZE**-0.5
    blocks = min(B * heads, processors(qkv))
    values = (sa, dsa, lse, of_q, of_v, heads, B * heads, scale, scale * math.log2(math.e))
    _kernel(qkv.device, T)(blocks, *maps, *values)
    return dqkv, torch.cat([sum_rows(of_q), of_q.new_zeros(width), sum_rows(of_v)])  # the rows of dS sum to 0


def padded(T: int) -> int:
    """Return T rounded up to what a product can have as its depth."""
    return -(-T // 16) * 16


def parts(tokens: int) -> list[tuple[int, int]]:
    """Divide queries into parts of at most WIDEST: their sizes, multiples of 16, and where they begin."""
    count = -(-tokens // WIDEST)
    ends = [-(-tokens * i // (16 * count)) * 16 for i in range(count + 1)]
    return [(end - first, first) for first, end in itertools.pairwise(ends)]


@functools.cache
def _kernel(device: torch.device, T: int) -> Kernel:
    tokens = padded(T)
    cut = parts(tokens)
    before = [
        f"constexpr int T = {T}, TP = {tokens};",
        "#define PARTS " + " ".join(f"PART({size}, {first})" for size, first in cut),
        *(wgmma("mma", size) for size in sorted({size for size, _ in cut})),
        wgmma("mma_held", SIZE, turn_b=True, held=True),
        wgmma("mma_turned", SIZE, turn_a=True, turn_b=True),
    ]
    shared = 8 * tokens * 128 + 2 * tokens * 8 + 128  # q, k, v, dO, dS, lse and delta, barriers
    return Kernel(Path(__file__).with_name("attention_gradient.cu"), device, shared, before)
