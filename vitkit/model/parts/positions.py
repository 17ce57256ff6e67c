"""POSITIONS: what is added to the tokens. 1-D is the paper's; none and 2-D are of its appendix D.4, sin-cos came later.
And RULES: the seven ways in which public libraries resize E_pos for another image size (section 3.2).

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
from vitkit.model.config import ViTConfig

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
    "siglip2": _interpolate(mode="bilinear", antialias=True),
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


class OnGrid(nn.Module):
    """A part that depends on the grid of patches. Unless it says otherwise, any grid will do."""

    def check(self, grid: Grid) -> None:
        """Raise ConfigError if `regrid` would."""

    def regrid(self, grid: Grid) -> None:
        """Make `grid` the trained grid: what was resized on demand becomes the parameter (section 3.2)."""

    def remember(self, grid: Grid) -> None:
        """Keep what `grid` needs until the parameters change."""


def regrid(model: nn.Module, grid: Grid) -> None:
    """Make `grid` the trained grid of all parts of a model, or of none if one of them raises ConfigError."""
    parts = [module for module in model.modules() if isinstance(module, OnGrid)]
    for part in parts:
        part.check(grid)
    for part in parts:
        part.regrid(grid)


class PositionEmbedding(OnGrid):
    """E_pos for the grid it was trained on, resized on demand for any other grid.

    A resized table is computed anew in each forward, so that gradients reach the trained one and it can never be
    stale. `remember` keeps the result for sizes that are used often; `forward` only ever reads what is kept, and
    only when no gradient is wanted and the trained table has not changed since. A compiled graph cannot ask whether
    it has, so it computes; `regrid` is the way to a constant there.

    Args:
        grid: (rows, columns) of patches.
        width: D.
        prefix: rows for tokens before the patches (1 for a class token with a position, else 0).
        rule: a row of RULES.
        bare: tokens before the patches that get zeros and have no row (1 for a class token without a position).
    """

    def __init__(self, grid: Grid, width: int, prefix: int, rule: str, bare: int = 0) -> None:
        super().__init__()
        self.grid, self.rule, self.bare = grid, rule, bare
        self.table = nn.Parameter(torch.zeros(1, prefix + grid[0] * grid[1], width))
        self._kept: dict[Grid, tuple[Tensor, int, Tensor]] = {}  # the source table, its version, the result

    def forward(self, grid: Grid) -> Tensor:
        """E_pos for `grid`: [1, class + rows * columns, D]."""
        if grid == self.grid:
            return self.whole(self.table)
        wants_grad = torch.is_grad_enabled() and self.table.requires_grad
        if not torch.compiler.is_compiling() and not wants_grad and grid in self._kept:
            table, version, kept = self._kept[grid]
            if table is self.table and version == table._version:
                return kept
        return self.whole(resize(self.table, self.grid, grid, self.rule))

    def whole(self, table: Tensor) -> Tensor:
        """Put zeros in front of a table for the tokens that have no row of it."""
        return F.pad(table, (0, 0, self.bare, 0)) if self.bare else table

    @torch.no_grad()
    def remember(self, grid: Grid) -> None:
        """Keep the table of `grid` until the trained one changes."""
        if grid != self.grid and not self.table.is_inference():  # an inference tensor has no version
            table = self.whole(resize(self.table, self.grid, grid, self.rule))
            self._kept[grid] = self.table, self.table._version, table

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


class NoPositions(OnGrid):
    """Zeros: a bag of patches, unless attention knows positions (Table 8)."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.width, self.prefix = c.hidden_size, int(c.class_token)
        self.like: Tensor
        self.register_buffer("like", torch.zeros(1), persistent=False)  # has the model's device and type

    def forward(self, grid: Grid) -> Tensor:
        """[1, class + rows * columns, D], without memory of its own."""
        return self.like.expand(1, self.prefix + grid[0] * grid[1], self.width)


class SinCos(NoPositions):
    """Fixed: sines and cosines of column and row (arXiv 2205.01580); zero for the class token. Any grid."""

    def forward(self, grid: Grid) -> Tensor:
        """[1, class + rows * columns, D]."""
        quarter = self.width // 4
        omega = 10000.0 ** -(torch.arange(quarter, device=self.like.device) / (quarter - 1))
        row, column = places(grid, self.like.device)
        angles = [place[:, None] * omega for place in (column, row)]  # 2 x [N, D / 4]
        table = torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)
        return F.pad(table, (0, 0, self.prefix, 0))[None].to(self.like)


class TwoD(OnGrid):
    """Half of the lanes for the row and half for the column (appendix D.4); the class token has a row of its own."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.grid, self.rule = c.grid, c.position_resize
        self.rows, self.columns = (nn.Parameter(torch.zeros(1, n, c.hidden_size // 2)) for n in c.grid)
        self.first = nn.Parameter(torch.zeros(1, int(c.class_token), c.hidden_size))

    def forward(self, grid: Grid) -> Tensor:
        """[1, class + rows * columns, D]."""
        rows, columns = self.resized(grid)
        rows, columns = rows[:, :, None].expand(-1, -1, grid[1], -1), columns[:, None].expand(-1, grid[0], -1, -1)
        return torch.cat([self.first, torch.cat([rows, columns], dim=-1).flatten(1, 2)], dim=1)

    def resized(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """The two tables for `grid`: [1, rows, D / 2], [1, columns, D / 2]."""
        return (
            resize(self.rows, (self.grid[0], 1), (grid[0], 1), self.rule),
            resize(self.columns, (1, self.grid[1]), (1, grid[1]), self.rule),
        )

    @torch.no_grad()
    def regrid(self, grid: Grid) -> None:
        """Make `grid` the trained grid, as `PositionEmbedding.regrid` does."""
        for name, table in zip(("rows", "columns"), self.resized(grid), strict=True):
            setattr(self, name, nn.Parameter(table.clone(), requires_grad=getattr(self, name).requires_grad))
        self.grid = grid


def places(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row and the column of every patch, 2 x [N], as real numbers."""
    row, column = torch.meshgrid(*(torch.arange(n, device=device).float() for n in grid), indexing="ij")
    return row.flatten(), column.flatten()


def one_d(c: ViTConfig) -> PositionEmbedding:
    """Return E_pos of the paper."""
    prefix = int(c.class_token and c.prefix_positions)
    return PositionEmbedding(c.grid, c.hidden_size, prefix, c.position_resize, bare=int(c.class_token) - prefix)


POSITIONS: dict[str, Callable[[ViTConfig], OnGrid]] = {
    "1d": one_d,
    "none": NoPositions,
    "2d": TwoD,
    "sincos": SinCos,
}
