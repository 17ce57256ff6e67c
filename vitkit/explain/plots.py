"""PLOTS: every picture of a model. A plot is arrays, a pure function of (model, pixels), and a drawer of those arrays.

The command line, the report and the web page show whatever stands in the table: a new plot is a function or two and a
row here.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.errors import InputError, OutputError
from vitkit.explain import draw
from vitkit.explain.attention import attention_distance, class_attention, gradient_rollout, rollout
from vitkit.explain.common import (
    Arrays,
    Ask,
    Pixels,
    batches,
    eval_mode,
    grid_of,
    image_of,
    needs_head,
    patch_at,
    patch_map,
    reader,
    targets_of,
    to_array,
    unwrap,
)
from vitkit.explain.draw import Figure
from vitkit.explain.embeddings import filters, patch_similarity, position_similarity
from vitkit.explain.occlusion import occlusion
from vitkit.types import Array

SHEET = 24  # images on a sheet of rollouts
MOST_ROWS = 250_000  # a table of numbers larger than this is left to the .npz file


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One kind of picture.

    Args:
        title: what it shows.
        needs: what its arrays are made of: the `model` alone, many `images`, or one `image`.
        value: name of the array that its table of numbers holds.
        axes: names of that array's axes.
        arrays: (model, pixels, what was asked) -> arrays; the same twice.
        draw: arrays -> a figure.
        head: whether it needs a model that classifies.
        evidence: whether it is a map of what speaks for a class, so that its faithfulness can be scored.
        slow: whether it is made only on request.
    """

    title: str
    needs: Literal["model", "images", "image"]
    value: str
    axes: tuple[str, ...]
    arrays: Callable[[nn.Module, Pixels, Ask], Arrays]
    draw: Callable[[Arrays], Figure]
    head: bool = False
    evidence: bool = False
    slow: bool = False

    def fits(self, model: nn.Module) -> bool:
        """Whether it can be made for this model."""
        return not self.head or unwrap(model).config.num_classes > 0

    def write(self, arrays: Arrays, base: Path) -> list[Path]:
        """Write `base`.png and .svg, and the data beside them as .npz and .csv.

        Args:
            arrays: what `arrays` gave.
            base: path without an ending.
        """
        paths = [base.with_name(f"{base.name}.{ending}") for ending in ("png", "svg", "npz", "csv")]
        try:
            base.parent.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(paths[2], allow_pickle=False, **arrays)
            if arrays[self.value].size <= MOST_ROWS:
                write_table(paths[3], arrays[self.value], self.axes, self.value)
            else:
                paths.pop()
        except OSError as error:
            raise OutputError(
                f"Expected a folder that can be written to; {base.parent} cannot ({error.strerror}). "
                f"Choose another with --out."
            ) from error
        draw.save(self.draw(arrays), *paths[:2])
        return paths


def write_table(path: Path, values: Array, axes: tuple[str, ...], name: str) -> None:
    """One line for each number of an array: its indices, counted from 0, and the number; NaN left out.

    Args:
        path: the .csv file.
        values: the array.
        axes: names of its axes.
        name: of the numbers.
    """
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*axes, name])
        for index, value in np.ndenumerate(values):
            if not np.isnan(value):
                writer.writerow([*index, f"{value:.6g}"])


def _one(pixels: Pixels) -> Tensor:
    """The single image of a plot that needs one, [1, C, H, W]."""
    x = next(batches(pixels, 1), None)
    if x is None:
        raise InputError("Expected an image; got none.")
    return x


# Figure 7 left.
def _filters(model: nn.Module, pixels: Pixels, ask: Ask) -> Arrays:
    components, share = filters(model)
    return {"filters": components, "share": share}


def _draw_filters(arrays: Arrays) -> Figure:
    pictures = []
    for one in arrays["filters"]:
        shown = 0.5 + 0.5 * one / max(float(np.abs(one).max()), 1e-12)  # zero is gray: the sign can be seen
        pictures.append(shown if shown.shape[-1] == 3 else np.repeat(shown[..., :1], 3, -1))
    return draw.tiles(
        pictures,
        7,
        side=0.8,
        title=f"Embedding filters: first {len(pictures)} principal components\n"
        f"({float(arrays['share'].sum()):.0%} of their variance)",
    )


# Figures 7 centre and 10.
def _positions(model: nn.Module, pixels: Pixels, ask: Ask) -> Arrays:
    return {"similarity": position_similarity(model)}


