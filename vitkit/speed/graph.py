"""The model as a graph for other runtimes: the model itself, with what exports badly replaced.

- Positions of another image size are arithmetic inside the graph (axis.py).
- On request, tokens are merged between attention and MLP (merge.py); the image size is then fixed.
"""

from __future__ import annotations

import copy

from torch import Tensor, nn

from vitkit.model.backbone import Backbone
from vitkit.model.config import ROTATIONS
from vitkit.model.create import need_vit
from vitkit.model.parts.fit import EVERY_PART, Takes, unfit
from vitkit.model.parts.positions import Grid, PositionEmbedding
from vitkit.model.vit import ViT
from vitkit.speed.axis import resized
from vitkit.speed.merge import merge, plan

TAKES: Takes = EVERY_PART
ANY_SIZE: Takes = {**EVERY_PART, "positions": ("none", "sincos"), "positions_in": (), "relative": ROTATIONS}


class AnyGrid(nn.Module):
    """E_pos for a grid that is only known when the graph runs.

    Args:
        positions: the model's own.
    """

    def __init__(self, positions: PositionEmbedding) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, grid: Grid) -> Tensor:
        """[1, class + rows * columns, D]."""
        table = resized(self.positions.table, self.positions.grid, grid, self.positions.rule)
        return self.positions.whole(table)


class Graph(nn.Module):
    """A model's forward for inference, with the model's own weights.

    Args:
        model: a ViT or a ResNet.
        merge: tokens to merge in each block (default: none).
        any_size: whether the graph takes other image sizes; it never does when tokens are merged, or when positions
            are not those of ANY_SIZE.
    """

    def __init__(self, model: Backbone, merge: int = 0, any_size: bool = False) -> None:
        super().__init__()
        self.config, self.input_spec = model.config, model.input_spec
        self.counts = plan(need_vit(model, "Merging tokens").config, merge) if merge else []
        self.any_size = any_size and not merge and not (isinstance(model, ViT) and unfit(model.config, ANY_SIZE))
        self.model: nn.Module = model
        if self.any_size and isinstance(model, ViT):
            self.model = copy.copy(model)  # the same weights; only its table of parts is another
            if isinstance(model.positions, PositionEmbedding):
                self.model._modules = {**model._modules, "positions": AnyGrid(model.positions)}

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, K] of pixels [B, C, H, W] whose sides are multiples of the patch."""
        if not any(self.counts):
            logits: Tensor = self.model(x)
            return logits
        model, size = self.model, None
        assert isinstance(model, ViT)
        z, grid = model.embed(x), model.grid_of(x)  # Eq. 1
        for r, block in zip(self.counts, model.blocks, strict=True):
            rows = model.pool.rows if block is model.blocks[-1] else None
            seen: dict[str, Tensor | None] = {"k": None}
            bias = None if size is None else size.log().mT[:, None]
            z = block.attend(z, grid, rows, bias=bias, seen=seen)  # Eq. 2
            if r and (keys := seen["k"]) is not None:
                z, size = merge(z, size, keys, r, model.config.num_prefix_tokens)
            z = block.feed_forward(z)  # Eq. 3
        return model.classify(model.read(z, size))  # Eq. 4
