"""Images through a model -> predictions, maps over the images at their own resolution, arrays and numbers."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitkit.data.preprocess import preprocess, resized
from vitkit.errors import InputError, OutputError, nearest
from vitkit.evaluation.names import class_names
from vitkit.evaluation.predict import Given, Images
from vitkit.explain import draw
from vitkit.explain.common import Arrays, Ask, Grid, grid_of, targets_of, unwrap
from vitkit.explain.occlusion import Faithfulness, faithfulness
from vitkit.explain.plots import MAP, PLOTS, write_table
from vitkit.model.classifier import device_of, evaluating
from vitkit.model.config import InputSpec
from vitkit.types import Array, Progress


@dataclass(frozen=True, kw_only=True)
class Explained:
    """What was found in one image.

    Args:
        image: what it is called.
        folder: where its files are.
        predictions: (class, probability), the likeliest first; empty for a model without a head.
        target: name of the class that was explained; None for a model without a head.
        scores: faithfulness of each map, and of a random order; empty where it was not asked for.
    """

    image: str
    folder: Path
    predictions: tuple[tuple[str, float], ...]
    target: str | None
    scores: dict[str, Faithfulness]


def target_of(text: str | None, names: tuple[str, ...]) -> int | None:
    """The class that a user means: a name in any case, or a number.

    Args:
        text: what was given.
        names: of the classes.
    """
    if text is None:
        return None
    lower = [name.lower() for name in names]
    if text.lower() in lower:
        return lower.index(text.lower())
    if text.isdigit() and int(text) < len(names):
        return int(text)
    hint = nearest(text, list(names)) or "."
    raise InputError(f"There is no class {text!r}{hint} Give a name or a number between 0 and {len(names) - 1}.")


def patch_of(text: str | None, grid: Grid) -> Grid | None:
    """The patch that a user means: `ROW,COLUMN` counted from 0, or the number that `vitkit patches` writes on it.

    Args:
        text: what was given.
        grid: (rows, columns).
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not 1 <= len(parts) <= 2 or not all(part.isdigit() for part in parts):
        raise InputError(
            f"Expected a patch as ROW,COLUMN (counted from 0) or as one number (counted from 1, as "
            f"`vitkit patches` writes it); got {text!r}."
        )
    if len(parts) == 2:
        return int(parts[0]), int(parts[1])
    if not 1 <= int(parts[0]) <= grid[0] * grid[1]:
        raise InputError(f"Expected a patch between 1 and {grid[0] * grid[1]}; got {text}.")
    return divmod(int(parts[0]) - 1, grid[1])


def at_size(spec: InputSpec, size: int | tuple[int, int] | None) -> InputSpec:
    """The same preparation for another size of image."""
    if size is None:
        return spec
    return dataclasses.replace(spec, size=(size, size) if isinstance(size, int) else size)


def seen(image: Image.Image, spec: InputSpec) -> tuple[int, int, int, int]:
    """The part of an image that the model is fed: left, top, right, bottom in the image's own pixels."""
    (H, W), (width, height) = spec.size, resized(*image.size, spec)
    left, top = round((width - W) / 2), round((height - H) / 2)
    across, down = image.width / width, image.height / height
    box = left * across, top * down, (left + W) * across, (top + H) * down
    return (
        max(round(box[0]), 0),
        max(round(box[1]), 0),
        min(round(box[2]), image.width),
        min(round(box[3]), image.height),
    )


def over(
    image: Image.Image, heat: Array, spec: InputSpec, patch_size: int, patch: Grid | None = None
) -> NDArray[np.uint8]:
    """A map over a whole image at its own resolution; what the model is not fed (cropped away) is darkened.

    Args:
        image: as decoded.
        heat: [rows, columns] of patches.
        spec: how the image was prepared.
        patch_size: P.
        patch: (row, column) to frame.
    """
    whole = np.asarray(image.convert("RGB"))
    left, top, right, bottom = seen(image, spec)
    rows, columns = heat.shape
    fed = draw.enlarged(heat, rows * patch_size, columns * patch_size)[
        : spec.size[0], : spec.size[1]
    ]  # padding cut off
    part = draw.overlay(whole[top:bottom, left:right], fed)
    if patch is not None:
        part = draw.framed(part, patch, (spec.size[0] / patch_size, spec.size[1] / patch_size))
    result = (whole.mean(-1, keepdims=True) * 0.25).repeat(3, -1).astype(np.uint8)
    result[top:bottom, left:right] = part
    return result


