"""The run folder: what a training run or a probe leaves behind. It can be passed anywhere weights are expected.

    run.json            the request: model, recipe, settings, data and its fingerprint, environment
    config.toml         the options that repeat the run: `vitkit train --config RUN/config.toml --out NEW`
    metrics.jsonl       one line per event; everything that depends on time is under "time"
    best.safetensors    the best weights on the validation part, if there is one
    last.safetensors    the latest weights
    ema.safetensors     the running average of the weights, if there is one
    lora.safetensors    adapters of the best weights, to be merged into the backbone they name; only with --lora
    kernels.json        on CUDA, the algorithms that were chosen by timing, so that a resumed run rounds alike
    state/              the last two training states, needed to resume; each has checksums and a copy of run.json
    tb/                 TensorBoard events
    .lock               locked while a process writes to the folder

A run folder stands for its best weights, or its last ones if it has no best; `RUN@ema` names others. Nothing here
imports torch until weights are saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.errors import CheckpointError, ConfigError, Occupied, OutputError, UnreadableFile, VitkitError
from vitkit.model.config import config_from_dict
from vitkit.training.lock import NAME

if TYPE_CHECKING:
    from torch import Tensor

    from vitkit.model.backbone import Backbone

KINDS = ("best", "last", "ema")  # the checkpoints of a run
# Of the lines of metrics: events that belong to a step, and what are numbers.
OF_STEPS = {"train", "val", "epoch", "stop"}
NUMBERS = {"step", "epoch", "loss", "accuracy", "gradient", "lr", "top1", "top5", "mean_ap", "images", "n"}
TIMES = {"seconds", "images_per_second", "waiting"}


def environment() -> dict[str, Any]:
    """Return the package versions and the machine, for run.json."""
    import torch

    packages: dict[str, str | None] = {"torch": str(torch.__version__)}  # names its build, which metadata may not
    for name in ("numpy", "pillow", "accelerate", "vitkit"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "cpus": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "command": sys.argv,
    }


class Header:
    """The metadata of a state file: JSON values and two checksums, one of the values and one of the tensors.

    The values can be checked on their own, without reading the tensors.

    Args:
        values: `progress` and `run`, the contents of run.json.
        tensor_sum: hexadecimal checksum of the tensors; unknown until they have been written.
    """

    KEY = "state"
    UNKNOWN = "?" * 64

    def __init__(self, values: Mapping[str, Any], tensor_sum: str = UNKNOWN) -> None:
        self.values, self.tensor_sum = values, tensor_sum

    def metadata(self) -> dict[str, str]:
        """Return the metadata to write."""
        text = json.dumps(self.values)
        return {self.KEY: f"{self.tensor_sum} {hashlib.sha256(text.encode()).hexdigest()} {text}"}

    def fill_in(self, path: Path, tensor_sum: str) -> None:
        """Put the checksum of the tensors in its place in a file that was written without it."""
        with open(path, "r+b") as file:
            start = file.read(int.from_bytes(file.read(8), "little"))
            file.seek(8 + start.index(self.UNKNOWN.encode()))
            file.write(tensor_sum.encode())
        self.tensor_sum = tensor_sum

    @classmethod
    def of(cls, path: Path) -> Header:
        """Read the header of a state file without its tensors, and without torch.

        Raises:
            UnreadableFile: the header is damaged.
            CheckpointError: the file was written by another version.
        """
        try:
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                metadata = json.loads(file.read(min(size, os.fstat(file.fileno()).st_size)))["__metadata__"]
            if "progress" in metadata:
                raise CheckpointError(f"{path} was written by an older version of vitkit; start a new run.")
            tensor_sum, own_sum, text = metadata[cls.KEY].split(" ", 2)
            if own_sum == hashlib.sha256(text.encode()).hexdigest():
                return cls(json.loads(text), tensor_sum)
        except OSError as error:
            raise UnreadableFile(f"{path} cannot be read: {error.strerror}.") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UnreadableFile(f"{path} is damaged: its header is not valid.") from error
        raise UnreadableFile(f"{path} is damaged: the checksum of its header does not match.")


def states_in(folder: Path) -> list[Path]:
    """Return the state files in a run's `state` folder, newest first."""
    return sorted((path for path in folder.glob("step-*.safetensors") if path.is_file()), reverse=True)


