"""The Vision Transformer, equation by equation: arXiv 2010.11929, section 3.1 and appendix A.

Legend: B images, C channels, H x W pixels, P patch side, N = HW / P^2 patches, T tokens (class token, registers,
patches), D width, h heads, d = D / h, L layers, K classes.

Where this differs from the paper:
  - U_qkv, U_msa, E, and the MLP have biases, as the authors' code has.
  - Options the paper does not have are off by default: mean pooling, registers, layer scale, stochastic depth.
  - Head masks multiply A v instead of A: A enters Eq. 7 linearly, so the result is the same and the kernel stays fused.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitkit.errors import ConfigError, InputError
from vitkit.model.checks import Indices, indices, pair
from vitkit.model.config import InputSpec, ViTConfig
from vitkit.model.init import initialise
from vitkit.model.inputs import masks, validate_and_pad
from vitkit.model.positions import PositionEmbedding
from vitkit.model.prune import prune_heads
from vitkit.model.residual import Residual


class PatchEmbedding(nn.Module):
    """x_p E of Eq. 1. A convolution with stride P is the linear projection E of every flattened P x P patch."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.c = c
        self.projection = nn.Conv2d(c.num_channels, c.hidden_size, c.patch_size, stride=c.patch_size)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """[B, C, H, W] -> [B, N, D], and the grid (rows, columns) of the N patches."""
        x = self.projection(validate_and_pad(x, self.c))                                  # [B, D, H/P, W/P]
        return x.flatten(2).mT, (x.shape[2], x.shape[3])                                  # [B, N, D]


