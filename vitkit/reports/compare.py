"""Several runs -> one page: a table, their curves in shared plots, and the settings that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vitkit.explanations import draw
from vitkit.reports.render import figure, render
from vitkit.training.run_folder import RunFolder, flatten

MOST_LINES = 8
WORDS = ("recipe.source", "recipe.expect")  # describe a recipe, but do not change the result


def comparison(runs: Sequence[RunFolder], rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """Render the page that compares runs.

    Args:
        runs: the runs.
        rows: for each run, the fields that `vitkit runs` lists, and `link`, the address of its report.
        title: title of the page.
    """
    names = [str(row["path"]) for row in rows]
    return render(
        "runs.html",
        title=title,
        rows=rows,
        curves=_curves(runs, names),
        names=names,
        reports=["report.html" if (run.path / "report.html").is_file() else None for run in runs],
        differences=differences(runs),
    )


def _curves(runs: Sequence[RunFolder], names: Sequence[str]) -> list[Markup]:
    drawn = []
    for event, value, title in (
        ("val", "top1", "Validation accuracy"),
        ("val", "mean_ap", "Validation mAP"),
        ("train", "loss", "Training loss"),
        ("val", "loss", "Validation loss"),
    ):
        series = {}
        for name, run in zip(names, runs, strict=True):
            lines = [
                row
                for row in run.metrics()
                if row.get("event") == event
                and row.get(value) is not None
                and row.get("weights", "last") == "last"
                and run.info.get("kind") == "train"
            ]
            if lines:
                series[name] = ([row["step"] for row in lines], [row[value] for row in lines])
        if series:
            shown = dict(list(series.items())[-MOST_LINES:])
            words = title if len(shown) == len(series) else f"{title} (the latest {MOST_LINES} runs)"
            y = {"top1": "top-1 accuracy", "mean_ap": "mAP"}.get(value, value)
            drawn.append(figure(draw.lines(shown, title=words, x="step", y=y), f"{title} of the runs"))
    return drawn


def differences(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Return (setting, its value in each run) for each setting that differs between runs."""
    flat = [
        flatten(
            {
                k: run.info.get(k)
                for k in (
                    "recipe_name",
                    "recipe",
                    "settings",
                    "model",
                    "weights",
                    "features",
                    "parameters",
                    "processes",
                    "device",
                )
            }
            | {"data": run.info.get("data", {}).get("spec")}
        )
        for run in runs
    ]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    return [
        (key, [str(one.get(key, "–")) for one in flat])
        for key in keys
        if len({str(one[key]) for one in flat if key in one}) > 1 and key not in WORDS
    ]
