"""The Triton kernel behind resize.py, which documents what it computes. Imported only if Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

FIELDS = 11  # what `about` says of an image, in this order: see `_across` and `_down`
ROWS, COLUMNS = 8, 128  # outputs of a program


@triton.jit(do_not_specialize_on_alignment=["pixels", "numbers"])
def _across(
    pixels,
    numbers,
    about,
    out,
    W,
    FIELDS: tl.constexpr,
    BITS: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The first pass: the width of those rows that the second one needs; `out` [rows of all images, C, W]."""
    about += tl.program_id(2) * FIELDS
    rows = tl.load(about + 9)
    y = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    if tl.program_id(0) * ROWS < rows:
        x = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = (y < rows) & (x < W)
        channel, row, column = tl.load(about + 1), tl.load(about + 2), tl.load(about + 3)
        wide = tl.load(about + 5).to(tl.int32)
        table = numbers + tl.load(about + 4) + x * wide
        start = tl.load(table, mask=x < W, other=0)
        line = pixels + tl.load(about) + y * row + start * column
        to = out + ((tl.load(about + 10) + y) * C) * W + x
        for c in tl.static_range(C):
            total = tl.full((ROWS, COLUMNS), 1 << (BITS - 1), tl.int32)
            for k in range(wide - 1):
                weight = tl.load(table + 1 + k, mask=x < W, other=0)
                total += tl.load(line + c * channel + k * column, mask=inside, other=0).to(tl.int32) * weight
            total = tl.minimum(tl.maximum(total >> BITS, 0), 255)
            tl.store(to + c * W, total.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["numbers"])
def _down(
    between,
    numbers,
    about,
    out,
    H,
    W,
    FIELDS: tl.constexpr,
    BITS: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The second pass: the height; `out` [n, C, H, W]."""
    image = tl.program_id(2).to(tl.int64)
    about += image * FIELDS
    y = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    x = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (y < H) & (x < W)
    high = tl.load(about + 7).to(tl.int32)
    table = numbers + tl.load(about + 6) + y * high
    start = tl.load(table, mask=y < H, other=0) - tl.load(about + 8)
    line = between + ((tl.load(about + 10) + start) * C) * W + x
    to = out + image * C * H * W + y * W + x
    for c in tl.static_range(C):
        total = tl.full((ROWS, COLUMNS), 1 << (BITS - 1), tl.int32)
        for k in range(high - 1):
            weight = tl.load(table + 1 + k, mask=y < H, other=0)
            total += tl.load(line + (k * C + c) * W, mask=inside, other=0).to(tl.int32) * weight
        total = tl.minimum(tl.maximum(total >> BITS, 0), 255)
        tl.store(to + c * H * W, total.to(tl.uint8), mask=inside)


def resize(pixels: Tensor, numbers: Tensor, about: Tensor, between: Tensor, out: Tensor, most: int, bits: int) -> None:
    """Resize images.

    Args:
        pixels: any of the images; the places of all are counted from its first byte.
        numbers: any table of weights; the places of all are counted from its first number.
        about: [n, FIELDS] int64 for each image: its place, the steps from one channel, row and column to the next, the
            place of the weights of its width and the length of their rows, the same for its height, the first row that
            is needed, how many are, and their place in `between`. The image's place is that of the first needed row.
        between: [rows, C, W] uint8, room for what the first pass computes.
        out: [n, C, H, W] uint8.
        most: the most rows that an image needs.
        bits: bits of the weights behind the point.
    """
    n, C, H, W = out.shape
    sizes = {"FIELDS": FIELDS, "BITS": bits, "C": C, "ROWS": ROWS, "COLUMNS": COLUMNS}
    _across[(triton.cdiv(most, ROWS), triton.cdiv(W, COLUMNS), n)](pixels, numbers, about, between, W, **sizes)
    _down[(triton.cdiv(H, ROWS), triton.cdiv(W, COLUMNS), n)](between, numbers, about, out, H, W, **sizes)
