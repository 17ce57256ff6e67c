"""Figure 1 of the paper with a model's own shapes, and with the patches of a photo if one is given.

The model stands on the left, from the image at the bottom to the head at the top; one encoder block on the right.
"""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray

from vitkit.errors import ConfigError
from vitkit.explanations import svg
from vitkit.explanations.pixels import jpeg, shrunk
from vitkit.model.config import ViTConfig
from vitkit.model.parts.fit import EVERY_PART, Takes, unfit
from vitkit.model.parts.stems import STEMS

FIGURE_1: Takes = {  # the parts that the figure shows, or that change no word in it
    "hidden_act": EVERY_PART["hidden_act"],
    "positions": ("2d", "sincos"),
    "pool": ("mean",),
    "stem": EVERY_PART["stem"],
    "without_bias": EVERY_PART["without_bias"],
}
LEFT, RIGHT, MIDDLE = 40, 620, 330  # of the model
BLOCK_BOTTOM = 502  # of the encoder block, whose frame then begins where the head does
SIDE = 210  # pixels of the longer side of the image
MOST = 40  # patches per side that are drawn one by one; more would be too small to see

Photo = NDArray[np.uint8]  # [H, W, 3], as the model sees it


def _wide(y: float, tall: float, kind: str, words: str, shapes: str) -> list[str]:
    """Draw a box across the model, with its words and shapes in the middle."""
    return [
        svg.box(LEFT, y, RIGHT - LEFT, tall, kind),
        svg.text(MIDDLE, y + tall / 2 - 2, words),
        svg.text(MIDDLE, y + tall / 2 + 15, shapes, "shape"),
    ]


def _picture(x: float, y: float, width: float, height: float, pixels: Photo) -> str:
    """Draw pixels [H, W, 3], stored inside the drawing."""
    stored = base64.b64encode(jpeg(shrunk(pixels, round(2 * width)))).decode()
    return (
        f'<image x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" preserveAspectRatio="none" '
        f'href="data:image/jpeg;base64,{stored}"/>'
    )


def _model(c: ViTConfig, photo: Photo | None) -> tuple[list[str], float]:
    """Draw the left half; return its parts and its lower edge."""
    D, T = c.hidden_size, c.num_prefix_tokens + c.num_patches
    parts = [svg.text(LEFT, 34, "Vision Transformer (ViT)", "title", "start")]
    parts += _wide(
        56,
        46,
        "head",
        "Head" + (" (pre-logits: dense, tanh; then dense)" if c.pre_logits else ""),
        f"{D} → {c.num_classes} logits" if c.num_classes else f"{D} features (no head)",
    )
    pooled = "y = LN(z_L^0)" if c.pool == "cls" else "y = mean of the patches' tokens"
    parts += [
        svg.arrow(MIDDLE, 150, MIDDLE, 104),
        svg.text(MIDDLE + 12, 132, f"Eq. 4   {pooled}   [B, {D}]", "shape", "start"),
    ]
    parts += _wide(
        150, 64, "level2", f"Transformer encoder: {c.num_hidden_layers} blocks", f"Eqs. 2, 3   [B, {T}, {D}]"
    )
    patches = {"1": 0, "2": 1, "3": 2, "…": None, str(c.num_patches): c.num_patches - 1}
    tokens = ["*"] * c.class_token + ["R"] * bool(c.num_register_tokens) + list(patches)
    step = (RIGHT - LEFT) / len(tokens)
    for i, name in enumerate(tokens):
        x = LEFT + step * (i + 0.5)
        parts += [
            svg.arrow(x, 262, x, 216),
            svg.box(x - 32, 262, 30, 40, "position"),
            svg.box(x, 262, 30, 40, "token"),
            svg.text(x - 17, 287, {"*": "0", "R": "–"}.get(name, name), "shape"),
            svg.text(x + 15, 287, name if name in "*R" else ""),
        ]
        if name not in "*R":
            parts.append(svg.arrow(x + 15, 350, x + 15, 304))
            if not _hybrid(c):
                parts += _patch(x + 15, patches[name], c, photo)
    _, channels, pixels = STEMS[c.stem]
    P, C = c.patch_size // pixels, channels or c.num_channels
    parts += _wide(
        350,
        50,
        "embed",
        "Linear projection of flattened patches",
        f"Eq. 1   [B, {c.num_patches}, {P}² · {C}] E → [B, {c.num_patches}, {D}]",
    )
    if not _hybrid(c):
        image, bottom = _image(c, photo, 500)
        return [*parts, *image], bottom
    rows, columns = c.grid
    parts.append(svg.arrow(MIDDLE, 446, MIDDLE, 402))
    parts += _wide(446, 50, "mlp", f"ResNet stem: {c.stem}", f"feature map [B, {C}, {rows * P}, {columns * P}]")
    image, bottom = _image(c, photo, 542)
    return [*parts, svg.arrow(MIDDLE, 538, MIDDLE, 498), *image], bottom


def _hybrid(c: ViTConfig) -> bool:
    return c.stem != "none"


