"""List the runs in a folder, and compare two of them. Only comparing weights imports torch."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from vitkit.errors import UnreadableFile
from vitkit.training.run_folder import KINDS, RunFolder, flatten


@dataclass(frozen=True)
class Row:
    """One run of a list.

    Args:
        path: the run folder.
        kind: `train` or `probe`.
        recipe: name of the recipe.
        model: the variant, or the weights that training started from.
        step: updates saved.
        total: updates of the whole run; None for a probe.
        loss: training loss in the last line of metrics.
        top1: validation accuracy of the last weights.
        best: highest validation accuracy, or mAP of several labels per image.
        created: when the run was started.
        seconds: duration of training, without validation.
        mean_ap: validation mAP of the last weights, with several labels per image.
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
    mean_ap: float | None = None


def list_runs(folder: str | Path) -> list[Row]:
    """Return every run under a folder, oldest first.

    Args:
        folder: searched recursively.

    Raises:
        UnreadableFile: there is no such folder.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UnreadableFile(
            f"Expected a folder of runs; {folder} {'is a file' if folder.exists() else 'does not exist'}."
        )
    found = []
    for file in sorted(folder.rglob("run.json")):
        try:
            run = RunFolder.open(file.parent)
        except UnreadableFile:
            continue  # not a run.json of ours
        try:
            found.append(_row(run))
        except UnreadableFile as error:
            warnings.warn(f"{run.path} is not listed. {error}", stacklevel=1)
    return sorted(found, key=lambda row: (row.created, str(row.path)))


def _row(run: RunFolder) -> Row:
    with run.reading():
        return _read_row(run)


def _read_row(run: RunFolder) -> Row:
    rows, state = run.metrics(), run.latest()
    train = [row for row in rows if row.get("event") == "train"]
    score = "mean_ap" if run.info.get("data", {}).get("several") else "top1"
    judged = [row for row in rows if row.get("event") == "val" and score in row]
    tops = [float(row[score]) for row in judged]
    last = [float(row[score]) for row in judged if row.get("weights", "last") == "last"]
    steps, created = run.info.get("steps"), str(run.info.get("created", ""))
    if created:
        datetime.fromisoformat(created)  # which the page of all runs shows
    return Row(
        run.path,
        str(run.info.get("kind", "")),
        str(run.info.get("recipe_name", "")),
        str(run.info.get("model") or run.info.get("weights") or ""),
        int(state.stem.rpartition("-")[2]) if state else 0,
        int(steps) if steps is not None else None,
        float(train[-1]["loss"]) if train else None,
        last[-1] if last and score == "top1" else None,
        max(tops, default=None),
        created,
        sum(float(row["time"]["seconds"]) for row in train),
        last[-1] if last and score == "mean_ap" else None,
    )


COMPARED = ("step", "loss", "top1", "mean_ap", "best")  # the results of two runs that `diff` shows


@dataclass(frozen=True)
class Difference:
    """The differences between two runs; every pair is (first run, second run).

    Args:
        settings: name -> pair, for everything in run.json that differs.
        metrics: the first pair of lines that differ in more than times; None if there is no such pair.
        lines: numbers of lines of metrics.
        numbers: name -> pair, for the last step, the last loss, and the last and the best accuracy or mAP.
        weights: checkpoint -> largest difference of any weight; 0 if bit-identical, None if the shapes differ.
    """

    settings: dict[str, tuple[Any, Any]]
    metrics: tuple[Any, Any] | None
    lines: tuple[int, int]
    numbers: dict[str, tuple[float | None, float | None]]
    weights: dict[str, float | None] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether both runs gave bit-identical results."""
        return self.metrics is None and all(value == 0 for value in self.weights.values())


def diff(a: str | Path, b: str | Path) -> Difference:
    """Compare the settings, the metrics and the weights of two runs.

    Args:
        a: a run folder.
        b: another run folder.
    """
    one, two = RunFolder.open(a), RunFolder.open(b)
    old, new = _settings(one), _settings(two)
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
        {name: (getattr(rows[0], name), getattr(rows[1], name)) for name in COMPARED},
        {
            which: _distance(one.path / f"{which}.safetensors", two.path / f"{which}.safetensors")
            for which in KINDS
            if all((run.path / f"{which}.safetensors").is_file() for run in (one, two))
        },
    )


def timeless(run: RunFolder) -> list[dict[str, Any]]:
    """Return the lines of metrics without everything that depends on time."""
    return [{name: value for name, value in row.items() if name != "time"} for row in run.metrics()]


def _distance(a: Path, b: Path) -> float | None:
    from vitkit.checkpoints import containers

    one, two = containers.read(a)[0], containers.read(b)[0]
    if {name: t.shape for name, t in one.items()} != {name: t.shape for name, t in two.items()}:
        return None
    return max(
        (float((one[name].double() - two[name].double()).abs().max()) for name in one if one[name].numel()), default=0.0
    )


def _settings(run: RunFolder) -> dict[str, Any]:
    """Return the settings of a run, flattened. Of `same`, only the data's fingerprint is not found elsewhere."""
    info = run.info
    with run.reading():
        flat = flatten({name: value for name, value in info.items() if name != "same"})
        return flat | {"data.fingerprint": info["same"].get("data")} if "same" in info else flat
