"""Eq. 1 step by step: an image cut into patches, embedded, and turned into a sequence; as arrays and as pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.explanations import draw
from vitkit.explanations.common import Arrays, eval_mode, image_of, to_array


def cut(image: NDArray[np.uint8], patch_size: int) -> NDArray[np.uint8]:
    """Cut an image into patches.

    Args:
        image: [H, W, C]; H and W are multiples of P.
        patch_size: P.

    Returns:
        [H / P, W / P, P, P, C]; entry [r, c] is the patch in row r, column c.
    """
    height, width, channels = image.shape
    P = patch_size
    if height % P or width % P:
        raise InputError(
            f"Expected an image whose sides are multiples of the patch size {P}; got {height} x {width}. "
            f"Resize it to {max(height // P, 1) * P} x {max(width // P, 1) * P}."
        )
    return image.reshape(height // P, P, width // P, P, channels).swapaxes(1, 2)


@torch.no_grad()
def embedding(model: nn.Module, pixels: Tensor) -> Arrays:
    """Compute every step of Eq. 1 for one image.

    Args:
        model: a ViT, compiled or plain.
        pixels: one image, [1, C, H, W].

    Returns:
        image [H, W, 3]; patches [rows, columns, P, P, 3]; maps [D, rows, columns], the patch embedding as the feature
        maps of a convolution; flattened [1, N], the map of the middle channel as a row; embedded [N, D]; positions
        E_pos, [N + 1, D] with a class token or else [N, D]; and sequence, z_0 [T, D].
    """
    with eval_mode(model, pixels) as (vit, x):
        if len(x) != 1:
            raise InputError(f"Expected one image [1, C, H, W]; got {list(x.shape)}.")
        maps = vit.patch_embedding.projection(vit.patch_embedding.stem(x))  # [1, D, rows, columns]
        grid = (maps.shape[2], maps.shape[3])
        image = image_of(x, vit)[0]
        return {
            "image": image,
            "patches": cut(image, vit.config.patch_size),
            "maps": to_array(maps[0]),
            "flattened": to_array(maps[0].flatten(1)[len(maps[0]) // 2][None]),
            "embedded": to_array(maps.flatten(2).mT[0]),
            "positions": to_array(vit.positions(grid)[0]),
            "sequence": to_array(vit.embed(x)[0]),
            "channels": np.array(vit.config.num_channels),
            "prefix": np.array(vit.config.num_prefix_tokens),
            "class_token": np.array(vit.config.class_token),
        }


def _image(a: Arrays) -> draw.Figure:
    H, W = a["image"].shape[:2]
    return draw.tiles(
        [a["image"]], 1, side=4, title=f"The image: {H} x {W} x {a['channels']} (height x width x channels)"
    )


def _row(a: Arrays) -> draw.Figure:
    rows, columns, P = a["patches"].shape[:3]
    return draw.tiles(
        list(a["patches"][rows // 2]),
        columns,
        side=0.7,
        names=[str(rows // 2 * columns + c + 1) for c in range(columns)],
        title=f"Row {rows // 2 + 1} of {rows}: {columns} patches of {P} x {P} x {a['channels']}",
    )


def _grid(a: Arrays) -> draw.Figure:
    rows, columns, P = a["patches"].shape[:3]
    return draw.tiles(
        [a["patches"][r, c] for r in range(rows) for c in range(columns)],
        columns,
        side=min(0.55, 9 / columns),
        names=[str(i + 1) for i in range(rows * columns)],
        title=f"All {rows} x {columns} = {rows * columns} patches of {P} x {P} x {a['channels']}",
    )


def _maps(a: Arrays, count: int = 10, seed: int = 0) -> draw.Figure:
    D, rows, columns = a["maps"].shape
    chosen = np.sort(np.random.default_rng(seed).permutation(D)[:count])
    return draw.tiles(
        [a["maps"][k] for k in chosen],
        min(count, 5),
        side=1.5,
        names=[f"channel {k + 1}" for k in chosen],
        scale=draw.SIGNED,
        title=f"Patch embedding as feature maps: {len(chosen)} random channels of {D}, each {rows} x {columns}",
    )


def _flattened(a: Arrays) -> draw.Figure:
    D, rows, columns = a["maps"].shape
    return draw.values(
        a["flattened"],
        title=f"One feature map flattened: {rows} x {columns} -> [1 x {rows * columns}], channel {D // 2 + 1} of {D}",
        x="patch, counted from 0",
        y="",
        tall=1.5,
        marks={0: f"channel {D // 2 + 1}"},
    )


def _one(a: Arrays) -> draw.Figure:
    N, D = a["embedded"].shape
    middle = a["patches"].shape[0] // 2 * a["patches"].shape[1] + a["patches"].shape[1] // 2
    return draw.values(
        a["embedded"][middle : middle + 1],
        title=f"Embedding of one patch: patch {middle + 1} of {N} as a vector [1 x {D}]",
        x="dimension",
        y="",
        tall=1.5,
        marks={0: f"patch {middle + 1}"},
    )


def _sequence(a: Arrays) -> draw.Figure:
    T, D = a["sequence"].shape
    prefix, own = int(a["prefix"]), int(a["class_token"])
    first = ", ".join(["class token"] * own + ["registers"] * (prefix > own)) or "patch 1"
    return draw.values(
        a["sequence"],
        title=f"The input of the encoder, z_0 of Eq. 1: [{T} tokens x {D}], with the position embeddings added",
        x="dimension",
        y="",
        tall=4,
        marks={0: first, T - 1: f"patch {T - prefix}"},
    )


def _positions(a: Arrays) -> draw.Figure:
    rows, D = a["positions"].shape
    return draw.values(
        a["positions"],
        title=f"The position embeddings, E_pos: [{rows} x {D}]",
        x="dimension",
        y="",
        tall=4,
        marks={0: "class token" if a["class_token"] else "patch 1", rows - 1: f"patch {len(a['embedded'])}"},
    )


PICTURES: dict[str, Callable[[Arrays], draw.Figure]] = {
    "image": _image,
    "row": _row,
    "grid": _grid,
    "feature_maps": _maps,
    "flattened": _flattened,
    "embedding": _one,
    "positions": _positions,
    "sequence": _sequence,
}


def draw_all(arrays: Arrays, out: Path) -> list[Path]:
    """Draw all PICTURES, numbered in the order of Eq. 1, and save the arrays.

    Args:
        arrays: the result of `embedding`.
        out: folder for `1_image.png` and so on, and `arrays.npz`.
    """
    written = [
        draw.save(picture(arrays), out / f"{i}_{name}.png")
        for i, (name, picture) in enumerate(PICTURES.items(), start=1)
    ]
    np.savez_compressed(out / "arrays.npz", allow_pickle=False, **arrays)
    return [*written, out / "arrays.npz"]
