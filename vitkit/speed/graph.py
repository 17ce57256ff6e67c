"""The model as a graph for other runtimes: the same equations on the same weights, written so that they export well.

What differs from model/vit.py, and why the answers do not (beyond rounding, and beyond merging where it is asked for):
  - Positions of another size are two matrix products of arithmetic inside the graph (axis.py).
  - With class-token pooling the head reads one token, so the last block computes queries, U_msa and MLP for that alone.
  - E of Eq. 1 is a matrix product over flattened patches: some runtimes' convolutions are slow, or crash, in int8.
  - Nothing is checked and nothing is random: whoever runs the graph has checked the pixels.
  - On request tokens are merged between attention and MLP (merge.py); the image size is then fixed.

Legend: B images, T tokens, D width, h heads, d = D / h.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.model.vit import MSA, Block, ViT
from vitkit.speed.axis import resized
from vitkit.speed.merge import merge, plan


class Graph(nn.Module):
    """A ViT's forward for inference, with the ViT's own weights.

    Args:
        model: any ViT.
        merge: tokens to merge in each block; 0 merges none.
        any_size: whether images of other sizes are taken; they are not when tokens are merged.
    """

    def __init__(self, model: ViT, merge: int = 0, any_size: bool = False) -> None:
        super().__init__()
        self.model, self.config, self.input_spec = model, model.config, model.input_spec
        self.counts, self.any_size = plan(model.config, merge), any_size and not merge
        self.E = patches(model.patch_embedding.projection)
        msa, width = model.blocks[-1].msa, len(model.blocks[-1].msa.heads) * model.config.head_size
        self.last_q, self.last_kv = part(msa.qkv, 0, width), part(msa.qkv, width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, K] of pixels [B, C, H, W] whose sides are multiples of the patch."""
        model, size = self.model, None
        z = self.embed(x)  # Eq. 1
        for layer, block in enumerate(model.blocks):
            alone = self.config.pool == "cls" and layer == len(model.blocks) - 1
            z, size = self.block(block, z, size, self.counts[layer], alone)  # Eqs. 2, 3
        y = self.pooled(z, size)  # Eq. 4
        if model.pre_logits is not None:
            y = torch.tanh(model.pre_logits(y))
        return model.head(y)

    def embed(self, x: Tensor) -> Tensor:
        """z_0 of Eq. 1, [B, T, D]."""
        model, n = self.model, int(self.config.class_token)
        P, C = self.config.patch_size, self.config.num_channels
        old, new = model.positions.grid, (x.shape[2] // P, x.shape[3] // P)
        table = (
            resized(model.positions.table, old, new, model.positions.rule)
            if self.any_size
            else model.positions(self.config.grid)
        )
        x = x.reshape(-1, C, new[0], P, new[1], P).permute(0, 2, 4, 1, 3, 5)  # [B, H/P, W/P, C, P, P]
        z = self.E(x.reshape(-1, new[0] * new[1], C * P * P)) + table[:, n:]
        prefix = []
        if model.class_token is not None:
            prefix.append(model.class_token + table[:, :1])
        if model.register_tokens is not None:
            prefix.append(model.register_tokens)
        return torch.cat([*(token.expand(z.shape[0], -1, -1) for token in prefix), z], dim=1)

    def block(self, block: Block, z: Tensor, size: Tensor | None, r: int, alone: bool) -> tuple[Tensor, Tensor | None]:
        """z_{l-1} -> z_l and the sizes of its tokens; only the class token's when `alone`."""
        msa, u = block.msa, block.norm1(z)
        if alone:
            q, k, v = *self.heads(self.last_q(u[:, :1]), msa, 1), *self.heads(self.last_kv(u), msa, 2)
            z = z[:, :1]
        else:
            q, k, v = self.heads(msa.qkv(u), msa, 3)  # Eq. 5
        mask = None if size is None else size.log().mT[:, None]  # [B, 1, 1, T]
        sa = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # Eqs. 6, 7
        z = z + block.residual1(msa.out(sa.transpose(1, 2).flatten(2)))  # Eqs. 8, 2
        if r:
            z, size = merge(z, size, k, r, self.config.num_prefix_tokens)
        mlp = block.mlp
        return z + block.residual2(mlp.fc2(mlp.act(mlp.fc1(block.norm2(z))))), size  # Eq. 3

    @staticmethod
    def heads(u: Tensor, msa: MSA, count: int) -> tuple[Tensor, ...]:
        """[B, T, count h d] -> count times [B, h, T, d]."""
        return u.unflatten(2, (count, len(msa.heads), msa.head_size)).permute(2, 0, 3, 1, 4).unbind(0)

    def pooled(self, z: Tensor, size: Tensor | None) -> Tensor:
        """y of Eq. 4, [B, D]; a mean counts a token as often as it has patches."""
        c, norm = self.config, self.model.norm
        if c.pool == "cls":
            return norm(z[:, 0])
        z = z[:, c.num_prefix_tokens :]
        z = z if c.norm_after_pool else norm(z)
        if size is None:
            y = z.mean(1)
        else:
            weight = size[:, c.num_prefix_tokens :]
            y = (z * weight).sum(1) / weight.sum(1)
        return norm(y) if c.norm_after_pool else y


def part(layer: nn.Linear, start: int, end: int) -> nn.Linear:
    """A dense layer of some outputs of another, its weights shared."""
    found = nn.Linear(layer.in_features, end - start, bias=layer.bias is not None, device="meta")
    found.weight = nn.Parameter(layer.weight[start:end].detach(), requires_grad=False)
    if layer.bias is not None:
        found.bias = nn.Parameter(layer.bias[start:end].detach(), requires_grad=False)
    return found


def patches(layer: nn.Conv2d) -> nn.Linear:
    """A convolution whose stride is its size as a dense layer of flattened patches, its weights shared."""
    found = nn.Linear(layer.weight[0].numel(), layer.out_channels, bias=layer.bias is not None, device="meta")
    found.weight = nn.Parameter(layer.weight.detach().flatten(1), requires_grad=False)
    if layer.bias is not None:
        found.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    return found
