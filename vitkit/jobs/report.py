"""A run folder -> report.html beside its files; a folder of runs -> one page that compares them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.checkpoints import load
from vitkit.checkpoints.atomic import staging
from vitkit.data.base import Source, Subset
from vitkit.data.sources import open_splits
from vitkit.errors import UnreadableFile, VitkitError
from vitkit.jobs.evaluate import evaluate, part_of
from vitkit.jobs.listing import list_runs
from vitkit.jobs.splits import train_and_val
from vitkit.model.count import flops
from vitkit.model.vit import ViT
from vitkit.report import Shown, comparison, page
from vitkit.training.run_folder import RunFolder
from vitkit.types import Tick

MOST_IMAGES = 5000  # of a validation part that are evaluated for a page; `vitkit eval` takes all of them


def report(run: str | Path, *, out: str | Path | None = None, progress: Tick | None = None) -> Path:
    """Write the page of a run.

    What `vitkit eval` or `vitkit probe` left in the folder is shown; a training that was not evaluated yet is, on its
    validation part. The test part is never touched here.

    Args:
        run: the run's folder.
        out: the page; `report.html` in the run's folder when not given.
        progress: called with the number of images evaluated since the last call.
    """
    folder = RunFolder.open(run)
    notes: list[str] = []
    model = _try(
        lambda: load(folder.path, device=_device()),
        notes,
        "The weights cannot be read, so there are no rollouts and figures",
    )
    parts = _try(lambda: _parts(folder), notes, "The images are not where they were")
    train, held, words = parts if parts is not None else (None, None, "")
    found = evaluation_of(folder)
    if found is not None:
        if (folder.path / "evaluation.json").stat().st_mtime < folder.weights().stat().st_mtime:
            notes.append("The weights are newer than the evaluation; `vitkit eval` measures them again.")
        held = _try(lambda: _source_of(found, folder), notes, "The evaluated images are not where they were")
    elif model is not None and held is not None:
        found = _try(lambda: _evaluated(folder, model, held, words, notes, progress), notes, "It was not evaluated")
    place = Path(out).expanduser() if out is not None else folder.path / "report.html"
    return _write(
        place,
        page(
            folder,
            Shown(
                evaluation=found,
                train=train,
                held=held,
                model=model,
                notes=notes,
                looks=_affordable(model, 1e12, 4, 32) if model is not None else 0,
            ),
        ),
    )


def _device() -> str:
    """Where a page's pictures are computed."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _affordable(model: ViT, work: float, least: int, most: int) -> int:
    """Images that a page may spend `work` operations on; on an accelerator `most`."""
    if model.positions.table.device.type != "cpu":
        return most
    return int(min(max(work / flops(model.config), least), most))


def _try(what: Any, notes: list[str], otherwise: str) -> Any:
    """The value of `what()`; a mistake that has a sentence becomes a note on the page, and None."""
    try:
        return what()
    except VitkitError as error:
        notes.append(f"{otherwise}: {error}")
        return None


def evaluation_of(run: RunFolder) -> dict[str, Any] | None:
    """What evaluation.json of a run holds, or None where there is none."""
    try:
        found = json.loads((run.path / "evaluation.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "per_class" in found else None


def _parts(run: RunFolder) -> tuple[Source, Source | None, str]:
    """What a run was fitted to, what it may be judged on without touching the test part, and what that is."""
    data = run.info["data"]
    if run.info.get("kind") == "train":
        train, val, _ = train_and_val(data["spec"], run.info["recipe"]["val"], run.info["settings"]["seed"])
        return train, val, "the validation part"
    splits = open_splits(data["spec"])
    return splits["train" if "train" in splits else "all"](), None, ""


def _source_of(found: Mapping[str, Any], run: RunFolder) -> Source:
    """The images that an evaluation.json is about."""
    names = {row["image"] for row in found["worst"]}
    source, _ = part_of(found["data"], None, run)
    if names <= set(source.names):
        return source
    for opened in open_splits(found["data"]).values():
        if names <= set((other := opened()).names):
            return other
    return source


def _evaluated(
    run: RunFolder, model: ViT, held: Source, words: str, notes: list[str], progress: Tick | None
) -> dict[str, Any]:
    most = _affordable(model, 2e13, 100, MOST_IMAGES)
    if len(held) > most:
        notes.append(
            f"The numbers are of {most:,} of the {len(held):,} validation images, spread evenly; "
            f"`vitkit eval` measures on all."
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
    with staging(path.parent) as beside:
        (beside / path.name).write_text(text, encoding="utf-8", errors="surrogateescape")
    return path


def after(run: str | Path) -> str:
    """Write the page of a run that has just ended, and say where it is; a page that fails does not fail the run.

    Args:
        run: the run's folder.
    """
    try:
        return f"report: {report(run)}"
    except VitkitError as error:
        return f"no report was written: {error}"


def compare(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write one page about all runs under a folder.

    Args:
        folder: searched to any depth.
        out: the page; `runs.html` in the folder when not given.
    """
    rows = list_runs(folder)
    if not rows:
        raise UnreadableFile(f"Expected runs under {folder}; there are none.")
    place = Path(out).expanduser() if out is not None else Path(folder).expanduser() / "runs.html"
    root = Path(folder).expanduser()
    shown = [
        asdict(row)
        | {"path": os.path.relpath(row.path, root), "link": os.path.relpath(row.path / "report.html", place.parent)}
        for row in rows
    ]
    return _write(place, comparison([RunFolder.open(row.path) for row in rows], shown, f"Runs in {root.name or root}"))
