"""Atomic writing: files are written to a private folder, synced, and renamed into place. Training uses it too."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitkit.errors import OutputError

REASONS = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "your disk quota is used up; free some space",
    errno.EACCES: "permission denied; choose a location you can write to",
    errno.EPERM: "permission denied; choose a location you can write to",
    errno.EROFS: "the file system is read-only; choose another location",
    errno.ENOTDIR: "part of the path is a file; choose another location",
    errno.EEXIST: "part of the path is a file; choose another location",
    errno.EISDIR: "it is a folder; choose another name",
    errno.ENOTEMPTY: "a folder is in the way; choose another name",
}


def reason(error: OSError) -> str:
    """Say why the operating system refused, and what to do about it."""
    return REASONS.get(error.errno or 0, f"the operating system says: {error.strerror or error}")


@contextmanager
def staging(folder: Path, last: str = "", *, named: Path | None = None) -> Iterator[Path]:
    """Yield a private, empty folder; when the block succeeds, its files are synced and moved to `folder`.

    All files are complete on disk before the first is renamed, so a failure while writing (no space, no memory, a
    crash) leaves `folder` as it was.

    Args:
        folder: where the files belong; created if missing.
        last: the file that moves after all others, because it refers to them (default: any).
        named: what messages say cannot be written (default: `folder`).

    Raises:
        OutputError: `folder` cannot be written to; the message says why.
    """
    place = named or folder
    new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    done = moved = False
    private: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        private = Path(tempfile.mkdtemp(prefix=".vitkit-", dir=folder))
        yield private
        files = sorted(private.iterdir(), key=lambda file: (file.name == last, file.name))
        for file in files:
            if (folder / file.name).is_dir():
                place = folder / file.name
                raise IsADirectoryError(errno.EISDIR, "is a folder")
            os.chmod(file, 0o666 & ~_umask())
            sync(file)
        for file in files:
            os.replace(file, folder / file.name)
            moved = True
        sync(folder)
        done = True
    except OSError as error:
        rest = "Some files there may be new, others old." if moved else "Nothing there was changed."
        raise OutputError(f"Could not write to {place}: {reason(error)}. {rest}") from error
    finally:
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)
        if not done:
            for parent in new:
                if parent.is_dir() and not any(parent.iterdir()):
                    parent.rmdir()


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a private path for one file; when the block succeeds, the file is moved to `path`. See `staging`.

    Args:
        path: where the file belongs; its folder is created if missing.
    """
    with staging(path.parent, named=path) as beside:
        yield beside / path.name


def sync(path: Path) -> None:
    """Flush a file or folder to disk. Windows can only sync files opened for writing, and no folders."""
    windows = os.name == "nt"
    if windows and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
