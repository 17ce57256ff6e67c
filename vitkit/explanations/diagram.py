"""Drawings of a model with its own shapes: the classes of each interface; overview.py has Figure 1 of the paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from vitkit import huggingface
from vitkit.errors import ConfigError
from vitkit.explanations import svg
from vitkit.explanations.describe import Row, describe, rows_of
from vitkit.explanations.overview import overview
from vitkit.model.config import ViTConfig
from vitkit.model.count import parameters
from vitkit.model.parts.fit import unfit_of_paper

TALL, GAP, WIDE = 40, 6, 760
HIDDEN = {"Dropout", "Residual"}  # left out of the drawing if they have no parameters: they do not change any shape


def shape(sizes: tuple[int, ...] | None) -> str:
    """Format a shape with a symbolic batch size: (1, 197, 768) -> "B × 197 × 768"."""
    return " × ".join(["B", *map(str, (sizes or ())[1:])])


def _nested(rows: list[Row], blocks: str, layers: int) -> list[tuple[int, str, str]]:
    """Return (depth, name, shapes) of each box; the first encoder block stands for all of them.

    Args:
        rows: the modules of a model.
        blocks: path of the list of its encoder blocks; the list has no box of its own.
        layers: the number of blocks.
    """
    boxes = []
    for row in rows:
        inside = row.name.startswith(f"{blocks}.")
        if (row.kind in HIDDEN and not row.parameters) or row.name == blocks:
            continue
        if inside and row.name.removeprefix(f"{blocks}.").split(".")[0] != "0":
            continue
        words = f"{row.name.rpartition('.')[2] or 'model'}: {row.kind}"
        if row.name == f"{blocks}.0":
            words = f"{blocks.rpartition('.')[2]}: {layers} × {row.kind}"
        shapes = f"{shape(row.input)}  →  {shape(row.output)}"
        if row.kind in ("PositionEmbedding", "Parameter"):  # not computed from the images
            shapes = " × ".join(map(str, row.output or ()))
        each = " each" if row.name == f"{blocks}.0" else ""
        boxes.append(
            (
                row.depth - inside,
                words,
                f"{shapes}    {row.parameters:,} parameters{each}" if row.parameters else shapes,
            )
        )
    return boxes


def classes(config: ViTConfig) -> str:
    """Draw the nested classes as SVG.

    Args:
        config: the architecture.
    """
    title = f"The classes of this model: {parameters(config):,} parameters"
    return _boxes(title, _nested(describe(config), "blocks", config.num_hidden_layers))


def twelve(config: ViTConfig) -> str:
    """Draw the twelve classes of vitkit.huggingface as SVG, nested as they are.

    Args:
        config: the architecture.

    Raises:
        ConfigError: the model has something that the twelve classes have no place for.
    """
    config = dataclasses.replace(config, prefix_positions=True)  # as `as_huggingface` does
    with torch.device("meta"):
        x = torch.empty(1, config.num_channels, *config.image_hw)
        pooler = huggingface.ViTPooler(config)
        if config.num_classes:
            model: nn.Module = huggingface.ViTForImageClassification(config).eval()
        else:
            model = huggingface.ViTModel(config, config.pre_logits).eval()
    rows = rows_of(model, x)
    boxes = _nested(rows, "vit.encoder.layer" if config.num_classes else "encoder.layer", config.num_hidden_layers)
    if all(row.kind != "ViTPooler" for row in rows):
        tokens = torch.empty(1, 1 + config.num_patches, config.hidden_size, device="meta")
        (_, _, shapes), *rest = _nested(rows_of(pooler, tokens), "blocks", 0)
        boxes += [(0, "pooler: ViTPooler (in a ViTModel used alone)", shapes), *rest]
    return _boxes(f"{type(model).__name__} of vitkit.huggingface: {rows[0].parameters:,} parameters", boxes)


def _boxes(title: str, boxes: list[tuple[int, str, str]]) -> str:
    """Draw boxes inside each other.

    Args:
        title: a line above them.
        boxes: (depth, name, shapes) of each, in order.
    """
    parts: list[str] = []
    ends: list[tuple[int, int, float]] = []  # (depth, index into parts, top) of open boxes
    y = 56.0

    def close(depth: int) -> None:
        nonlocal y
        while ends and ends[-1][0] >= depth:
            level, index, top = ends.pop()
            height = max(y - top, TALL)
            parts[index] = svg.box(20 + 16 * level, top, WIDE - 40 - 32 * level, height, f"level{min(level, 3)}")
            y = top + height + GAP

    for depth, words, shapes in boxes:
        close(depth)
        ends.append((depth, len(parts), y))
        x = 34 + 16 * depth
        parts += ["", svg.text(x, y + 17, words, anchor="start"), svg.text(x, y + 33, shapes, "shape", "start")]
        y += TALL + GAP
    close(0)
    return svg.document(WIDE, y + 14, title, [svg.text(20, 34, title, "title", "start"), *parts])


@dataclass(frozen=True)
class Part:
    """One step inside a class of vitkit.paper.

    Args:
        colour: a kind of svg.box.
        words: what is applied; the name of a module first, if it is one.
        result: the shape that comes out.
        residual: whether the step's input is added to its result (default: False).
    """

    colour: str
    words: str
    result: tuple[int, ...]
    residual: bool = False


def paper_parts(c: ViTConfig) -> dict[str, tuple[str, tuple[int, ...], list[Part]]]:
    """Return what happens inside each class of vitkit.paper: {class: (equation, shape of its input, parts)}."""
    D, M, N, (rows, columns), P = c.hidden_size, c.intermediate_size, c.num_patches, c.grid, c.patch_size
    image, sequence = (c.num_channels, *c.image_hw), (N + 1, D)
    hidden = [Part("head", "classifier.1: Linear, then tanh", (D,))] if c.pre_logits else []
    return {
        "PatchEmbedding": (
            "Eq. 1",
            image,
            [
                Part("embed", f"patcher: Conv2d, kernel and stride {P}", (D, rows, columns)),
                Part("level2", "flatten: the patches in one row", (D, N)),
                Part("level2", "permute(0, 2, 1)", (N, D)),
            ],
        ),
        "MultiheadSelfAttentionBlock": (
            "MSA(LN(z)) of Eq. 2",
            sequence,
            [
                Part("norm", "layer_norm: LayerNorm", sequence),
                Part("msa", f"multihead_attn: {c.num_attention_heads} heads of {c.head_size}, Eqs. 5-8", sequence),
            ],
        ),
        "MLPBlock": (
            "MLP(LN(z)) of Eq. 3",
            sequence,
            [
                Part("norm", "layer_norm: LayerNorm", sequence),
                Part("mlp", "mlp.0: Linear", (N + 1, M)),
                Part(
                    "level2", f"mlp.1: GELU{' (tanh form)' * (c.hidden_act == 'gelu_tanh')}, then dropout", (N + 1, M)
                ),
                Part("mlp", "mlp.3: Linear, then dropout", sequence),
            ],
        ),
        "TransformerEncoderBlock": (
            "Eqs. 2 and 3",
            sequence,
            [
                Part("msa", "msa_block: MultiheadSelfAttentionBlock", sequence, residual=True),
                Part("mlp", "mlp_block: MLPBlock", sequence, residual=True),
            ],
        ),
        "ViT": (
            "Eqs. 1-4",
            image,
            [
                Part("embed", "patch_embedding: PatchEmbedding", (N, D)),
                Part("token", "class_embedding in front", sequence),
                Part("position", "+ position_embedding, then dropout", sequence),
                Part("level2", f"transformer_encoder: {c.num_hidden_layers} × TransformerEncoderBlock", sequence),
                Part("level2", "the class token, x[:, 0]", (D,)),
                Part("norm", "classifier.0: LayerNorm, Eq. 4", (D,)),
                *hidden,
                Part("head", f"classifier.{1 + 2 * len(hidden)}: Linear", (c.num_classes,)),
            ],
        ),
    }


def _paper(name: str) -> Callable[[ViTConfig], str]:
    def draw(config: ViTConfig) -> str:
        """Draw one class of vitkit.paper as SVG: from its input at the top to its output at the bottom."""
        odd = unfit_of_paper(config)
        if odd or not config.num_classes:
            raise ConfigError(
                f"The five classes of vitkit.paper have no place for {', '.join(odd) or 'a model without a head'}."
            )
        equation, start, parts = paper_parts(config)[name]
        left, wide, y = 60, 400, 60.0
        centre, around = left + wide / 2, left + wide + 34
        drawn = [
            svg.text(20, 34, f"{name}: {equation}", "title", "start"),
            svg.text(centre, y + 12, shape((1, *start)), "shape"),
        ]
        y += 22
        for part in parts:
            drawn += [
                svg.arrow(centre, y, centre, y + 34),
                svg.box(left, y + 36, wide, 40, part.colour),
                svg.text(centre, y + 61, part.words),
            ]
            top, y = y + 5, y + 76
            if part.residual:
                drawn += [
                    svg.arrow(centre, y, centre, y + 24),
                    f'<circle class="line" cx="{centre:g}" cy="{y + 34:g}" r="10"/>',
                    svg.text(centre, y + 38, "+"),
                    svg.path((centre, top), (around, top), (around, y + 34), (centre + 10, y + 34)),
                ]
                y += 44
            drawn.append(svg.text(centre + 14, y + 22, shape((1, *part.result)), "shape", "start"))
        drawn.append(svg.arrow(centre, y, centre, y + 34))
        return svg.document(520, y + 54, f"{name} of vitkit.paper", drawn)

    return draw


DIAGRAMS: dict[str, Callable[[ViTConfig], str]] = {
    "classes": classes,
    "overview": overview,
    "huggingface": twelve,
    **{
        f"paper-{name}": _paper(name)
        for name in ("PatchEmbedding", "MultiheadSelfAttentionBlock", "MLPBlock", "TransformerEncoderBlock", "ViT")
    },
}
