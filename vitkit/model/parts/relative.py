"""RELATIVE: what positions do inside attention, between Eqs. 5 and 6. The paper has nothing here but in appendix D.4.

Every row answers one question, (q, k) on a grid -> (q', k', bias), so that A = softmax(q' k'^T / sqrt(d) + bias)
whoever computes it: the fused kernel, or Eq. 6 written out. Tokens before the patches (n of them) have no place.

Legend: B images, h heads, N patches, T = n + N tokens, d lanes of a head, rows: the tokens that look (all when None).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError, InputError
from vitkit.model.config import ViTConfig
from vitkit.model.parts.positions import Grid, OnGrid, places

Rows = slice | Tensor | None  # of the tokens; None for all of them
Turned = tuple[Tensor, Tensor, Tensor | None]


class Offsets(OnGrid):
    """Appendix D.4: an extra attention whose keys are embeddings of the offset between two patches in the sequence."""

    def __init__(self, c: ViTConfig, layer: int) -> None:
        super().__init__()
        self.n, self.grid = c.num_prefix_tokens, c.grid
        self.table = nn.Parameter(torch.zeros(2 * c.num_patches - 1, c.head_size))

    def forward(self, q: Tensor, k: Tensor, grid: Grid, rows: Rows = None) -> Turned:
        """The bias depends on what looks: q r / sqrt(d), [B, h, rows, T]."""
        if grid != self.grid:
            raise InputError(
                f"relative='offsets' has one embedding per offset between its {self.grid[0]} x {self.grid[1]} patches; "
                f"got {grid[0]} x {grid[1]}. Resize the image to the model's size."
            )
        at = torch.arange(grid[0] * grid[1], device=q.device)
        r = self.table[at[:, None] - at + len(at) - 1]  # [N, N, d]
        r = F.pad(r, (0, 0, self.n, 0, self.n, 0))  # [T, T, d]
        r = r if rows is None else r[rows]
        return q, k, torch.einsum("bhqd,qtd->bhqt", q, r.to(q)) / q.shape[-1] ** 0.5

    def check(self, grid: Grid) -> None:
        """Refuse other grids: the paper does not say what an offset becomes on another grid."""
        if grid != self.grid:
            raise ConfigError("relative='offsets' cannot be resized to another image size: its offsets are numbers.")


class Bias(OnGrid):
    """BEiT: a learned bias per head and per step (down, right) between two patches, and three for the class token."""

    def __init__(self, c: ViTConfig, layer: int) -> None:
        super().__init__()
        self.grid, self.rule = c.grid, c.position_resize
        self.table = nn.Parameter(torch.zeros(math.prod(2 * n - 1 for n in c.grid) + 3, len(c.heads_of(layer))))

    def forward(self, q: Tensor, k: Tensor, grid: Grid, rows: Rows = None) -> Turned:
        """The bias is the same for every image: [h, rows, T]."""
        table, (H, W) = resize_steps(self.table, self.grid, grid, self.rule), grid
        row, column = (place.long() for place in places(grid, q.device))
        step = (row[:, None] - row + H - 1) * (2 * W - 1) + column[:, None] - column + W - 1  # [N, N]
        last = table.shape[0]
        itself = step.new_full((1, 1), last - 1)
        step = torch.cat([step.new_full((step.shape[0], 1), last - 2), step], dim=1)  # from a patch to the class token
        first = torch.cat([itself, step.new_full((1, step.shape[0]), last - 3)], dim=1)  # and back
        step = torch.cat([first, step])  # [T, T]
        step = step if rows is None else step[rows]
        return q, k, table[step].permute(2, 0, 1).to(q)

    @torch.no_grad()
    def regrid(self, grid: Grid) -> None:
        """Make `grid` the trained grid: the resized table becomes the parameter."""
        table = resize_steps(self.table, self.grid, grid, self.rule).clone()
        self.table, self.grid = nn.Parameter(table, requires_grad=self.table.requires_grad), grid


def resize_steps(table: Tensor, old: Grid, new: Grid, rule: str) -> Tensor:
    """Resize a table of biases per step.

    Args:
        table: [(2 rows - 1) (2 columns - 1) + 3, h]; the last three are kept as they are.
        old: (rows, columns) of patches that the table was made for.
        new: (rows, columns) that are wanted.
        rule: a row of `positions.RULES`: `huggingface` resizes as its BEiT does, all others as timm's does.
    """
    if new == old:
        return table
    matrix = _bilinear if rule == "huggingface" else _geometric
    down, right = (matrix(2 * n - 1, 2 * m - 1).to(table.device) for n, m in zip(old, new, strict=True))
    steps = table[:-3].float().unflatten(0, (2 * old[0] - 1, 2 * old[1] - 1))
    steps = torch.einsum("ri,cj,ijh->rch", down, right, steps).flatten(0, 1)
    return torch.cat([steps.to(table.dtype), table[-3:]])


def _bilinear(old: int, new: int) -> Tensor:
    return F.interpolate(torch.eye(old)[None, None], size=(new, old), mode="bilinear", align_corners=False)[0, 0]


def _geometric(old: int, new: int) -> Tensor:
    """Linear interpolation between old steps placed further and further apart, [new, old].

    BEiT's authors place the old steps at 0, 1, 1 + g, 1 + g + g^2, ..., with g such that the last one is at the new
    end: near steps keep their bias, far ones are stretched. Beyond the old steps the last ones continue.
    """
    low, high, half = 1.01, 1.5, old // 2
    while high - low > 1e-6:
        g = (low + high) / 2
        low, high = (low, g) if (1 - g**half) / (1 - g) > new // 2 else (g, high)
    far, step = [], 1.0
    for i in range(half):
        far.append(step)
        step += g ** (i + 1)
    at = torch.tensor([-place for place in reversed(far)] + [0.0, *far])
    wanted = torch.arange(-(new // 2), new // 2 + 1).float()
    if old == 1:
        return torch.ones(new, 1)
    right = torch.bucketize(wanted, at).clamp(1, old - 1)
    share = ((wanted - at[right - 1]) / (at[right] - at[right - 1])).clamp(0, 1)
    result = torch.zeros(new, old)
    result[torch.arange(new), right - 1] = 1 - share
    result[torch.arange(new), right] = share
    return result


@dataclass(frozen=True)
class Turn:
    """A rotation without parameters (arXiv 2104.09864, in two dimensions).

    Args:
        base: the frequencies are base^(-i / (d / 4)), half of them for the row and half for the column.
        offset: added to rows and columns.
        column_first: whether the column turns the first half of the lanes.
        halves: whether lanes i and i + d / 2 turn together; otherwise lanes 2 i and 2 i + 1 do.
        centred: whether places are the centres of patches between -1 and 1, whatever the size, in full turns.
    """

    base: float = 10000.0
    offset: float = 0.0
    column_first: bool = False
    halves: bool = False
    centred: bool = False

    def __call__(self, c: ViTConfig, layer: int) -> Rotation:
        """Return the module."""
        return Rotation(c, self)

    def angles(self, grid: Grid, d: int, trained: Grid | None, device: torch.device) -> Tensor:
        """[N, d / 2]; a grid other than `trained` is stretched to it."""
        if self.centred:
            period = self.base ** (torch.arange(d // 4, device=device).float() / (d // 4))
            both = [2 * (place + 0.5) / n - 1 for place, n in zip(places(grid, device), grid, strict=True)]
            return torch.cat([2 * math.pi * place[:, None] / period for place in both], dim=-1)
        band = 1.0 / self.base ** (torch.arange(d // 4, device=device).float() / (d // 4))
        both = [place + self.offset for place in places(grid, device)]
        if trained is not None:
            both = [place / now * then for place, now, then in zip(both, grid, trained, strict=True)]
        both = both[::-1] if self.column_first else both
        return torch.cat([place[:, None] * band for place in both], dim=-1)


def rotate(x: Tensor, angle: Tensor, halves: bool) -> Tensor:
    """Turn pairs of lanes of x [B, h, T, d] by angle [T, d / 2] or [h, T, d / 2]."""
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    a, b = x.chunk(2, dim=-1) if halves else (x[..., ::2], x[..., 1::2])
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.cat(turned, dim=-1) if halves else torch.stack(turned, dim=-1).flatten(-2)


class Rotation(OnGrid):
    """Turns q and k of every patch by its place, so that q k^T depends on the step between them. Any grid."""

    def __init__(self, c: ViTConfig, turn: Turn) -> None:
        super().__init__()
        self.turn, self.n, self.trained = turn, c.num_prefix_tokens, c.relative_grid

    def angle(self, grid: Grid, d: int, device: torch.device) -> Tensor:
        """[N, d / 2]."""
        return self.turn.angles(grid, d, self.trained, device)

    def forward(self, q: Tensor, k: Tensor, grid: Grid, rows: Rows = None) -> Turned:
        """The tokens before the patches are not turned."""
        angle = F.pad(self.angle(grid, q.shape[-1], q.device), (0, 0, self.n, 0))  # [T, d / 2]
        own = angle if rows is None else angle[..., rows, :]
        return rotate(q, own, self.turn.halves), rotate(k, angle, self.turn.halves), None


class Mixed(Rotation):
    """RoPE-ViT mixed (arXiv 2403.13298): every head of every layer has learned frequencies."""

    def __init__(self, c: ViTConfig, layer: int) -> None:
        super().__init__(c, Turn())
        self.frequencies = nn.Parameter(torch.zeros(2, len(c.heads_of(layer)), c.head_size // 2))

    def angle(self, grid: Grid, d: int, device: torch.device) -> Tensor:
        """[h, N, d / 2]."""
        row, column = places(grid, device)
        of_column, of_row = self.frequencies.float()[:, :, None]  # 2 x [h, 1, d / 2]
        return column[:, None] * of_column + row[:, None] * of_row


RELATIVE: dict[str, Callable[[ViTConfig, int], Any]] = {
    "none": lambda c, layer: None,
    "offsets": Offsets,
    "bias": Bias,
    "eva02": Turn(),
    "dinov3": Turn(base=100.0, halves=True, centred=True),
    "axial": Turn(base=100.0, column_first=True),  # RoPE-ViT
    "perception": Turn(offset=1.0, column_first=True),  # Perception Encoder, up to L
    "perception-g": Turn(column_first=True),  # and G
    "mixed": Mixed,
}
