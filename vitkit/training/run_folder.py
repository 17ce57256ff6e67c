"""The run folder: what a training or a probe leaves behind, and what stands wherever weights are taken.

    run.json            what was asked: model, recipe, settings, data and its fingerprint, environment
    metrics.jsonl       one line an event; everything about time stands under "time"
    best.safetensors    best on the validation part, if there is one
    last.safetensors    the latest
    ema.safetensors     the running average, if there is one
    state/              all that going on needs: one file a save (training only)
    tb/                 TensorBoard events

A folder means its best weights, else its last; `RUN@ema` another. Nothing here imports torch until weights are saved.
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

if TYPE_CHECKING:
    from vitkit.model.vit import ViT

KINDS = ("best", "last", "ema")  # a run's checkpoints


def environment() -> dict[str, Any]:
    """Versions and machine, as they go into run.json."""
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
    """One run on the disk. Use `create` for a new one, `open` for one that is there.

    Args:
        path: the folder.
        info: what run.json holds.
    """

    def __init__(self, path: Path, info: Mapping[str, Any]) -> None:
        self.path, self.info = path, dict(info)

    @classmethod
    def create(cls, path: str | Path, info: Mapping[str, Any], *, resume: bool = False) -> RunFolder:
        """Start a run, or with `resume` go on with the one that is there.

        Args:
            path: the folder; made when it is not there.
            info: goes into run.json, beside the environment and the date. With `resume` it must agree with what
                the run was started with in every key of `info["same"]`, where that is given.
            resume: whether a run may be there already; nothing there starts a new one.

        Raises:
            OutputError: there is something already, or the place cannot be written to.
            ConfigError: the run there was started with something else.
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
        with staging(path) as beside:
            (beside / "run.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        run = cls(path, values)
        run._tidy()
        return run

    @staticmethod
    def check_place(path: str | Path) -> None:
        """Refuse a place where something is already."""
        path = Path(path).expanduser()
        if (path / "run.json").is_file():
            raise OutputError(f"{path} holds a run already; choose another --out, or go on with it by --resume.")
        left = [p for p in path.iterdir() if not p.name.startswith(".vitkit-")] if path.is_dir() else []
        if left or path.is_file():
            raise OutputError(f"{path} is there already and holds no run; choose another --out.")

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """The run in a folder.

        Raises:
            UnreadableFile: there is none.
        """
        path = Path(path).expanduser()
        try:
            return cls(path, json.loads((path / "run.json").read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UnreadableFile(
                f"Expected a run folder with a run.json at {path}; there is none that can be read."
            ) from error

    def check(self, info: Mapping[str, Any]) -> None:
        """Refuse to go on where what decides the result differs from what the run was started with."""
        old, new = self.info.get("same", {}), json.loads(json.dumps(info.get("same", {})))
        for name in new:
            if old.get(name) != new[name]:
                difference = describe_difference(name, old.get(name), new[name])
                raise ConfigError(
                    f"{self.path} was started with {difference}; "
                    f"resume with what it had, or start another run with --out."
                )

    def weights(self, which: str | None = None) -> Path:
        """The checkpoint that the folder means.

        Args:
            which: one of KINDS; best, else last, when not given.

        Raises:
            UnreadableFile: there is no such checkpoint (yet).
        """
        from vitkit.checkpoints.source import run_weights

        return run_weights(self.path, which or "")

    def save(self, model: ViT, which: str, extra: Mapping[str, str] | None = None) -> Path:
        """Write one of the run's checkpoints, whole or not at all.

        Args:
            model: what is saved, in the native dialect.
            which: one of KINDS.
            extra: goes into the file's metadata.
        """
        from vitkit.checkpoints import save

        path = self.path / f"{which}.safetensors"
        save(model, path, extra=dict(extra or {}))
        return path

    def log(self, row: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl.

        Args:
            row: what JSON can hold; whatever has to do with time goes under "time".
        """
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(dict(row)) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; one that was cut short by a crash is left out."""
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
        """Bytes of metrics.jsonl, all of them on the disk when this returns."""
        try:
            with open(self.path / "metrics.jsonl", "rb") as file:
                os.fsync(file.fileno())
                return os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return 0

    def forget_after(self, size: int) -> None:
        """Cut metrics.jsonl to `size` bytes: what a run wrote after the state that it goes on from."""
        if (self.path / "metrics.jsonl").is_file():
            os.truncate(self.path / "metrics.jsonl", size)

    def latest(self) -> Path | None:
        """The newest state that is complete, or None where nothing was saved yet."""
        found = sorted((self.path / "state").glob("step-*.safetensors"))
        return found[-1] if found else None

    def _tidy(self) -> None:
        """Remove what a killed process had begun to write."""
        for folder in (self.path, self.path / "state"):
            for left in folder.glob(".vitkit-*"):
                shutil.rmtree(left, ignore_errors=True)


def describe_difference(name: str, old: Any, new: Any) -> str:
    """`batch_size 64, not 32`; of long values only the part that differs."""
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
