"""Resizing E_pos by plain arithmetic: the matrix of one axis for a size that is known only when the graph runs.

`model.parts.positions.RULES` uses torch's own filters, which other runtimes implement differently (antialiasing, the
cubic coefficient, borders). The same matrices are built from comparisons and products, on which all runtimes agree.

Legend: n old and m new cells of an axis; i [m] the new cells; s [m, 1] where a new cell samples, in units of old cells.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitkit.errors import pick

Place = Callable[[Tensor, Tensor, int], Tensor]
BORDER = 2  # cells beyond the border that the cubic filter reads


def hat(x: Tensor) -> Tensor:
    """Return the weight of linear interpolation at distance x."""
    return (1 - x.abs()).clamp(min=0)


def cubic(x: Tensor, a: float) -> Tensor:
    """Return the weight of Keys's cubic interpolation at distance x."""
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def corners(i: Tensor, m: Tensor, n: int) -> Tensor:
    """Align the centres of the first and last cells of both sizes (align_corners)."""
    return i * (n - 1) / (m - 1).clamp(min=1)


def centres(i: Tensor, m: Tensor, n: int) -> Tensor:
    """Align the outer borders of both sizes (half-pixel)."""
    return (i + 0.5) * (n / m) - 0.5


def shifted(i: Tensor, m: Tensor, n: int) -> Tensor:
    """Align as DINOv2 does: as `centres`, for a size of m + 0.1."""
    return (i + 0.5) * (n / (m + 0.1)) - 0.5


def linear(place: Place) -> Callable[[int, Tensor], Tensor]:
    """Interpolate linearly; the border extends outwards.

    Args:
        place: where new cells sample.
    """

    def matrix(n: int, i: Tensor) -> Tensor:
        s = place(i, count(i), n).clamp(0, n - 1)[:, None]
        return hat(s - torch.arange(n, dtype=s.dtype))

    return matrix


def cubed(place: Place) -> Callable[[int, Tensor], Tensor]:
    """Interpolate cubically (a = -0.75); weights beyond the border are added to the border cell.

    Args:
        place: where new cells sample.
    """

    def matrix(n: int, i: Tensor) -> Tensor:
        s = place(i, count(i), n)[:, None]
        wide = cubic(s - torch.arange(-BORDER, n + BORDER, dtype=s.dtype), -0.75)  # [m, n + 2 BORDER]
        fold = torch.arange(-BORDER, n + BORDER).clamp(0, n - 1)[:, None] == torch.arange(n)
        return wide @ fold.to(s.dtype)

    return matrix


def antialiased(weight: Callable[[Tensor], Tensor]) -> Callable[[int, Tensor], Tensor]:
    """Filter over the width of a new cell, cut off at the border and normalized to sum 1.

    Args:
        weight: of a distance in new cells.
    """

    def matrix(n: int, i: Tensor) -> Tensor:
        m = count(i)
        s = centres(i, m, n)[:, None]
        weights = weight((torch.arange(n, dtype=s.dtype) - s) / (n / m).clamp(min=1))
        return weights / weights.sum(1, keepdim=True)

    return matrix


def count(i: Tensor) -> Tensor:
    """Return m as a value inside the graph, given i = 0 ... m - 1."""
    return i[-1] + 1


def equal(n: int, i: Tensor) -> Tensor:
    """Return the identity matrix [m, n]; DINOv2's rule shifts positions even when the size stays the same."""
    return hat(i[:, None] - torch.arange(n, dtype=i.dtype))


AXES: dict[str, Callable[[int, Tensor], Tensor]] = {  # the same rows as model.parts.positions.RULES
    "google": linear(corners),
    "timm-npz": linear(centres),
    "timm": antialiased(lambda x: cubic(x, -0.5)),
    "huggingface": cubed(centres),
    "torchvision": cubed(corners),
    "dinov2": cubed(shifted),
    "siglip2": antialiased(hat),
}


def resized(table: Tensor, old: tuple[int, int], new: tuple[int, int], rule: str) -> Tensor:
    """Resize as `model.parts.positions.resize` does, for sizes that are known only when the graph runs.

    Args:
        table: [1, rows, D]; rows before those of the patches stay unchanged.
        old: (rows, columns) of the table's grid.
        new: (rows, columns) to resize to.
        rule: a row of AXES.
    """
    matrix, patches = pick(AXES, rule, "position rule"), old[0] * old[1]
    i = [torch.arange(m, dtype=torch.float32) for m in new]
    same = hat(count(i[0]) - old[0]) * hat(count(i[1]) - old[1])  # 1 if the size stays the same, else 0
    rows, columns = (same * equal(n, axis) + (1 - same) * matrix(n, axis) for n, axis in zip(old, i, strict=True))
    grid = table[0, -patches:].float().unflatten(0, old)  # [old0, old1, D]
    grid = (rows @ grid.flatten(1)).unflatten(1, (old[1], -1))  # [new0, old1, D]
    grid = columns @ grid  # [new0, new1, D]
    return torch.cat([table[:, :-patches], grid.flatten(0, 1)[None].to(table.dtype)], dim=1)
