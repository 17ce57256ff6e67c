"""Check outputs before the work: whether they can be written, and whether they would replace something else."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vitkit.checkpoints.atomic import reason
from vitkit.errors import ConfigError, Occupied, OutputError


def check_file(path: str | Path, endings: Sequence[str] = (), option: str = "") -> Path:
    """Refuse the name of a file that cannot be written; return it with `~` expanded.

    Args:
        path: the file, as the user named it.
        endings: the endings that its name may have, in lower case (default: any).
        option: the option that named it, for the message (default: none).

    Raises:
        ConfigError: its name ends in something else.
        OutputError: it is a folder, or its folder cannot be written to.
    """
    file = Path(path).expanduser()
    if endings and file.suffix.lower() not in endings:
        expected = f"{option} must end in" if option else "Expected a file name that ends in"
        raise ConfigError(f"{expected} {' or '.join(endings)}; got {str(path)!r}.")
    if os.path.isdir(file):
        raise Occupied(f"Could not write to {path}: it is a folder. Give the name of a file.")
    _try_to_write(file.parent, path)
    return file


def check_page(path: str | Path, option: str = "--out") -> Path:
    """Refuse the name of a page that cannot be written; return it with `~` expanded. See `check_file`.

    Args:
        path: the file, as the user named it.
        option: the option that names it (default: --out).
    """
    return check_file(path, (".html", ".htm"), option)


def check_folder(path: str | Path) -> Path:
    """Refuse a folder that cannot be written to, be it there or not; return it with `~` expanded.

    Args:
        path: the folder, as the user named it.

    Raises:
        OutputError: it is a file, or nothing can be written there.
    """
    folder = Path(path).expanduser()
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise Occupied(f"Could not write to {path}: it is a file. Give the name of a folder.")
    _try_to_write(folder, path)
    return folder


def _try_to_write(folder: Path, named: str | Path) -> None:
    """Make and remove something in a folder, or the nearest one above it that exists: permissions say too little."""
    there = next((one for one in (folder, *folder.parents) if os.path.lexists(one)), Path())
    try:
        if not os.path.isdir(there):
            raise NotADirectoryError(errno.ENOTDIR, "is a file")
        os.rmdir(tempfile.mkdtemp(prefix=".vitkit-", dir=there))
    except OSError as error:
        # Linux says so of its own folders, such as /proc.
        missing = error.errno == errno.ENOENT
        why = f"nothing can be created in {there}; choose another location" if missing else reason(error)
        raise OutputError(f"Could not write to {named}: {why}.") from error
