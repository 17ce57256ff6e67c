"""The fused engine with 8-bit matrix products: qkv and both layers of the MLP.

Behind a LayerNorm, values are alike in size: qkv and the MLP's first layer run in integers, which are finer there than
8-bit floating point is. Every row has a scale of its own, found by the LayerNorm that writes it. Behind a GELU they are
not: the MLP's second layer runs in floating point (e4m3), with one static scale that needs no calibration, because a
bound on its input follows from the weights (nothing can saturate, and e4m3 keeps its relative precision over the range
that a bound wastes). Weights have a scale for each output. Scaling is the last step of the LayerNorm and of the GELU
that precede a product. U_msa stays in bf16: quantizing the attention's output would cost what its product saves.

Legend: M = B T rows of tokens, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.model.vit import ViT
from vitkit.speed.fused import Fused, Layer
from vitkit.speed.kernels import FP8, FP8_MAX, linear_int8, multiply, to_int8


class Fp8Layer:
    """The 8-bit matrices of one block, each [N, K] with the scales of its rows [N], and the scale behind the GELU."""

    def __init__(self, layer: Layer, D: int) -> None:
        W1, b1 = (t.float() for t in layer.fc1)
        weight, bias = layer.norm2
        reach = (W1 * weight[:, None]).norm(dim=0) * math.sqrt(D) + (bias @ W1 + b1).abs()  # |u W_1 + b_1| of a unit
        self.scale_h = float(reach.max()) / FP8_MAX
        self.qkv, self.fc1 = self.integers(layer.qkv[0]), self.integers(layer.fc1[0])
        scale = layer.fc2.float().abs().amax(0).clamp(min=1e-12) / FP8_MAX
        self.fc2 = (layer.fc2.float() / scale).clamp(-FP8_MAX, FP8_MAX).mT.to(FP8).contiguous(), scale

    @staticmethod
    def integers(W: Tensor) -> tuple[Tensor, Tensor]:
        """(int8 [N, K], scales [N]) of [K, N]: each output of a layer has a scale of its own."""
        scale = torch.empty(W.shape[1], device=W.device)
        return to_int8(W.mT, scale).contiguous(), scale


class Fp8(Fused):
    """A ViT ready to run in fp8.

    Args:
        model: a ViT whose widths are multiples of 16.
        dtype: of everything that is not a matrix product in fp8.
        graphs: whether small batches on CUDA are captured as graphs.
        full: how many of the first blocks keep their matrices in full; a third of them when not given. Rounding done
            early is carried through every later block: on real weights these blocks cost most of the agreement.
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
        first = c.num_hidden_layers // 3 if full is None else full
        self.rows: dict[tuple[int, float], Tensor] = {}
        with torch.no_grad():
            self.small = [None if i < first else Fp8Layer(layer, c.hidden_size) for i, layer in enumerate(self.layers)]

    def scale(self, M: int, value: float) -> Tensor:
        """[M, 1] of one number: products take a scale for each row."""
        if (M, value) not in self.rows:
            self.rows[M, value] = torch.full((M, 1), value, device=self.device)
        return self.rows[M, value]

    def block(
        self, z: Tensor, pending: Tensor | None, layer: Layer, i: int, B: int, T: int
    ) -> tuple[Tensor, Tensor | None]:
        """Eqs. 2 and 3 of block i, in 8 bits where it has such matrices."""
        small, M = self.small[i], len(z)
        if small is None:
            return super().block(z, pending, layer, i, B, T)
        scales = torch.empty(M, device=z.device)
        u = self.read(z, pending, layer.shift1, layer.norm1, scales)
        if self.ends_in_class_token(i):
            matrix, of_kv, bias = (part[len(part) // 3 :] for part in (*small.qkv, layer.qkv[1]))
            kv = linear_int8(u, (matrix, of_kv), scales, bias, self.dtype)
            own = self.read(z.view(B, T, -1)[:, 0].contiguous(), None, layer.shift1, layer.norm1)
            return self.class_block(z, own, kv, layer, B, T), None
        qkv = linear_int8(u, small.qkv, scales, layer.qkv[1], self.dtype)  # Eq. 5
        z.addmm_(self.attention(qkv, layer, B, T), layer.out)  # Eqs. 6-8, 2
        u = self.read(z, None, layer.shift2, layer.norm2, scales)
        h = linear_int8(u, small.fc1, scales, layer.fc1[1], self.dtype, small.scale_h)
        return z, multiply(h, small.fc2, self.scale(M, small.scale_h), None, self.dtype)  # Eq. 3, added later
