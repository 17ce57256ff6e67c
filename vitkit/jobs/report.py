"""A run folder -> its report.html; a folder of runs -> one page that compares them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch

from vitkit.checkpoints import load
from vitkit.checkpoints.atomic import writing
from vitkit.checkpoints.outputs import check_page
from vitkit.data.base import Source, Subset
from vitkit.data.sources import open_splits
from vitkit.errors import UnreadableFile, VitkitError
from vitkit.jobs.evaluate import evaluate, part_of
from vitkit.jobs.listing import list_runs
from vitkit.jobs.pretrain import picture
from vitkit.jobs.splits import some, train_and_val, unlabelled
from vitkit.model.backbone import Backbone
from vitkit.model.classifier import device_of
from vitkit.model.count import flops
from vitkit.reports import PageInputs, comparison, page
from vitkit.training.objectives import OBJECTIVES
from vitkit.training.recipe import Recipe
from vitkit.training.run_folder import RunFolder, read_object
from vitkit.types import Tick

MOST_IMAGES = 5000  # validation images that are evaluated for a report; `vitkit eval` uses all of them


def report(run: str | Path, *, out: str | Path | None = None, progress: Tick | None = None) -> Path:
    """Write the HTML report of a run, and return its path.

    The report shows the results that `vitkit eval` or `vitkit probe` left in the folder. A training run without such
    results is evaluated on its validation split; the test split is never used here.

    Args:
        run: the run folder.
        out: the HTML file (default: `report.html` in the run folder).
        progress: called with the number of images evaluated since the last call.
    """
    folder = RunFolder.open(run)
    place = check_page(out if out is not None else folder.path / "report.html")
    notes: list[str] = []
    model = _try(
        lambda: load(folder.path, device=_device()),
        notes,
        "The weights cannot be read, so rollouts and figures are missing",
    )
    with folder.reading():
        return _report(folder, model, place, notes, progress)


def _report(folder: RunFolder, model: Backbone | None, place: Path, notes: list[str], progress: Tick | None) -> Path:
    parts = _try(lambda: _parts(folder), notes, "The images cannot be found any more")
    train, held, words = parts if parts is not None else (None, None, "")
    found = evaluation_of(folder)
    if found is not None:
        if (folder.path / "evaluation.json").stat().st_mtime < folder.weights().stat().st_mtime:
            notes.append("The weights are newer than these results. Evaluate them again with `vitkit eval`.")
        held = _try(lambda: _source_of(found, folder), notes, "The evaluated images cannot be found any more")
    elif model is not None and held is not None and model.config.num_classes:
        found = _try(
            lambda: _evaluated(folder, model, held, words, notes, progress), notes, "The run could not be evaluated"
        )
    return _write(
        place,
        page(
            folder,
            PageInputs(
                evaluation=found,
                train=train,
                held=held,
                model=model,
                masked=_masked(folder, held or train, notes),
                notes=notes,
                max_images=_affordable(model, 1e12, 4, 32) if model is not None else 0,
            ),
        ),
    )


def _device() -> str:
    """Return the device to compute the figures on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _affordable(model: Backbone, work: float, least: int, most: int) -> int:
    """Return how many images to process with a budget of `work` FLOPs on a CPU; `most` on an accelerator."""
    if device_of(model).type != "cpu":
        return most
    return int(min(max(work / flops(model.config), least), most))


def _try(what: Any, notes: list[str], otherwise: str) -> Any:
    """Return `what()`; if it raises a VitkitError, add a note to the page and return None."""
    try:
        return what()
    except VitkitError as error:
        notes.append(f"{otherwise}: {error}")
        return None


def evaluation_of(run: RunFolder) -> dict[str, Any] | None:
    """Return the contents of a run's evaluation.json, or None if there is none."""
    found = read_object(run.path / "evaluation.json")
    return found if found is not None and "per_class" in found else None


def _parts(run: RunFolder) -> tuple[Source, Source | None, str]:
    """Return the training images of a run, its validation images, and a name for the latter."""
    if run.info.get("kind") == "train":
        recipe, seed = Recipe.from_dict(run.info["recipe"]), run.info["settings"]["seed"]
        parts = train_and_val if OBJECTIVES[recipe.objective].labels else unlabelled
        train, val, _ = parts(run.data, recipe.val, seed)
        return some(train, recipe.images, seed), val, "the validation split"
    splits = open_splits(run.data)
    return splits["train" if "train" in splits else "all"](), None, ""


def _masked(run: RunFolder, source: Source | None, notes: list[str]) -> Any:
    """Draw the predictions of a run of masked patch prediction; None for any other run."""
    if run.info.get("recipe", {}).get("objective") != "masked-patch" or source is None:
        return None
    return _try(lambda: picture(run, source), notes, "The predicted patches cannot be drawn")


def _source_of(found: Mapping[str, Any], run: RunFolder) -> Source:
    """Return the images of an evaluation."""
    names = {row["image"] for row in found["worst"]}
    source, _ = part_of(found["data"], None, run, fitted=True)
    if names <= set(source.names):
        return source
    for opened in open_splits(found["data"]).values():
        if names <= set((other := opened()).names):
            return other
    return source


def _evaluated(
    run: RunFolder, model: Backbone, held: Source, words: str, notes: list[str], progress: Tick | None
) -> dict[str, Any]:
    most = _affordable(model, 2e13, 100, MOST_IMAGES)
    if len(held) > most:
        notes.append(
            f"These results are for {most:,} of the {len(held):,} validation images, spread evenly. "
            f"Evaluate all of them with `vitkit eval`."
        )
        held = Subset(held, np.linspace(0, len(held) - 1, most).round().astype(int))
    return evaluate(
        model,
        held,
        weights=run.weights().name,
        data=run.info["data"]["spec"],
        part=words,
        workers=0,
        progress=progress,
        bad_images="skip",
    ).to_dict()


def _write(path: Path, text: str) -> Path:
    with writing(path) as private:
        private.write_text(text, encoding="utf-8", errors="surrogateescape")
    return path


def try_report(run: str | Path) -> str:
    """Write the report of a run that has just ended, and return a line that says where it is.

    If the report fails, the line says why: the run itself has succeeded.

    Args:
        run: the run folder.
    """
    try:
        return f"report: {report(run)}"
    except VitkitError as error:
        return f"no report was written: {error}"


def compare(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write one page that compares all runs in a folder, and return its path.

    Args:
        folder: folder of runs, searched recursively.
        out: the HTML file (default: `runs.html` in the folder).
    """
    place = check_page(out if out is not None else Path(folder) / "runs.html", "--html")
    rows = list_runs(folder)
    if not rows:
        raise UnreadableFile(f"Expected at least one run in {folder}; found none. Give a folder that contains runs.")
    root = Path(folder).expanduser()
    shown = [
        asdict(row) | {"path": os.path.relpath(row.path, root), "link": _link(row.path / "report.html", place.parent)}
        for row in rows
    ]
    return _write(place, comparison([RunFolder.open(row.path) for row in rows], shown, f"Runs in {root.name or root}"))


def _link(target: Path, folder: Path) -> str:
    """Return the address of a file as seen from a page in `folder`."""
    try:
        return quote(Path(os.path.relpath(target, folder)).as_posix())
    except ValueError:  # on another drive of Windows
        return target.resolve().as_uri()
