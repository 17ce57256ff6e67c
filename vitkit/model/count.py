"""Count parameters and operations from a configuration alone, without building the model."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vitkit.model.config import ViTConfig
from vitkit.model.resnet_config import STEM_CHANNELS, STEM_DEPTHS, STEM_PIXELS, ResNetConfig


def _norm(c: ViTConfig, width: int, place: str = "") -> int:
    """Parameters of a norm; none if the model has no norm in that place."""
    return 0 if place and place not in c.norms else width * (2 if c.norm == "layer" else 1)


def _mlp(c: ViTConfig, M: int) -> int:
    """Parameters of two dense layers; a gated activation doubles the first."""
    D, first = c.hidden_size, 2 * M if c.hidden_act == "swiglu" else M
    return D * first + M * D + (0 if "mlp" in c.without_bias else first + D)


def _positions(c: ViTConfig) -> int:
    """Parameters of what is added to the tokens, in one place."""
    D, first = c.hidden_size, int(c.class_token and c.prefix_positions)
    return {"1d": D * (first + c.num_patches), "2d": D * first + sum(c.grid) * D // 2}.get(c.positions, 0)


def _relative(c: ViTConfig, heads: int) -> int:
    """Parameters of what positions do inside the attention of one block."""
    steps = math.prod(2 * n - 1 for n in c.grid) + 3
    return {"offsets": (2 * c.num_patches - 1) * c.head_size, "bias": steps * heads,
            "mixed": heads * c.head_size}.get(c.relative, 0)


def _attention(c: ViTConfig, heads: int) -> int:
    """Parameters of the attention of one block."""
    D, width = c.hidden_size, heads * c.head_size
    biases = width * (2 if "keys" in c.without_bias else 3 * c.qkv_bias) + (0 if "out" in c.without_bias else D)
    norms = 2 * _norm(c, c.head_size, "queries") + _norm(c, width, "heads")
    return 4 * width * D + biases + norms + _relative(c, heads)                                    # U_qkv, U_msa


def parameters(c: ViTConfig | ResNetConfig) -> int:
    """Count the parameters of a model."""
    if isinstance(c, ResNetConfig):
        convolutions = list(_convolutions(c.depths, c.hidden_sizes, c.embedding_size, c.num_channels, c.image_hw))
        norms = 2 * sum(_pre_activation_norms(c)) + 2 * c.width
        return sum(weights for weights, _ in convolutions) + norms + (c.width + 1) * c.num_classes
    D, M, K, PPC = c.hidden_size, c.intermediate_size, c.num_classes, _patch(c)
    L, branches = c.num_hidden_layers, 1 if c.block == "parallel" else 2
    embedding = PPC * D + (0 if "patches" in c.without_bias else D) + D * c.num_prefix_tokens      # E, tokens
    embedding += _norm(c, D, "patches") + _norm(c, D, "first")
    embedding += sum(weights for weights, _ in _stem(c)) + _stem_norms(c)                          # a hybrid's ResNet
    embedding += _positions(c) * (L if c.positions_in == "every" else 1)                           # E_pos
    attention = sum(_attention(c, len(c.heads_of(layer))) for layer in range(L))
    rest = _mlp(c, M) + _norm(c, M, "hidden") + branches * (_norm(c, D) + (0 if c.layer_scale is None else D))
    head = _norm(c, D, "final") + c.pre_logits * (D * D + D)
    if c.pool == "map":
        pool_M = c.pool_intermediate_size or M
        head += D + 4 * D * D + 4 * D + _norm(c, D) + _mlp(c, pool_M) + _norm(c, pool_M, "hidden")
    elif c.pool == "aimv2":
        head += D + 3 * D * D + D + 2 * D * c.qkv_bias
    heads = 2 if c.pool == "distilled" else 1
    head += K * ((2 if c.pool in ("distilled", "cls+mean") else 1) * D + (0 if "head" in c.without_bias else heads))
    return embedding + attention + rest * L + head


def flops(c: ViTConfig | ResNetConfig) -> int:
    """Count the floating-point operations per image: two per multiply-add of a matrix product or a convolution.

    All tokens of all blocks count, as the field counts. The model itself does less: with class-token pooling its last
    block computes one token.
    """
    if isinstance(c, ResNetConfig):
        convolutions = _convolutions(c.depths, c.hidden_sizes, c.embedding_size, c.num_channels, c.image_hw)
        return 2 * (sum(weights * places for weights, places in convolutions) + c.width * c.num_classes)
    D, M, N, T = c.hidden_size, c.intermediate_size, c.num_patches, c.num_prefix_tokens + c.num_patches
    products = 3 if c.hidden_act == "swiglu" else 2                                                # of an MLP
    scores = 3 if c.relative == "offsets" else 2                                                   # q k^T, A v, q r^T
    widths = [len(c.heads_of(layer)) * c.head_size for layer in range(c.num_hidden_layers)]
    embedding = N * _patch(c) * D + sum(weights * places for weights, places in _stem(c))          # Eq. 1
    layers = sum(T * 4 * width * D + scores * T * T * width + T * products * D * M for width in widths)
    pool = 0
    if c.pool == "map":
        read = T if c.pool_prefix else N
        pool = 2 * D * D + 2 * read * D * D + 2 * read * D + products * D * (c.pool_intermediate_size or M)
    elif c.pool == "aimv2":
        pool = D * D + 2 * N * D * D + 2 * N * D
    tokens = 2 if c.pool in ("distilled", "cls+mean") else 1
    return 2 * (embedding + layers + pool + c.pre_logits * D * D + tokens * D * c.num_classes)


def _convolutions(
    depths: tuple[int, ...], widths: tuple[int, ...], root: int, channels: int, image: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield the weights of each convolution of a ResNet, and the number of places where it is computed."""
    def halved(size: tuple[int, int]) -> tuple[int, int]:
        return math.ceil(size[0] / 2), math.ceil(size[1] / 2)

    size = halved(image)
    yield 49 * channels * root, size[0] * size[1]
    size, channels = halved(size), root                                                            # the max-pool
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        for unit in range(depth):
            before, narrow = size[0] * size[1], width // 4
            if stage and not unit:
                size = halved(size)
            places = size[0] * size[1]
            if not unit:                                                                           # the projection
                yield channels * width, places
            yield channels * narrow, before
            yield 9 * narrow * narrow, places
            yield narrow * width, places
            channels = width