class RunFolder:
    """A run on disk. `create` makes a new one, `open` opens an existing one.

    Args:
        path: the folder.
        info: the contents of run.json.
    """

    def __init__(self, path: Path, info: Mapping[str, Any]) -> None:
        self.path, self.info = path, dict(info)

    @classmethod
    def create(cls, path: str | Path, info: Mapping[str, Any], *, resume: bool = False) -> RunFolder:
        """Create a run folder, or open the existing one with `resume`.

        Args:
            path: the folder; created if it does not exist.
            info: written to run.json together with the environment and the date. A resumed run must agree with it in
                every key of `info["same"]`.
            resume: whether to open an existing run; if there is none, a new one is created.

        Raises:
            OutputError: something else is already there, or the folder cannot be written to.
            ConfigError: the existing run was started with different values.
        """
        path = Path(path).expanduser()
        if resume and cls.exists(path):
            run = cls.open(path, resume=True)
            run.check(info)
            run._tidy()
            if not (path / "run.json").is_file() or read_object(path / "run.json") != run.info:
                run.write_info()
            return run
        cls.check_place(path)
        values = {**info, "created": datetime.now(UTC).isoformat(timespec="seconds"), "environment": environment()}
        run = cls(path, values)
        run.write_info()
        run._tidy()
        return run

    def write_info(self) -> None:
        """Write run.json."""
        from vitkit.checkpoints.atomic import staging

        with staging(self.path) as private:
            (private / "run.json").write_text(json.dumps(self.info, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def exists(path: Path) -> bool:
        """Return whether there is a run, be it one whose run.json has been lost."""
        return (path / "run.json").is_file() or bool(states_in(path / "state"))

    @staticmethod
    def check_place(path: str | Path) -> None:
        """Refuse a path where something already exists, or where nothing can be written."""
        path = Path(path).expanduser()
        try:
            str(path).encode("utf-8")  # run.json and TensorBoard name it
        except UnicodeEncodeError:
            raise OutputError(f"--out must be a name in UTF-8; got {str(path)!a}. Choose another.") from None
        if RunFolder.exists(path):
            raise Occupied(
                f"--out must be a new folder; {path} holds a run. Choose another, or continue a training run with "
                f"--resume."
            )
        left = [p for p in path.iterdir() if not p.name.startswith((".vitkit-", NAME))] if path.is_dir() else []
        if left or path.is_file():
            raise Occupied(f"--out must be a new folder; {path} exists and is not a run. Choose another.")
        from vitkit.checkpoints.outputs import check_folder

        check_folder(path)

    @classmethod
    def open(cls, path: str | Path, *, resume: bool = False) -> RunFolder:
        """Open an existing run. If run.json cannot be read, the copy in the newest intact state stands in for it.

        Args:
            path: the folder.
            resume: whether the run is to be resumed: if run.json differs from its copy, the copy is used.

        Raises:
            UnreadableFile: the folder holds no run, or none that can be read.
        """
        path = Path(path).expanduser()
        info = read_object(path / "run.json")
        if info is not None and not resume:
            return cls(path, info)
        copy = next(filter(None, map(_copied_info, states_in(path / "state"))), None)
        if info is None and copy is None:
            if not (path / "run.json").is_file():
                raise UnreadableFile(
                    f"Expected a run folder at {path}; it has no run.json. `vitkit runs` lists your runs."
                )
            raise UnreadableFile(
                f"Expected a run folder at {path}, with a readable run.json; its run.json is damaged, and no state has "
                f"a copy. Start another run with a new --out."
            )
        if info is None:
            warnings.warn(f"{path / 'run.json'} is missing or damaged; its copy in state/ is used.", stacklevel=1)
        elif copy is not None and copy != info:
            what = describe_difference("run.json", copy, info)
            warnings.warn(f"{path} has {what} since its last save; the copy in state/ is used.", stacklevel=1)
        return cls(path, copy or info or {})

    def check(self, info: Mapping[str, Any]) -> None:
        """Refuse to resume if anything that determines the result differs from when the run was started."""
        old, new = (
            json.loads(json.dumps({**values.get("same", {}), "config": whole_config(values)}))
            for values in (self.info, info)
        )
        for name in new:
            if old.get(name) != new[name]:
                difference = f"other {name} (images, names or labels differ)"
                if not name.endswith("data"):
                    difference = describe_difference(name, old.get(name), new[name])
                raise ConfigError(
                    f"{self.path} was started with {difference}. Resume with the original value, or start another "
                    f"run with a new --out."
                )

    @property
    def data(self) -> str:
        """The run's data: its absolute path if it is still there, otherwise what the user gave; empty if unknown."""
        with self.reading():
            data = self.info.get("data", {})
            path, spec = str(data.get("path") or ""), str(data.get("spec", ""))
            place = path.partition(":")[2]
            return path if place and Path(place).exists() else spec

    def weights(self, which: str | None = None) -> Path:
        """Return the path of a checkpoint.

        Args:
            which: one of KINDS (default: best, or last if there is no best).

        Raises:
            UnreadableFile: there is no such checkpoint, or not yet.
        """
        from vitkit.checkpoints.source import run_weights

        return run_weights(self.path, which or "")

    def save(
        self,
        model: Backbone,
        which: str,
        extra: Mapping[str, str] | None = None,
        pretraining: Mapping[str, Tensor] | None = None,
    ) -> Path:
        """Write a checkpoint in the native dialect, atomically; return its path.

        Args:
            model: the model to save.
            which: one of KINDS.
            extra: additional metadata for the file.
            pretraining: tensors that pre-training has beside the model.
        """
        from vitkit.checkpoints import save

        path = self.path / f"{which}.safetensors"
        with self.writing():
            save(model, path, extra=dict(extra or {}), pretraining=pretraining)
            if self.info.get("lora") and (which == "best" or not (self.path / "best.safetensors").is_file()):
                from vitkit.training.lora import write

                write(self.path / "lora.safetensors", model, self.info["lora"])
        return path

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context for writing to the folder.

        Raises:
            OutputError: the folder has disappeared, or cannot be written to.
        """
        from vitkit.checkpoints.atomic import reason

        gone = OutputError(
            f"The run folder {self.path} no longer exists: it was deleted, renamed or unmounted. If it was renamed, "
            f"resume it with --out and its new name."
        )
        if not self.path.is_dir():
            raise gone
        try:
            yield
        except (OSError, OutputError) as error:
            if not self.path.is_dir():
                raise gone from error
            if isinstance(error, OutputError):
                raise
            raise OutputError(f"Could not write to {self.path}: {reason(error)}.") from error

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context for using what the folder's files say.

        Raises:
            UnreadableFile: a value is missing or of another kind than vitkit writes.
        """
        try:
            yield
        except VitkitError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise UnreadableFile(
                f"Expected the run {self.path} as vitkit wrote it; its run.json, metrics.jsonl or evaluation.json was "
                f"damaged or edited ({type(error).__name__}: {error})."
            ) from error

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl.

        Args:
            row: JSON values; everything that depends on time goes under "time".
        """
        with self.writing(), open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(dict(row)) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, without any that were cut short or damaged."""
        path = self.path / "metrics.jsonl"
        try:
            lines = path.read_bytes().splitlines() if path.is_file() else []
        except OSError:
            return []
        rows = []
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if _is_event(row):
                rows.append(row)
        return rows

    def final_score(self, which: str = "last") -> float:
        """Return the accuracy (or mAP) of the final weights on the validation part: not of the best, which flatter.

        Args:
            which: `last` or `ema` (default: last).

        Raises:
            UnreadableFile: metrics.jsonl does not have it, because it was lost or damaged.
        """
        for row in reversed(self.metrics()):
            score = row.get("top1", row.get("mean_ap"))
            if row["event"] == "val" and row.get("weights") == which and isinstance(score, int | float):
                return score
        raise UnreadableFile(
            f"Expected a validation of the final weights in {self.path / 'metrics.jsonl'}; it has none. Remove the "
            f"folder {self.path} and repeat the command with --resume, to train it again."
        )

    def logged(self) -> int:
        """Sync metrics.jsonl to disk and return its size in bytes."""
        with self.writing():
            if not self.log_size():
                return 0
            with open(self.path / "metrics.jsonl", "r+b") as file:  # Windows syncs only files open for writing
                os.fsync(file.fileno())
                return os.fstat(file.fileno()).st_size

    def log_size(self) -> int:
        """Return the size of metrics.jsonl in bytes; 0 if there is none."""
        try:
            return (self.path / "metrics.jsonl").stat().st_size
        except OSError:
            return 0

    def forget_after(self, size: int) -> int:
        """Drop the lines of metrics.jsonl that were written after the state that a run resumes from.

        Args:
            size: the size of the file in bytes when that state was saved.

        Returns:
            The number of bytes that are missing: 0, unless the file was shortened since.
        """
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return size
        with self.writing(), open(path, "r+b") as file:
            kept = file.read(size)
            if len(kept) < size:  # never extend the file: it would be padded with zeros
                kept = kept[: kept.rfind(b"\n") + 1]
            file.truncate(len(kept))
        return size - len(kept)

    def states(self) -> list[Path]:
        """Return the paths of the states, newest first."""
        return states_in(self.path / "state")

    def latest(self) -> Path | None:
        """Return the path of the newest state, or None if nothing has been saved yet."""
        return next(iter(self.states()), None)

    def _tidy(self) -> None:
        """Remove unfinished files of a process that was killed."""
        for folder in (self.path, self.path / "state"):
            for left in folder.glob(".vitkit-*"):
                shutil.rmtree(left, ignore_errors=True)


def whole_config(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields of a run's model, whatever the format of its run.json; empty if it names none."""
    config = info.get("config") or info.get("same", {}).get("config")
    return config_from_dict(config).to_dict(whole=True) if config else {}


def _is_event(row: Any) -> bool:
    """Return whether a value is a line of metrics: an event whose numbers are numbers."""
    if not isinstance(row, dict) or not isinstance(row.get("event"), str):
        return False
    time = row.get("time", {})
    if not isinstance(time, dict) or (row["event"] in OF_STEPS and not isinstance(row.get("step"), int)):
        return False
    values = [*(row.get(name) for name in NUMBERS), *(time.get(name) for name in TIMES)]
    return all(
        value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63) for value in values
    )


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _copied_info(state: Path) -> dict[str, Any] | None:
    """Return the copy of run.json in a state, or None if it is damaged."""
    try:
        return Header.of(state).values.get("run")
    except CheckpointError:
        return None


def describe_difference(name: str, old: Any, new: Any) -> str:
    """Describe a difference in words: `batch_size 64, not 32`; of a mapping, only the keys that differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        parts = [describe_difference(key, old.get(key), new.get(key)) for key in keys[:4]]
        return f"another {name} ({'; '.join(parts)}{'; ...' if len(keys) > 4 else ''})"
    short = [text if len(text) < 60 else text[:57] + "..." for text in (json.dumps(old), json.dumps(new))]
    return f"{name} {short[0]}, not {short[1]}"


def flatten(values: Mapping[str, Any], separator: str = ".", before: str = "") -> dict[str, Any]:
    """Turn nested mappings into one: {"a": {"b": 1}} -> {"a.b": 1}. Values of None are left out.

    Args:
        values: the nested mapping, such as `RunFolder.info`.
        separator: placed between the names.
        before: placed before every name.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, separator, f"{before}{name}{separator}")
        elif value is not None:
            flat[before + name] = value
    return flat
