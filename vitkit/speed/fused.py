"""The same model for inference, with as few passes over memory as the kernels allow. `Products` say how its matrix
products run: here in the type of the weights, in fp8.py with 8 bits.

What changes, and why the answers do not (beyond rounding):
  - The residual is added by the matrix product that makes the branch (C = A B + C). Its bias cannot be added there too,
    so biases stay out of the residual stream, and the LayerNorm that reads it adds their running sum, `shift`.
  - Layer scale is folded into the rows of the matrix before it.
  - E of Eq. 1 is one matrix product over flattened patches; class token, registers and positions are one table.
  - GELU is the epilogue of the matrix product before it (bf16 on CUDA: its tanh form, within that type's rounding; on
    the CPU by oneDNN, where that is the better library).
  - With class-token pooling the head reads one token, so the last block computes queries, U_msa and MLP for that alone.
  - Attention takes the fastest of torch's kernels and ours, chosen by timing them on the shapes at hand. So do products
    of many rows with cuBLASLt's algorithms (cublas.py).
  - A batch on CUDA is one graph launch instead of a hundred kernel launches. The longest product of small batches, the
    MLP's second, may be split along its length into parts that run side by side; the LayerNorm that reads next adds
    them up.

Legend: B images, T tokens, M = B T, D width, h heads, d = D / h.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from vitkit import cpu_products
from vitkit.cuda_capture import Replays
from vitkit.errors import ConfigError, InputError
from vitkit.model.config import GELUS
from vitkit.model.inputs import validate_and_pad
from vitkit.model.parts.fit import Takes, unfit
from vitkit.model.vit import ViT
from vitkit.speed.choices import fastest
from vitkit.speed.cublas import add_product, linear
from vitkit.speed.kernels import (
    add_norm,
    attends_by,
    attention,
    attention_loop,
    first_of,
    flat_patches,
    run_on,
    takes_attention,
    takes_attention_loop,
)

TAKES: Takes = {"hidden_act": GELUS, "positions": ("none", "2d", "sincos"), "pool": ("mean",)}
FEW = 1024          # tokens up to which a long matrix product leaves much of the device idle
Attention = Callable[[Tensor, int, int, int], Tensor]       # qkv [M, 3 h d], heads, B, T -> [M, h d]
Normed = tuple[Tensor, Tensor | None]                       # LN(z) as a product reads it, and the scales of its rows


@dataclass
class Layer:
    """The weights of one block, in the shapes in which they are used."""

    shift1: Tensor
    norm1: tuple[Tensor, Tensor]
    qkv: tuple[Tensor, Tensor]          # [D, 3 h d], [3 h d]
    out: Tensor                         # [h d, D]
    shift2: Tensor
    norm2: tuple[Tensor, Tensor]
    fc1: tuple[Tensor, Tensor]
    fc2: Tensor
    heads: int


class Products:
    """The matrix products of one block in the type of its weights.

    Args:
        layer: the block's weights.
        tanh: whether its GELU is the tanh form.
        splits: rows of an MLP's second product -> how many parts it is split into, filled by timing; None never splits.
    """

    def __init__(self, layer: Layer, tanh: bool, splits: dict[int, int] | None) -> None:
        self.layer, self.approximate, self.splits = layer, "tanh" if tanh else "none", splits

    def scales(self, z: Tensor) -> Tensor | None:
        """Where the LayerNorm puts the scales of its rows; None if a product reads no scales."""
        return None

    def qkv(self, u: Normed, first: int = 0) -> Tensor:
        """Eq. 5, [M, 3 h d], or only its columns from `first` on."""
        W, b = self.layer.qkv
        return linear(u[0], W[:, first:], b[first:])

    def project(self, z: Tensor, sa: Tensor) -> None:
        """Eq. 8 and the residual of Eq. 2: add sa U_msa to z."""
        add_product(z, sa, self.layer.out)

    def hidden(self, u: Normed) -> Tensor:
        """GELU(u W_1 + b_1)."""
        (W, b), x = self.layer.fc1, u[0]
        if x.is_cuda and x.dtype != torch.float32:
            return linear(x, W, b, gelu=True)
        return F.gelu(torch.addmm(b, x, W), approximate=self.approximate)

    def add(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """z + h W_2; or z, and the parts [S M, D] that are still to be added to it."""
        (M, K), W, splits = h.shape, self.layer.fc2, self.splits
        if splits is None or M > FEW:
            return add_product(z, h, W), None
        if M not in splits:
            other = z.clone()
            ways: dict[str, Callable[[], object]] = {"1": lambda: other.addmm_(h, W)}
            ways |= {str(S): partial(parts, h, W, S) for S in (2, 4) if K % (8 * S) == 0}
            splits[M] = int(fastest(f"parts of a product {M} x {K} x {W.shape[1]}, {h.dtype}", ways) or 1)
        return (z, parts(h, W, splits[M])) if splits[M] > 1 else (z.addmm_(h, W), None)


class OneDNN(Products):
    """The same on CPUs where oneDNN is the better library (cpu_products.py), with GELU as a part of its product."""

    def qkv(self, u: Normed, first: int = 0) -> Tensor:
        """Eq. 5, [M, 3 h d], or only its columns from `first` on."""
        W, b = self.layer.qkv
        return cpu_products.linear(u[0], W[:, first:].mT, b[first:])

    def project(self, z: Tensor, sa: Tensor) -> None:
        """Eq. 8 and the residual of Eq. 2: add sa U_msa to z."""
        z.add_(cpu_products.linear(sa, self.layer.out.mT))

    def hidden(self, u: Normed) -> Tensor:
        """GELU(u W_1 + b_1)."""
        W, b = self.layer.fc1
        return cpu_products.linear_gelu(u[0], W.mT, b, self.approximate)

    def add(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """z + h W_2."""
        return z.add_(cpu_products.linear(h, self.layer.fc2.mT)), None


class Fused:
    """A ViT ready to run fused.

    Args:
        model: any ViT; its device and image size are kept, other sizes resize its positions as it does.
        dtype: type of weights and activations (default: bf16 on CUDA, elsewhere the model's own).
        graphs: whether batches on CUDA are captured as graphs.
        share: whether weights that need no change stay the model's own, which saves their memory. The model must then
            not change any more: norms are copied, and would not fit. Otherwise all are copied, and later changes of the
            model do not reach the engine.
        head: whether it returns logits; otherwise y of Eq. 4.
    """

    def __init__(self, model: ViT, dtype: torch.dtype | None = None, graphs: bool = True, share: bool = False,
                 head: bool = True) -> None:
        c = self.config = model.config
        if odd := unfit(c, TAKES):
            raise ConfigError(f"The fused engines do not compute {', '.join(odd)}. Use --engine torch.")
        if not run_on(model.patch_embedding.projection.weight.device):
            raise ConfigError("On CUDA, the fused engines need Triton and a GPU of compute capability 8.0 or more. Use "
                              "--engine torch.")
        self.share = share
        self.input_spec, self.positions = model.input_spec, copy.deepcopy(model.positions)
        weight = model.patch_embedding.projection.weight
        self.device, self.graphs = weight.device, graphs and weight.is_cuda
        self.dtype = dtype or (torch.bfloat16 if weight.is_cuda else weight.dtype)
        self.tables: dict[tuple[int, int], Tensor] = {}
        self.kernels: dict[tuple[int, ...], Attention] = {}
        self.replays = Replays(self.dtype)
        with torch.no_grad():
            self.E = self.cast(weight.flatten(1).mT)                                      # [C P P, D]
            self.layers: list[Layer] = []
            self.prefix = [t[0].float() for t in (model.class_token, model.register_tokens) if t is not None]
            self.patch_bias = cast(Tensor, model.patch_embedding.projection.bias).float()
            shift = torch.zeros(c.hidden_size, device=self.device)
            for block in model.blocks:
                scales = [None if r.gamma is None else r.gamma.float() for r in (block.residual1, block.residual2)]
                msa, mlp = block.msa, block.mlp
                bias = msa.qkv.bias if msa.qkv.bias is not None else torch.zeros_like(msa.qkv.weight[:, 0])
                shift1, shift = shift, shift + scaled(msa.out.bias.float(), scales[0])
                self.layers.append(Layer(
                    shift1=shift1, norm1=self.norm(block.norm1), qkv=(self.cast(msa.qkv.weight.mT), self.cast(bias)),
                    out=self.cast(scaled(msa.out.weight.mT, scales[0])), shift2=shift, norm2=self.norm(block.norm2),
                    fc1=(self.cast(mlp.fc1.weight.mT), self.cast(mlp.fc1.bias)),
                    fc2=self.cast(scaled(mlp.fc2.weight.mT, scales[1])), heads=len(msa.heads)))
                shift = shift + scaled(mlp.fc2.bias.float(), scales[1])
            splits: dict[int, int] | None = {} if self.graphs else None
            onednn = self.device.type == "cpu" and self.dtype == torch.float32 and cpu_products.onednn_is_wider()
            kind = OneDNN if onednn else Products
            self.plain: list[Products] = [kind(layer, c.hidden_act == "gelu_tanh", splits) for layer in self.layers]
            self.products = self.plain
            self.shift, self.last_norm = shift, self.norm(model.norm)
            last = torch.nn.Sequential() if not (c.num_classes and head) else model.head
            # The head runs in fp32: it costs nothing, and close logits would be equal in 16 bits.
            self.tail = _copy(torch.nn.Sequential(model.pre_logits, torch.nn.Tanh(), last)
                              if model.pre_logits is not None and head else last,
                              torch.promote_types(self.dtype, torch.float32))

    def cast(self, t: Tensor) -> Tensor:
        """A tensor in the engine's type, laid out so that its columns are contiguous (as weights are)."""
        return t.detach().to(self.dtype, copy=not self.share)

    def norm(self, module: torch.nn.Module) -> tuple[Tensor, Tensor]:
        """Weight and bias of a LayerNorm, in fp32: they are read once per row and cost nothing."""
        assert isinstance(module, torch.nn.LayerNorm)
        return module.weight.detach().float().clone(), module.bias.detach().float().clone()

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [B, K] in fp32 of pixels [B, C, H, W]."""
        # Under the caller's autocast the head would run in 16 bits. Kernels and graphs run on the current device.
        with (torch.inference_mode(), torch.autocast(self.device.type, enabled=False),
              torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()):
            x = validate_and_pad(x, self.config).to(self.device)
            if not len(x):
                raise InputError("Expected at least one image; got a batch of 0.")
            return self.replays(self.run, x) if self.graphs else self.run(x.to(self.dtype))

    def table(self, grid: tuple[int, int]) -> Tensor:
        """What is added to the projected patches, [T, D]: positions and biases; the tokens before them whole."""
        if grid not in self.tables:
            positions, c = self.positions(grid)[0].float(), self.config                   # [class + N, D]
            patches = positions[int(c.class_token):] + self.patch_bias
            prefix = [token.clone() for token in self.prefix]
            if c.class_token:
                prefix[0] += positions[:1]
            self.tables[grid] = torch.cat([*prefix, patches]).to(self.dtype)
        return self.tables[grid]

    def run(self, x: Tensor) -> Tensor:
        """All equations. What is still to be added to z is left to the LayerNorm that reads it next."""
        B, table = len(x), self.table((x.shape[2] // self.config.patch_size, x.shape[3] // self.config.patch_size))
        flat = flat_patches(x, self.config.patch_size, self.config.num_prefix_tokens, x.dtype)
        z = flat @ self.E                                                                 # Eq. 1   [M, D]
        pending: Tensor | None = table
        for i in range(len(self.layers)):
            z, pending = self.block(z, pending, i, B, len(table))
        return self.finish(z, pending, B)

    def block(self, z: Tensor, pending: Tensor | None, i: int, B: int, T: int) -> tuple[Tensor, Tensor | None]:
        """Eqs. 2 and 3 of block i: z [M, D], and what is still to be added to it. The last block's may be [B, D]."""
        layer, by = self.layers[i], self.products[i]
        u = self.read(z, pending, layer.shift1, layer.norm1, by)
        if self.config.pool == "cls" and i == len(self.layers) - 1:     # only the class token is read
            width = layer.out.shape[0]
            k, v = by.qkv(u, width).view(B, T, 2, layer.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)   # 2 x [B, h, T, d]
            by, z = self.plain[i], z.view(B, T, -1)[:, 0].contiguous()                    # [B, D]
            own = u[0].view(B, T, -1)[:, 0] if u[1] is None else self.read(z, None, layer.shift1, layer.norm1)[0]
            q = torch.addmm(layer.qkv[1][:width], own, layer.qkv[0][:, :width]).view(B, 1, layer.heads, -1)
            sa = F.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2).reshape(B, -1)
        else:
            sa = self.attention(by.qkv(u), layer, B, T)                                   # Eqs. 5-7
        by.project(z, sa)                                                                 # Eqs. 8, 2
        return by.add(z, by.hidden(self.read(z, None, layer.shift2, layer.norm2, by)))    # Eq. 3

    def read(self, z: Tensor, pending: Tensor | None, shift: Tensor, norm: tuple[Tensor, Tensor],
             by: Products | None = None) -> Normed:
        """LN(z) in the form that products read; what is pending is added to z on the way."""
        scales = None if by is None else by.scales(z)
        total = None if pending is None else z
        return add_norm(z, pending, shift, *norm, self.config.layer_norm_eps, total=total, scale=scales), scales

    def attention(self, qkv: Tensor, layer: Layer, B: int, T: int) -> Tensor:
        """Eqs. 6 and 7: [M, 3 h d] -> [M, h d]."""
        key = B, T, layer.heads
        if key not in self.kernels:
            self.kernels[key] = fastest_attention(qkv, *key)
        return self.kernels[key](qkv, layer.heads, B, T)

    def finish(self, z: Tensor, pending: Tensor | None, B: int) -> Tensor:
        """Eq. 4 and the head: [B or M, D] -> [B, K]."""
        c = self.config
        if c.norm_after_pool:
            z = z if pending is None else z + pending.view(-1, *z.shape).sum(0).to(z.dtype)
            z, pending = z.view(B, -1, z.shape[1])[:, c.num_prefix_tokens:].float().mean(1).to(z.dtype), None
        y, _ = self.read(z, pending, self.shift, self.last_norm)
        if c.pool == "mean" and not c.norm_after_pool:
            y = y.view(B, -1, y.shape[1])[:, c.num_prefix_tokens:].float().mean(1).to(y.dtype)
        return self.tail(y.to(torch.promote_types(y.dtype, torch.float32))).float()


