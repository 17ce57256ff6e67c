"""Images through a model -> predictions, maps over the images at full resolution, and the numbers behind them."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitkit.checkpoints.outputs import check_folder
from vitkit.data.preprocess import preprocess, resized
from vitkit.data.samples import PHOTOS, sample_photo
from vitkit.data.table import cells
from vitkit.errors import BadImage, InputError, OutputError, nearest
from vitkit.evaluation.names import class_names
from vitkit.evaluation.predict import Given, Images
from vitkit.explanations import draw
from vitkit.explanations.common import Arrays, Grid, PlotOptions, cell_of, grid_of, targets_of, unwrap_any
from vitkit.explanations.occlusion import Faithfulness, faithfulness
from vitkit.explanations.plots import MAP, PLOTS, write_table
from vitkit.explanations.registers import Registers, find, with_registers
from vitkit.model.classifier import device_of, evaluating
from vitkit.model.config import InputSpec
from vitkit.model.create import need_vit
from vitkit.model.vit import ViT
from vitkit.types import Array, Plotted, Progress

FEW = 10  # classes that a message lists
FOUND_ON = 14  # of the images, besides the sample photos, on which register neurons are looked for


@dataclass(frozen=True, kw_only=True)
class Explained(Plotted):
    """The explanation of one image.

    Args:
        image: its name.
        folder: where its files are.
        predictions: (class, probability), the most probable first; empty for a model without a head.
        target: name of the explained class; None for a model without a head.
        scores: faithfulness of each map and of a random order; empty unless requested.
        registers: the neurons that were moved to registers for the maps; None unless requested.
    """

    image: str
    folder: Path
    predictions: tuple[tuple[str, float], ...]
    target: str | None
    scores: dict[str, Faithfulness]
    registers: Registers | None = None

    def plot(self) -> Any:
        """Draw the image next to its maps."""
        with Image.open(self.folder / "overview.png") as picture:
            return draw.photo(np.asarray(picture.convert("RGB")), Path(self.image).name, wide=picture.width / draw.DPI)


def target_of(text: str | None, names: tuple[str, ...]) -> int | None:
    """Parse `--class`: a class name, in upper or lower case, or a class number.

    Args:
        text: the value of the option.
        names: the class names.
    """
    if text is None:
        return None
    lower = [name.lower() for name in names]
    if text.lower() in lower:
        return lower.index(text.lower())
    if text.isdigit() and int(text) < len(names):
        return int(text)
    hint = nearest(text, list(names)) or "."
    listed = f"one of {', '.join(names)}" if len(names) <= FEW else "a class name"
    raise InputError(f"There is no class {text!r}{hint} Give {listed}, or a number from 0 to {len(names) - 1}.")


def patch_of(text: str | None, grid: Grid) -> Grid | None:
    """Parse `--patch`: `ROW,COLUMN` counted from 0, or the number that `vitkit patches` shows.

    Args:
        text: the value of the option.
        grid: (rows, columns).
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not 1 <= len(parts) <= 2 or not all(part.isdigit() for part in parts):
        raise InputError(
            f"Expected a patch as ROW,COLUMN (counted from 0) or as a number (counted from 1, as "
            f"`vitkit patches` shows it); got {text!r}."
        )
    if len(parts) == 2:
        return int(parts[0]), int(parts[1])
    if not 1 <= int(parts[0]) <= grid[0] * grid[1]:
        raise InputError(f"Expected a patch from 1 to {grid[0] * grid[1]}; got {text}.")
    return divmod(int(parts[0]) - 1, grid[1])


def at_size(spec: InputSpec, size: int | tuple[int, int] | None) -> InputSpec:
    """Return the same preprocessing for another image size."""
    if size is None:
        return spec
    return dataclasses.replace(spec, size=(size, size) if isinstance(size, int) else size)


