"""One run -> one page. Only run.json is required; the page says what else is missing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from vitkit.data.base import Source
from vitkit.data.preprocess import preprocess
from vitkit.explanations import draw
from vitkit.explanations.common import PlotOptions, batches
from vitkit.explanations.plots import PLOTS
from vitkit.reports import labels
from vitkit.reports import results as classes
from vitkit.reports.render import duration, figure, headed, millions, prose, render, thumbnail
from vitkit.reports.results import confused, read, wrong
from vitkit.training.run_folder import RunFolder, whole_config

MOST_SAMPLES = 60  # sample images on the page
MOST_ROWS = 200  # rows of the per-class table
SHEET = 12  # images in the sheet of rollouts
OUTPUTS = ("class_names", "thresholds")  # fields of InputSpec that are not about preprocessing
ELSEWHERE = ("position-grid",)  # `vitkit figures` draws it; here it would repeat the smaller one
PREDICTED = (
    "Validation photos; what the model saw of them, grey where the mask token stands, with "
    "another patch here and there; and what it predicted at the corrupted places. Predictions should continue the "
    "shapes and colours around them."
)
CAPTIONS = {
    "Loss": "Both curves should fall. If the training loss keeps falling while the validation loss rises, the model is "
    "overfitting.",
    "Accuracy": "Share of images classified correctly. Training accuracy is measured on augmented images, so it can be "
    "lower than validation accuracy.",
    "Learning rate": "The schedule of the recipe: a rise during the warm-up, if it has one, then the decay.",
    "Throughput": "A dip means that training had to wait, for example for images to be decoded.",
}


@dataclass(frozen=True, kw_only=True)
class PageInputs:
    """What a page shows in addition to the files of the run.

    Args:
        evaluation: the contents of evaluation.json; None if the run was not evaluated.
        train: the training images; None if they cannot be found.
        held: the evaluated images; None if they cannot be found.
        model: the model of the run; None leaves out rollouts and figures.
        max_images: maximum number of images to compute each figure from (default: 32).
        masked: photos, masked photos and predicted patches of a run of masked patch prediction; None for other runs.
        notes: sentences about what is missing.
    """

    evaluation: Mapping[str, Any] | None = None
    train: Source | None = None
    held: Source | None = None
    model: Any = None
    max_images: int = 32
    masked: draw.Figure | None = None
    notes: Sequence[str] = field(default_factory=tuple)


def page(run: RunFolder, shown: PageInputs) -> str:
    """Render the page of one run as a single file that needs no other file and no network.

    Args:
        run: the run folder.
        shown: what else to show.
    """
    metrics = run.metrics()
    found = shown.evaluation
    said = labels if found and found.get("several") else classes
    return render(
        "page.html",
        title=run.path.resolve().name,
        run=run,
        info=run.info,
        command=command(run.info),
        cards=cards(run.info, metrics, found),
        settings=settings(run.info),
        curves=curves(metrics),
        methods=[row for row in metrics if row.get("event") == "probe"],
        skipped=[row for row in metrics if row.get("event") == "skipped"],
        samples=samples(shown.train),
        counts=counts(run.info),
        evaluation=found,
        verdict=said.verdict(found) if found else None,
        results=said.results(found) if found else None,
        rows=said.rows(found)[:MOST_ROWS] if found else [],
        wrong=wrong(found, shown.held, shown.model, shown.max_images) if found and shown.held is not None else [],
        pairs=confused(found, shown.held),
        masked=(figure(shown.masked, "Predicted patches"), PREDICTED) if shown.masked else None,
        figures=figures(shown.model, shown.held or shown.train, shown.max_images),
        notes=list(shown.notes) + list(run.info.get("notes", [])),
    )


def command(info: Mapping[str, Any]) -> str:
    """Return the command line that started the run; empty if the run was started from Python."""
    argv = info.get("environment", {}).get("command") or []
    if argv and Path(argv[0]).stem in ("vitkit", "__main__"):
        return "vitkit " + shlex.join(argv[1:])
    return ""


def cards(
    info: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], found: Mapping[str, Any] | None
) -> list[tuple[str, str, str]]:
    """Return (name, value, remark) of the numbers below the headline."""
    train = [row for row in metrics if row.get("event") == "train"]
    val = [row for row in metrics if row.get("event") == "val"]
    result = []
    scored = [row["mean_ap"] for row in val if "mean_ap" in row]
    if scored:
        if not found:
            result.append(("best mAP", f"{max(scored):.1%}", "on the validation split"))
    elif info.get("recipe", {}).get("objective", "classify") != "classify":
        if val:
            result.append(
                ("lowest validation loss", f"{min(row['loss'] for row in val):.3f}", "what the run minimises")
            )
    elif not found and val:
        result.append(("best top-1 accuracy", f"{max(row['top1'] for row in val):.1%}", "on the validation split"))
    if found and "top5" in found and len(found["per_class"]) > 5:
        result.append(("top-5 accuracy", f"{found['top5']:.1%}", "the true class is among the five most probable"))
    if train:
        result.append(("training loss", f"{train[-1]['loss']:.3f}", f"step {train[-1]['step']:,} of {info['steps']:,}"))
        speeds = [row["time"]["images_per_second"] for row in train]
        result.append(("throughput", f"{np.median(speeds):,.0f}", "images per second (median)"))
        waits = [row["time"].get("waiting", 0.0) for row in train]
        result.append(
            (
                "training time",
                duration(sum(row["time"]["seconds"] for row in train)),
                f"{np.mean(waits):.0%} of it waiting for data",
            )
        )
    elif found:
        result.append(("time", duration(found["seconds"]), "without imports"))
    if "parameters" in info:
        total, trained = info["parameters"], info.get("trained", 0)
        frozen = "all of them trained" if trained == total else f"{trained:,} trained, the rest frozen"
        result.append(("parameters", millions(total), frozen))
    return result


def settings(info: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the tables of settings: (title, [(name, value)])."""
    environment = info.get("environment", {})
    tables = [
        (
            "Run",
            {
                label: info.get(name)
                for label, name in {
                    "kind": "kind",
                    "recipe": "recipe_name",
                    "model": "model",
                    "pre-trained weights": "weights",
                    "features": "features",
                    "steps": "steps",
                    "stopped early": "stopped_early",
                    "device": "device",
                    "processes": "processes",
                    "threads": "torch_threads",
                }.items()
            },
        ),
        ("Recipe", info.get("recipe", {})),
        ("Settings", info.get("settings", {})),
        ("Model", whole_config(info)),
        ("Preprocessing", {k: v for k, v in info.get("input_spec", {}).items() if k not in OUTPUTS}),
        (
            "Environment",
            {k: v for k, v in environment.items() if k not in ("command", "packages")}
            | environment.get("packages", {}),
        ),
        (
            "Data",
            {k: v for k, v in info.get("data", {}).items() if k not in ("classes", "counts")}
            | ({"fingerprint": info["same"]["data"]} if info.get("same", {}).get("data") else {}),
        ),
    ]
    return [
        (title, [(name, _plain(value)) for name, value in values.items() if value not in (None, [], {}, "")])
        for title, values in tables
        if values
    ]


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(v) for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def curves(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, Markup, str]]:
    """Draw loss, accuracy, learning rate and throughput over the training steps: (title, drawing, caption)."""
    train = [row for row in metrics if row.get("event") == "train"]
    val = [row for row in metrics if row.get("event") == "val" and "loss" in row]
    if not train:
        return []
    steps = [row["step"] for row in train]

    def of(name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
        return [row["step"] for row in rows], [row[name] for row in rows]

    kinds = {"last": "validation", "ema": "validation (averaged weights)"}
    judged = {words: rows for kind, words in kinds.items() if (rows := [r for r in val if r["weights"] == kind])}
    speed = [row["time"]["images_per_second"] for row in train]
    captions = CAPTIONS | {"mAP": labels.MAP_CURVE}
    drawn = {
        "Loss": draw.lines(
            {"training": of("loss", train)} | {n: of("loss", rows) for n, rows in judged.items()},
            title="Loss",
            x="step",
            y="loss",
        ),
        **(
            {
                "Accuracy": draw.lines(
                    {"training": of("accuracy", train)} | {n: of("top1", rows) for n, rows in judged.items()},
                    title="Accuracy",
                    x="step",
                    y="top-1 accuracy",
                )
            }
            if "accuracy" in train[0]
            else {}
        ),
        **(
            {"mAP": draw.lines({n: of("mean_ap", rows) for n, rows in judged.items()}, title="mAP", x="step", y="mAP")}
            if val and "mean_ap" in val[0]
            else {}
        ),
        "Learning rate": draw.lines(
            {"lr": of("lr", train)}, title="Learning rate", x="step", y="learning rate", from_zero=True
        ),
        "Throughput": draw.lines(
            {"images/s": (steps, speed)}, title="Throughput", x="step", y="images per second", from_zero=True
        ),
    }
    return [headed(one, f"{name} over the training steps", captions[name]) for name, one in drawn.items()]


def counts(info: Mapping[str, Any]) -> list[tuple[str, int, float]]:
    """Return (class, training images, their number relative to the largest class)."""
    found: Mapping[str, int] = info.get("data", {}).get("counts", {})
    most = max(found.values(), default=1) or 1
    return [(name, count, count / most) for name, count in list(found.items())[:MOST_ROWS]]


def samples(source: Source | None) -> list[tuple[str, list[str]]]:
    """Return some images of each class, spread evenly over the class, as data URIs."""
    if source is None:
        return []
    result = []
    K = len(source.class_names)
    each = max(min(MOST_SAMPLES // max(K, 1), 8), 1)
    for label in range(min(max(K, 1), MOST_SAMPLES)):
        of_class = np.flatnonzero(source.labels[:, label] if source.several else source.labels == label)
        places = of_class[np.linspace(0, len(of_class) - 1, min(each, len(of_class))).round().astype(int)]
        shown = [one for one in (read(source, int(i)) for i in places) if one is not None]
        result.append((source.class_names[label] if K else "without labels", [thumbnail(image) for image in shown]))
    return result


def figures(model: Any, source: Source | None, max_images: int) -> list[dict[str, Any]]:
    """Draw the plots that need the model alone or many images: title, drawing, caption, and whether it is wide."""
    if model is None:
        return []
    result = []
    images = []
    if source is not None:
        chosen = np.linspace(0, len(source) - 1, min(max_images, len(source))).round().astype(int)
        images = [image for image in (read(source, int(i)) for i in chosen) if image is not None]
    for name, plot in PLOTS.items():
        if name in ELSEWHERE or plot.needs == "image" or plot.slow or not plot.fits(model):
            continue
        if plot.needs == "images" and not images:
            continue
        wide = "image" in plot.axes
        shown = [images[i] for i in np.linspace(0, len(images) - 1, SHEET).round().astype(int)] if wide else images
        shown = images if len(images) <= SHEET else shown
        arrays = plot.arrays(
            model, (x for one in shown for x in batches(preprocess(one, model.input_spec)[None])), PlotOptions()
        )
        drawn = plot.draw(arrays)
        said = draw.without_title(drawn).replace("\n", " ")
        caption = f"{said}. {plot.caption}" + (in_corners(arrays[plot.value]) if wide else "")
        result.append({"title": plot.title, "svg": figure(drawn, plot.title), "caption": prose(caption), "wide": wide})
    narrow = [one for one in result if not one["wide"]]
    for one in narrow:
        one["alone"] = len(narrow) % 2 == 1 and one is narrow[-1]  # nothing stands next to it
    return result


def in_corners(maps: NDArray[np.float32]) -> str:
    """Explain maps whose brightest patch lies in a corner of the image, if that happens in a third of them or more.

    Args:
        maps: [images, rows, columns].
    """
    _, rows, columns = maps.shape
    if min(rows, columns) < 6:
        return ""
    count = 0
    for one in maps:
        row, column = divmod(int(np.nanargmax(one)), columns)
        count += min(row, rows - 1 - row) <= 1 and min(column, columns - 1 - column) <= 1
    if 3 * count < len(maps):
        return ""
    return (
        f" In {count} of {len(maps)} images the brightest patch lies in a corner: there the model keeps information "
        f"about the whole image (arXiv 2309.16588), so a bright corner says little about what it shows. "
        f"`vitkit explain --registers` draws maps without this."
    )
