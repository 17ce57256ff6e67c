"""A folder of results: shards, `job.json`, which says what they are, and `manifest.jsonl`, which lists those finished.

A shard is written under its final name: on a disk to a temporary file that is synced and renamed, on S3 by one request.
So it is complete or not there, and any number of machines may write it any number of times. Only the driver writes the
manifest, one line after each shard, synced. S3 cannot append, so there the manifest is written anew every few seconds;
what a killed driver had not listed yet is computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitkit.checkpoints.atomic import reason, staging
from vitkit.cluster.plan import difference
from vitkit.data import remote
from vitkit.errors import DataError, OutputError

JOB, MANIFEST = "job.json", "manifest.jsonl"
SECONDS = 5.0  # between two requests that write the manifest to S3
READERS = 8  # threads that check finished shards


@dataclass(frozen=True)
class Entry:
    """A line of the manifest: a finished shard.

    Args:
        shard: name of its file.
        rows: number of images.
        errors: how many of them could not be read.
        sha256: hash of the file's bytes.
    """

    shard: str
    rows: int
    errors: int
    sha256: str


class Folder:
    """A folder of results, on a disk that all machines share or at an s3:// address.

    Args:
        place: the folder or the address.
    """

    def __init__(self, place: str | Path) -> None:
        self.away = remote.is_remote(str(place))
        self.place = str(place) if self.away else os.path.abspath(os.path.expanduser(place))
        self.path = Path(self.place)

    def write(self, name: str, data: bytes) -> None:
        """Write a file; it is complete or not there.

        Raises:
            OutputError: the folder cannot be written to.
        """
        if not self.away:
            with staging(self.path) as beside:
                (beside / name).write_bytes(data)
            return
        try:
            remote.write(remote.join(self.place, name), data)
        except OSError as error:
            raise OutputError(f"Could not write {name} to {self.place}: {remote.why(error)}.") from error

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, or None if there is no such file."""
        try:
            if self.away:
                return remote.read(remote.join(self.place, name))
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"Could not read {name} in {self.place}: {remote.why(error)}.") from error

    def append(self, name: str, line: bytes) -> None:
        """Append a line to a file on a disk and sync it; a torn last line is ended first."""
        try:
            handle = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                size = os.fstat(handle).st_size
                torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
                os.write(handle, (b"\n" if torn else b"") + line)
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise OutputError(f"Could not write to {self.path / name}: {reason(error)}.") from error

    def tidy(self) -> None:
        """Remove the temporary folders of killed machines."""
        if not self.away:
            for left in self.path.glob(".vitkit-*"):
                shutil.rmtree(left, ignore_errors=True)


class Manifest:
    """The finished shards of a folder.

    Args:
        folder: the folder; `job.json` is written if it has none.
        job: what makes the results what they are; a folder with other results is refused.
        about: what else `job.json` says, for people.

    Raises:
        OutputError: the folder holds the results of another job.
    """

    def __init__(self, folder: Folder, job: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self.folder, self.entries = folder, dict[str, Entry]()
        self._written = time.monotonic()
        text = json.dumps({"job": dict(job), "about": dict(about)}, indent=1, sort_keys=True)
        there = folder.read(JOB)
        if there is None:
            folder.write(JOB, text.encode() + b"\n")
        else:
            try:
                old = json.loads(there)["job"]
                differs = difference(old, json.loads(text)["job"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise OutputError(f"Expected a job.json of vitkit in {folder.place}; got another file.") from error
            if differs:
                raise OutputError(
                    f"Expected an empty folder, or one with results of the same job; {folder.place} holds others "
                    f"({differs}). Choose another --out."
                )
        for line in (folder.read(MANIFEST) or b"").splitlines():
            try:
                entry = Entry(**json.loads(line))
            except (ValueError, TypeError):  # a torn line: its shard is computed again
                continue
            self.entries[entry.shard] = entry

    def keep(self, names: Iterable[str]) -> list[str]:
        """Return those of some shards that are finished, and forget the others: missing or changed since.

        Args:
            names: the shards of the plan.
        """
        listed = [name for name in names if name in self.entries]
        with ThreadPoolExecutor(READERS) as pool:
            whole = list(pool.map(lambda name: self._bytes(self.entries[name]) is not None, listed))
        self.entries = {name: self.entries[name] for name, good in zip(listed, whole, strict=True) if good}
        return list(self.entries)

    def add(self, entry: Entry) -> None:
        """List a finished shard."""
        self.entries[entry.shard] = entry
        if not self.folder.away:
            self.folder.append(MANIFEST, json.dumps(asdict(entry)).encode() + b"\n")
        elif time.monotonic() - self._written > SECONDS:
            self.close()

    def close(self) -> None:
        """Write what is not written yet."""
        if self.folder.away:
            lines = [json.dumps(asdict(entry)) + "\n" for entry in self.entries.values()]
            self.folder.write(MANIFEST, "".join(lines).encode())
            self._written = time.monotonic()

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Yield (name, bytes) of finished shards; their hashes are checked.

        Raises:
            DataError: a shard is missing or was changed.
        """
        for name in names:
            data = self._bytes(self.entries[name]) if name in self.entries else None
            if data is None:
                raise DataError(
                    f"Expected {name} in {self.folder.place} as {MANIFEST} lists it; it is missing or was changed. Run "
                    f"the same command again: it computes this shard again."
                )
            yield name, data

    def _bytes(self, entry: Entry) -> bytes | None:
        data = self.folder.read(entry.shard)
        return data if data is not None and hashlib.sha256(data).hexdigest() == entry.sha256 else None