def crop_box(image: Image.Image, spec: InputSpec) -> tuple[int, int, int, int]:
    """Return the part of an image that the model sees: left, top, right, bottom in pixels of the image."""
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
    """Lay a map over the whole image at full resolution, fading what preprocessing crops away to nearly white.

    Args:
        image: the decoded image.
        heat: [rows, columns], one value per patch.
        spec: the model's preprocessing.
        patch_size: P.
        patch: (row, column) of a patch to frame (default: none).
    """
    whole = np.asarray(image.convert("RGB"))
    left, top, right, bottom = crop_box(image, spec)
    rows, columns = heat.shape
    padded = draw.enlarged(heat, rows * patch_size, columns * patch_size)
    part = draw.overlay(whole[top:bottom, left:right], padded[: spec.size[0], : spec.size[1]])
    if patch is not None:
        part = draw.framed(part, patch, (spec.size[0] / patch_size, spec.size[1] / patch_size))
    result = (255 - (255 - whole.mean(-1, keepdims=True)) * 0.25).repeat(3, -1).astype(np.uint8)
    result[top:bottom, left:right] = part
    return result


def explain(
    model: nn.Module,
    images: Given | Iterable[Given] | Images,
    out: Path,
    *,
    target: str | None = None,
    patch: str | None = None,
    layer: int | None = None,
    occlusion: bool = False,
    score: bool = False,
    registers: bool = False,
    image_size: int | tuple[int, int] | None = None,
    progress: Progress | None = None,
    on_bad: Callable[[str, str], None] | None = None,
) -> Iterator[Explained]:
    """Explain images one by one, and write the files of each into its own folder inside `out`.

    Args:
        model: a ViT or a ResNet, compiled or plain.
        images: anything that `vitkit.predict` accepts.
        out: folder to write to.
        target: name or number of the class to explain (default: the most probable class of each image).
        patch: patch to compare the others with: `ROW,COLUMN` counted from 0, or its number in `vitkit patches`
            (default: the middle patch).
        layer: compare patches in z_layer, 0 to L (default: the output of the final LayerNorm).
        occlusion: whether to compute the occlusion map, which is slow.
        score: whether to score the faithfulness of the maps; implies `occlusion`.
        registers: whether to compute the maps with test-time registers, against bright corners. Predictions, occlusion
            and faithfulness are those of the model as it is.
        image_size: image size in pixels (default: the model's).
        progress: called with (done, total) during occlusion.
        on_bad: called with (name, reason) for every image that cannot be read, and is skipped (default: the first one
            raises BadImage).
    """
    check_folder(out)
    vit, source = unwrap_any(model), images if isinstance(images, Images) else Images(images)
    if not isinstance(vit, ViT) and (patch is not None or layer is not None):
        need_vit(vit, "Comparing patches (--patch, --layer)")
    spec, K = at_size(vit.input_spec, image_size), vit.config.num_classes
    names = class_names(vit) if K else ()
    if not K and (target is not None or occlusion or score):
        raise InputError(
            "Expected a model with a classification head for --class, --occlusion or --faithfulness; this one has no "
            "head (num_classes=0). Remove these options, or load a model that has classes."
        )
    if not K:
        need_vit(vit, "Explaining a model without a head")
    found = _find(need_vit(vit, "Test-time registers (--registers)"), source, spec) if registers else None
    inside = with_registers(vit, found.neurons, found.count) if found is not None and found.neurons else vit
    used: set[str] = set()
    for i in range(len(source)):
        try:
            image, _ = source.read(i)
            x = preprocess(image, spec, source.names[i])[None]
        except BadImage as error:
            if on_bad is None:
                raise
            on_bad(source.names[i], str(error))
            continue
        options = PlotOptions(
            target=target_of(target, names),
            patch=patch_of(patch, grid_of(vit, x)),
            layer=layer,
            names=names,
            progress=progress,
        )
        folder = out / _free(Path(source.names[i]).stem or "image", used)
        one = _one(vit, inside, x, image, source.names[i], spec, options, folder, occlusion or score, score)
        yield dataclasses.replace(one, registers=found)


