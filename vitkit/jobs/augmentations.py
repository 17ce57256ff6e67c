"""What the model sees: images of a batch before and after augmentation and mixing, with their targets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vitkit.data.batch import Batch
from vitkit.data.decode import decode
from vitkit.data.mix import plan
from vitkit.data.preprocess import pixels
from vitkit.data.train_loader import TrainLoader
from vitkit.explanations import draw
from vitkit.jobs.pretrain import in_colour
from vitkit.jobs.train import Prepared
from vitkit.model.config import InputSpec
from vitkit.types import Array

MOST = 16  # images in the picture
COLUMNS = 8
FEW = 100  # steps in which a mixed batch is looked for


@dataclass(frozen=True)
class Sample:
    """One image of a training batch.

    Args:
        name: its name in the data set.
        original: [H, W, 3] uint8, prepared as for evaluation.
        seen: [H, W, 3] uint8, as the model sees it: augmented and mixed.
        label: its class; empty without labels.
        target: what the model learns of it, such as `pizza 62%, sushi 38%`; empty without labels.
    """

    name: str
    original: Array
    seen: Array
    label: str
    target: str


def samples(ready: Prepared, count: int = MOST) -> list[Sample]:
    """Return the first images of a run's first batch; if the run mixes images, of the first one that is mixed.

    Args:
        ready: the result of `prepare`.
        count: how many, at most; a larger batch is cut to so many before it is mixed (default: 16).
    """
    recipe, spec, source = ready.recipe, ready.model.input_spec, ready.train
    loader = TrainLoader(
        source,
        spec,
        recipe.augment,
        batch_size=min(recipe.batch_size, count),
        seed=ready.settings.seed,
        mix=recipe.mix,
        sampling=recipe.sampling,
        augment_on=recipe.augment_on,
        workers=0,
        bad_images=ready.settings.bad_images,
    )
    plans = (plan(recipe.mix, ready.settings.seed, step, loader.batch_size) for step in range(FEW if recipe.mix else 0))
    step = next((step for step, mixed in enumerate(plans) if mixed.weight != 1.0), 0)
    batch = next(loader.batches(step, step + 1))
    names = source.class_names if ready.objective.labels else ()
    found = []
    for place, i in enumerate(batch.index.tolist()):
        original = pixels(decode(source.raw(i), source.names[i]), spec, source.names[i])
        seen = _levels(batch.pixels[place], spec)
        label = names[int(batch.labels[place])] if names else ""
        target = _target(batch, place, list(names)) if names else ""
        found.append(Sample(source.names[i], _colours(original), _colours(seen), label, target))
    return found


def _levels(x: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    """Undo the normalisation: [C, H, W] uint8."""
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (spec.mean, spec.std))
    return ((x * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


def _colours(x: torch.Tensor) -> Array:
    return in_colour(x.permute(1, 2, 0).numpy())


def _target(batch: Batch, place: int, names: list[str]) -> str:
    shares = batch.targets(len(names))[place]
    parts = sorted(((float(share), names[k]) for k, share in enumerate(shares) if share > 0), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in parts) if len(parts) > 1 else parts[0][1]


def picture(ready: Prepared, count: int = MOST) -> draw.Figure:
    """Draw originals above what the model sees of them. The arguments are those of `samples`."""
    found = samples(ready, count)
    tiles: list[Array | None] = []
    names: list[str] = []
    left: list[str] = []
    columns = min(COLUMNS, len(found))
    for start in range(0, len(found), columns):
        row = found[start : start + columns]
        empty: list[Array | None] = [None] * (columns - len(row))
        tiles += [*(sample.original for sample in row), *empty, *(sample.seen for sample in row), *empty]
        blank = [""] * len(empty)
        names += [*(sample.label for sample in row), *blank, *(sample.target for sample in row), *blank]
        left += ["original", "as seen"]
    return draw.tiles(tiles, columns, names=names, left=left)
