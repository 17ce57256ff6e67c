"""The run folder: what a training run or a probe leaves behind. It can be passed anywhere weights are expected.

    run.json            the request: model, recipe, settings, data and its fingerprint, environment
    metrics.jsonl       one line per event; everything that depends on time is under "time"
    best.safetensors    the best weights on the validation part, if there is one
    last.safetensors    the latest weights
    ema.safetensors     the running average of the weights, if there is one
    state/              the training state, needed to resume
    tb/                 TensorBoard events

A run folder stands for its best weights, or its last ones if it has no best; `RUN@ema` names others. Nothing here
imports torch until weights are saved.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.errors import ConfigError, OutputError, UnreadableFile
from vitkit.model.config import ViTConfig

if TYPE_CHECKING:
    from vitkit.model.vit import ViT

KINDS = ("best", "last", "ema")  # the checkpoints of a run


def environment() -> dict[str, Any]:
    """Return the package versions and the machine, for run.json."""
    packages: dict[str, str | None] = {}
    for name in ("torch", "numpy", "pillow", "accelerate", "vitkit"):
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
        if (path / "run.json").is_file() and resume:
            run = cls.open(path)
            run.check(info)
            run._tidy()
            return run
        cls.check_place(path)
        from vitkit.checkpoints.atomic import staging

        values = {**info, "created": datetime.now(UTC).isoformat(timespec="seconds"), "environment": environment()}
        with staging(path) as private:
            (private / "run.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        run = cls(path, values)
        run._tidy()
        return run

    @staticmethod
    def check_place(path: str | Path) -> None:
        """Refuse a path where something already exists."""
        path = Path(path).expanduser()
        if (path / "run.json").is_file():
            raise OutputError(
                f"--out must be a new folder; {path} holds a run. Choose another, or continue a training run with "
                f"--resume."
            )
        left = [p for p in path.iterdir() if not p.name.startswith(".vitkit-")] if path.is_dir() else []
        if left or path.is_file():
            raise OutputError(f"--out must be a new folder; {path} exists and is not a run. Choose another.")

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open an existing run.

        Raises:
            UnreadableFile: the folder holds no readable run.json.
        """
        path = Path(path).expanduser()
        try:
            return cls(path, json.loads((path / "run.json").read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UnreadableFile(
                f"Expected a run folder at {path}, with a readable run.json; found none. `vitkit runs` lists your runs."
            ) from error

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
        data = self.info.get("data", {})
        path = data.get("path") or ""
        place = path.partition(":")[2]
        return path if place and Path(place).exists() else data.get("spec", "")

    def weights(self, which: str | None = None) -> Path:
        """Return the path of a checkpoint.

        Args:
            which: one of KINDS (default: best, or last if there is no best).

        Raises:
            UnreadableFile: there is no such checkpoint, or not yet.
        """
        from vitkit.checkpoints.source import run_weights

        return run_weights(self.path, which or "")

    def save(self, model: ViT, which: str, extra: Mapping[str, str] | None = None) -> Path:
        """Write a checkpoint in the native dialect, atomically; return its path.

        Args:
            model: the model to save.
            which: one of KINDS.
            extra: additional metadata for the file.
        """
        from vitkit.checkpoints import save

        path = self.path / f"{which}.safetensors"
        save(model, path, extra=dict(extra or {}))
        return path

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl.

        Args:
            row: JSON values; everything that depends on time goes under "time".
        """
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(dict(row)) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, without any that a crash has cut short."""
        try:
            lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        rows = []
        for line in lines:
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return rows

    def logged(self) -> int:
        """Sync metrics.jsonl to disk and return its size in bytes."""
        try:
            with open(self.path / "metrics.jsonl", "r+b") as file:  # Windows syncs only files open for writing
                os.fsync(file.fileno())
                return os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return 0

    def forget_after(self, size: int) -> None:
        """Cut metrics.jsonl to `size` bytes, to drop the lines written after the state that a run resumes from."""
        if (self.path / "metrics.jsonl").is_file():
            os.truncate(self.path / "metrics.jsonl", size)

    def latest(self) -> Path | None:
        """Return the path of the newest state, or None if nothing has been saved yet."""
        found = sorted((self.path / "state").glob("step-*.safetensors"))
        return found[-1] if found else None

    def _tidy(self) -> None:
        """Remove unfinished files of a process that was killed."""
        for folder in (self.path, self.path / "state"):
            for left in folder.glob(".vitkit-*"):
                shutil.rmtree(left, ignore_errors=True)


def whole_config(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields of a run's model, whatever the format of its run.json; empty if it names none."""
    config = info.get("config") or info.get("same", {}).get("config")
    return ViTConfig.from_dict(config).to_dict(whole=True) if config else {}


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
