"""One run -> one page. Only run.json is required; the page says what else is missing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from vitkit.data.base import Source
from vitkit.data.preprocess import preprocess
from vitkit.errors import BadImage
from vitkit.explanations import draw
from vitkit.explanations.common import PlotOptions, batches
from vitkit.explanations.plots import PLOTS, Plot
from vitkit.reports.render import duration, figure, picture, render, thumbnail
from vitkit.training.run_folder import RunFolder, whole_config

MOST_SAMPLES = 60  # sample images on the page
MOST_ROWS = 200  # rows of the per-class table
MOST_WRONG = 12  # wrong predictions shown with their images
CAPTIONS = {
    "Loss": "Both curves should fall. If the training loss keeps falling while the validation loss rises, the model is "
    "overfitting.",
    "Accuracy": "Share of images classified correctly. Training accuracy is measured on augmented images, so it can be "
    "lower than validation accuracy.",
    "Learning rate": "The schedule of the recipe: a rise during the warm-up, if it has one, then the decay.",
    "Throughput": "A dip means that training had to wait, for example for images to be decoded.",
    "Confusion matrix": "Rows are true classes, columns predicted ones; correct predictions lie on the diagonal. A "
    "dark cell off the diagonal is a pair of classes that the model confuses.",
    "Reliability diagram": "How often predictions of a given confidence are correct. Points below the dashed line mean "
    "that the model is overconfident, points above it that it is underconfident. Small points stand for few images and "
    "say little.",
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
        notes: sentences about what is missing.
    """

    evaluation: Mapping[str, Any] | None = None
    train: Source | None = None
    held: Source | None = None
    model: Any = None
    max_images: int = 32
    notes: Sequence[str] = field(default_factory=tuple)


def page(run: RunFolder, shown: PageInputs) -> str:
    """Render the page of one run as a single file that needs no other file and no network.

    Args:
        run: the run folder.
        shown: what else to show.
    """
    metrics = run.metrics()
    found = shown.evaluation
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
        results=results(found) if found else None,
        rows=(found or {}).get("per_class", [])[:MOST_ROWS],
        wrong=wrong(found, shown.held, shown.model, shown.max_images) if found and shown.held is not None else [],
        pairs=confused(found, shown.held),
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
    """Return (name, value, remark) of the numbers at the top of the page."""
    train = [row for row in metrics if row.get("event") == "train"]
    val = [row for row in metrics if row.get("event") == "val"]
    result = []
    if found:
        low, high = found["ci95"]
        result.append(
            (
                "top-1 accuracy",
                f"{found['top1']:.1%}",
                f"on {found['part']}; 95% confidence interval {low:.1%} to {high:.1%}",
            )
        )
        if len(found["per_class"]) > 5:
            result.append(("top-5 accuracy", f"{found['top5']:.1%}", f"{found['n']:,} images"))
    elif val:
        result.append(("best top-1 accuracy", f"{max(row['top1'] for row in val):.1%}", "on the validation split"))
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
        result.append(("parameters", f"{info['parameters']:,}", f"{info.get('trained', 0):,} trained"))
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
                    "device": "device",
                    "processes": "processes",
                    "threads": "torch_threads",
                }.items()
            },
        ),
        ("Recipe", info.get("recipe", {})),
        ("Settings", info.get("settings", {})),
        ("Model", whole_config(info)),
        ("Preprocessing", {k: v for k, v in info.get("input_spec", {}).items() if k != "class_names"}),
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


def curves(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[Markup, str]]:
    """Draw loss, accuracy, learning rate and throughput over the training steps: (drawing, caption)."""
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
    drawn = {
        "Loss": draw.lines(
            {"training": of("loss", train)} | {n: of("loss", rows) for n, rows in judged.items()},
            title="Loss",
            x="step",
            y="loss",
            from_zero=True,
        ),
        "Accuracy": draw.lines(
            {"training": of("accuracy", train)} | {n: of("top1", rows) for n, rows in judged.items()},
            title="Accuracy",
            x="step",
            y="top-1 accuracy",
        ),
        "Learning rate": draw.lines(
            {"lr": of("lr", train)}, title="Learning rate", x="step", y="learning rate", from_zero=True
        ),
        "Throughput": draw.lines(
            {"images/s": (steps, speed)}, title="Throughput", x="step", y="images per second", from_zero=True
        ),
    }
    return [(figure(one, f"{name} over the training steps"), CAPTIONS[name]) for name, one in drawn.items()]


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
    for label in range(min(K, MOST_SAMPLES)):
        of_class = np.flatnonzero(source.labels == label)
        places = of_class[np.linspace(0, len(of_class) - 1, min(each, len(of_class))).round().astype(int)]
        shown = [one for one in (_read(source, int(i)) for i in places) if one is not None]
        result.append((source.class_names[label], [thumbnail(image) for image in shown]))
    return result


