"""Where numbers go besides metrics.jsonl: TensorBoard events in `tb/`, and wandb or mlflow through the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitkit.errors import pick
from vitkit.runtime import TRACKERS, tracker
from vitkit.training.run_folder import RunFolder, flatten

NAMES: dict[str, str] = {"tensorboard": "events in the run's tb/", **dict.fromkeys(TRACKERS, "through accelerate")}


class Trackers:
    """All trackers of a run; does nothing where there are none.

    Args:
        names: rows of NAMES. TensorBoard is left out where it is not installed, others are then an error.
        run: the run's folder.
        step: where the run starts; events after it, of a process that was killed, are hidden.
    """

    def __init__(self, names: Sequence[str], run: RunFolder, step: int = 0) -> None:
        self.board: Any = None
        self.others: list[Any] = []
        self.missing: list[str] = []
        for name in names:
            pick(NAMES, name, "tracker")
            if name != "tensorboard":
                self.others.append(tracker(name, "vitkit", str(run.path), run.path.name))
                self.others[-1].store_init_configuration(flatten(run.info.get("recipe", {}), "/"))
                continue
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self.missing.append(name)
                continue
            self.board = SummaryWriter(str(run.path / "tb"), purge_step=step or None)

    def log(self, row: Mapping[str, Any]) -> None:
        """Pass on one line of metrics.

        Args:
            row: as it stands in metrics.jsonl.
        """
        values = {
            f"{row['event']}/{name}": float(value)
            for name, value in flatten(row, "/").items()
            if name not in ("event", "step") and isinstance(value, int | float)
        }
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, row["step"])
        for other in self.others:
            other.log(values, step=row["step"])

    def close(self) -> None:
        """Write out what is left."""
        if self.board is not None:
            self.board.close()
        for other in self.others:
            other.finish()