def scaled(t: Tensor, by: Tensor | None) -> Tensor:
    """t with layer scale multiplied into its last dimension, in fp32; t itself where there is none."""
    return t if by is None else t.float() * by


def _copy(module: torch.nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return copy.deepcopy(module).to(dtype).eval()


def parts(h: Tensor, W: Tensor, S: int) -> Tensor:
    """The S parts of h W, cut along its length, in fp32: [M, K], [K, N] -> [S M, N]."""
    a, b = h.unflatten(1, (S, -1)).transpose(0, 1), W.unflatten(0, (S, -1))
    return torch.bmm(a, b, out_dtype=torch.float32).flatten(0, 1)


def by_torch(backend: SDPBackend) -> Attention:
    """Eqs. 6 and 7 by one of torch's kernels; on the CPU by the one that torch takes."""

    def run(qkv: Tensor, heads: int, B: int, T: int) -> Tensor:
        q, k, v = qkv.view(B, T, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)           # 3 x [B, h, T, d]
        with first_of(backend, SDPBackend.MATH) if qkv.is_cuda else nullcontext():
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B * T, -1)

    return run


BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}
ATTENTIONS: dict[str, Attention] = {
    **{name: by_torch(backend) for name, backend in BACKENDS.items()},
    "ours": attention,
    "ours, many images": attention_loop,
    "math": by_torch(SDPBackend.MATH),
}


def fastest_attention(qkv: Tensor, B: int, T: int, heads: int) -> Attention:
    """Time every attention kernel on these tensors; on the CPU there is one choice."""
    if not qkv.is_cuda:
        return ATTENTIONS["flash"]
    size = qkv.shape[1] // 3 // heads
    ways = {name: partial(way, qkv, heads, B, T) for name, way in ATTENTIONS.items() if name != "math"}
    if not takes_attention(T, size, qkv.dtype):
        del ways["ours"]
    if not takes_attention_loop(T, size, qkv.dtype):
        del ways["ours, many images"]
    qkv_of_heads = qkv.view(B, T, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    for name, backend in BACKENDS.items():
        if not attends_by(backend, *qkv_of_heads):      # plain products would be timed in its place
            del ways[name]
    return ATTENTIONS[fastest(f"attention of {B} x {T} tokens, {heads} heads of {size}, {qkv.dtype}", ways) or "math"]
