"""A photo through Eqs. 1-4, one step at a time, with the shape, a few values and a picture of each step."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitkit.errors import CannotExpress, pick
from vitkit.evaluation.names import class_names
from vitkit.evaluation.predict import Given
from vitkit.explanations import draw
from vitkit.explanations.common import eval_mode, patch_map, reader, to_array
from vitkit.explanations.patches import PICTURES as EQ_1
from vitkit.explanations.patches import embedding
from vitkit.jobs.patches import pixels_of
from vitkit.model.classifier import probabilities
from vitkit.model.parts.fit import EVERY_PART, Takes, unfit
from vitkit.model.vit import ViT

TAKES: Takes = {**EVERY_PART, "block": ("res-post-norm",)}  # a parallel block has no Eq. 2


@dataclass(frozen=True)
class Step:
    """One step of the walk: the equation, what it does, and the tensor that comes out."""

    equation: str
    words: str
    value: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self.value.shape)

    @property
    def few(self) -> str:
        """Its first values."""
        few = ", ".join(f"{value:.3g}" for value in self.value.flatten()[:3].tolist())
        return few + ", ..." * (self.value.numel() > 3)


class Walk(list[Step]):
    """The steps of one photo, from its pixels to the logits; shown as a table with a few values of each tensor.

    Args:
        model: a ViT in eval mode.
        x: pixels [1, C, H, W], normalised as the model's InputSpec says.
    """

    def __init__(self, model: ViT, x: Tensor) -> None:
        super().__init__(steps(model, x))
        self.names, self.spec = class_names(model) if model.config.num_classes else (), model.input_spec
        self.arrays = embedding(model, x)
        rows, self.reads = reader(model)
        value = {step.equation: step.value for step in self}
        attention = to_array(value["Eq. 6"][0, :, rows].mean(1))  # [h, T]
        self.attention = patch_map(attention, model, (self[1].shape[2], self[1].shape[3]))  # [h, rows, columns]
        self.y = value["Eq. 4"]

    @property
    def probabilities(self) -> Tensor:
        """The softmax of the logits, [1, K], or for several labels the sigmoid of each; the features' own values for a
        model without a head."""
        value = self[-1].value
        return probabilities(value, self.spec).to(value.dtype) if self.names else value

    def best(self, count: int = 3) -> list[tuple[str, float]]:
        """The most probable classes with their probabilities; none for a model without a head.

        Args:
            count: how many (default: 3).
        """
        if not self.names:
            return []
        p, order = self.probabilities[0].sort(descending=True, stable=True)
        return [(self.names[k], float(value)) for value, k in zip(p[:count], order[:count], strict=True)]

    def pictures(self) -> Iterator[tuple[str, draw.Figure]]:
        """Draw the steps that can be seen: (name, figure) in the order of the walk."""
        for name, picture in self.drawers.items():
            yield name, picture(self)

    @property
    def drawers(self) -> dict[str, Callable[[Walk], draw.Figure]]:
        """What draws each picture; a model without a head has no probabilities."""
        return {name: picture for name, picture in PICTURES.items() if name != "probabilities" or self.names}

    def plot(self, name: str | None = None) -> draw.Figure:
        """Draw one picture, or all of them, one below the other.

        Args:
            name: photo, patches, feature_maps, flattened, positions, sequence, attention, features or probabilities
                (default: all).
        """
        if name is not None:
            return pick(self.drawers, name, "picture")(self)
        return draw.stacked([figure for _, figure in self.pictures()])

    def save(self, out: Path) -> list[Path]:
        """Write the pictures as `1_photo.png` and so on, and return their paths.

        Args:
            out: folder to write to.
        """
        return [draw.save(figure, out / f"{i}_{name}.png") for i, (name, figure) in enumerate(self.pictures(), start=1)]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Equation, shape, first values and words of every step, and of the probabilities."""
        shown = [*self]
        if self.names:
            words = "probabilities: " + ", ".join(f"{name} {p:.1%}" for name, p in self.best())
            shown.append(Step("", words, self.probabilities))
        return [(step.equation, str(list(step.shape)), step.few, step.words) for step in shown]

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{equation}</td><td><code>{shape}</code></td><td><code>{few}</code></td>"
            f"<td>{html.escape(words)}</td></tr>"
            for equation, shape, few, words in self.rows()
        )
        return f"<table><tr><th></th><th>shape</th><th>first values</th><th></th></tr>{rows}</table>"