def explain(
    model: nn.Module,
    images: Given | Iterable[Given],
    out: Path,
    *,
    target: str | None = None,
    patch: str | None = None,
    layer: int | None = None,
    occlusion: bool = False,
    score: bool = False,
    image_size: int | tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> Iterator[Explained]:
    """Explain images one after another; each gets a folder of its own below `out`.

    Args:
        model: a ViT, compiled or plain.
        images: what `vitkit.evaluation.predict` takes.
        out: folder.
        target: class to explain, by name or number; the most probable one when not given.
        patch: patch to compare the others with, `ROW,COLUMN` or a number; the middle one when not given.
        layer: states to compare; the last when not given.
        occlusion: whether the slow occlusion map is made too.
        score: whether the maps' faithfulness is measured; includes occlusion.
        image_size: pixels to feed; the model's own when not given.
        progress: called with (done, of how many) while occlusion runs.
    """
    vit, source = unwrap(model), Images(images)
    spec, K = at_size(vit.input_spec, image_size), vit.config.num_classes
    names = class_names(vit.input_spec, K) if K else ()
    if not K and (target is not None or occlusion or score):
        raise InputError(
            "This model has no head (num_classes=0): it has no classes to explain, and occlusion and "
            "faithfulness need one. Leave --class, --occlusion and --faithfulness out."
        )
    used: set[str] = set()
    for i in range(len(source)):
        image, _ = source.read(i)
        x = preprocess(image, spec, source.names[i])[None]
        ask = Ask(
            target=target_of(target, names),
            patch=patch_of(patch, grid_of(vit, x)),
            layer=layer,
            names=names,
            progress=progress,
        )
        folder = out / _free(Path(source.names[i]).stem or "image", used)
        yield _one(vit, x, image, source.names[i], spec, ask, folder, occlusion or score, score)


def _free(name: str, used: set[str]) -> str:
    """A folder name that was not used yet."""
    found = next(n for n in (name, *(f"{name}-{k}" for k in range(2, 10**6))) if n not in used)
    used.add(found)
    return found


def _one(
    model: Any,
    x: Tensor,
    image: Image.Image,
    name: str,
    spec: InputSpec,
    ask: Ask,
    folder: Path,
    slow: bool,
    score: bool,
) -> Explained:
    chosen = {
        key: plot
        for key, plot in PLOTS.items()
        if plot.needs == "image" and plot.fits(model) and (slow or not plot.slow)
    }
    predictions: tuple[tuple[str, float], ...] = ()
    if ask.names:
        with evaluating(model):
            ask = dataclasses.replace(ask, target=int(targets_of(model(x.to(device_of(model))), ask.target)))
    found: dict[str, Arrays] = {key: plot.arrays(model, x, ask) for key, plot in chosen.items()}
    maps = {key: found[key][plot.value] for key, plot in chosen.items() if plot.axes == MAP}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            folder / "arrays.npz",
            allow_pickle=False,
            **{
                f"{key}.{part}": values
                for key, arrays in found.items()
                for part, values in arrays.items()
                if part != "image"
            },
        )
        pictures = {}
        for key, heat in maps.items():
            at = tuple(int(v) for v in found[key]["patch"]) if "patch" in found[key] else None
            pictures[key] = over(image, heat, spec, model.config.patch_size, at)  # type: ignore[arg-type]
            Image.fromarray(pictures[key]).save(folder / f"{key}.png")
        _columns(folder / "patches.csv", maps)
        for key in chosen.keys() - maps.keys() - {"predictions"}:
            write_table(folder / f"{key}.csv", found[key][chosen[key].value], chosen[key].axes, chosen[key].value)
            draw.save(chosen[key].draw(found[key]), folder / f"{key}.png")
        if "predictions" in found:
            said = found["predictions"]
            predictions = tuple((str(n), float(p)) for n, p in zip(said["name"], said["probability"], strict=True))
            with open(folder / "predictions.csv", "w", newline="", encoding="utf-8") as file:
                rows = zip(said["name"], said["index"], said["probability"], strict=True)
                csv.writer(file).writerows(
                    [("class", "index", "probability"), *((n, i, f"{p:.6g}") for n, i, p in rows)]
                )
    except OSError as error:
        raise OutputError(
            f"Expected a folder that can be written to; {folder} cannot ({error.strerror}). Choose another with --out."
        ) from error
    target = ask.names[ask.target] if ask.names and ask.target is not None else None
    title = ", ".join(f"{n} {p:.0%}" for n, p in predictions[:3])
    draw.save(
        draw.tiles(
            [np.asarray(image.convert("RGB")), *pictures.values()],
            1 + len(pictures),
            side=2.6,
            names=["image", *(f"{key}: {target}" if chosen[key].head else key for key in pictures)],
            title=title,
        ),
        folder / "overview.png",
    )
    scores: dict[str, Faithfulness] = {}
    if score:
        evidence = {key: heat for key, heat in maps.items() if chosen[key].evidence}
        scores = faithfulness(model, x, evidence, ask.target)
        _write_scores(folder, scores)
    return Explained(image=name, folder=folder, predictions=predictions, target=target, scores=scores)


def _columns(path: Path, maps: dict[str, Array]) -> None:
    """One line for each patch, one column for each map."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*MAP, *maps])
        for place in np.ndindex(*next(iter(maps.values())).shape):
            writer.writerow([*place, *(f"{heat[place]:.6g}" for heat in maps.values())])


def _write_scores(folder: Path, scores: dict[str, Faithfulness]) -> None:
    with open(folder / "faithfulness.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [
                ("map", "deletion", "insertion"),
                *((name, f"{s.deletion:.6g}", f"{s.insertion:.6g}") for name, s in scores.items()),
            ]
        )
    for kind, curve in (("deletion", "deleted"), ("insertion", "inserted")):
        series = {name: (np.linspace(0, 1, len(getattr(s, curve))), getattr(s, curve)) for name, s in scores.items()}
        words = "hidden: low is good" if kind == "deletion" else "shown: high is good"
        draw.save(
            draw.lines(
                series,
                title=f"{kind.capitalize()}: the class as its best patches are {words}",
                x="share of the patches",
                y="probability",
                from_zero=True,
            ),
            folder / f"{kind}.png",
        )


def summary(results: Iterable[Explained]) -> dict[str, dict[str, float]]:
    """Mean faithfulness over images, and how often each map beats a random order.

    Args:
        results: with scores.

    Returns:
        {map: {deletion, insertion, deletion_beats_random, insertion_beats_random}}.
    """
    scores = [one.scores for one in results if one.scores]
    table = {}
    for name in scores[0] if scores else ():
        table[name] = {
            "deletion": float(np.mean([s[name].deletion for s in scores])),
            "insertion": float(np.mean([s[name].insertion for s in scores])),
            "deletion_beats_random": float(np.mean([s[name].deletion < s["random"].deletion for s in scores])),
            "insertion_beats_random": float(np.mean([s[name].insertion > s["random"].insertion for s in scores])),
        }
    return table
