"""Explanations that treat the model as a black box: hide parts of an image and watch the probability of one class.

`occlusion` uses neither attention nor gradients, so it is an independent check of the maps that do. `faithfulness`
scores any map by deleting (or inserting) patches in the order of the map (Petsiuk et al., arXiv 1806.07421).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.explanations.common import Grid, cell_of, eval_mode_any, grid_of, needs_head, targets_of, to_array
from vitkit.model.backbone import Backbone
from vitkit.model.classifier import log_probabilities
from vitkit.types import Array, Progress


@torch.no_grad()
def _log_probability(vit: Backbone, x: Tensor, target: int, batch: int) -> Tensor:
    """Return the log-probability of one class, [B]."""
    return torch.cat([log_probabilities(vit(part).float(), vit.input_spec)[:, target] for part in x.split(batch)])


@torch.no_grad()
def occlusion(
    model: nn.Module,
    pixels: Tensor,
    target: int | None = None,
    *,
    window: int | None = None,
    batch: int = 32,
    progress: Progress | None = None,
) -> Array:
    """Measure how far the log-probability of a class falls when a square of patches is covered with the mean colour.

    Args:
        model: a ViT or ResNet with a head, compiled or plain.
        pixels: [B, C, H, W].
        target: the class (default: the most probable one of each image).
        window: side of the square in patches, an odd number (default: 3, or 1 if the grid is less than 7 patches wide
            or high).
        batch: batch size of the covered images (default: 32).
        progress: called with (done, total) after each batch.

    Returns:
        [B, rows, columns]: the fall for the square centred on each patch; negative if covering it helped.
    """
    with eval_mode_any(model, pixels) as (vit, x):
        needs_head(vit, "Occlusion")
        P, (rows, columns) = cell_of(vit), grid_of(vit, x)
        window = (3 if min(rows, columns) >= 7 else 1) if window is None else window
        if window < 1 or window % 2 == 0:
            raise InputError(f"Expected an odd window of at least 1 patch; got {window}.")
        reach = window // 2
        logits = vit(x)
        result = np.zeros((len(x), rows, columns), np.float32)
        places = [(r, c) for r in range(rows) for c in range(columns)]
        for i, (image, label) in enumerate(zip(x, targets_of(logits, target).tolist(), strict=True)):
            whole = float(log_probabilities(logits[i].float(), vit.input_spec)[label])
            for start in range(0, len(places), batch):
                chosen = places[start : start + batch]
                covered = image.expand(len(chosen), -1, -1, -1).clone()
                for one, (r, c) in zip(covered, chosen, strict=True):
                    one[:, max(r - reach, 0) * P : (r + reach + 1) * P, max(c - reach, 0) * P : (c + reach + 1) * P] = 0
                fall = whole - to_array(_log_probability(vit, covered, label, batch))
                for value, (r, c) in zip(fall, chosen, strict=True):
                    result[i, r, c] = value
                if progress is not None:
                    progress(i * len(places) + start + len(chosen), len(x) * len(places))
    return result


@dataclass(frozen=True, kw_only=True)
class Faithfulness:
    """How well a ranking of the patches explains a class of one image.

    Args:
        deletion: area under `deleted`; lower is better.
        insertion: area under `inserted`; higher is better.
        deleted: probability of the class as the patches are covered, the highest-ranked first, from none to all.
        inserted: probability of the class as the patches of a blurred image are sharpened, in the same order.
    """

    deletion: float
    insertion: float
    deleted: Array
    inserted: Array


def _hidden(image: Tensor, cover: Tensor, order: Array, grid: Grid, P: int, steps: int) -> Tensor:
    """Replace the first 0/steps, 1/steps, ... of the patches in `order` with `cover`: [steps + 1, C, H, W]."""
    masks = torch.zeros(steps + 1, grid[0] * grid[1], dtype=torch.bool)
    for step in range(steps + 1):
        masks[step, torch.from_numpy(order[: round(len(order) * step / steps)].copy())] = True
    masks = masks.view(-1, 1, *grid).repeat_interleave(P, 2).repeat_interleave(P, 3).to(image.device)
    return torch.where(masks, cover, image)


def blurred(image: Tensor, P: int) -> Tensor:
    """Remove details smaller than about two patches from an image [C, H, W]."""
    size = [max(side // (2 * P), 1) for side in image.shape[1:]]
    small = F.interpolate(image[None].float(), size, mode="area")
    return F.interpolate(small, image.shape[1:], mode="bilinear", align_corners=False)[0].to(image.dtype)


@torch.no_grad()
def faithfulness(
    model: nn.Module,
    pixels: Tensor,
    maps: Mapping[str, Array],
    target: int | None = None,
    *,
    steps: int = 10,
    random: int = 3,
    seed: int = 0,
) -> dict[str, Faithfulness]:
    """Score maps of one image, and a random order of its patches for comparison.

    Args:
        model: a ViT or ResNet with a head, compiled or plain.
        pixels: one image, [1, C, H, W].
        maps: {name: [rows, columns]}, higher where there is more evidence for the class.
        target: the class (default: the most probable one).
        steps: number of steps in which all patches are covered or sharpened (default: 10).
        random: number of random orders, whose mean is returned as "random" (default: 3).
        seed: random seed of these orders (default: 0).
    """
    with eval_mode_any(model, pixels) as (vit, x):
        needs_head(vit, "Faithfulness")
        if len(x) != 1:
            raise InputError(f"Expected one image [1, C, H, W]; got {list(x.shape)}.")
        P, grid, image = cell_of(vit), grid_of(vit, x), x[0]
        N = grid[0] * grid[1]
        label = int(targets_of(vit(x), target))
        rng = np.random.default_rng(seed)
        orders = {name: [np.argsort(-values.reshape(-1), kind="stable")] for name, values in maps.items()}
        orders["random"] = [rng.permutation(N) for _ in range(random)]
        for name, found in orders.items():
            if len(found[0]) != N:
                raise InputError(
                    f"Expected maps of {grid[0]} x {grid[1]} patches; {name!r} has {len(found[0])} values."
                )
        blur, gray = blurred(image, P), torch.zeros_like(image)

        def score(order: Array) -> Faithfulness:
            deleted = _log_probability(vit, _hidden(image, gray, order, grid, P, steps), label, 32)
            inserted = _log_probability(vit, _hidden(blur, image, order, grid, P, steps), label, 32)
            curves = [to_array(curve.exp()) for curve in (deleted, inserted)]
            area = [float(np.trapezoid(curve, dx=1 / steps)) for curve in curves]
            return Faithfulness(deletion=area[0], insertion=area[1], deleted=curves[0], inserted=curves[1])

        result = {}
        for name, found in orders.items():
            scores = [score(order) for order in found]
            result[name] = Faithfulness(
                deletion=float(np.mean([s.deletion for s in scores])),
                insertion=float(np.mean([s.insertion for s in scores])),
                deleted=np.mean([s.deleted for s in scores], 0),
                inserted=np.mean([s.inserted for s in scores], 0),
            )
    return result