def walk(model: ViT, image: Given | None = None, image_size: int | tuple[int, int] | None = None) -> Walk:
    """Take one photo through a model.

    Args:
        model: a ViT.
        image: any image that `vitkit.predict` accepts (default: a sample photo).
        image_size: image size in pixels (default: the model's).
    """
    with eval_mode(model, pixels_of(model, image, image_size)) as (vit, x):
        return Walk(vit, x)


@torch.no_grad()
def steps(model: ViT, x: Tensor) -> Iterator[Step]:
    """Yield every step of Eqs. 1-4 for one image, with its tensor; the last one is the model's own answer.

    Args:
        model: a ViT in eval mode.
        x: pixels [1, C, H, W], normalised as the model's InputSpec says.
    """
    if odd := unfit(model.config, TAKES):
        raise CannotExpress(f"`vitkit walk` shows Eqs. 1-4 of the paper, and this model has {', '.join(odd)}.")
    c, L, P = model.config, model.config.num_hidden_layers, model.config.patch_size
    yield Step("", "the photo, as normalised pixels", x)
    e, grid = model.patch_embedding(x)  # [1, N, D]
    yield Step("Eq. 1", f"E as a convolution: every {P} x {P} patch becomes D numbers", e.mT.unflatten(2, grid))
    yield Step("Eq. 1", "flattened: the patches in one row", e.mT)
    yield Step("Eq. 1", "transposed: x_p E, a sequence of patch embeddings", e)
    if model.class_token is not None:
        yield Step("Eq. 1", "x_class: the class token, which is learned", model.class_token)
        yield Step("Eq. 1", "the class token in front", torch.cat([model.class_token, e], dim=1))
    z = model.embed(x)
    registers = f", {c.num_register_tokens} registers inserted" if c.num_register_tokens else ""
    yield Step("Eq. 1", f"z_0: the positions E_pos added{registers}", z)
    yield Step("Eq. 6", "A: what each token of block 1 attends to, per head", model.blocks[0].attention(z, grid))
    for layer, block in enumerate(model.blocks, start=1):
        z = block.attend(z, grid)
        if layer in (1, L):
            yield Step("Eq. 2", f"z'_{layer} = MSA(LN(z_{layer - 1})) + z_{layer - 1}", z)
        z = block.feed_forward(z)
        if layer in (1, L):
            yield Step("Eq. 3", f"z_{layer} = MLP(LN(z'_{layer})) + z'_{layer}", z)
    y = model.read(z)
    yield Step(
        "Eq. 4",
        f"y = LN(z_{L}^0): the class token sums up the photo"
        if c.pool == "cls"
        else "y: the mean of the patches sums up the photo",
        y,
    )
    yield Step("", "logits: one number per class" if c.num_classes else "no head: the features", model.classify(y))


def _attention(found: Walk) -> draw.Figure:
    heads = len(found.attention)
    return draw.tiles(
        [draw.overlay(found.arrays["image"], heat) for heat in found.attention],
        min(heads, 6),
        side=2,
        names=[f"head {head + 1}" for head in range(heads)],
        title=f"Attention of the {found.reads} in block 1 (A of Eq. 6): coloured patches get the most weight",
    )


def _features(found: Walk) -> draw.Figure:
    y = to_array(found.y)
    return draw.values(
        y,
        title=f"What the head reads, y of Eq. 4: the {found.reads} after the last block, [1 x {y.shape[1]}]",
        x="dimension",
        y="",
        tall=1.5,
        marks={0: "y"},
    )


def _probabilities(found: Walk) -> draw.Figure:
    best = found.best(5)
    title = f"Probabilities: the {len(best)} highest of {len(found.names)} classes"
    return draw.bars([name for name, _ in best], [p for _, p in best], title=title, x="probability")


def _of_eq_1(name: str) -> Callable[[Walk], draw.Figure]:
    return lambda found: EQ_1[name](found.arrays)


PICTURES: dict[str, Callable[[Walk], draw.Figure]] = {
    "photo": _of_eq_1("image"),
    "patches": _of_eq_1("grid"),
    "feature_maps": _of_eq_1("feature_maps"),
    "flattened": _of_eq_1("flattened"),
    "positions": _of_eq_1("positions"),
    "sequence": _of_eq_1("sequence"),
    "attention": _attention,
    "features": _features,
    "probabilities": _probabilities,
}
