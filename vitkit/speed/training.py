"""A model's own forward for training, with the work left out whose result nobody reads.

  - With class-token pooling the loss sees one token of the last block, so that block's queries, U_msa and MLP are
    computed for that token alone, forward and backward.
  - E of Eq. 1 is a matrix product over flattened patches: convolution libraries take the long way round, and back.

The parameters are the model's own, and the logits are the same numbers up to rounding.

Legend: B images, C channels, P patch side, N patches, T tokens, D width, h heads, d = D / h.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.model.inputs import fit
from vitkit.model.vit import Block, ViT


def class_block(block: Block, z: Tensor) -> Tensor:
    """The class token after a block: [B, T, D] -> [B, 1, D]."""
    msa = block.msa
    B, T, _ = z.shape
    u, width = block.norm1(z), len(msa.heads) * msa.head_size
    weight, bias = msa.qkv.weight, msa.qkv.bias
    q = F.linear(u[:, :1], weight[:width], None if bias is None else bias[:width])        # Eq. 5 of one token
    kv = F.linear(u, weight[width:], None if bias is None else bias[width:])              # and of all
    k, v = kv.view(B, T, 2, len(msa.heads), msa.head_size).permute(2, 0, 3, 1, 4).unbind(0)
    q = q.view(B, 1, len(msa.heads), msa.head_size).transpose(1, 2)
    sa = F.scaled_dot_product_attention(q, k, v, dropout_p=msa.dropout_A if msa.training else 0.0)
    z = block.residual1(msa.dropout(msa.out(sa.transpose(1, 2).flatten(2)))) + z[:, :1]   # Eq. 2
    return block.residual2(block.mlp(block.norm2(z))) + z                                 # Eq. 3


def patch_product(model: ViT, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """What the model's patch embedding gives, by one matrix product: [B, C, H, W] -> [B, N, D], and the grid."""
    x, P, projection = fit(x, model.config), model.config.patch_size, model.patch_embedding.projection
    B, C, rows, columns = len(x), x.shape[1], x.shape[2] // P, x.shape[3] // P
    flat = x.view(B, C, rows, P, columns, P).permute(0, 2, 4, 1, 3, 5).reshape(B, rows * columns, C * P * P)
    return F.linear(flat, projection.weight.flatten(1), projection.bias), (rows, columns)


def training_forward(model: ViT, x: Tensor) -> Tensor:
    """Logits [B, K] of pixels [B, C, H, W], with gradients to the model's parameters.

    Args:
        model: a ViT; one with mean pooling runs as it is.
        x: pixels.
    """
    if model.config.pool != "cls" or model.gradient_checkpointing:
        return model(x)
    z = model.join(*patch_product(model, x))                                              # Eq. 1
    for block in model.blocks[:-1]:
        z = block(z)
    y = model.norm(class_block(model.blocks[-1], z)[:, 0])                                # Eq. 4
    return model.classify(y)


class Lean(nn.Module):
    """`training_forward` as a module around a model, for what wants a module (DDP, torch.compile).

    Args:
        model: a ViT; its parameters are the only ones.
    """

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, K] of pixels [B, C, H, W]."""
        return training_forward(self.model, x)
