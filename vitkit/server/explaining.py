"""Explanations of one image, as arrays or as pictures; KINDS lists them."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import InputError, pick
from vitkit.explanations.attention import class_attention, gradient_rollout, rollout
from vitkit.explanations.common import PlotOptions, image_of, patch_map, to_array
from vitkit.explanations.plots import PLOTS, Plot
from vitkit.model.checks import indices
from vitkit.model.vit import ViT
from vitkit.types import Array


@dataclass(frozen=True, kw_only=True)
class Question:
    """The parameters of an explanation.

    Args:
        kind: a row of KINDS.
        layer: layer, counted from 0, or from the end if negative.
        head: head, by its number before pruning.
        query: token whose attention is shown; 0 is the class token, and patches follow row by row (default: the token
            that the classification head reads).
        target: class to explain, for `gradient` (default: the most likely one).
    """

    kind: str = "rollout"
    layer: int | None = None
    head: int | None = None
    query: int | None = None
    target: int | None = None


def _attention(model: ViT, x: Tensor, ask: Question) -> Array:
    """[layers, heads, T]: A of Eq. 6, for the requested layers and heads only; NaN for pruned heads."""
    c = model.config
    L, h = c.num_hidden_layers, c.num_attention_heads
    layers = list(range(L)) if ask.layer is None else indices("layer", ask.layer, L)
    heads = list(range(h)) if ask.head is None else indices("head", ask.head, h)
    if ask.query is None:
        return class_attention(model, x)[0][layers][:, heads]
    found = model.attention(x, layers=layers, query=ask.query)
    result = np.full((len(layers), h, next(iter(found.values())).shape[-1]), np.nan, np.float32)
    for row, layer in enumerate(layers):
        result[row, list(c.heads_of(layer))] = to_array(found[layer][0, :, 0])
    return result[:, heads]


def _rollout(model: ViT, x: Tensor, ask: Question) -> Array:
    return rollout(model, x)[0]


def _gradient(model: ViT, x: Tensor, ask: Question) -> Array:
    return gradient_rollout(model, x, ask.target)[0]


def _input(model: ViT, x: Tensor, ask: Question) -> Array:
    return image_of(x, model)[0]


@dataclass(frozen=True)
class Kind:
    """One kind of explanation.

    Args:
        arrays: (model, pixels [1, C, H, W], question) -> an array.
        takes: names of the parameters that it accepts.
        words: what it shows.
    """

    arrays: Callable[[ViT, Tensor, Question], Array]
    takes: tuple[str, ...]
    words: str


KINDS: dict[str, Kind] = {
    "input": Kind(_input, (), "the image as the model sees it: resized and cropped"),
    "attention": Kind(_attention, ("layer", "head", "query"), "where a token looks, in each layer and head (Eq. 6)"),
    "rollout": Kind(_rollout, (), "attention accumulated over all layers (Figure 6)"),
    "gradient": Kind(_gradient, ("target",), "rollout of the attention that supports one class"),
}
# The figures of `explain.plots` that one request can ask for: those that need at most one image and are quick.
PICTURES: dict[str, Plot] = {name: plot for name, plot in PLOTS.items() if plot.needs != "images" and not plot.slow}


def arrays(model: ViT, x: Tensor, ask: Question) -> Array:
    """Compute an explanation.

    Args:
        model: the ViT.
        x: pixels [1, C, H, W].
        ask: its parameters.

    Raises:
        InputError: a parameter that this kind does not take, or a value that the model does not have.
    """
    kind = pick(KINDS, ask.kind, "kind of explanation")
    for name in ("layer", "head", "query", "target"):
        if getattr(ask, name) is not None and name not in kind.takes:
            raise InputError(
                f"kind={ask.kind!r} does not take {name}; it takes {', '.join(kind.takes) or 'no parameters'}."
            )
    grad = torch.enable_grad() if ask.kind == "gradient" else torch.no_grad()
    with grad:
        return kind.arrays(model, x, ask)


def overlay(model: ViT, x: Tensor, ask: Question) -> bytes:
    """Draw an explanation over the image as the model sees it; a PNG.

    `attention` shows the last layer and the mean of its heads unless the question names others.
    """
    from vitkit.explanations import draw

    if ask.kind == "attention" and ask.layer is None:
        ask = Question(kind=ask.kind, layer=-1, head=ask.head, query=ask.query)
    values, image = arrays(model, x, ask), image_of(x, model)[0]
    if ask.kind == "input":
        return draw.png(image)
    if ask.kind == "attention":
        if np.isnan(values).all():
            raise InputError(f"head={ask.head} was pruned from layer={ask.layer} (counted from 0); choose another.")
        values = np.nanmean(values, axis=(0, 1))
    return draw.png(draw.overlay(image, patch_map(values, model, grid(model))))


def grid(model: ViT) -> tuple[int, int]:
    """(rows, columns) of the patches of an image at the size that the model is served with."""
    rows, columns = (-(-side // model.config.patch_size) for side in model.input_spec.size)
    return rows, columns


def picture(model: ViT, x: Tensor, name: str, theme: Literal["light", "dark"] | None = None) -> bytes:
    """Draw one row of PICTURES; a PNG.

    Args:
        model: the ViT.
        x: pixels [1, C, H, W].
        name: the row.
        theme: the page that it is for (default: none, and a white background).
    """
    from vitkit.explanations import draw

    plot = pick(PICTURES, name, "picture")
    if not isinstance(model, plot.models):
        raise InputError(f"The picture {name!r} cannot be drawn for a {type(model).__name__}, and this model is one.")
    if not plot.fits(model):
        raise InputError(
            f"The picture {name!r} explains a class, but this model has no classification head (num_classes=0)."
        )
    return draw.figure_png(plot.draw(plot.arrays(model, x, PlotOptions())), theme)


def npy(values: Array) -> bytes:
    """An array as the bytes of a .npy file."""
    out = io.BytesIO()
    np.save(out, values, allow_pickle=False)
    return out.getvalue()


def plain(values: Array) -> Any:
    """An array as nested lists, with None for NaN, which JSON cannot hold."""
    if values.dtype == np.uint8:
        return values.tolist()
    rounded = np.array([float(f"{value:.6g}") for value in values.ravel().tolist()]).reshape(values.shape)
    return np.where(np.isnan(rounded), None, rounded).tolist()  # type: ignore[call-overload]
