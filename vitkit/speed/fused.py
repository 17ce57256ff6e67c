"""The same model with as few passes over memory as the libraries' kernels allow, for inference.

What changes, and why the answers do not (beyond rounding):
  - The residual is added by the matrix product that makes the branch (C = A B + C). Its bias cannot be added there too,
    so biases stay out of the residual stream and the LayerNorm that reads it adds their running sum, `shift`.
  - Layer scale is folded into the rows of the matrix before it.
  - E of Eq. 1 is one matrix product over flattened patches; class token, registers and positions are one table.
  - GELU is the epilogue of the matrix product before it (bf16 on CUDA: its tanh form, within that type's rounding).
  - With class-token pooling the head reads one token, so the last block computes queries, U_msa and MLP for that alone.
  - Attention takes the fastest of torch's kernels and ours, chosen by timing them on the shapes at hand.
  - Small batches on CUDA are one graph launch instead of a hundred kernel launches. Their longest product, the MLP's
    second, may be cut along its length into parts that run side by side; the LayerNorm that reads next adds them up.

Legend: B images, T tokens, M = B T, D width, h heads, d = D / h.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitkit.errors import InputError
from vitkit.model.inputs import validate_and_pad
from vitkit.model.vit import ViT
from vitkit.speed.cuda_graphs import capture, warm_up
from vitkit.speed.kernels import add_norm, attention, flat_patches, takes_attention

SMALL = 4096        # tokens in a batch up to which launching kernels takes longer than running them
FEW = 1024          # tokens up to which a long matrix product leaves much of the device idle
Attention = Callable[[Tensor, int, int, int], Tensor]       # qkv [M, 3 h d], heads, B, T -> [M, h d]


@dataclass
class Layer:
    """The matrices of one block, in the shapes in which they are used."""

    shift1: Tensor
    norm1: tuple[Tensor, Tensor]
    qkv: tuple[Tensor, Tensor]          # [D, 3 h d], [3 h d]
    out: Tensor                         # [h d, D]
    shift2: Tensor
    norm2: tuple[Tensor, Tensor]
    fc1: tuple[Tensor, Tensor]
    fc2: Tensor
    heads: int


class Fused:
    """A ViT ready to run fused.

    Args:
        model: any ViT; its device and image size are kept, other sizes take the plain path of its positions.
        dtype: type of weights and activations; bf16 on CUDA and the model's own elsewhere when not given.
        graphs: whether small batches on CUDA are captured as graphs.
        share: whether weights that need no change stay the model's own, which saves their memory. Otherwise all are
            copied, and later changes of the model do not reach the engine.
    """

    def __init__(self, model: ViT, dtype: torch.dtype | None = None, graphs: bool = True, share: bool = False) -> None:
        c = self.config = model.config
        self.share = share
        self.input_spec, self.positions = model.input_spec, copy.deepcopy(model.positions)
        weight = model.patch_embedding.projection.weight
        self.device, self.graphs = weight.device, graphs and weight.is_cuda
        self.dtype = dtype or (torch.bfloat16 if weight.is_cuda else weight.dtype)
        self.tables: dict[tuple[int, int], Tensor] = {}
        self.kernels: dict[tuple[int, ...], Attention] = {}
        self.cuts: dict[int, int] = {}
        self.captured: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
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
            self.shift, self.last_norm = shift, self.norm(model.norm)
            head = torch.nn.Sequential() if not c.num_classes else model.head
            self.tail = _copy(torch.nn.Sequential(model.pre_logits, torch.nn.Tanh(), head)
                              if model.pre_logits is not None else head, self.dtype)

    def cast(self, t: Tensor) -> Tensor:
        """A tensor in the engine's type, laid out so that its columns are contiguous (as weights are)."""
        return t.detach().to(self.dtype, copy=not self.share)

    def norm(self, module: torch.nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """Weight and bias of a LayerNorm, in fp32: they are read once a row and cost nothing."""
        return module.weight.detach().float().clone(), module.bias.detach().float().clone()

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [B, K] in fp32 of pixels [B, C, H, W]."""
        with torch.inference_mode():
            x = validate_and_pad(x, self.config).to(self.device, self.dtype)
            grid = x.shape[2] // self.config.patch_size, x.shape[3] // self.config.patch_size
            tokens = len(x) * (self.config.num_prefix_tokens + grid[0] * grid[1])
            if not len(x):
                raise InputError("Expected at least one image; got a batch of 0.")
            return self.replay(x, grid) if self.graphs and tokens <= SMALL else self.run(x, grid)

    def replay(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Run by a captured graph, captured the first time a shape comes."""
        key = tuple(x.shape)
        if key not in self.captured:
            still = x.clone()
            work = partial(self.run, still, grid)
            warm_up(work)
            graph, result = capture(work)
            self.captured[key] = graph, still, result
        graph, still, result = self.captured[key]
        still.copy_(x)
        graph.replay()
        return result.clone()

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

    def run(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """All equations. What is still to be added to z is left to the LayerNorm that reads it next."""
        B, table = len(x), self.table(grid)
        flat = flat_patches(x, self.config.patch_size, self.config.num_prefix_tokens, x.dtype)
        z = flat @ self.E                                                                 # Eq. 1   [M, D]
        pending: Tensor | None = table
        for i, layer in enumerate(self.layers):
            z, pending = self.block(z, pending, layer, i, B, len(table))
        return self.finish(z, pending, B)

    def block(self, z: Tensor, pending: Tensor | None, layer: Layer, i: int, B: int,
              T: int) -> tuple[Tensor, Tensor | None]:
        """Eqs. 2 and 3 of block i: z [M, D] (the last one's may be [B, D]), and what is still to be added to it."""
        u = self.read(z, pending, layer.shift1, layer.norm1)
        width = layer.qkv[0].shape[1] // 3
        if self.ends_in_class_token(i):
            kv = torch.addmm(layer.qkv[1][width:], u, layer.qkv[0][:, width:])            # Eq. 5 of keys and values
            return self.class_block(z, u.view(B, T, -1)[:, 0], kv, layer, B, T), None
        z.addmm_(self.attention(torch.addmm(layer.qkv[1], u, layer.qkv[0]), layer, B, T), layer.out)  # Eqs. 5-8, 2
        u = self.read(z, None, layer.shift2, layer.norm2)
        return self.add(z, self.hidden(u, layer), layer.fc2)                              # Eq. 3

    def add(self, z: Tensor, h: Tensor, W: Tensor) -> tuple[Tensor, Tensor | None]:
        """z + h W, or z and the parts [S M, D] that are still to be added to it."""
        M, K = h.shape
        if not self.graphs or M > FEW:
            return z.addmm_(h, W), None
        if M not in self.cuts:
            other = z.clone()
            ways: dict[int, Callable[[], object]] = {1: lambda: other.addmm_(h, W)}
            ways |= {S: partial(parts, h, W, S) for S in (2, 4) if K % (8 * S) == 0}
            self.cuts[M] = min(ways, key=lambda S: _time(ways[S]))
        return (z, parts(h, W, self.cuts[M])) if self.cuts[M] > 1 else (z.addmm_(h, W), None)

    def read(self, z: Tensor, pending: Tensor | None, shift: Tensor, norm: tuple[Tensor, Tensor],
             scale: float | Tensor | None = None) -> Tensor:
        """LN(z), what is pending being added to z on the way."""
        total = None if pending is None else z
        return add_norm(z, pending, shift, *norm, self.config.layer_norm_eps, total=total, scale=scale)

    def ends_in_class_token(self, i: int) -> bool:
        """Whether only the class token of block i is read."""
        return self.config.pool == "cls" and i == len(self.layers) - 1

    def hidden(self, u: Tensor, layer: Layer) -> Tensor:
        """GELU(u W_1 + b_1)."""
        if u.is_cuda and u.dtype != torch.float32:
            return torch._addmm_activation(layer.fc1[1], u, layer.fc1[0], use_gelu=True)
        approximate = "tanh" if self.config.hidden_act == "gelu_tanh" else "none"
        return F.gelu(torch.addmm(layer.fc1[1], u, layer.fc1[0]), approximate=approximate)

    def attention(self, qkv: Tensor, layer: Layer, B: int, T: int) -> Tensor:
        """Eqs. 6 and 7: [M, 3 h d] -> [M, h d]."""
        key = B, T, layer.heads
        if key not in self.kernels:
            self.kernels[key] = fastest(qkv, *key)
        return self.kernels[key](qkv, layer.heads, B, T)

    def class_block(self, z: Tensor, own: Tensor, kv: Tensor, layer: Layer, B: int, T: int) -> Tensor:
        """Eqs. 5-8, 2 and 3 for the class token alone: [B, D].

        Args:
            z: [M, D].
            own: [B, D], the class token's LN(z).
            kv: [M, 2 h d], keys and values of all tokens.
            layer: the block's matrices.
            B: images.
            T: tokens.
        """
        width = layer.qkv[0].shape[1] // 3
        q = torch.addmm(layer.qkv[1][:width], own, layer.qkv[0][:, :width]).view(B, 1, layer.heads, -1).transpose(1, 2)
        k, v = kv.view(B, T, 2, layer.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)         # 2 x [B, h, T, d]
        sa = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, -1)
        z = z.view(B, T, -1)[:, 0].contiguous().addmm_(sa, layer.out)
        return z.addmm_(self.hidden(self.read(z, None, layer.shift2, layer.norm2), layer), layer.fc2)

    def finish(self, z: Tensor, pending: Tensor | None, B: int) -> Tensor:
        """Eq. 4 and the head: [B or M, D] -> [B, K]."""
        c = self.config
        if c.pool == "cls":
            return self.tail(self.read(z, pending, self.shift, self.last_norm)).float()
        if c.norm_after_pool:
            z = z if pending is None else z + pending.view(-1, *z.shape).sum(0).to(z.dtype)
            z = z.view(B, -1, z.shape[1])[:, c.num_prefix_tokens:]
            return self.tail(self.read(z.float().mean(1).to(z.dtype), None, self.shift, self.last_norm)).float()
        y = self.read(z, pending, self.shift, self.last_norm).view(B, -1, z.shape[1])[:, c.num_prefix_tokens:]
        return self.tail(y.float().mean(1).to(z.dtype)).float()


def scaled(t: Tensor, by: Tensor | None) -> Tensor:
    """t with layer scale multiplied into its last dimension, in fp32; t itself where there is none."""
    return t if by is None else t.float() * by


def _copy(module: torch.nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return copy.deepcopy(module).to(dtype).eval()


def _time(work: Callable[[], object], times: int = 10) -> float:
    """Milliseconds of CUDA work without the time that launching it takes: small kernels finish before the next is
    launched, so they are replayed from a graph."""
    def many() -> None:
        for _ in range(times):
            work()

    warm_up(work)
    graph, _ = capture(many)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def parts(h: Tensor, W: Tensor, S: int) -> Tensor:
    """The S parts of h W, cut along its length, in fp32: [M, K], [K, N] -> [S M, N]."""
    a, b = h.unflatten(1, (S, -1)).transpose(0, 1), W.unflatten(0, (S, -1))
    return torch.bmm(a, b, out_dtype=torch.float32).flatten(0, 1)


def by_torch(backend: SDPBackend) -> Attention:
    """Eqs. 6 and 7 by one of torch's kernels."""

    def run(qkv: Tensor, heads: int, B: int, T: int) -> Tensor:
        q, k, v = qkv.view(B, T, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)           # 3 x [B, h, T, d]
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B * T, -1)

    return run


def fastest(qkv: Tensor, B: int, T: int, heads: int) -> Attention:
    """Time every attention kernel on these tensors; on the CPU there is one choice."""
    if not qkv.is_cuda:
        return by_torch(SDPBackend.FLASH_ATTENTION)
    ways = [by_torch(backend) for backend in
            (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)]
    if takes_attention(T, qkv.shape[1] // 3 // heads, qkv.dtype):
        ways.append(attention)
    found: list[tuple[float, Attention]] = []
    for way in ways:
        try:
            found.append((_time(partial(way, qkv, heads, B, T)), way))
        except RuntimeError:        # this kernel does not take these shapes or this type
            continue
    return min(found, key=lambda pair: pair[0])[1] if found else by_torch(SDPBackend.MATH)
