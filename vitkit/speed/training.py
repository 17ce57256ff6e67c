"""The model's forward for training on CUDA in bf16, by the fused parts in differentiable/.

The residual stream is bf16 too. Models that these parts do not compute run as they are (`TrainingForward`). The
parameters are the model's own, and the logits are the same numbers up to rounding; with dropout, a hash chooses what is
dropped, where the plain model draws random numbers.

Legend: B images, C channels, P patch side, N patches, T tokens, M = B T, D width, h heads, d = D / h.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from vitkit.errors import ConfigError
from vitkit.model.config import GELUS, ViTConfig
from vitkit.model.inputs import validate_and_pad
from vitkit.model.parts.fit import Takes, unfit
from vitkit.model.parts.layers import Residual
from vitkit.model.vit import MSA, ViT
from vitkit.speed import differentiable
from vitkit.speed.cuda_graphs import GraphedStep
from vitkit.speed.differentiable import Rounded
from vitkit.speed.dropping import Depth, Dropout
from vitkit.speed.kernels import first_of, flat_patches, run_on

TAKES: Takes = {"hidden_act": GELUS, "positions": ("none", "2d", "sincos"), "pool": ("mean",)}
# Attention kernels in the order in which they are tried; on Hopper the first is the fastest, forward and backward.
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

log = logging.getLogger("vitkit")


def fusible(model: ViT, x: Tensor) -> bool:
    """Tell whether the fused parts apply to this model and these pixels in the current autocast and gradient modes."""
    return (x.is_cuda and torch.is_grad_enabled() and torch.is_autocast_enabled("cuda")
            and torch.get_autocast_dtype("cuda") == torch.bfloat16 and not unfit(model.config, TAKES)
            and run_on(x.device))


def refuse_fp8(c: ViTConfig, device: torch.device, checkpointing: bool = False) -> None:
    """Raise if a model cannot be trained with fp8 products.

    Args:
        c: the architecture.
        device: where it is trained.
        checkpointing: whether activations are computed again in the backward pass, which the fused parts do not do.

    Raises:
        ConfigError: with the reason, and what to use instead.
    """
    heads = {len(c.heads_of(layer)) for layer in range(c.num_hidden_layers)}
    widths = (c.hidden_size, c.intermediate_size, *(count * c.head_size for count in heads))
    for wrong, why in ((device.type != "cuda", f"a CUDA device; got {device.type}"),
                       (unfit(c, TAKES), f"a model without {', '.join(unfit(c, TAKES))}"),
                       (any(width % 16 for width in widths), "widths that are multiples of 16"),
                       (checkpointing, "--no-checkpointing"),
                       (device.type == "cuda" and not multiplies_in_fp8(device),
                        "Triton and a GPU of compute capability 8.9 or more")):
        if wrong:
            raise ConfigError(f"--precision fp8 needs {why}. Use --precision bf16.")


def multiplies_in_fp8(device: torch.device) -> bool:
    """Return whether a GPU has products in fp8 and runs our kernels."""
    return run_on(device) and torch.cuda.get_device_capability(device) >= (8, 9)


def dropouts(model: ViT, device: torch.device) -> Iterator[Dropout | None]:
    """Yield the dropout of each place, in the order of the forward pass: after the embedding, and in every block after
    attention, after the GELU and after the MLP. None where there is none.

    Args:
        model: a ViT.
        device: whose generator draws the keys.
    """
    rate, places = model.config.hidden_dropout_prob, 1 + 3 * len(model.blocks)
    if not (model.training and rate > 0):
        return repeat(None)
    keys = torch.randint(-(2**31), 2**31, (places, 2), device=device).int()
    return (Dropout(key, rate) for key in keys)


def depths(model: ViT, images: int, device: torch.device) -> Iterator[Depth | None]:
    """Yield the stochastic depth of each residual branch, in the order of the forward pass; None where there is none.

    Args:
        model: a ViT.
        images: of the batch.
        device: whose generator draws the numbers.
    """
    rates = [residual.rate for block in model.blocks for residual in (block.residual1, block.residual2)]
    if not (model.training and any(rates)):
        return repeat(None)
    drawn = torch.rand(sum(rate > 0 for rate in rates), images + 1, device=device)
    order = drawn[:, :-1].argsort(dim=1, stable=True)
    rows = zip(order, order.argsort(dim=1).int(), drawn[:, -1], strict=True)
    return (Depth(*next(rows), rate) if rate > 0 else None for rate in rates)


def fused_embedding(model: ViT, x: Tensor, drop: Dropout | None = None) -> Tensor:
    """z_0 of Eq. 1 by one product and one sum: [B, C, H, W] -> [B, T, D], bf16 on CUDA.

    Args:
        model: a ViT.
        x: pixels; they get no gradient.
        drop: dropout of the result; None for none.
    """
    x, c, projection = validate_and_pad(x, model.config), model.config, model.patch_embedding.projection
    positions = model.positions((x.shape[2] // c.patch_size, x.shape[3] // c.patch_size))[0]
    rows = [positions[int(c.class_token):] + projection.bias]
    if model.register_tokens is not None:
        rows.insert(0, model.register_tokens[0])
    if model.class_token is not None:
        rows.insert(0, model.class_token[0] + positions[:1])
    flat = flat_patches(x, c.patch_size, c.num_prefix_tokens, torch.bfloat16 if x.is_cuda else x.dtype)
    z = differentiable.Embed.apply(flat, projection.weight.flatten(1), torch.cat(rows))
    z = z if drop is None else differentiable.Drop.apply(z, drop)
    return z.view(len(x), -1, c.hidden_size)


def fused_forward(model: ViT, x: Tensor, fp8: bool = False) -> Tensor:
    """Logits by fused parts.

    Args:
        model: a ViT to which they apply (`fusible`).
        x: pixels.
        fp8: whether products of the blocks run in fp8: see differentiable/.
    """
    drops = dropouts(model, x.device)
    return model.classify(fused_blocks(model, fused_embedding(model, x, next(drops)), drops, fp8))


def fused_blocks(model: ViT, z: Tensor, drops: Iterator[Dropout | None], fp8: bool = False) -> Tensor:
    """Eqs. 2 to 4 by fused parts: z_0 [B, T, D] -> y [B, D].

    Args:
        model: a ViT to which they apply.
        z: in the type that the residual stream is to have; on CUDA that of matrix products.
        drops: the blocks' part of `dropouts`.
        fp8: see `fused_forward`.
    """
    (B, T, D), c = z.shape, model.config
    stream: Tensor = z.reshape(B * T, D)
    branches = depths(model, B, z.device)
    branch = bias = depth = drop = rounded = None

    def read(norm: nn.Module, after: Depth | None = None, fp8: bool = False) -> tuple[Tensor, Tensor, list[Tensor]]:
        """z with the latest branch added, its LayerNorm for the next branch, and that in fp8 with its scales if
        `fp8`."""
        assert isinstance(norm, nn.LayerNorm)
        total, u, *small = differentiable.AddNorm.apply(stream, branch, bias, depth, norm.weight, norm.bias, norm.eps,
                                                        drop, after, fp8, rounded)
        return total, u, small

    def last(layer: nn.Linear, residual: Residual) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the last layer of a branch, layer scale included: it costs no pass over the tokens, and
        its gradient follows from the weight's."""
        W, b, gamma = layer.weight, layer.bias, residual.gamma
        return (W, b) if gamma is None else (W * gamma[:, None], b * gamma)

    for block in model.blocks:
        msa, mlp, after = block.msa, block.mlp, next(branches)
        stream, u, small = read(block.norm1, after, fp8)
        images = len(u) // T                                                                       # not left out
        first = c.pool == "cls" and block is model.blocks[-1]                                      # the only token read
        if (msa.training and msa.dropout_A) or not (first or differentiable.attends(T, msa.head_size, z.device)):
            sa = attention(msa, differentiable.Parts.apply(u, msa.qkv.weight, msa.qkv.bias, *small), images)
        elif first:
            sa = differentiable.AttendFirst.apply(u, msa.qkv.weight, msa.qkv.bias, images, len(msa.heads), *small)
        else:
            sa = differentiable.Attend.apply(u, msa.qkv.weight, msa.qkv.bias, images, len(msa.heads), *small)
        if first:
            stream, sa = (x.view(n, -1, x.shape[1])[:, 0].contiguous() for x, n in ((stream, B), (sa, images)))
            fp8 = False
        W, bias = last(msa.out, block.residual1)
        rounded = Rounded() if fp8 else None
        branch = differentiable.Product.apply(sa, W, rounded)                                      # Eqs. 5-8
        drop, depth, after = next(drops), after, next(branches)
        stream, u, small = read(block.norm2, after, fp8)                                           # Eq. 2
        W, bias = last(mlp.fc2, block.residual2)
        rounded = Rounded() if fp8 else None
        branch = differentiable.MLP.apply(u, mlp.fc1.weight, mlp.fc1.bias, W, c.hidden_act == "gelu_tanh", next(drops),
                                          rounded, *small)
        drop, depth = next(drops), after                                                           # Eq. 3, by `read`
    stream, u, _ = read(model.norm)
    if c.pool == "cls":
        return u                                                                                   # Eq. 4
    tokens = (stream if c.norm_after_pool else u).view(B, T, D)[:, c.num_prefix_tokens:]
    return model.norm(tokens.mean(1)) if c.norm_after_pool else tokens.mean(1)