def _patch(c: ViTConfig) -> int:
    """Numbers in a flattened patch: P^2 C, or fewer but deeper ones after a stem."""
    return (c.patch_size // STEM_PIXELS.get(c.stem, 1)) ** 2 * STEM_CHANNELS.get(c.stem, c.num_channels)


def _stem(c: ViTConfig) -> list[tuple[int, int]]:
    """Weights and places of each convolution of a hybrid's stem."""
    if c.stem == "none":
        return []
    depths, image = STEM_DEPTHS[c.stem], (c.grid[0] * c.patch_size, c.grid[1] * c.patch_size)
    return list(_convolutions(depths, _stem_widths(depths), 64, c.num_channels, image))


def _stem_widths(depths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(256 * 2 ** stage for stage in range(len(depths)))


def _stem_norms(c: ViTConfig) -> int:
    """Parameters of the norms of a hybrid's stem: one after each convolution."""
    if c.stem == "none":
        return 0
    depths = STEM_DEPTHS[c.stem]
    stages = zip(depths, _stem_widths(depths), strict=True)
    return 2 * (64 + sum(depth * (width // 4 + width // 4 + width) + width for depth, width in stages))


def _pre_activation_norms(c: ResNetConfig) -> Iterator[int]:
    """Yield the channels of each GroupNorm of a ResNet's units."""
    channels = c.embedding_size
    for depth, width in zip(c.depths, c.hidden_sizes, strict=True):
        for _ in range(depth):
            yield from (channels, width // 4, width // 4)
            channels = width
