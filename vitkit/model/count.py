"""Count parameters and operations from a configuration alone, without building the model."""

from __future__ import annotations

from vitkit.model.config import ViTConfig


def parameters(c: ViTConfig) -> int:
    """Count the parameters of a model."""
    D, M, K, PPC = c.hidden_size, c.intermediate_size, c.num_classes, c.patch_size ** 2 * c.num_channels
    widths = [len(c.heads_of(layer)) * c.head_size for layer in range(c.num_hidden_layers)]
    embedding = PPC * D + D + D * c.num_prefix_tokens + D * (c.class_token + c.num_patches)        # E, tokens, E_pos
    attention = sum(3 * width * (D + c.qkv_bias) + width * D + D for width in widths)              # U_qkv, U_msa
    rest = 2 * D * M + M + D + 4 * D + (2 * D if c.layer_scale is not None else 0)                 # MLP, two LN
    head = 2 * D + c.pre_logits * (D * D + D) + (D + 1) * K                                        # LN, head
    return embedding + attention + rest * c.num_hidden_layers + head


def flops(c: ViTConfig) -> int:
    """Count the floating-point operations per image: two per multiply-add of a matrix product.

    All tokens of all blocks count, as the field counts. The model itself does less: with class-token pooling its last
    block computes one token.
    """
    D, M, N, T = c.hidden_size, c.intermediate_size, c.num_patches, c.num_prefix_tokens + c.num_patches
    widths = [len(c.heads_of(layer)) * c.head_size for layer in range(c.num_hidden_layers)]
    embedding = N * c.patch_size ** 2 * c.num_channels * D                                         # Eq. 1
    layers = sum(T * 4 * width * D + 2 * T * T * width + T * 2 * D * M for width in widths)        # Eqs. 5-8, MLP
    return 2 * (embedding + layers + c.pre_logits * D * D + D * c.num_classes)