def _draw_positions(arrays: Arrays, most: int = 7) -> Figure:
    similarity = arrays["similarity"]
    rows, columns = (np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(int)) for n in similarity.shape[:2])
    pictures = [similarity[r, c] for r in rows for c in columns]
    side = 0.8 if most <= 7 else 0.5
    return draw.tiles(
        pictures,
        len(columns),
        side=side,
        scale=draw.SIGNED,
        limits=(-1, 1),
        bar="cosine similarity",
        left=[str(r + 1) for r in rows],
        top=[str(c + 1) for c in columns],
        title="Position embedding similarity\n(rows and columns: place of the patch)",
    )


def _draw_position_grid(arrays: Arrays) -> Figure:
    return _draw_positions(arrays, most=16)


# Figures 7 right and 11.
def _distance(model: nn.Module, pixels: Pixels, ask: Ask) -> Arrays:
    count = 0

    def counted() -> Iterator[Tensor]:
        nonlocal count
        for x in batches(pixels):
            count += len(x)
            yield x

    distance = attention_distance(model, counted())
    return {"distance": distance, "images": np.array(count)}


def _draw_distance(arrays: Arrays) -> Figure:
    return draw.points(
        arrays["distance"],
        title=f"Mean attention distance ({int(arrays['images'])} images)",
        x="Network depth (layer)",
        y="Mean attention distance (pixels)",
        name="Head",
    )


# Figures 6 and 14.
def _rollout(model: nn.Module, pixels: Pixels, ask: Ask) -> Arrays:
    images, maps = [], []
    for x in batches(pixels):
        with eval_mode(model, x) as (vit, fitted):
            maps.append(patch_map(rollout(vit, fitted), vit, grid_of(vit, fitted)))
            images.append(image_of(fitted, vit))
        if sum(map(len, images)) >= SHEET:
            break
    if not images:
        raise InputError("Expected at least one image for rollout; got none.")
    return {"rollout": np.concatenate(maps)[:SHEET], "image": np.concatenate(images)[:SHEET]}