def attention(msa: MSA, qkv: tuple[Tensor, ...], images: int) -> Tensor:
    """Eqs. 6 and 7 by a library: q, k and v [B T, h d] -> [B T, h d].

    Args:
        msa: sets the heads and their dropout.
        qkv: q, k, v.
        images: B.
    """
    q, k, v = (part.view(images, -1, len(msa.heads), msa.head_size).transpose(1, 2) for part in qkv)
    with first_of(*KERNELS):
        sa = F.scaled_dot_product_attention(q, k, v, dropout_p=msa.dropout_A if msa.training else 0.0)
    return sa.transpose(1, 2).reshape(len(qkv[0]), -1)


class TrainingForward(nn.Module):
    """A model's forward in training, as a module around the model.

    Args:
        model: a ViT; its parameters are the only ones.
        graph: whether the fused forward and backward passes become one CUDA graph each, which saves the time between
            their kernels. Gradients then live in the graph's memory and must be used before the next forward pass, so
            they cannot be accumulated over several.
        fp8: see `fused_forward`; the model must pass `refuse_fp8`.
    """

    def __init__(self, model: ViT, graph: bool = False, fp8: bool = False) -> None:
        super().__init__()
        self.model, self.graph, self.fp8 = model, graph, fp8
        if (odd := unfit(model.config, TAKES)) and next(model.parameters()).is_cuda:
            log.warning("The fused kernels do not compute %s; plain PyTorch trains this model.", ", ".join(odd))
        self.graphed: GraphedStep | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, K] of pixels [B, C, H, W]."""
        if self.capturable(x):                # a statement: torch.compile resumes inside conditional expressions
            return self.fused(x)
        return self.model(x)

    def capturable(self, x: Tensor) -> bool:
        """Tell whether the forward and backward passes for these pixels can be captured: if the fused parts apply."""
        return not self.model.gradient_checkpointing and fusible(self.model, x)

    def compile(self, *args: Any, **how: Any) -> None:
        """Compile the plain forward; the fused parts stay as they are."""
        self.fused = torch.compiler.disable(self.fused)  # type: ignore[method-assign]  # here: it takes seconds to import
        super().compile(*args, **how)

    def fused(self, x: Tensor) -> Tensor:
        """Logits by fused parts, from a CUDA graph if `graph`."""
        if not self.graph or not self.model.training:
            return fused_forward(self.model, x, self.fp8)
        if self.graphed is None or self.graphed.x.shape != x.shape:
            self.graphed = None               # free its memory before the next graph takes some
            self.graphed = GraphedStep(Whole(self.model, self.fp8).train(), x)
        return self.graphed(x)


class Whole(nn.Module):
    """`fused_forward` as a module, for a GraphedStep.

    Args:
        model: a ViT.
        fp8: see `fused_forward`.
    """

    def __init__(self, model: ViT, fp8: bool) -> None:
        super().__init__()
        self.model, self.fp8 = model, fp8

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, K]."""
        return fused_forward(self.model, x, self.fp8)
