"""A finished run in Python: its curves, its weights, its report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from vitkit.checkpoints import load
from vitkit.explanations import draw
from vitkit.model.backbone import Backbone
from vitkit.training.run_folder import RunFolder
from vitkit.types import Plotted

NAMES = {"train": ("train_loss", "train_acc"), "val": ("test_loss", "test_acc")}  # the lessons' words


def _score(row: dict[str, Any]) -> float:
    """Return the accuracy or mAP of a line of metrics; NaN if it has none."""
    return float(next((row[name] for name in ("accuracy", "top1", "mean_ap") if name in row), math.nan))


class Run(Plotted):
    """A run folder: what `vitkit.train` returns.

    Args:
        path: the folder.

    Raises:
        UnreadableFile: there is no run in it.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = RunFolder.open(path)
        self.path, self.info = self.folder.path, self.folder.info

    @property
    def results(self) -> dict[str, list[float]]:
        """Loss and accuracy per epoch, as the lessons keep them: train_loss, train_acc, test_loss, test_acc.

        The `test` values are those of the validation part, with the weights at the end of the epoch; without such a
        part they are empty. A run of many epochs is measured every few epochs. Where answers are neither right nor
        wrong, as in a regression, accuracies are NaN. With several labels per image, test_acc is the mAP.
        """
        rows = self.folder.metrics()
        epochs = [row for row in rows if row.get("event") == "epoch"]
        tested = [row for row in rows if row.get("event") == "val" and row.get("weights", "last") == "last"]
        return {
            "train_loss": [row["loss"] for row in epochs],
            "train_acc": [row.get("accuracy", math.nan) for row in epochs],
            "test_loss": [row["loss"] for row in tested],
            "test_acc": [_score(row) for row in tested],
        }

    def curves(self) -> dict[str, tuple[list[int], list[float]]]:
        """{name: (steps, values)} of every measured loss and accuracy, under the names of `results`."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for row in self.folder.metrics():
            if row.get("event") in NAMES and row.get("weights", "last") == "last":
                values = (row["loss"], _score(row))
                for name, value in zip(NAMES[row["event"]], values, strict=True):
                    steps, numbers = found.setdefault(name, ([], []))
                    steps.append(row["step"])
                    numbers.append(value)
        return found

    def plot(self) -> Any:
        """Draw loss and accuracy over the steps, of training and of validation."""
        return draw.curves(
            {
                title: {words: curve for name, words in names.items() if (curve := self.curves().get(name))}
                for title, names in {
                    "Loss": {"train_loss": "training", "test_loss": "validation"},
                    "Accuracy": {"train_acc": "training", "test_acc": "validation"},
                }.items()
            }
        )

    def model(self, which: str | None = None) -> Backbone:
        """Load its weights: `best`, `last` or `ema` (default: the best there are)."""
        return load(self.folder.weights(which) if which else self.path)

    def __repr__(self) -> str:
        last = {name: values[-1] for name, values in self.results.items() if values}
        return f"Run({str(self.path)!r}, " + ", ".join(f"{name} {value:.4f}" for name, value in last.items()) + ")"
