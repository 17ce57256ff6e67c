"""Look inside a model: its modules, its first steps, its figures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vitkit.api.models import Model, config_of, model_of, names_weights
from vitkit.model.backbone import Config
from vitkit.model.create import need_vit

if TYPE_CHECKING:
    from vitkit.evaluation.predict import Given
    from vitkit.explanations.describe import Summary
    from vitkit.jobs.figures import Drawing
    from vitkit.jobs.patches import Patches
    from vitkit.jobs.walk import Walk


def summary(model: Model | Config, *, batch: int = 1, depth: int | None = None) -> Summary:
    """List the modules of a model with their shapes and parameters.

    Args:
        model: a variant's name, a ViTConfig, a model of any interface, or anything that `vitkit.load` accepts.
        batch: images per batch, for the shapes (default: 1).
        depth: show modules only down to this depth (default: all).

    Example:
        >>> import vitkit
        >>> vitkit.summary("vit-b/16").parameters
        86567656
    """
    from vitkit.explanations.describe import Summary, describe

    config = config_of(model)
    return Summary(config, [row for row in describe(config, batch) if depth is None or row.depth <= depth])


def patches(image: Given | None = None, model: Model = "vit-b/16") -> Patches:
    """Cut an image into patches and embed them: every step of Eq. 1 as an array and as a picture.

    Args:
        image: any image that `predict` accepts (default: a sample photo).
        model: a model of any interface, anything that `vitkit.load` accepts, or a variant, which gets random weights
            (default: vit-b/16).

    Returns:
        The arrays by name, their `shapes`, and `plot()`.

    Example:
        >>> import vitkit
        >>> found = vitkit.patches(model="vit-ti/16")
        >>> found.arrays["maps"].shape, found.arrays["flattened"].shape
        ((192, 14, 14), (1, 196))
    """
    from vitkit.jobs.patches import model_for
    from vitkit.jobs.patches import patches as job

    trained = not isinstance(model, str) or names_weights(model)
    return job(need_vit(model_of(model), "vitkit.patches") if trained else model_for(str(model)), image)


def walk(model: Model, image: Given | None = None) -> Walk:
    """Take one photo through Eqs. 1-4, and keep the tensor of every step.

    Args:
        model: a model of any interface, anything that `vitkit.load` accepts, or a variant, which gets random weights.
        image: any image that `predict` accepts (default: a sample photo).

    Returns:
        A list of steps, from the pixels to the logits, with `probabilities`, `best()` and `plot()`.

    Example:
        >>> import vitkit
        >>> steps = vitkit.walk(vitkit.create("vit-ti/16", num_classes=3, num_hidden_layers=1))
        >>> steps[1].shape, steps[-1].shape
        ((1, 192, 14, 14), (1, 3))
    """
    from vitkit.jobs.patches import model_for
    from vitkit.jobs.walk import walk as job

    trained = not isinstance(model, str) or names_weights(model)
    return job(need_vit(model_of(model), "vitkit.walk") if trained else model_for(str(model)), image)


def plot(
    model: Model,
    name: str,
    images: Given | Iterable[Given] | None = None,
    *,
    target: str | None = None,
    patch: str | None = None,
    layer: int | None = None,
    count: int = 128,
) -> Drawing:
    """Draw one figure of the paper, or any other plot of `vitkit figures --list`, for a model.

    Args:
        model: a model of any interface, or anything that `vitkit.load` accepts.
        name: filters, positions, distance, rollouts, attention, similarity or another row of
            `vitkit.explanations.plots.PLOTS`.
        images: anything that `predict` accepts, or the name of a data set; a plot of a single image uses the first
            (default: the two sample photos).
        target: name or number of the class to explain (default: the most probable class).
        patch: patch to compare the others with, `ROW,COLUMN` counted from 0 (default: the middle one).
        layer: compare patches in z_layer, 0 to L (default: after the final LayerNorm).
        count: maximum number of images from a data set or a folder (default: 128).

    Returns:
        The plot, which a notebook shows: `arrays`, `caption` and `plot()`.

    Example:
        >>> import vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=64, num_classes=3, num_hidden_layers=2)
        >>> vitkit.plot(model, "distance").arrays["distance"].shape
        (2, 3)
    """
    from vitkit.evaluation.names import class_names
    from vitkit.explanations.common import PlotOptions
    from vitkit.jobs.explain import patch_of, target_of
    from vitkit.jobs.figures import plot as job

    found = model_of(model)
    names = class_names(found) if found.config.num_classes else ()
    options = PlotOptions(
        target=target_of(target, names),
        patch=patch_of(patch, need_vit(found, "Comparing patches").config.grid) if patch is not None else None,
        layer=layer,
        names=names,
    )
    return job(found, name, images, count=count, options=options)