class MSA(nn.Module):
    """Multi-head self-attention: Eqs. 5-8."""

    def __init__(self, c: ViTConfig, layer: int) -> None:
        super().__init__()
        self.heads = c.heads_of(layer)          # by original number: pruned ones are missing
        self.head_size, width = c.head_size, len(self.heads) * c.head_size
        self.qkv = nn.Linear(c.hidden_size, 3 * width, bias=c.qkv_bias)                   # U_qkv
        self.out = nn.Linear(width, c.hidden_size)                                        # U_msa
        self.dropout_A, self.dropout = c.attention_probs_dropout_prob, nn.Dropout(c.hidden_dropout_prob)

    def project(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 5: [q, k, v] = z U_qkv, three times [B, h, T, d]."""
        B, T, _ = z.shape
        qkv = self.qkv(z).view(B, T, 3, len(self.heads), self.head_size)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, z: Tensor, head_mask: Tensor | None = None) -> Tensor:
        """MSA(z), [B, T, D] -> [B, T, D], by the fused kernel."""
        q, k, v = self.project(z)                                                         # Eq. 5
        dropout = self.dropout_A if self.training else 0.0
        sa = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)                   # Eqs. 6, 7   [B, h, T, d]
        if head_mask is not None:
            sa = sa * head_mask[list(self.heads)].to(sa).view(-1, 1, 1)
        return self.dropout(self.out(sa.transpose(1, 2).flatten(2)))                      # Eq. 8

    def attention(self, z: Tensor, heads: Sequence[int], query: Tensor | None) -> Tensor:
        """A, written out for the heads and query tokens asked for: [B, heads, queries, T]."""
        q, k, _ = self.project(z)
        if list(heads) != list(self.heads):
            if gone := sorted(set(heads) - set(self.heads)):
                raise InputError(f"Heads {gone} are pruned from this layer; choose from {list(self.heads)}.")
            kept = [self.heads.index(head) for head in heads]
            q, k = q[:, kept], k[:, kept]
        if query is not None:
            q = q[:, :, query]
        return (q @ k.mT / self.head_size ** 0.5).softmax(-1)                             # Eq. 6


class MLP(nn.Module):
    """Two dense layers with a GELU between them; the second half of a block."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(c.hidden_size, c.intermediate_size)
        self.act = nn.GELU(approximate="tanh" if c.hidden_act == "gelu_tanh" else "none")
        self.fc2 = nn.Linear(c.intermediate_size, c.hidden_size)
        self.dropout, self.chunk = nn.Dropout(c.hidden_dropout_prob), c.chunk_size_feed_forward

    def forward(self, z: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D], `chunk` tokens at a time where the config asks for it."""
        if 0 < self.chunk < z.shape[1]:
            return torch.cat([self.forward(part) for part in z.split(self.chunk, dim=1)], dim=1)
        return self.dropout(self.fc2(self.dropout(self.act(self.fc1(z)))))


class Block(nn.Module):
    """One encoder layer: Eqs. 2 and 3."""

    def __init__(self, c: ViTConfig, layer: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps) for _ in range(2))
        self.msa, self.mlp = MSA(c, layer), MLP(c)
        self.residual1, self.residual2 = Residual(c, layer), Residual(c, layer)

    def forward(self, z: Tensor, head_mask: Tensor | None = None) -> Tensor:
        """z_{l-1} -> z_l, both [B, T, D]."""
        z = self.residual1(self.msa(self.norm1(z), head_mask)) + z   # Eq. 2   z'_l = MSA(LN(z_{l-1})) + z_{l-1}
        return self.residual2(self.mlp(self.norm2(z))) + z           # Eq. 3   z_l  = MLP(LN(z'_l)) + z'_l


class ViT(nn.Module):
    """A Vision Transformer; `vitkit.create(name)` and `vitkit.load(source)` are the usual doors to it.

    Args:
        config: the architecture.
        input_spec: what it expects to be fed; the default for a new model when not given.
    """

    def __init__(self, config: ViTConfig | None = None, input_spec: InputSpec | None = None, **course: Any) -> None:
        super().__init__()
        if course or not isinstance(config, ViTConfig):
            raise ConfigError("vitkit.ViT takes a ViTConfig (or use vitkit.create('vit-b/16', ...)); the course's "
                              "ViT(img_size, in_channels, patch_size, ...) is vitkit.paper.ViT.")
        c = self.config = config
        self.input_spec = (input_spec or InputSpec.of(c)).check(c)
        self.gradient_checkpointing = False     # set it to True to trade time for memory in training
        self.patch_embedding = PatchEmbedding(c)
        self.class_token = nn.Parameter(torch.zeros(1, 1, c.hidden_size)) if c.class_token else None
        R = c.num_register_tokens
        self.register_tokens = nn.Parameter(torch.zeros(1, R, c.hidden_size)) if R else None
        self.positions = PositionEmbedding(c.grid, c.hidden_size, int(c.class_token), c.position_resize)
        self.dropout = nn.Dropout(c.hidden_dropout_prob)
        blocks = [Block(c, layer) for layer in range(c.num_hidden_layers)]
        self.blocks: Sequence[Block] = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.norm = nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)
        self.pre_logits = nn.Linear(c.hidden_size, c.hidden_size) if c.pre_logits else None
        self.head = nn.Linear(c.hidden_size, c.num_classes) if c.num_classes else nn.Identity()
        initialise(self)

    def forward(self, x: Tensor, head_mask: Tensor | None = None) -> Tensor:
        """Logits [B, K] of pixels [B, C, H, W].

        Args:
            x: pixels, normalised as `input_spec` says.
            head_mask: [h] or [L, h], multiplies the attention of each head (1 keeps, 0 silences).
        """
        return self.classify(self.features(x, head_mask))

    def classify(self, y: Tensor) -> Tensor:
        """Logits [B, K] of features [B, D]."""
        if self.pre_logits is not None:
            y = torch.tanh(self.pre_logits(y))
        return self.head(y)

    def features(self, x: Tensor, head_mask: Tensor | None = None) -> Tensor:
        """y of Eq. 4, [B, D]: the class token (or the mean of the patches) after the final LayerNorm."""
        z = self.encode(x, head_mask)
        if self.config.pool == "cls":
            return self.norm(z[:, 0])                                                     # Eq. 4   y = LN(z_L^0)
        z = z[:, self.config.num_prefix_tokens:]                                          # the patches' tokens
        return self.norm(z.mean(1)) if self.config.norm_after_pool else self.norm(z).mean(1)

    def tokens(self, x: Tensor, head_mask: Tensor | None = None) -> Tensor:
        """All tokens after the final LayerNorm, [B, T, D]: class token, registers, patches row by row."""
        return self.norm(self.encode(x, head_mask))

    def hidden_states(self, x: Tensor, head_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """(z_0, ..., z_L), each [B, T, D], before the final LayerNorm."""
        return tuple(self.states(x, head_mask))

    def encode(self, x: Tensor, head_mask: Tensor | None = None) -> Tensor:
        """z_L, [B, T, D]: what the last block gives."""
        return deque(self.states(x, head_mask), maxlen=1)[0]     # one state at a time: earlier ones are freed

    def states(self, x: Tensor, head_mask: Tensor | None = None) -> Iterator[Tensor]:
        """Yield z_0, z_1, ..., z_L; each is computed when it is asked for."""
        z = self.embed(x)                                                                 # Eq. 1   [B, T, D]
        yield z
        for block, mask in zip(self.blocks, masks(head_mask, self.config), strict=True):
            if self.gradient_checkpointing and self.training:
                z = checkpoint(block, z, mask, use_reentrant=False)
            else:
                z = block(z, mask)                                                        # Eqs. 2, 3
            yield z

    def embed(self, x: Tensor) -> Tensor:
        """z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos (Eq. 1), [B, T, D]."""
        return self.join(*self.patch_embedding(x))

    def join(self, z: Tensor, grid: tuple[int, int]) -> Tensor:
        """z_0 of projected patches [B, N, D] that lie in this grid."""
        if self.class_token is not None:
            z = torch.cat([self.class_token.expand(len(z), -1, -1), z], dim=1)            # [B, 1 + N, D]
        z = z + self.positions(grid)
        if self.register_tokens is not None:
            n = self.config.num_prefix_tokens - self.config.num_register_tokens
            z = torch.cat([z[:, :n], self.register_tokens.expand(len(z), -1, -1), z[:, n:]], dim=1)
        return self.dropout(z)

    def attention(self, x: Tensor, layers: Indices = None, heads: Indices = None,
                  query: Indices = None) -> dict[int, Tensor]:
        """Attention A of Eq. 6, exact, and computed only for what is asked.

        Args:
            x: pixels [B, C, H, W].
            layers: layers, counted from 0 (negative from the end); all when not given.
            heads: heads, by original number; all that the layer has when not given.
            query: rows of A, that is tokens that look (0 is the class token); all when not given.

        Returns:
            {layer: [B, heads, queries, T]}; every row sums to one.
        """
        L = self.config.num_hidden_layers
        wanted = indices("layers", layers, L) if layers is not None else list(range(L))
        chosen = indices("heads", heads, self.config.num_attention_heads) if heads is not None else None
        result: dict[int, Tensor] = {}
        for layer, z in enumerate(self.states(x)):
            if layer in wanted:
                block = self.blocks[layer]
                rows = None if query is None else torch.tensor(indices("query", query, z.shape[1]), device=z.device)
                result[layer] = block.msa.attention(block.norm1(z), chosen or block.msa.heads, rows)
            if layer >= max(wanted, default=-1):
                break
        return {layer: result[layer] for layer in wanted}

    prune_heads = prune_heads

    def set_image_size(self, size: int | tuple[int, int]) -> None:
        """Make another image size this model's own, in place: E_pos is resized once and trained from there on."""
        config = dataclasses.replace(self.config, image_size=size)
        self.positions.regrid(config.grid)
        self.config, self.input_spec = config, dataclasses.replace(self.input_spec, size=pair(size))

    def remember_size(self, size: int | tuple[int, int]) -> None:
        """Keep the resized positions of a size that is often used, until the weights change or training starts."""
        self.positions.remember(dataclasses.replace(self.config, image_size=size).grid)