def _find(vit: ViT, source: Images, spec: InputSpec) -> Registers:
    """Find the neurons to move, on the sample photos and some of the images that can be read."""
    photos = [*map(sample_photo, PHOTOS)]
    for i in np.unique(np.linspace(0, len(source) - 1, min(FOUND_ON, len(source))).round().astype(int)):
        with suppress(BadImage):  # which whoever explains it reports
            photos.append(source.read(int(i))[0])
    return find(vit, (preprocess(photo, spec)[None] for photo in photos))


def _free(name: str, used: set[str]) -> str:
    """Return a folder name that is not in use yet, also where names differ in case only, as on Windows and macOS."""
    found = next(n for n in chain([name], (f"{name}-{k}" for k in count(2))) if n.lower() not in used)
    used.add(found.lower())
    return found


def _one(
    model: Any,
    inside: Any,
    x: Tensor,
    image: Image.Image,
    name: str,
    spec: InputSpec,
    options: PlotOptions,
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
    if options.names:
        with evaluating(model):
            options = dataclasses.replace(
                options, target=int(targets_of(model(x.to(device_of(model))), options.target))
            )
    # A plot for ViTs alone looks at tokens: with registers where there are any. What others tell is the model's own.
    found: dict[str, Arrays] = {
        key: plot.arrays(inside if plot.models == (ViT,) else model, x, options) for key, plot in chosen.items()
    }
    if inside is not model:
        found["norms"]["without"] = chosen["norms"].arrays(model, x, options)["norm"]
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
            pictures[key] = over(image, heat, spec, cell_of(model), at)  # type: ignore[arg-type]
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
                    [("class", "index", "probability"), *(cells((str(n), i, f"{p:.6g}")) for n, i, p in rows)]
                )
    except OSError as error:
        raise OutputError(
            f"Expected a writable folder; cannot write to {folder} ({error.strerror}). Choose another one with --out."
        ) from error
    target = options.names[options.target] if options.names and options.target is not None else None
    title = ", ".join(f"{n} {p:.0%}" for n, p in predictions[:3])
    draw.save(
        draw.tiles(
            [np.asarray(image.convert("RGB")), *pictures.values()],
            1 + len(pictures),
            side=2.6,
            names=["photo", *(_said(key, target if chosen[key].head else None) for key in pictures)],
            title=title,
            caption="bright: what the model looks at; gray: outside of what it sees" if maps else "",
        ),
        folder / "overview.png",
    )
    scores: dict[str, Faithfulness] = {}
    if score:
        evidence = {key: heat for key, heat in maps.items() if chosen[key].evidence}
        scores = faithfulness(model, x, evidence, options.target)
        _write_scores(folder, scores)
    return Explained(image=name, folder=folder, predictions=predictions, target=target, scores=scores)


def _said(key: str, target: str | None) -> str:
    """What a map is called above its picture."""
    words = {"similarity": "similar to the framed patch"}.get(key, key.replace("-", " "))
    return f"{words}: {target}" if target is not None else words


def _columns(path: Path, maps: dict[str, Array]) -> None:
    """Write one line per patch, with one column per map."""
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
        words = "covered: lower is better" if kind == "deletion" else "sharpened: higher is better"
        draw.save(
            draw.lines(
                series,
                title=f"{kind.capitalize()}: as the highest-ranked patches are {words}",
                x="share of the patches",
                y="probability of the class",
                from_zero=True,
            ),
            folder / f"{kind}.png",
        )


def summary(results: Iterable[Explained]) -> dict[str, dict[str, float]]:
    """Average faithfulness over images, and count how often each map beats a random order.

    Args:
        results: explanations with scores.

    Returns:
        {map: {deletion, insertion, deletion_beats_random, insertion_beats_random}}; the last two are shares of images.
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
