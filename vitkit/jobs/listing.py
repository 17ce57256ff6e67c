"""Runs beside each other: a list of what a folder holds, and what differs between two. Only weights need torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitkit.errors import UnreadableFile
from vitkit.training.run_folder import KINDS, RunFolder, flatten


@dataclass(frozen=True)
class Row:
    """One run of a list.

    Args:
        path: its folder.
        kind: `train` or `probe`.
        recipe: its recipe's name.
        model: what was trained.
        step: updates that are saved.
        total: updates of the whole run; None where there are none.
        loss: of the last line of training metrics.
        top1: accuracy of the last validation of the last weights.
        best: highest accuracy on the validation part.
        created: when it was started.
        seconds: of training, validation apart.
    """

    path: Path
    kind: str
    recipe: str
    model: str
    step: int
    total: int | None
    loss: float | None
    top1: float | None
    best: float | None
    created: str
    seconds: float


def list_runs(folder: str | Path) -> list[Row]:
    """Every run under a folder, oldest first.

    Args:
        folder: searched to any depth.

    Raises:
        UnreadableFile: there is no such folder.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UnreadableFile(f"Expected a folder of runs; there is none at {folder}.")
    found = []
    for file in sorted(folder.rglob("run.json")):
        try:
            found.append(_row(RunFolder.open(file.parent)))
        except UnreadableFile:
            continue  # a run.json of something else
    return sorted(found, key=lambda row: (row.created, str(row.path)))


def _row(run: RunFolder) -> Row:
    rows, state = run.metrics(), run.latest()
    train = [row for row in rows if row.get("event") == "train"]
    tops = [row["top1"] for row in rows if row.get("event") == "val"]
    last = [row["top1"] for row in rows if row.get("event") == "val" and row.get("weights", "last") == "last"]
    return Row(
        run.path,
        str(run.info.get("kind", "")),
        str(run.info.get("recipe_name", "")),
        str(run.info.get("model") or run.info.get("weights") or ""),
        int(state.stem.rpartition("-")[2]) if state else 0,
        run.info.get("steps"),
        train[-1]["loss"] if train else None,
        last[-1] if last else None,
        max(tops, default=None),
        str(run.info.get("created", "")),
        sum(row["time"]["seconds"] for row in train),
    )


@dataclass(frozen=True)
class Difference:
    """What differs between two runs.

    Args:
        settings: name -> (of the first, of the second), of everything in run.json that differs.
        metrics: the first line that differs, times apart: (of the first, of the second); None where they are equal.
        lines: lines of metrics of each.
        numbers: name -> (of the first, of the second): last loss, last and best accuracy.
        weights: checkpoint -> largest difference of any weight; 0 when equal to the bit, None when shapes differ.
    """

    settings: dict[str, tuple[Any, Any]]
    metrics: tuple[Any, Any] | None
    lines: tuple[int, int]
    numbers: dict[str, tuple[float | None, float | None]]
    weights: dict[str, float | None] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether both came to the same result, to the bit."""
        return self.metrics is None and all(value == 0 for value in self.weights.values())


def diff(a: str | Path, b: str | Path) -> Difference:
    """Compare two runs: what was asked, what was measured, what came out.

    Args:
        a: a run's folder.
        b: another's.
    """
    one, two = RunFolder.open(a), RunFolder.open(b)
    old, new = _settings(one.info), _settings(two.info)
    settings = {
        name: (old.get(name), new.get(name))
        for name in {**old, **new}
        if old.get(name) != new.get(name) and not name.startswith(("created", "environment.command"))
    }
    lines = timeless(one), timeless(two)
    pairs = list(itertools.zip_longest(*lines))
    rows = _row(one), _row(two)
    return Difference(
        settings,
        next((pair for pair in pairs if pair[0] != pair[1]), None),
        (len(lines[0]), len(lines[1])),
        {name: (getattr(rows[0], name), getattr(rows[1], name)) for name in ("step", "loss", "top1", "best")},
        {
            which: _distance(one.path / f"{which}.safetensors", two.path / f"{which}.safetensors")
            for which in KINDS
            if all((run.path / f"{which}.safetensors").is_file() for run in (one, two))
        },
    )


def timeless(run: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics without what has to do with time."""
    return [{name: value for name, value in row.items() if name != "time"} for row in run.metrics()]


def _distance(a: Path, b: Path) -> float | None:
    from vitkit.checkpoints import containers

    one, two = containers.read(a)[0], containers.read(b)[0]
    if {name: t.shape for name, t in one.items()} != {name: t.shape for name, t in two.items()}:
        return None
    return max(
        (float((one[name].double() - two[name].double()).abs().max()) for name in one if one[name].numel()), default=0.0
    )


def _settings(info: Mapping[str, Any]) -> dict[str, Any]:
    """The flat settings of a run. `same` repeats what stands elsewhere, except the data's fingerprint."""
    flat = flatten({name: value for name, value in info.items() if name != "same"})
    return flat | {"data.fingerprint": info["same"].get("data")} if "same" in info else flat