def _read(source: Source, i: int) -> Any:
    try:
        return source.read(i)[0]
    except BadImage:  # already reported by training or evaluation
        return None


def results(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table and the figures of an evaluation."""
    names = [row["name"] for row in found["per_class"]]
    bins = found["reliability"]
    drawn = {}
    if found.get("confusion") is not None and len(names) <= 120:
        drawn["Confusion matrix"] = draw.matrix(
            np.array(found["confusion"]), names, title="Confusion matrix", x="predicted class", y="true class"
        )
    drawn["Reliability diagram"] = draw.reliability(
        *([b[name] for b in bins] for name in ("confidence", "accuracy", "count")),
        title=f"Reliability (expected calibration error {found['ece']:.3f})",
    )
    table = [
        ("images", f"{found['n']:,}"),
        ("top-1 accuracy", f"{found['top1']:.2%}"),
        *([("top-5 accuracy", f"{found['top5']:.2%}")] if len(names) > 5 else []),
        ("95% confidence interval of top-1", f"{found['ci95'][0]:.2%} to {found['ci95'][1]:.2%}"),
        ("negative log-likelihood", f"{found['nll']:.4f}"),
        ("expected calibration error (ECE)", f"{found['ece']:.4f}"),
        ("macro F1", f"{found['macro_f1']:.4f}"),
        ("seconds", f"{found['seconds']:.2f}"),
        ("skipped images", str(len(found.get("skipped", [])))),
    ]
    return {"table": table, "drawn": [(figure(one, name), CAPTIONS[name]) for name, one in drawn.items()]}


def wrong(found: Mapping[str, Any], held: Source, model: Any, max_images: int) -> list[dict[str, Any]]:
    """Return the most confident wrong predictions with their images, and with rollouts if there is a model."""
    places = {name: i for i, name in enumerate(held.names)} if found["worst"] else {}
    result: list[dict[str, Any]] = []
    for row in found["worst"]:
        image = _read(held, places[row["image"]]) if row["image"] in places else None
        if image is None:
            continue
        looked = None
        if model is not None and len(result) < max_images:
            names = [score["name"] for score in found["per_class"]]
            x = preprocess(image, model.input_spec, row["image"])[None]
            target = names.index(row["predicted"]) if row["predicted"] in names else None
            maps = [
                PLOTS[name].arrays(model, x, PlotOptions(target=target)) for name in ("rollout", "gradient-rollout")
            ]
            looked = [
                picture(draw.overlay(_large(one["image"]), one[PLOTS[name].value]))
                for name, one in zip(("rollout", "gradient-rollout"), maps, strict=True)
            ]
        result.append({**row, "picture": thumbnail(image, 160), "looked": looked})
        if len(result) == MOST_WRONG:
            break
    return result


def _large(image: Any) -> Any:
    """Bring a model's input to about 160 pixels."""
    f = max(160 // image.shape[1], 1)
    return draw.shrunk(image.repeat(f, 0).repeat(f, 1), 160)


def confused(found: Mapping[str, Any] | None, held: Source | None) -> list[dict[str, Any]]:
    """Return the most frequent confusions, each with an example if the wrong predictions include one."""
    if not found:
        return []
    places = {name: i for i, name in enumerate(held.names)} if held is not None else {}
    result = []
    for truth, predicted, count in found["confused"][:10]:
        example = next(
            (
                row["image"]
                for row in found["worst"]
                if row["truth"] == truth and row["predicted"] == predicted and row["image"] in places
            ),
            None,
        )
        image = _read(held, places[example]) if held is not None and example is not None else None
        result.append(
            {
                "truth": truth,
                "predicted": predicted,
                "count": count,
                "picture": thumbnail(image, 96) if image is not None else None,
            }
        )
    return result


def figures(model: Any, source: Source | None, max_images: int) -> list[tuple[Plot, Markup, bool]]:
    """Draw every plot that needs the model alone or many images: (plot, drawing, whether it fills the page's width)."""
    if model is None:
        return []
    result = []
    images = []
    if source is not None:
        chosen = np.linspace(0, len(source) - 1, min(max_images, len(source))).round().astype(int)
        images = [image for image in (_read(source, int(i)) for i in chosen) if image is not None]
    for plot in PLOTS.values():
        if plot.needs == "image" or plot.slow or not plot.fits(model) or (plot.needs == "images" and not images):
            continue
        pixels = (x for image in images for x in batches(preprocess(image, model.input_spec)[None]))
        drawn = figure(plot.draw(plot.arrays(model, pixels, PlotOptions())), plot.title)
        result.append((plot, drawn, "image" in plot.axes))
    return result
