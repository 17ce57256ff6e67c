"""8-bit products for the fused engine: qkv and both layers of the MLP.

After a LayerNorm, values are alike in size: qkv and the MLP's first layer run in integers, which are finer there than
8-bit floating point is. Every row has its own scale, found by the LayerNorm that writes it. After a GELU they are not
alike: the MLP's second layer runs in floating point (e4m3), with one static scale that needs no calibration, because a
bound on its input follows from the weights (nothing can saturate, and e4m3 keeps its relative precision over the range
that a bound wastes). Weights have a scale per output. Scaling is the last step of the LayerNorm and of the GELU that
precede a product. U_msa stays in bf16: quantizing the attention's output would cost what its product saves.

Most of the error comes from the MLP's second layer, and a rounding done early is carried through every later block: in
the first blocks that layer stays in bf16. So does the whole MLP of the class token where the head reads it: one row per
image costs little, and its errors reach the head directly. [The log](../../docs/log.md) has what else was tried: scales
that move the outliers of a LayerNorm into the weights, weights rounded so that their errors cancel, corrected biases.

Small batches and narrow models are faster in bf16. The engine times both for every new shape, runs the faster, and
says so if that is bf16.

Legend: M = B T rows of tokens, D width.
"""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import cast

import torch
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.model.vit import ViT
from vitkit.speed.choices import busy_milliseconds, fastest, milliseconds
from vitkit.speed.fused import Fused, Layer, Normed, Products
from vitkit.speed.kernels import FP8, FP8_MAX, linear_int8, multiply, to_int8


class EightBit(Products):
    """The products of one block with 8-bit matrices, each [N, K] with the scales of its rows [N].

    Args:
        layer: the block's weights.
        second: whether the MLP's second layer has 8 bits, too.
    """

    def __init__(self, layer: Layer, second: bool) -> None:
        super().__init__(layer, tanh=True, splits=None)
        self.second = second
        W1, b1 = (t.float() for t in layer.fc1)
        weight, bias = layer.norm2
        D = len(W1)
        reach = (W1 * weight[:, None]).norm(dim=0) * math.sqrt(D) + (bias @ W1 + b1).abs()  # |u W_1 + b_1| per unit
        self.scale_h = float(reach.max()) / FP8_MAX  # after the GELU
        self.small_qkv, self.small_fc1 = integers(layer.qkv[0]), integers(layer.fc1[0])
        scale = layer.fc2.float().abs().amax(0).clamp(min=1e-12) / FP8_MAX
        self.small_fc2 = (layer.fc2.float() / scale).clamp(-FP8_MAX, FP8_MAX).mT.to(FP8).contiguous(), scale
        self.rows: dict[int, Tensor] = {}

    def scales(self, z: Tensor) -> Tensor | None:
        """[M], filled by the LayerNorm."""
        return torch.empty(len(z), device=z.device)

    def qkv(self, u: Normed, first: int = 0) -> Tensor:
        """Eq. 5."""
        (matrix, scale), bias = self.small_qkv, self.layer.qkv[1]
        return linear_int8(u[0], (matrix[first:], scale[first:]), cast(Tensor, u[1]), bias[first:], bias.dtype)

    def hidden(self, u: Normed) -> Tensor:
        """GELU(u W_1 + b_1), in e4m3 if the second layer has 8 bits."""
        bias, scale = self.layer.fc1[1], self.scale_h if self.second else None
        return linear_int8(u[0], self.small_fc1, cast(Tensor, u[1]), bias, bias.dtype, gelu=True, scale=scale)

    def add(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """z, and h W_2, which the next LayerNorm adds to it."""
        if not self.second:
            return super().add(z, h)
        if (M := len(h)) not in self.rows:  # products take a scale per row
            self.rows[M] = torch.full((M, 1), self.scale_h, device=h.device)
        return z, multiply(h, self.small_fc2, self.rows[M], None, z.dtype)


def integers(W: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [N, K], scales [N]) of a matrix [K, N]: each output of a layer has its own scale."""
    scale = torch.empty(W.shape[1], device=W.device)
    return to_int8(W.mT, scale).contiguous(), scale


class Fp8(Fused):
    """The fused engine with 8-bit products, for the shapes that they make faster.

    Args:
        model: a ViT whose widths are multiples of 16.
        dtype: type of everything that is not an 8-bit product (default: as for Fused).
        graphs: whether batches on CUDA are captured as graphs.
        full: how many of the first blocks keep the MLP's second layer in full (default: a sixth of them).
    """

    def __init__(
        self, model: ViT, dtype: torch.dtype | None = None, graphs: bool = True, full: int | None = None
    ) -> None:
        c = model.config
        widths = {c.hidden_size, c.intermediate_size, *(3 * len(b.msa.heads) * c.head_size for b in model.blocks)}
        if any(width % 16 for width in widths):
            raise ConfigError(
                f"fp8 needs widths that are multiples of 16; this model has "
                f"{sorted(w for w in widths if w % 16)}. Use the engine cuda-fused."
            )
        super().__init__(model, dtype, graphs)
        first = c.num_hidden_layers // 6 if full is None else full
        with torch.no_grad():
            self.small: list[Products] = [EightBit(by.layer, i >= first) for i, by in enumerate(self.plain)]
        self.remarks: dict[tuple[int, ...], str] = {}  # shape of pixels -> what was said about it; "" for 8 bits

    def run(self, x: Tensor) -> Tensor:
        """All equations, with 8-bit products if they are faster for these pixels."""
        key = tuple(x.shape)
        if key not in self.remarks:
            self.remarks[key] = "" if self.pays(x) else remark(x)
            if self.remarks[key]:
                warnings.warn(self.remarks[key], stacklevel=2)
        self.products = self.plain if self.remarks[key] else self.small
        return super().run(x)

    def block(self, z: Tensor, pending: Tensor | None, i: int, B: int, T: int) -> tuple[Tensor, Tensor | None]:
        """As in Fused, with the class token's MLP in full if the head reads that token."""
        z, pending = super().block(z, pending, i, B, T)
        last = i == len(self.layers) - 1  # in full anyway
        if pending is not None and self.products is self.small and self.config.pool == "cls" and not last:
            layer, own = self.layers[i], z.view(B, T, -1)[:, 0]
            h = self.plain[i].hidden(self.read(own, None, layer.shift2, layer.norm2))
            torch.mm(h, layer.fc2, out=pending.view(B, T, -1)[:, 0])
        return z, pending

    def pays(self, x: Tensor) -> bool:
        """Whether 8 bits are faster than bf16; always true without a CUDA device, where they are only tested."""
        if not x.is_cuda:
            return True

        def by(products: list[Products]) -> Tensor:
            self.products = products
            return super(Fp8, self).run(x)

        c, ways = self.config, {"8 bits": partial(by, self.small), "bf16": partial(by, self.plain)}
        what = f"ViT {c.hidden_size}/{c.intermediate_size}, {c.num_hidden_layers} blocks, pixels {list(x.shape)}"
        # Without a graph, launching kernels is part of the time: 8-bit products take longer to launch.
        time = partial(milliseconds, times=1) if self.graphs else partial(busy_milliseconds, times=3)
        return fastest(f"{what}, {self.dtype}", ways, time) != "bf16"


def remark(x: Tensor) -> str:
    """The sentence that says that fp8 does not pay for these pixels."""
    B, _, height, width = x.shape
    images = "one image" if B == 1 else f"{B} images"
    return f"For {images} of {height} x {width} pixels, bf16 is faster here than 8 bits: fp8 runs as cuda-fused."
