"""The Vision Transformer in five small classes: read this page first, with the paper (arXiv 2010.11929) beside it.

    PatchEmbedding                 x_p E       Eq. 1    an image becomes a sequence of patches
    MultiheadSelfAttentionBlock    MSA(LN(z))  Eq. 2    tokens look at each other
    MLPBlock                       MLP(LN(z))  Eq. 3    each token thinks for itself
    TransformerEncoderBlock        Eqs. 2, 3            the two above, each with its residual connection
    ViT                            Eqs. 1-4             the whole model

Plain torch and nothing of ours but errors, so that the tests can judge the model (`vitkit.ViT`) by it.
Shapes are those of the defaults, ViT-B/16 at 224 pixels: B images, 14 x 14 = 196 patches, width D = 768, 12 heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError, InputError


class PatchEmbedding(nn.Module):
    """Turn images into a sequence of patch embeddings (x_p E of Eq. 1).

    Args:
        in_channels: C, the channels of an image.
        patch_size: P, the side of a patch in pixels.
        embedding_dim: D, the width of an embedding.
    """

    def __init__(self, in_channels: int = 3, patch_size: int = 16, embedding_dim: int = 768) -> None:
        super().__init__()
        _at_least_one(in_channels=in_channels, patch_size=patch_size, embedding_dim=embedding_dim)
        self.in_channels, self.patch_size = in_channels, patch_size
        # A kernel as large as its stride sees every patch once: this is the linear projection E of a flattened patch.
        self.patcher = nn.Conv2d(in_channels, embedding_dim, kernel_size=patch_size, stride=patch_size)
        self.flatten = nn.Flatten(start_dim=2, end_dim=3)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, N, D] with N = HW / P^2."""
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise InputError(f"Expected images [batch, {self.in_channels}, height, width]; got {list(x.shape)}. "
                             f"Set in_channels, or add the batch axis with x.unsqueeze(0).")
        for name, side in zip(("height", "width"), x.shape[2:], strict=True):
            _divides(f"The image's {name}", side, self.patch_size, InputError)
        x = self.patcher(x)                      # [B, 3, 224, 224] -> [B, 768, 14, 14]
        x = self.flatten(x)                      #                  -> [B, 768, 196]
        return x.permute(0, 2, 1)                #                  -> [B, 196, 768]


class MultiheadSelfAttentionBlock(nn.Module):
    """MSA(LN(z)) of Eq. 2, without the residual.

    Args:
        embedding_dim: D, the width of a token.
        num_heads: h, the number of heads; divides embedding_dim.
        attn_dropout: dropout on the attention weights.
    """

    def __init__(self, embedding_dim: int = 768, num_heads: int = 12, attn_dropout: float = 0) -> None:
        super().__init__()
        _at_least_one(embedding_dim=embedding_dim, num_heads=num_heads)
        if embedding_dim % num_heads:
            raise ConfigError(f"num_heads must divide embedding_dim; {num_heads} heads do not divide {embedding_dim}.")
        self.layer_norm = nn.LayerNorm(embedding_dim)
        self.multihead_attn = nn.MultiheadAttention(embedding_dim, num_heads, dropout=attn_dropout, batch_first=True)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """[B, 197, 768] -> [B, 197, 768]; with need_weights also the attention A of Eq. 6, [B, 12, 197, 197]."""
        z = self.layer_norm(x)
        z, A = self.multihead_attn(z, z, z, need_weights=need_weights, average_attn_weights=False)
        return (z, A) if need_weights else z


class MultiHeadSelfAttentionBlock(MultiheadSelfAttentionBlock):
    """The same block under the other spelling in use.

    Args:
        embedding_dimension: D, the width of a token.
        num_heads: h, the number of heads; divides embedding_dimension.
        attn_dropout: dropout on the attention weights.
    """

    def __init__(self, embedding_dimension: int = 768, num_heads: int = 12, attn_dropout: float = 0) -> None:
        super().__init__(embedding_dimension, num_heads, attn_dropout)


