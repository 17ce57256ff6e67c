"""The lock of a run folder: one process at a time writes to it. The operating system releases it when the process ends.

The lock is on the open file `.lock`, not the file's existence, so nothing has to be removed after a crash.
"""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vitkit.errors import OutputError

NAME = ".lock"
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)  # another process has it
FAR = 1 << 30  # Windows locks a range of bytes and hides it from other processes: lock one that holds nothing

_held: set[int] = set()  # file descriptors that a forked worker has to close, or it would hold the lock as well


@contextmanager
def locked(folder: str | Path) -> Iterator[str | None]:
    """Hold the lock of a folder, which is created if it does not exist.

    Args:
        folder: the run folder.

    Yields:
        None, or a sentence that says why this file system has no locks; the caller goes on without one.

    Raises:
        OutputError: another process holds the lock, or the folder cannot be written to.
    """
    from vitkit.checkpoints.atomic import reason

    folder = Path(folder).expanduser()
    new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        _remove_empty(new)
        raise OutputError(f"Could not write to {folder}: {reason(error)}. Nothing there was changed.") from error
    _held.add(handle)
    note = None
    try:
        try:
            _lock(handle)
        except OSError as error:
            if error.errno in TAKEN:
                raise OutputError(
                    f"--out must be a folder that no other process writes to; {folder} is in use by {_owner(handle)}. "
                    f"Wait until it ends, stop it, or choose another --out."
                ) from error
            note = (
                f"The file system of {folder} has no locks ({error.strerror}): make sure that no other process writes "
                f"to this folder."
            )
        with suppress(OSError):  # a full disk: the lock holds without its owner's name
            os.truncate(handle, 0)
            os.lseek(handle, 0, os.SEEK_SET)
            os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
        yield note
    except BaseException:
        _remove_empty(new)
        _release(handle)
        raise
    _release(handle)


def _release(handle: int) -> None:
    _held.discard(handle)
    os.close(handle)


def _lock(handle: int) -> None:
    if os.name == "nt":
        import msvcrt

        os.lseek(handle, FAR, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _owner(handle: int) -> str:
    os.lseek(handle, 0, os.SEEK_SET)
    return os.read(handle, 200).decode(errors="replace") or "another process"


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders that were made for nothing: those that hold the lock file at most."""
    for folder in folders:
        with suppress(OSError):
            if {path.name for path in folder.iterdir()} == {NAME}:
                (folder / NAME).unlink()
            folder.rmdir()


def _close_in_child() -> None:
    for handle in _held:
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
