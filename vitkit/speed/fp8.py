"""The fused engine with 8-bit floating-point matrix products (e4m3): qkv and both layers of the MLP.

Scales are static and need no calibration: a LayerNorm's output cannot exceed sqrt(D) |weight| + |bias|, so its scale
follows from the weights, and so does a bound on what the MLP's first layer makes of it. Nothing can saturate, and e4m3
keeps its relative precision over the range that such a bound wastes. Weights have a scale for each output. Scaling is
the last step of the LayerNorm and of the GELU that precede a product. U_msa stays in bf16: quantizing the attention's
output would cost what its product saves.

Legend: M = B T rows of tokens, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.model.vit import ViT
from vitkit.speed.fused import Fused, Layer
from vitkit.speed.kernels import FP8, FP8_MAX, mlp_fp8


def multiply(a: Tensor, b: tuple[Tensor, Tensor], scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a b^T scale_a scale_b + bias, of fp8 matrices.

    Args:
        a: [M, K] fp8.
        b: [N, K] fp8, and the scales of its rows [N].
        scale: [M, 1], of the rows of a.
        bias: [N], or None.
        dtype: of the result.
    """
    matrix, of_b = b
    if a.is_cuda:
        return torch._scaled_mm(a, matrix.mT, scale, of_b[None], bias=bias, out_dtype=dtype, use_fast_accum=True)
    product = (a.float() @ matrix.float().mT) * (scale * of_b)
    return (product if bias is None else product + bias.float()).to(dtype)


class Fp8Layer:
    """The 8-bit matrices of one block, and the scales of what they are multiplied with."""

    def __init__(self, layer: Layer, D: int) -> None:
        bound1, bound2 = (math.sqrt(D) * weight.abs() + bias.abs() for weight, bias in (layer.norm1, layer.norm2))
        self.scale1, self.scale2 = (float(bound.max()) / FP8_MAX for bound in (bound1, bound2))
        W1, b1 = (t.float() for t in layer.fc1)
        weight, bias = layer.norm2
        reach = (W1 * weight[:, None]).norm(dim=0) * math.sqrt(D) + (bias @ W1 + b1).abs()    # |u W_1 + b_1| of a unit
        self.scale_h = float(reach.max()) / FP8_MAX
        self.qkv, self.fc1, self.fc2 = (self.quantize(W) for W in (layer.qkv[0], layer.fc1[0], layer.fc2))

    @staticmethod
    def quantize(W: Tensor) -> tuple[Tensor, Tensor]:
        """(fp8 matrix [N, K], the scales of its rows [N]) of [K, N]: each output of a layer has a scale of its own."""
        scale = W.float().abs().amax(0).clamp(min=1e-12) / FP8_MAX
        return (W.float() / scale).clamp(-FP8_MAX, FP8_MAX).mT.to(FP8).contiguous(), scale


class Fp8(Fused):
    """A ViT ready to run in fp8.

    Args:
        model: a ViT whose widths are multiples of 16.
        dtype: of everything that is not a matrix product in fp8.
        graphs: whether small batches on CUDA are captured as graphs.
        full: how many of the first blocks keep their matrices in full; a third of them when not given. Rounding done
            early is carried through every later block: on real weights these blocks cost most of the agreement.
    """

    def __init__(self, model: ViT, dtype: torch.dtype | None = None, graphs: bool = True,
                 full: int | None = None) -> None:
        c = model.config
        widths = {c.hidden_size, c.intermediate_size, *(3 * len(b.msa.heads) * c.head_size for b in model.blocks)}
        if any(width % 16 for width in widths):
            raise ConfigError(f"fp8 needs widths that are multiples of 16; this model has "
                              f"{sorted(w for w in widths if w % 16)}. Use the engine cuda-fused.")
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

    def block(self, z: Tensor, pending: Tensor | None, layer: Layer, i: int, B: int,
              T: int) -> tuple[Tensor, Tensor | None]:
        """Eqs. 2 and 3 of block i, in fp8 where it has 8-bit matrices."""
        small, M = self.small[i], len(z)
        if small is None:
            return super().block(z, pending, layer, i, B, T)
        u = self.read(z, pending, layer.shift1, layer.norm1, small.scale1)
        if self.ends_in_class_token(i):
            matrix, scales = (part[len(part) // 3:] for part in small.qkv)
            bias = layer.qkv[1][len(layer.qkv[1]) // 3:]
            kv = multiply(u, (matrix, scales), self.scale(M, small.scale1), bias, self.dtype)
            own = self.read(z.view(B, T, -1)[:, 0].contiguous(), None, layer.shift1, layer.norm1)
            return self.class_block(z, own, kv, layer, B, T), None
        qkv = multiply(u, small.qkv, self.scale(M, small.scale1), layer.qkv[1], self.dtype)       # Eq. 5
        z.addmm_(self.attention(qkv, layer, B, T), layer.out)                             # Eqs. 6-8, 2
        u = self.read(z, None, layer.shift2, layer.norm2, small.scale2)
        h = mlp_fp8(u, small.fc1[0], small.scale2, small.fc1[1], layer.fc1[1], small.scale_h)
        return z, multiply(h, small.fc2, self.scale(M, small.scale_h), None, self.dtype)  # Eq. 3, added later
