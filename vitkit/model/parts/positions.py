"""E_pos of Eq. 1, and the six ways in which public libraries resize it for another image size (section 3.2).

Every rule is separable: new[r, c] = sum_ij R[r, i] C[c, j] old[i, j]. So a rule is one function that gives the matrix
of one axis, and resizing is two matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import pick

Grid = tuple[int, int]


def _interpolate(**how: Any) -> Callable[[int, int], Tensor]:
    """Make a rule of one of torch's own filters: its matrix is the filtered identity."""

    def matrix(old: int, new: int) -> Tensor:
        return F.interpolate(torch.eye(old)[None, None], size=(new, old), **how)[0, 0]  # [new, old]

    return matrix


def _dinov2(old: int, new: int) -> Tensor:
    """DINOv2 passes a scale of (new + 0.1) / old instead of a size, which shifts every sample a little."""
    return F.interpolate(torch.eye(old)[None, None], scale_factor=((new + 0.1) / old, 1.0), mode="bicubic")[0, 0]


RULES: dict[str, Callable[[int, int], Tensor]] = {
    "google": _interpolate(mode="bilinear", align_corners=True),  # scipy zoom, order 1; big_vision too
    "timm-npz": _interpolate(mode="bilinear", align_corners=False),  # timm reading Google's files
    "timm": _interpolate(mode="bicubic", antialias=True),  # timm otherwise
    "huggingface": _interpolate(mode="bicubic", align_corners=False),  # also DeiT, MAE
    "torchvision": _interpolate(mode="bicubic", align_corners=True),
    "dinov2": _dinov2,
}


def resize(table: Tensor, old: Grid, new: Grid, rule: str) -> Tensor:
    """Resize a table of positions.

    Args:
        table: [1, rows, D]; rows before the patches (the class token's) are kept as they are.
        old: (rows, columns) of patches that the table was made for.
        new: (rows, columns) that are wanted.
        rule: a row of RULES.

    Returns:
        [1, rows of the prefix + new[0] * new[1], D], of the table's own type.
    """
    matrix = pick(RULES, rule, "position rule")
    if new == old:
        return table
    patches = old[0] * old[1]
    prefix, grid = table[:, :-patches], table[0, -patches:].float().unflatten(0, old)  # [old0, old1, D]
    rows, columns = (matrix(n, m).to(table.device) for n, m in zip(old, new, strict=True))
    grid = torch.einsum("ri,cj,ijd->rcd", rows, columns, grid)
    return torch.cat([prefix, grid.flatten(0, 1)[None].to(table.dtype)], dim=1)


class PositionEmbedding(nn.Module):
    """E_pos for the grid it was trained on, resized on demand for any other grid.

    A resized table is computed anew in each forward, so that gradients reach the trained one and it can never be
    stale. `remember` keeps the result for sizes that are used often; `forward` only ever reads what is kept, and
    only when no gradient is wanted and the trained table has not changed since. A compiled graph cannot ask whether
    it has, so it computes; `regrid` is the way to a constant there.

    Args:
        grid: (rows, columns) of patches.
        width: D.
        prefix: rows for tokens before the patches (1 with a class token, else 0).
        rule: a row of RULES.
    """

    def __init__(self, grid: Grid, width: int, prefix: int, rule: str) -> None:
        super().__init__()
        self.grid, self.rule = grid, rule
        self.table = nn.Parameter(torch.zeros(1, prefix + grid[0] * grid[1], width))
        self._kept: dict[Grid, tuple[Tensor, int, Tensor]] = {}  # the source table, its version, the result

    def forward(self, grid: Grid) -> Tensor:
        """E_pos for `grid`: [1, prefix + rows * columns, D]."""
        if grid == self.grid:
            return self.table
        wants_grad = torch.is_grad_enabled() and self.table.requires_grad
        if not torch.compiler.is_compiling() and not wants_grad and grid in self._kept:
            table, version, kept = self._kept[grid]
            if table is self.table and version == table._version:
                return kept
        return resize(self.table, self.grid, grid, self.rule)

    @torch.no_grad()
    def remember(self, grid: Grid) -> None:
        """Keep the table of `grid` until the trained one changes."""
        if grid != self.grid and not self.table.is_inference():  # an inference tensor has no version
            self._kept[grid] = self.table, self.table._version, resize(self.table, self.grid, grid, self.rule)

    @torch.no_grad()
    def regrid(self, grid: Grid) -> None:
        """Make `grid` the trained grid: the resized table becomes the parameter (fine-tuning, section 3.2)."""
        table = resize(self.table, self.grid, grid, self.rule).clone()
        self.table = nn.Parameter(table, requires_grad=self.table.requires_grad)
        self.grid = grid
        self._kept.clear()

    def train(self, mode: bool = True) -> PositionEmbedding:
        """Set the mode; training changes the table, so it drops everything that was kept."""
        if mode:
            self._kept.clear()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> PositionEmbedding:
        self._kept.clear()  # another device or type
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._kept.clear()
        super()._load_from_state_dict(*args, **kwargs)
