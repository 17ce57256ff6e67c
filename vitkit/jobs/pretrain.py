"""Runs without labels: the recipe to use, and a picture of what was learnt (photos, masked photos, predicted patches).

The run itself is that of `jobs.train`: a recipe says what is learnt.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from vitkit.checkpoints import load
from vitkit.checkpoints.containers import read
from vitkit.checkpoints.native import PRETRAINING
from vitkit.data.base import Source
from vitkit.data.preprocess import preprocess
from vitkit.errors import BadImage, ConfigError, DataError, pick
from vitkit.explanations import draw
from vitkit.jobs.splits import some, unlabelled
from vitkit.model.create import need_vit
from vitkit.training.masked import VALIDATION, MaskedPatches, keys_of
from vitkit.training.objectives import OBJECTIVES
from vitkit.training.recipe import Recipe
from vitkit.training.recipes import RECIPES
from vitkit.training.run_folder import RunFolder
from vitkit.types import Array

PHOTOS = 8  # in a picture
PICTURE = "masked.png"  # in the run folder


def choose_recipe(
    objective: str = "masked-patch", recipe: str | Recipe | None = None, resumed: str | Path | None = None
) -> str | Recipe | None:
    """Return the recipe of a run without labels, for `jobs.train.prepare`; None for the recipe of the resumed run.

    Args:
        objective: a row of OBJECTIVES that needs no labels (default: masked-patch).
        recipe: a key of RECIPES, or a Recipe, with this objective (default: `OBJECTIVE-small`).
        resumed: the run folder, if a run there is to be resumed.

    Raises:
        ConfigError: the objective needs labels, or the recipe is for another one.
    """
    if pick(OBJECTIVES, objective, "objective").labels:
        raise ConfigError(f"--objective {objective} needs labels; use `vitkit train`.")
    if recipe is None:
        there = resumed is not None and (Path(resumed).expanduser() / "run.json").is_file()
        return None if there else f"{objective}-small"
    row = pick(RECIPES, recipe, "recipe") if isinstance(recipe, str) else recipe
    if row.objective != objective:
        fit = ", ".join(name for name, other in RECIPES.items() if other.objective == objective)
        raise ConfigError(f"Expected a recipe for {objective}: {fit}; {recipe!r} is for {row.objective}.")
    return recipe


def learner_of(run: RunFolder) -> MaskedPatches:
    """Load the model of a run with its mask token and its predictor.

    Args:
        run: a run of masked patch prediction.
    """
    path = run.weights()
    learner = MaskedPatches(need_vit(load(path), "Masked patch prediction"), run.info["recipe"]["target"])
    beside = {
        name.removeprefix(PRETRAINING): tensor for name, tensor in read(path)[0].items() if name.startswith(PRETRAINING)
    }
    learner.load_state_dict({**{f"vit.{name}": t for name, t in learner.vit.state_dict().items()}, **beside})
    return learner.eval()


def pictures(run: RunFolder, source: Source, count: int = PHOTOS) -> dict[str, Array]:
    """Return photos, masked photos and predictions as images, see `MaskedPatches.pictures`.

    Args:
        run: a run of masked patch prediction.
        source: where the photos come from; they are spread evenly over it.
        count: number of photos (default: 8).
    """
    learner, pixels, places = learner_of(run), [], []
    for i in dict.fromkeys(np.linspace(0, len(source) - 1, min(count, len(source))).round().astype(int).tolist()):
        try:
            pixels.append(preprocess(source.read(i)[0], learner.vit.input_spec, source.names[i]))
            places.append(i)
        except BadImage:  # already reported by training
            continue
    if not pixels:
        raise DataError("Expected at least one readable photo; got none.")
    keys = keys_of(run.info["settings"]["seed"], VALIDATION, torch.tensor(places))
    return learner.pictures(torch.stack(pixels), keys)


def picture(run: RunFolder, source: Source, count: int = PHOTOS) -> draw.Figure:
    """Draw photos, masked photos and predictions, one photo per column. The arguments are those of `pictures`."""
    found = pictures(run, source, count)
    tiles = [in_colour(image) for images in found.values() for image in images]
    return draw.tiles(tiles, len(found["photo"]), left=list(found), side=1.3)


def write_picture(run: RunFolder) -> Path | None:
    """Write the picture of a run into its folder, of validation photos if it has some; None for any other objective.

    Args:
        run: a run.
    """
    recipe, seed = Recipe.from_dict(run.info["recipe"]), run.info["settings"]["seed"]
    if recipe.objective != "masked-patch":
        return None
    train, val, _ = unlabelled(run.data, recipe.val, seed)
    return draw.save(picture(run, val or some(train, recipe.images, seed)), run.path / PICTURE)


def in_colour(image: Array) -> Array:
    """Return [H, W, 3]: colours as they are, any other channels as their mean in grey."""
    return image if image.shape[-1] == 3 else np.repeat(image.mean(-1, keepdims=True), 3, -1).astype(np.uint8)