def _patch(x: float, n: int | None, c: ViTConfig, photo: Photo | None) -> list[str]:
    """Draw patch n below the projection, around x; three dots for None."""
    if n is None:
        return [svg.text(x, 463, "…")]
    (row, column), P = divmod(n, c.grid[1]), c.patch_size
    arrow = svg.arrow(x, 442, x, 402)
    if photo is None:
        return [arrow, svg.box(x - 15, 444, 30, 30, "level3")]
    cut = photo[row * P : (row + 1) * P, column * P : (column + 1) * P]
    return [arrow, _picture(x - 15, 444, 30, 30, cut)]


def _image(c: ViTConfig, photo: Photo | None, top: float) -> tuple[list[str], float]:
    """Draw the image cut into its patches, and what it is; return the parts and the lower edge."""
    (height, width), (rows, columns), P = c.image_hw, c.grid, c.patch_size
    cell = SIDE / max(rows, columns)
    left, right, bottom = MIDDLE - columns * cell / 2, MIDDLE + columns * cell / 2, top + rows * cell
    if photo is None:
        parts = [svg.box(left, top, right - left, bottom - top, "level3 square")]
    else:
        parts = [_picture(left, top, width / P * cell, height / P * cell, photo)]
    if max(rows, columns) <= MOST and not _hybrid(c):
        cuts = [(left + j * cell, top, left + j * cell, bottom) for j in range(1, columns)]
        cuts += [(left, top + i * cell, right, top + i * cell) for i in range(1, rows)]
        parts += [f'<line class="cut" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>' for x1, y1, x2, y2 in cuts]
    legend = (
        "violet: E_pos, pink: patch embeddings"
        + ", *: class token" * c.class_token
        + (f", R: {c.num_register_tokens} registers" if c.num_register_tokens else "")
    )
    size = f"image {height} × {width} × {c.num_channels}, "
    size += (
        f"{rows} × {columns} patches of a feature map"
        if _hybrid(c)
        else f"cut into {rows} × {columns} patches of {P} × {P}"
    )
    lines = [svg.text(MIDDLE, bottom + 20 + 18 * i, words, "shape") for i, words in enumerate((size, legend))]
    return parts + lines, bottom + 56


def _heads(c: ViTConfig) -> str:
    """Words about the heads: how many each block has, and whether q, k and v have a bias."""
    counts = {len(c.heads_of(layer)) for layer in range(c.num_hidden_layers)}
    number = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
    return f"{number} heads of {c.head_size}" + ", no bias in Eq. 5" * (not c.qkv_bias)


def _block(c: ViTConfig, bottom: float) -> list[str]:
    """Draw the right half: one encoder block, upwards from `bottom`."""
    D, T, left, wide = c.hidden_size, c.num_prefix_tokens + c.num_patches, 720, 250
    centre, around = left + wide / 2, left + wide + 30
    parts: list[str] = []
    y = bottom
    for norm, (kind, words, shapes) in zip(
        (f"[B, {T}, {D}]", f"eps {c.layer_norm_eps:g}"),
        (
            ("msa", "Multi-head self-attention: Eqs. 5-8", _heads(c)),
            ("mlp", "MLP", f"{D} → {c.intermediate_size} → {D}   {c.hidden_act}"),
        ),
        strict=True,
    ):
        fork, plus = y - 12, y - 190
        for tall, colour, name, note in ((y - 80, "norm", "LayerNorm", norm), (y - 150, kind, words, shapes)):
            parts += [
                svg.arrow(centre, tall + 70 if colour != "norm" else y, centre, tall + 46),
                svg.box(left, tall, wide, 44, colour),
                svg.text(centre, tall + 19, name),
                svg.text(centre, tall + 35, note, "shape"),
            ]
        parts += [
            svg.arrow(centre, y - 150, centre, plus + 11),
            svg.text(centre, plus + 4, "+"),
            f'<circle class="line" cx="{centre:g}" cy="{plus:g}" r="10"/>',
            svg.path((centre, fork), (around, fork), (around, plus), (centre + 10, plus)),
        ]
        y = plus - 10
    parts += [
        svg.arrow(centre, y, centre, y - 34),
        svg.text(centre + 12, y - 20, "z_l", "shape", "start"),
        svg.text(centre + 12, bottom + 4, "z_(l-1)", "shape", "start"),
    ]
    top = y - 46
    return [
        svg.text(700, 34, "Encoder block: Eqs. 2 and 3", "title", "start"),
        svg.box(700, top, wide + 90, bottom - top + 20, "level0"),
        *parts,
    ]


def overview(config: ViTConfig, photo: Photo | None = None) -> str:
    """Draw Figure 1 of the paper as SVG: the model on the left, one encoder block on the right.

    Args:
        config: the architecture.
        photo: [H, W, 3], an image of the model's size, whose patches are shown (default: empty patches).

    Raises:
        ConfigError: the model has parts that the figure does not show.
    """
    if odd := unfit(config, FIGURE_1):
        raise ConfigError(f"Figure 1 of the paper does not show {', '.join(odd)}, which this model has.")
    model, bottom = _model(config, photo)
    return svg.document(
        1080, bottom, "Figure 1 of the paper with this model's shapes", [*model, *_block(config, BLOCK_BOTTOM)]
    )
