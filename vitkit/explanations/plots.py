"""PLOTS: every plot of a model. A plot is a pure function (model, pixels, options) -> arrays, and one that draws them.

The command line, the report and the web page read this table: to add a plot, write its two functions and add a row.
Pictures count layers and heads from 1, as the paper does; arrays and .csv files count from 0, as Python does.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.errors import InputError, OutputError
from vitkit.explanations import draw
from vitkit.explanations.attention import attention_distance, class_attention, gradient_rollout, rollout
from vitkit.explanations.common import (
    Arrays,
    Pixels,
    PlotOptions,
    batches,
    eval_mode,
    eval_mode_any,
    grid_of,
    image_of,
    needs_head,
    patch_at,
    patch_map,
    reader,
    targets_of,
    to_array,
    unwrap_any,
)
from vitkit.explanations.draw import Figure
from vitkit.explanations.embeddings import WITH_POSITIONS, filters, patch_similarity, position_similarity
from vitkit.explanations.occlusion import occlusion
from vitkit.explanations.registers import STANDS_OUT, patch_norms
from vitkit.model.backbone import Backbone
from vitkit.model.classifier import probabilities
from vitkit.model.parts.fit import EVERY_PART, Takes, unfit
from vitkit.model.resnet import ResNet
from vitkit.model.vit import ViT
from vitkit.types import Array

SHEET = 24  # images on a sheet of rollouts
MOST_ROWS = 250_000  # rows of a .csv file; larger arrays are written to the .npz file only


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One kind of plot.

    Args:
        title: what it shows.
        caption: what to look at, and what it means.
        needs: what its arrays are computed from: the `model` alone, many `images`, or one `image`.
        value: name of the array that the .csv file holds.
        axes: names of that array's axes.
        arrays: (model, pixels, options) -> arrays; deterministic.
        draw: arrays -> a figure.
        head: whether the model must have a classification head.
        takes: the parts that the model may have (default: all).
        evidence: whether it is a map of the evidence for a class, whose faithfulness can be scored.
        slow: whether it is made only on request.
        models: the kinds of models that it can be made for.
    """

    title: str
    caption: str
    needs: Literal["model", "images", "image"]
    value: str
    axes: tuple[str, ...]
    arrays: Callable[[nn.Module, Pixels, PlotOptions], Arrays]
    draw: Callable[[Arrays], Figure]
    head: bool = False
    takes: Takes = field(default_factory=lambda: EVERY_PART)
    evidence: bool = False
    slow: bool = False
    models: tuple[type[Backbone], ...] = (ViT,)

    def fits(self, model: nn.Module) -> bool:
        """Return whether this plot can be made for the model."""
        inner = unwrap_any(model)
        if isinstance(inner, ViT) and unfit(inner.config, self.takes):
            return False
        return isinstance(inner, self.models) and (not self.head or inner.config.num_classes > 0)

    def write(self, arrays: Arrays, base: Path) -> list[Path]:
        """Write the plot as `base`.png and .svg, and its data as .npz and .csv.

        Args:
            arrays: the result of `self.arrays`.
            base: path without a suffix.
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
                f"Expected a writable folder; cannot write to {base.parent} ({error.strerror}). "
                f"Choose another one with --out."
            ) from error
        draw.save(self.draw(arrays), *paths[:2])
        return paths


def write_table(path: Path, values: Array, axes: tuple[str, ...], name: str) -> None:
    """Write one line per value of an array: its indices, counted from 0, and the value; NaN is left out.

    Args:
        path: the .csv file.
        values: the array.
        axes: names of its axes.
        name: name of the values.
    """
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*axes, name])
        for index, value in np.ndenumerate(values):
            if not np.isnan(value):
                writer.writerow([*index, f"{value:.6g}"])


def _one(pixels: Pixels) -> Tensor:
    """Return the first image, [1, C, H, W]."""
    x = next(batches(pixels, 1), None)
    if x is None:
        raise InputError("Expected an image; got none.")
    return x


# Figure 7, left.
def _filters(model: nn.Module, pixels: Pixels, options: PlotOptions) -> Arrays:
    components, share = filters(model)
    return {"filters": components, "share": share}


def _draw_filters(arrays: Arrays) -> Figure:
    pictures = []
    for one in arrays["filters"]:
        shown = 0.5 + 0.5 * one / max(float(np.abs(one).max()), 1e-12)  # gray is zero
        pictures.append(shown if shown.shape[-1] == 3 else np.repeat(shown[..., :1], 3, -1))
    return draw.tiles(
        pictures,
        min(len(pictures), 7),
        side=0.8,
        title=f"Embedding filters: first {len(pictures)} principal components\n"
        f"({float(arrays['share'].sum()):.0%} of the variance)",
    )


# Figure 7, centre, and Figure 10.
def _positions(model: nn.Module, pixels: Pixels, options: PlotOptions) -> Arrays:
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
        title="Position embedding similarity\n(each tile: one patch, by row and column)",
    )


def _draw_position_grid(arrays: Arrays) -> Figure:
    return _draw_positions(arrays, most=16)


# Figure 7, right, and Figure 11.
def _distance(model: nn.Module, pixels: Pixels, options: PlotOptions) -> Arrays:
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
        title=f"Mean attention distance ({arrays['images']} image{'' if arrays['images'] == 1 else 's'})",
        x="layer",
        y="mean attention distance (pixels)",
        name="Head",
    )


# Figures 6 and 14.
def _rollout(model: nn.Module, pixels: Pixels, options: PlotOptions) -> Arrays:
    images, maps = [], []
    for x in batches(pixels):
        with eval_mode(model, x) as (vit, fitted):
            maps.append(patch_map(rollout(vit, fitted), vit, grid_of(vit, fitted)))
            images.append(image_of(fitted, vit))
        if sum(map(len, images)) >= SHEET:
            break
    if not images:
        raise InputError("Expected at least one image for attention rollout; got none.")
    return {"rollout": np.concatenate(maps)[:SHEET], "image": np.concatenate(images)[:SHEET]}


def _draw_rollout(arrays: Arrays) -> Figure:
    pictures = []
    for image, heat in zip(arrays["image"], arrays["rollout"], strict=True):
        pictures += [image, draw.overlay(image, heat)]
    columns = 2 * min(len(arrays["image"]), 3)
    return draw.tiles(
        pictures,
        columns,
        title="Attention rollout: bright where the output token gets its information",
        side=1.5,
        top=["Input", "Attention"] * (columns // 2),
    )


def _class_name(vit: Backbone, options: PlotOptions, k: int) -> str:
    names = options.names or vit.input_spec.class_names
    return names[k] if names else str(k)


# One image.
def _predictions(model: nn.Module, pixels: Pixels, options: PlotOptions, top: int = 5) -> Arrays:
    with torch.no_grad(), eval_mode_any(model, _one(pixels)) as (vit, x):
        needs_head(vit, "A prediction")
        p = to_array(probabilities(vit(x), vit.input_spec).float())[0]
    best = np.argsort(-p, kind="stable")[:top]
    return {"probability": p[best], "index": best, "name": np.array([_class_name(vit, options, k) for k in best])}


def _draw_predictions(arrays: Arrays) -> Figure:
    return draw.bars(
        [str(name) for name in arrays["name"]], arrays["probability"], title="Most probable classes", x="probability"
    )


def _attention(model: nn.Module, pixels: Pixels, options: PlotOptions) -> Arrays:
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
    maps, rows, columns = arrays["attention"], "layer", "head"  # [L, h, rows, columns]
    if h < L:  # the longer side is horizontal
        maps, rows, columns = maps.swapaxes(0, 1), columns, rows
    most = [float(np.nanquantile(row, 0.97)) if np.isfinite(row).any() else 0.0 for row in maps]
    shown = [
        None if np.isnan(one).any() else draw.overlay(small, one, (0.0, high))
        for row, high in zip(maps, most, strict=True)
        for one in row
    ]
    pruned = bool(np.isnan(arrays["attention"]).any())
    title = f"Attention of the {arrays['reader']} (Eq. 6)" + ("; pruned heads are left blank" if pruned else "")
    return draw.tiles(
        shown,
        maps.shape[1],
        side=1.1,
        left=[f"{rows} {i + 1}\n0 to {high:.1%}+" for i, high in enumerate(most)],
        top=[f"{columns} {i + 1}" for i in range(maps.shape[1])],
        title=title + "\nEach row has one scale, written at its left",
    )


def _gradient_rollout(model: nn.Module, pixels: Pixels, options: PlotOptions) -> Arrays:
    with eval_mode(model, _one(pixels)) as (vit, x):
        needs_head(vit, "Gradient-weighted rollout")
        with torch.no_grad():
            target = int(targets_of(vit(x), options.target))
        R = gradient_rollout(vit, x, target)[0]
        return {
            "relevance": patch_map(R, vit, grid_of(vit, x)),
            "image": image_of(x, vit)[0],
            "target": np.array(target),
            "name": np.array(_class_name(vit, options, target)),
        }


def _similarity(model: nn.Module, pixels: Pixels, options: PlotOptions) -> Arrays:
    with eval_mode(model, _one(pixels)) as (vit, x):
        return {
            "similarity": patch_similarity(vit, x, options.patch, options.layer)[0],
            "image": image_of(x, vit)[0],
            "patch": np.array(patch_at(options.patch, grid_of(vit, x))),
        }


def _norms(model: nn.Module, pixels: Pixels, options: PlotOptions) -> Arrays:
    return {"norm": patch_norms(model, _one(pixels))[0]}  # [1 + L, rows, columns]


def _draw_norms(arrays: Arrays) -> Figure:
    """Draw one tile per layer; a second row if there are the norms of the model with and without registers."""
    rows = {"without": arrays["without"], "with": arrays["norm"]} if "without" in arrays else {"": arrays["norm"]}
    L = len(arrays["norm"])
    across = L if len(rows) > 1 or L <= 14 else -(-L // 2)
    return draw.tiles(
        [tile for norms in rows.values() for tile in norms],
        across,
        side=0.9,
        names=[f"{n}: {tile.max():.1f}x" for norms in rows.values() for n, tile in enumerate(norms)],
        scale="YlOrRd",  # pale where nothing stands out
        limits=(0, 2 * STANDS_OUT),
        bar="norm / median",
        left=[f"{name} registers" for name in rows] if len(rows) > 1 else (),
        title="Norms of the patches after each layer, and the largest",
    )


def _occlusion(model: nn.Module, pixels: Pixels, options: PlotOptions) -> Arrays:
    with eval_mode_any(model, _one(pixels)) as (vit, x):
        needs_head(vit, "Occlusion")
        with torch.no_grad():
            target = int(targets_of(vit(x), options.target))
        return {
            "fall": occlusion(vit, x, target, progress=options.progress)[0],
            "image": image_of(x, vit)[0],
            "target": np.array(target),
            "name": np.array(_class_name(vit, options, target)),
        }


@torch.no_grad()
def _activation(model: nn.Module, pixels: Pixels, options: PlotOptions) -> Arrays:
    """Return each place's share of a ResNet's logit: the logit is the mean of the map, plus the head's bias."""
    with eval_mode_any(model, _one(pixels)) as (resnet, x):
        needs_head(resnet, "A class activation map")
        if not isinstance(resnet, ResNet):
            raise InputError("A class activation map needs a ResNet; this is a Vision Transformer. Use rollout.")
        features = resnet.feature_map(x)  # [1, F, rows, columns]
        head = cast(nn.Linear, resnet.head)
        target = int(targets_of(head(features.mean((2, 3))), options.target))
        return {
            "activation": to_array(torch.einsum("f,frc->rc", head.weight[target], features[0])),
            "image": image_of(x, resnet)[0],
            "target": np.array(target),
            "name": np.array(_class_name(resnet, options, target)),
        }