class MLPBlock(nn.Module):
    """MLP(LN(z)) of Eq. 3, without the residual.

    Args:
        embedding_dim: D, the width of a token.
        mlp_size: width of the hidden layer.
        dropout: dropout after each of the two dense layers.
    """

    def __init__(self, embedding_dim: int = 768, mlp_size: int = 3072, dropout: float = 0.1) -> None:
        super().__init__()
        _at_least_one(embedding_dim=embedding_dim, mlp_size=mlp_size)
        self.layer_norm = nn.LayerNorm(embedding_dim)
        self.mlp = nn.Sequential(
            nn.Linear(embedding_dim, mlp_size),  # [B, 197, 768] -> [B, 197, 3072]
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(mlp_size, embedding_dim),  #               -> [B, 197, 768]
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, 197, 768] -> [B, 197, 768]."""
        return self.mlp(self.layer_norm(x))


class TransformerEncoderBlock(nn.Module):
    """One encoder layer: Eqs. 2 and 3. The residual connections are here.

    Args:
        embedding_dim: D, the width of a token.
        num_heads: h, the number of heads.
        mlp_size: width of the MLP's hidden layer.
        mlp_dropout: dropout after the MLP's dense layers.
        attn_dropout: dropout on the attention weights.
    """

    def __init__(self, embedding_dim: int = 768, num_heads: int = 12, mlp_size: int = 3072, mlp_dropout: float = 0.1,
                 attn_dropout: float = 0) -> None:
        super().__init__()
        self.msa_block = MultiheadSelfAttentionBlock(embedding_dim, num_heads, attn_dropout)
        self.mlp_block = MLPBlock(embedding_dim, mlp_size, mlp_dropout)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """[B, 197, 768] -> [B, 197, 768]; with need_weights also the attention [B, 12, 197, 197]."""
        if need_weights:
            z, A = self.msa_block(x, need_weights=True)
        else:
            z, A = self.msa_block(x), None
        x = z + x                                # Eq. 2   z'_l = MSA(LN(z_{l-1})) + z_{l-1}
        x = self.mlp_block(x) + x                # Eq. 3   z_l  = MLP(LN(z'_l)) + z'_l
        return x if A is None else (x, A)


def torch_encoder_block(embedding_dim: int = 768, num_heads: int = 12, mlp_size: int = 3072,
                        dropout: float = 0.1) -> nn.TransformerEncoderLayer:
    """Return the same block from torch.nn: what `TransformerEncoderBlock` is there, in one call.

    Args:
        embedding_dim: D, the width of a token.
        num_heads: h, the number of heads.
        mlp_size: width of the MLP's hidden layer.
        dropout: dropout after every dense layer and on the attention weights.
    """
    return nn.TransformerEncoderLayer(embedding_dim, num_heads, mlp_size, dropout, activation="gelu", batch_first=True,
                                      norm_first=True)        # the norm comes before each branch, as in Eqs. 2 and 3


class ViT(nn.Module):
    """The Vision Transformer of the paper. The defaults are ViT-B/16 (Table 1).

    Args:
        img_size: pixels, one number or (height, width); patch_size divides it.
        in_channels: C, the channels of an image.
        patch_size: P, the side of a patch in pixels.
        num_transformer_layers: L, the number of encoder blocks.
        embedding_dim: D, the width of a token.
        mlp_size: width of the MLP's hidden layer.
        num_heads: h, the heads of each block.
        num_classes: K, the number of classes.
        attn_dropout: dropout on the attention weights.
        mlp_dropout: dropout after the MLP's dense layers.
        embedding_dropout: dropout after adding the positions.
        pre_logits: whether the head is the paper's pre-training head, with one hidden tanh layer (default: False).
        authors_start: start like the authors, with a class token of zeros and positions of standard deviation 0.02,
            instead of the lesson's `torch.randn` (default: False).
    """

    def __init__(self, img_size: int | tuple[int, int] = 224, in_channels: int = 3,
                 patch_size: int = 16, num_transformer_layers: int = 12, embedding_dim: int = 768,
                 mlp_size: int = 3072, num_heads: int = 12, num_classes: int = 1000, *, attn_dropout: float = 0,
                 mlp_dropout: float = 0.1, embedding_dropout: float = 0.1, pre_logits: bool = False,
                 authors_start: bool = False) -> None:
        super().__init__()
        _at_least_one(patch_size=patch_size, num_transformer_layers=num_transformer_layers, num_classes=num_classes)
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        self.img_size = (height, width)
        for side in self.img_size:
            _divides("img_size", side, patch_size, ConfigError)
        self.num_patches = (height // patch_size) * (width // patch_size)     # N = HW / P^2, 196

        self.class_embedding = nn.Parameter(torch.randn(1, 1, embedding_dim))                            # x_class
        self.position_embedding = nn.Parameter(torch.randn(1, self.num_patches + 1, embedding_dim))      # E_pos
        if authors_start:
            nn.init.zeros_(self.class_embedding)
            nn.init.normal_(self.position_embedding, std=0.02)
        self.embedding_dropout = nn.Dropout(embedding_dropout)
        self.patch_embedding = PatchEmbedding(in_channels, patch_size, embedding_dim)
        self.transformer_encoder = nn.Sequential(*(
            TransformerEncoderBlock(embedding_dim, num_heads, mlp_size, mlp_dropout, attn_dropout)
            for _ in range(num_transformer_layers)))
        hidden = (nn.Linear(embedding_dim, embedding_dim), nn.Tanh()) if pre_logits else ()
        self.classifier = nn.Sequential(
            nn.LayerNorm(embedding_dim),         # Eq. 4   y = LN(z_L^0)
            *hidden,
            nn.Linear(embedding_dim, num_classes),
        )

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
        """Logits [B, 1000] of images [B, 3, 224, 224].

        Args:
            x: the images.
            need_weights: return (logits, attentions) instead, with one [B, 12, 197, 197] for each layer.
        """
        x = self.embed(x)                        # [B, 3, 224, 224] -> [B, 197, 768]   Eq. 1
        attentions = []
        if need_weights:
            for block in self.transformer_encoder:
                x, A = block(x, need_weights=True)
                attentions.append(A)
        else:
            x = self.transformer_encoder(x)      # -> [B, 197, 768]   Eqs. 2, 3, L times
        x = self.classifier(x[:, 0])             # -> [B, 768] -> [B, 1000]   Eq. 4 and the head
        return (x, tuple(attentions)) if need_weights else x

    def embed(self, x: Tensor) -> Tensor:
        """z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos (Eq. 1): [B, 3, 224, 224] -> [B, 197, 768]."""
        patches = self.patch_embedding(x)                                     # [B, 196, 768]
        if x.shape[2:] != self.img_size:
            (height, width), (h, w) = self.img_size, x.shape[2:]
            raise InputError(f"Expected images of {height} x {width} pixels; got {h} x {w}. "
                             f"Resize them, or build ViT(img_size=({h}, {w})).")
        class_token = self.class_embedding.expand(len(x), -1, -1)             # [B, 1, 768]
        z = torch.cat((class_token, patches), dim=1) + self.position_embedding    # [B, 197, 768]
        return self.embedding_dropout(z)


def _at_least_one(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ConfigError(f"{name} must be at least 1; got {number}.")


def _divides(what: str, side: int, patch_size: int, error: type[ConfigError | InputError]) -> None:
    if side % patch_size or side < 1:
        raise error(f"{what} must be a multiple of the patch size; {side} pixels are no multiple of {patch_size}. "
                    f"Use {max(side // patch_size, 1) * patch_size}.")
