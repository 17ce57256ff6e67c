"""An evaluation -> what the page says first: how good, what it confuses, how sure to be, and its worst errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitkit.data.base import Source
from vitkit.data.preprocess import preprocess
from vitkit.errors import BadImage
from vitkit.evaluation.measure import wilson
from vitkit.explanations import draw
from vitkit.explanations.common import PlotOptions
from vitkit.explanations.plots import PLOTS
from vitkit.reports.render import headed, images_of, picture, share, thumbnail

MOST_WRONG = 12  # wrong predictions shown with their images
FEWEST = 10  # images that a point of the reliability diagram stands for, at least
SURE = 0.9  # confidence that the page calls sure
CAPTIONS = {
    "Confusion matrix": "Rows are true classes, columns predicted ones; correct predictions lie on the diagonal. A "
    "dark cell off the diagonal is a pair of classes that the model confuses.",
    "Reliability diagram": "How often predictions of a given confidence are correct, with 95% intervals. Points below "
    "the dashed line mean that the model is overconfident, points above it that it is underconfident.",
}


def verdict(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headline of an evaluation: accuracy, images, interval, and sentences that say what they mean."""
    n, (low, high) = found["n"], found["ci95"]
    right = round(found["top1"] * n)
    one = "image" if n == 1 else "images"
    sure = how_sure(found["reliability"])
    return {
        "accuracy": share(found["top1"]),
        "unit": "",
        "low": low,
        "high": high,
        "at": found["top1"],
        "says": f"{right:,} of {n:,} {one} of {images_of(found)} are classified correctly.",
        "means": f"On other images of this kind, expect {low:.1%} to {high:.1%} (95% confidence interval).",
        "facts": [("What it confuses", confuses(found)), *([("How sure to be", sure)] if sure else [])],
    }


def confuses(found: Mapping[str, Any]) -> str:
    """Say which two classes the model confuses most."""
    if not found.get("confused"):
        return "It confuses no classes on these images."
    support = {row["name"]: row["support"] for row in found["per_class"]}
    said = []
    for truth, predicted, count in found["confused"][:2]:
        if count == found["confused"][0][2]:  # the second only if it is as frequent
            of = support.get(truth)
            total = f" of {of:,}" if of is not None else ""
            said.append(f"{truth} taken for {predicted}: {count:,}{total} image{'' if (of or count) == 1 else 's'}.")
    return " ".join(said)


def how_sure(bins: Sequence[Mapping[str, Any]]) -> str:
    """Say how often predictions with a confidence of 90% or more are right, and how often the others are."""

    def right(chosen: Sequence[Mapping[str, Any]]) -> str:
        n = sum(b["count"] for b in chosen)
        return f"it is right on {round(sum(b['count'] * b['accuracy'] for b in chosen)):,} of {n:,} images."

    sure, unsure = ([b for b in bins if b["count"] and (b["confidence"] >= SURE) == high] for high in (True, False))
    if not sure:
        return f"It is never {SURE:.0%} sure; {right(unsure)}" if unsure else ""
    rest = f" When it is less sure, {right(unsure)}" if unsure else ""
    return f"When it is at least {SURE:.0%} sure, {right(sure)}{rest}"


def merged(bins: Sequence[Mapping[str, Any]], fewest: int = FEWEST) -> list[tuple[float, float, int]]:
    """Join neighbouring bins until each holds enough images: (confidence, accuracy, images).

    Args:
        bins: in order of confidence; each has `confidence`, `accuracy` and `count`.
        fewest: images that each result holds, if there are that many at all (default: 10).
    """
    result: list[list[float]] = []
    for b in bins:
        n = b["count"]
        if not n:
            continue
        if result and (result[-1][2] < fewest):
            c, a, m = result[-1]
            result[-1] = [(c * m + b["confidence"] * n) / (m + n), (a * m + b["accuracy"] * n) / (m + n), m + n]
        else:
            result.append([b["confidence"], b["accuracy"], n])
    if len(result) > 1 and result[-1][2] < fewest:
        (c, a, m), (d, e, n) = result[-2:]
        result[-2:] = [[(c * m + d * n) / (m + n), (a * m + e * n) / (m + n), m + n]]
    return [(c, a, int(m)) for c, a, m in result]


def results(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table and the figures of an evaluation."""
    names = [row["name"] for row in found["per_class"]]
    bins = found["reliability"]
    drawn = {}
    if found.get("confusion") is not None and len(names) <= 120:
        drawn["Confusion matrix"] = draw.matrix(
            np.array(found["confusion"]), names, title="Confusion matrix", x="predicted class", y="true class"
        )
    points = merged(bins)
    drawn["Reliability diagram"] = draw.reliability(
        [c for c, _, _ in points],
        [a for _, a, _ in points],
        [wilson(a, n) for _, a, n in points],
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
    return {"table": table, "drawn": [headed(one, name, CAPTIONS[name]) for name, one in drawn.items()]}


LOOKED = {  # the maps next to a wrong prediction, those that fit the model, and what the page calls them
    "rollout": "attention rollout",
    "gradient-rollout": "rollout weighted by the gradient of the predicted class",
    "activation": "class activation map of the predicted class",
}


def wrong(found: Mapping[str, Any], held: Source, model: Any, max_images: int) -> list[dict[str, Any]]:
    """Return the most confident wrong predictions with their images, and with maps (LOOKED) if there is a model.

    With several labels per image, the maps are of the label in question.
    """
    places = {name: i for i, name in enumerate(held.names)} if found["worst"] else {}
    result: list[dict[str, Any]] = []
    for row in found["worst"]:
        image = read(held, places[row["image"]]) if row["image"] in places else None
        if image is None:
            continue
        looked = None
        if model is not None and len(result) < max_images:
            names = [score["name"] for score in found["per_class"]]
            x = preprocess(image, model.input_spec, row["image"])[None]
            about = row.get("label", row["predicted"])
            target = names.index(about) if about in names else None
            looked = []
            for name, words in LOOKED.items():
                if PLOTS[name].fits(model):
                    one = PLOTS[name].arrays(model, x, PlotOptions(target=target))
                    about_it = words.replace("predicted class", "label") if "label" in row else words
                    looked.append((picture(draw.overlay(_large(one["image"]), one[PLOTS[name].value])), about_it))
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
    if not found or found.get("several"):
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
        image = read(held, places[example]) if held is not None and example is not None else None
        result.append(
            {
                "truth": truth,
                "predicted": predicted,
                "count": count,
                "picture": thumbnail(image, 96) if image is not None else None,
            }
        )
    return result


def read(source: Source, i: int) -> Any:
    """Return image i, or None if it cannot be read."""
    try:
        return source.read(i)[0]
    except BadImage:  # already reported by training or evaluation
        return None


def rows(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of the table of classes."""
    return list(found["per_class"])