def _draw_rollout(arrays: Arrays) -> Figure:
    pictures = []
    for image, heat in zip(arrays["image"], arrays["rollout"], strict=True):
        pictures += [image, draw.spotlight(image, heat)]
    columns = 2 * min(len(arrays["image"]), 3)
    return draw.tiles(
        pictures,
        columns,
        title="Attention rollout: input, and where the answer comes from",
        side=1.5,
        top=["Input", "Attention"] * (columns // 2),
    )


# One image.
def _predictions(model: nn.Module, pixels: Pixels, ask: Ask, top: int = 5) -> Arrays:
    with torch.no_grad(), eval_mode(model, _one(pixels)) as (vit, x):
        needs_head(vit, "A prediction")
        p = to_array(vit(x).float().softmax(1))[0]
    best = np.argsort(-p, kind="stable")[:top]
    names = ask.names or vit.input_spec.class_names
    return {"probability": p[best], "index": best, "name": np.array([names[k] if names else str(k) for k in best])}


def _draw_predictions(arrays: Arrays) -> Figure:
    return draw.bars(
        [str(name) for name in arrays["name"]], arrays["probability"], title="Predictions", x="probability"
    )


def _attention(model: nn.Module, pixels: Pixels, ask: Ask) -> Arrays:
    with eval_mode(model, _one(pixels)) as (vit, x):
        A = class_attention(vit, x)[0]  # [L, h, T]
        return {
            "attention": patch_map(A, vit, grid_of(vit, x)),
            "tokens": A,
            "image": image_of(x, vit)[0],
            "reader": np.array(reader(vit)[1]),
        }


def _draw_attention(arrays: Arrays) -> Figure:
    L, h = arrays["attention"].shape[:2]
    small = draw.shrunk(arrays["image"], 128)
    shown = [
        [None if np.isnan(one).any() else draw.overlay(small, one) for one in layer] for layer in arrays["attention"]
    ]
    layers, heads = [f"layer {i}" for i in range(L)], [f"head {i}" for i in range(h)]
    pruned = bool(np.isnan(arrays["attention"]).any())
    title = f"Attention of the {arrays['reader']} (Eq. 6)" + ("; no picture: head pruned" if pruned else "")
    if h < L:  # the longer side goes across
        return draw.tiles(
            [layer[i] for i in range(h) for layer in shown], L, side=1.1, left=heads, top=layers, title=title
        )
    return draw.tiles([one for layer in shown for one in layer], h, side=1.1, left=layers, top=heads, title=title)


def _gradient_rollout(model: nn.Module, pixels: Pixels, ask: Ask) -> Arrays:
    with eval_mode(model, _one(pixels)) as (vit, x):
        needs_head(vit, "Gradient-weighted rollout")
        with torch.no_grad():
            target = int(targets_of(vit(x), ask.target))
        R = gradient_rollout(vit, x, target)[0]
        return {
            "relevance": patch_map(R, vit, grid_of(vit, x)),
            "image": image_of(x, vit)[0],
            "target": np.array(target),
        }


def _similarity(model: nn.Module, pixels: Pixels, ask: Ask) -> Arrays:
    with eval_mode(model, _one(pixels)) as (vit, x):
        return {
            "similarity": patch_similarity(vit, x, ask.patch, ask.layer)[0],
            "image": image_of(x, vit)[0],
            "patch": np.array(patch_at(ask.patch, grid_of(vit, x))),
        }


def _occlusion(model: nn.Module, pixels: Pixels, ask: Ask) -> Arrays:
    with eval_mode(model, _one(pixels)) as (vit, x):
        needs_head(vit, "Occlusion")
        with torch.no_grad():
            target = int(targets_of(vit(x), ask.target))
        return {
            "fall": occlusion(vit, x, target, progress=ask.progress)[0],
            "image": image_of(x, vit)[0],
            "target": np.array(target),
        }


def _draw_over(name: str, title: str) -> Callable[[Arrays], Figure]:
    """A drawer of one map over its image; the map's patch, where it has one, is framed."""

    def drawer(arrays: Arrays) -> Figure:
        image, heat = arrays["image"], arrays[name]
        over = draw.overlay(image, heat)
        if "patch" in arrays:
            over = draw.framed(over, tuple(arrays["patch"]), heat.shape)
        words = title + (f", class {int(arrays['target'])}" if "target" in arrays else "")
        return draw.tiles([image, over], 2, side=3.2, title=words)

    return drawer


MAP = ("row", "column")
PLOTS: dict[str, Plot] = {
    "filters": Plot(
        title="Principal components of the embedding filters (Figure 7 left)",
        needs="model",
        value="filters",
        axes=("component", *MAP, "channel"),
        arrays=_filters,
        draw=_draw_filters,
    ),
    "positions": Plot(
        title="Similarity of position embeddings (Figure 7 centre)",
        needs="model",
        value="similarity",
        axes=(*MAP, "other_row", "other_column"),
        arrays=_positions,
        draw=_draw_positions,
    ),
    "position-grid": Plot(
        title="Similarity of position embeddings, the whole grid (Figure 10)",
        needs="model",
        value="similarity",
        axes=(*MAP, "other_row", "other_column"),
        arrays=_positions,
        draw=_draw_position_grid,
    ),
    "distance": Plot(
        title="Mean attention distance by head and depth (Figures 7 right and 11)",
        needs="images",
        value="distance",
        axes=("layer", "head"),
        arrays=_distance,
        draw=_draw_distance,
    ),
    "rollouts": Plot(
        title="Attention rollout, a sheet of images (Figures 6 and 14)",
        needs="images",
        value="rollout",
        axes=("image", *MAP),
        arrays=_rollout,
        draw=_draw_rollout,
    ),
    "predictions": Plot(
        title="The likeliest classes",
        needs="image",
        value="probability",
        axes=("rank",),
        arrays=_predictions,
        draw=_draw_predictions,
        head=True,
    ),
    "attention": Plot(
        title="Attention of the class token, by layer and head (Eq. 6)",
        needs="image",
        value="attention",
        axes=("layer", "head", *MAP),
        arrays=_attention,
        draw=_draw_attention,
    ),
    "rollout": Plot(
        title="Attention rollout (Figure 6)",
        needs="image",
        value="rollout",
        axes=MAP,
        arrays=lambda model, pixels, ask: {
            name: values[0] for name, values in _rollout(model, _one(pixels), ask).items()
        },
        draw=_draw_over("rollout", "Attention rollout"),
        evidence=True,
    ),
    "gradient-rollout": Plot(
        title="Rollout weighted by a class's gradient",
        needs="image",
        value="relevance",
        axes=MAP,
        arrays=_gradient_rollout,
        draw=_draw_over("relevance", "Gradient-weighted rollout"),
        head=True,
        evidence=True,
    ),
    "similarity": Plot(
        title="Similarity of all patches to one",
        needs="image",
        value="similarity",
        axes=MAP,
        arrays=_similarity,
        draw=_draw_over("similarity", "Similarity to the framed patch"),
    ),
    "occlusion": Plot(
        title="What the class loses when a place is covered",
        needs="image",
        value="fall",
        axes=MAP,
        arrays=_occlusion,
        draw=_draw_over("fall", "Occlusion"),
        head=True,
        evidence=True,
        slow=True,
    ),
}
