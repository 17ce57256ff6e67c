"""Writing that either happens or does not: into a private folder beside, fsync, rename. Training uses it too."""

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
    errno.EACCES: "permission is denied; choose a place that you may write to",
    errno.EPERM: "permission is denied; choose a place that you may write to",
    errno.EROFS: "the file system is read-only; choose another place",
    errno.ENOTDIR: "a part of the path is a file; choose another place",
    errno.EEXIST: "a part of the path is a file; choose another place",
    errno.EISDIR: "a folder is in the way; choose another name",
    errno.ENOTEMPTY: "a folder is in the way; choose another name",
}


def reason(error: OSError) -> str:
    """Why the system refused, and what to do about it."""
    return REASONS.get(error.errno or 0, f"the system says {error.strerror or error}")


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """Yield a private, empty folder; when the block ends well, the files in it move to `folder`, whole and synced.

    The files are complete on the disk before the first of them is renamed, so that whatever fails while they are
    written (no space, no memory, a crash) leaves `folder` as it was. The first file written moves first.

    Args:
        folder: where the files belong; made when it is not there.

    Raises:
        OutputError: the place cannot be written to; says why.
    """
    new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    done = False
    private: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        private = Path(tempfile.mkdtemp(prefix=".vitkit-", dir=folder))
        yield private
        files = sorted(private.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        for file in files:
            if (folder / file.name).is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a folder")
            os.chmod(file, 0o666 & ~_umask())
            _sync(file)
        for file in files:
            os.replace(file, folder / file.name)
        _sync(folder)
        done = True
    except OSError as error:
        raise OutputError(f"Could not write to {folder}: {reason(error)}. Nothing there was changed.") from error
    finally:
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)
        if not done:
            for parent in new:
                if parent.is_dir() and not any(parent.iterdir()):
                    parent.rmdir()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