def _draw_over(name: str, title: str) -> Callable[[Arrays], Figure]:
    """Return a function that draws a map over its image and frames the patch that it is about, if any."""

    def drawer(arrays: Arrays) -> Figure:
        image, heat = arrays["image"], arrays[name]
        over = draw.overlay(image, heat)
        if "patch" in arrays:
            over = draw.framed(over, tuple(arrays["patch"]), heat.shape)
        of_class = f", class {arrays['name']}" if "name" in arrays else ""
        return draw.tiles([image, over], 2, side=3.2, title=title + of_class)

    return drawer


MAP = ("row", "column")
PLOTS: dict[str, Plot] = {
    "filters": Plot(
        title="Principal components of the embedding filters (Figure 7, left)",
        caption="Look for smooth patterns, such as edges, stripes and blobs of colour: trained filters describe the "
        "fine structure within a patch. Filters that look like noise have learned little.",
        needs="model",
        value="filters",
        axes=("component", *MAP, "channel"),
        arrays=_filters,
        draw=_draw_filters,
    ),
    "positions": Plot(
        title="Similarity of position embeddings (Figure 7, centre)",
        caption="Each tile compares the position of one patch with all others. A bright spot at the tile's own place, "
        "with a bright row and column, shows that the model has learned where patches are in the image.",
        needs="model",
        value="similarity",
        axes=(*MAP, "other_row", "other_column"),
        arrays=_positions,
        takes=WITH_POSITIONS,
        draw=_draw_positions,
    ),
    "position-grid": Plot(
        title="Similarity of position embeddings, the whole grid (Figure 10)",
        caption="The same for up to 16 by 16 patches. Neighbouring tiles should look alike, with the bright spot "
        "moving from tile to tile.",
        needs="model",
        value="similarity",
        axes=(*MAP, "other_row", "other_column"),
        arrays=_positions,
        takes=WITH_POSITIONS,
        draw=_draw_position_grid,
    ),
    "distance": Plot(
        title="Mean attention distance by head and layer (Figure 7, right, and Figure 11)",
        caption="Each point is one head: how far away, in pixels, the patches that it attends to are. Low points are "
        "heads that look at their neighbourhood, as a convolution does; high points look across the whole image.",
        needs="images",
        value="distance",
        axes=("layer", "head"),
        arrays=_distance,
        draw=_draw_distance,
    ),
    "rollouts": Plot(
        title="Attention rollout for several images (Figures 6 and 14)",
        caption="Next to each image, the patches whose information reaches the output stay bright. If the object is "
        "dark and the background bright, the model may be relying on the background.",
        needs="images",
        value="rollout",
        axes=("image", *MAP),
        arrays=_rollout,
        draw=_draw_rollout,
    ),
    "predictions": Plot(
        title="Most probable classes",
        caption="The length of a bar is the probability of the class. Similar lengths mean that the model is unsure.",
        needs="image",
        value="probability",
        axes=("rank",),
        arrays=_predictions,
        draw=_draw_predictions,
        head=True,
        models=(ViT, ResNet),
    ),
    "attention": Plot(
        title="Attention of the class token, by layer and head (Eq. 6)",
        caption="Each picture is one head; bright patches get most of its attention. Compare early layers, where heads "
        "often differ in what they look at, with late layers, where they tend to agree on the object.",
        needs="image",
        value="attention",
        axes=("layer", "head", *MAP),
        arrays=_attention,
        draw=_draw_attention,
    ),
    "rollout": Plot(
        title="Attention rollout (Figure 6)",
        caption="Bright patches are those whose information reaches the output through all layers. The map is the same "
        "for every class.",
        needs="image",
        value="rollout",
        axes=MAP,
        arrays=lambda model, pixels, options: {
            name: values[0] for name, values in _rollout(model, _one(pixels), options).items()
        },
        draw=_draw_over("rollout", "Attention rollout"),
        evidence=True,
    ),
    "gradient-rollout": Plot(
        title="Gradient-weighted rollout",
        caption="Bright patches are those whose information reaches the output and raises the score of the class.",
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
        caption="Bright patches have tokens similar to that of the framed patch. In late layers, parts of the same "
        "object should light up together.",
        needs="image",
        value="similarity",
        axes=MAP,
        arrays=_similarity,
        draw=_draw_over("similarity", "Similarity to the framed patch"),
    ),
    "norms": Plot(
        title="Norms of the patches, by layer",
        caption=f"Each tile is the image after one layer (0: the embedding), with the largest norm in multiples of the "
        f"median. Single patches above {STANDS_OUT:g} hold information about the whole image: they attract attention "
        "regardless of their content, and attention maps mislead there. `vitkit explain --registers` removes them.",
        needs="image",
        value="norm",
        axes=("layer", *MAP),
        arrays=_norms,
        draw=_draw_norms,
    ),
    "occlusion": Plot(
        title="Occlusion",
        caption="Bright patches are those that, when covered, lower the probability of the class most. No attention or "
        "gradient is involved, so this map checks the others.",
        needs="image",
        value="fall",
        axes=MAP,
        arrays=_occlusion,
        draw=_draw_over("fall", "Occlusion"),
        head=True,
        evidence=True,
        slow=True,
        models=(ViT, ResNet),
    ),
    "activation": Plot(
        title="Class activation map of a ResNet",
        caption="Bright places raise the score of the class most; dark ones lower it. The score is the mean of this "
        "map, so nothing is left out.",
        needs="image",
        value="activation",
        axes=MAP,
        arrays=_activation,
        draw=_draw_over("activation", "Class activation map"),
        head=True,
        evidence=True,
        models=(ResNet,),
    ),
}
