"""The fused engine with 8-bit floating-point matrix products (e4m3): qkv and both layers of the MLP.

Scales are static and need no calibration: a LayerNorm's output cannot exceed sqrt(D) |weight| + |bias|, so its scale
follows from the weights, and so does a bound on what the MLP's first layer makes of it. Nothing can saturate, and e4m3
keeps its relative precision over the range that such a bound wastes. Scaling is the last step of the LayerNorm and of
the GELU that precede a product. U_msa stays in bf16: quantizing the attention's output would cost what its product
saves.

Legend: M = B T rows of tokens, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.model.vit import ViT
from vitkit.speed.fused import Fused, Layer
from vitkit.speed.kernels import FP8, FP8_MAX, add_norm, gelu_fp8


def multiply(a: Tensor, b: tuple[Tensor, Tensor], scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a b scale_a scale_b + bias, of fp8 matrices.

    Args:
        a: [M, K] fp8.
        b: [K, N] fp8, columns contiguous, and its scale.
        scale: of a.
        bias: [N], or None.
        dtype: of the result.
    """
    matrix, of_b = b
    if a.is_cuda:
        return torch._scaled_mm(a, matrix, scale, of_b, bias=bias, out_dtype=dtype, use_fast_accum=True)
    product = (a.float() @ matrix.float()) * (scale * of_b)
    return (product if bias is None else product + bias.float()).to(dtype)


class Fp8Layer:
    """The 8-bit matrices of one block, and the scales of what they are multiplied with."""

    def __init__(self, layer: Layer, D: int) -> None:
        device = layer.out.device
        bound1, bound2 = (math.sqrt(D) * weight.abs() + bias.abs() for weight, bias in (layer.norm1, layer.norm2))
        self.scale1, self.scale2 = (float(bound.max()) / FP8_MAX for bound in (bound1, bound2))
        W1, b1 = (t.float() for t in layer.fc1)
        weight, bias = layer.norm2
        reach = (W1 * weight[:, None]).norm(dim=0) * math.sqrt(D) + (bias @ W1 + b1).abs()    # |u W_1 + b_1| of a unit
        self.scale_h = float(reach.max()) / FP8_MAX
        self.qkv, self.fc1, self.fc2 = (self.quantize(W) for W in (layer.qkv[0], layer.fc1[0], layer.fc2))
        self.s1, self.s2, self.s_h = (torch.tensor(s, device=device) for s in (self.scale1, self.scale2, self.scale_h))

    @staticmethod
    def quantize(W: Tensor) -> tuple[Tensor, Tensor]:
        """(fp8 matrix with contiguous columns, its scale) of [K, N]."""
        scale = W.float().abs().max().clamp(min=1e-12) / FP8_MAX
        return (W.float().mT / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).contiguous().mT, scale


class Fp8(Fused):
    """A ViT ready to run in fp8.

    Args:
        model: a ViT whose widths are multiples of 16.
        dtype: of everything that is not a matrix product in fp8.
        graphs: whether small batches on CUDA are captured as graphs.
    """

    def __init__(self, model: ViT, dtype: torch.dtype | None = None, graphs: bool = True) -> None:
        c = model.config
        widths = {c.hidden_size, c.intermediate_size, *(3 * len(b.msa.heads) * c.head_size for b in model.blocks)}
        if any(width % 16 for width in widths):
            raise ConfigError(f"fp8 needs widths that are multiples of 16; this model has "
                              f"{sorted(w for w in widths if w % 16)}. Use the engine cuda-fused.")
        super().__init__(model, dtype, graphs)
        with torch.no_grad():
            self.small = [Fp8Layer(layer, c.hidden_size) for layer in self.layers]

    def run(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """All equations; the sum of a branch of fc2 and the residual is left to the next LayerNorm."""
        B, c, eps = len(x), self.config, self.config.layer_norm_eps
        table = self.table(grid)
        T = len(table)
        z = self.patches(x, grid) @ self.E                                                # Eq. 1   [M, D]
        branch = table
        for i, (layer, small) in enumerate(zip(self.layers, self.small, strict=True)):
            u = add_norm(z, branch, layer.shift1, *layer.norm1, eps, total=z, scale=small.scale1)
            if c.pool == "cls" and i == len(self.layers) - 1:
                return self.finish(self.class_block(z, u, layer, small, B, T), B)
            qkv = multiply(u, small.qkv, small.s1, layer.qkv[1], self.dtype)              # Eq. 5
            z.addmm_(self.attention(qkv, layer, B, T), layer.out)                         # Eqs. 6-8, 2
            u = add_norm(z, None, layer.shift2, *layer.norm2, eps, scale=small.scale2)
            h = multiply(u, small.fc1, small.s2, layer.fc1[1], self.dtype)
            branch = multiply(gelu_fp8(h, small.scale_h), small.fc2, small.s_h, None, self.dtype)
        return self.finish(z + branch, B)

    def class_block(self, z: Tensor, u: Tensor, layer: Layer, small: Fp8Layer, B: int, T: int) -> Tensor:
        """The last block: keys and values of all tokens in fp8, the rest for the class token alone, in full."""
        width = layer.qkv[0].shape[1] // 3
        matrix, scale = small.qkv
        kv = multiply(u, (matrix[:, width:], scale), small.s1, layer.qkv[1][width:], self.dtype)
        k, v = kv.view(B, T, 2, layer.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        z = z.view(B, T, -1)[:, 0].contiguous()
        own = add_norm(z, None, layer.shift1, *layer.norm1, self.config.layer_norm_eps)
        q = torch.addmm(layer.qkv[1][:width], own, layer.qkv[0][:, :width]).view(B, 1, layer.heads, -1)
        sa = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2).reshape(B, -1)
        z.addmm_(sa, layer.out)
        u = add_norm(z, None, layer.shift2, *layer.norm2, self.config.layer_norm_eps)
        return z.addmm_(self.hidden(u, layer), layer.fc2)
