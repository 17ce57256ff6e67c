"""WebDataset shards: tar files with `key.jpg` next to `key.cls` (a number), or with a folder per class.

The shards are listed once, and the list is saved next to them if that folder can be written to. Images are then read in
any order, directly from their place in a shard.
"""

from __future__ import annotations

import contextlib
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from vitkit.data.base import Source, Splits, excerpt
from vitkit.data.files import ENDINGS, irregular
from vitkit.data.folder import SPLIT_FOLDERS
from vitkit.data.string_table import StringTable, natural
from vitkit.errors import BadImage, DataError
from vitkit.types import Array

CLASS_FILES = ("class_names.txt", "classnames.txt", "classes.txt")  # beside the shards or above them
INDEX = ".vitkit-index-{}.json"  # next to the shards, one per split


class Shards(Source):
    """Images in tar files.

    Args:
        shards: the tar files.
        where: [N, 3] int64, the shard, first byte and length of each image.
        names: `shard/member`, the name of each image.
        labels: see Source.
        class_names: see Source.
    """

    def __init__(
        self, shards: Sequence[str | Path], where: Array, names: list[str], labels: list[int], class_names: list[str]
    ) -> None:
        super().__init__(labels, class_names, StringTable(names))
        self.shards, self.where = shards, torch.from_numpy(where)

    def raw(self, i: int) -> bytes:
        """Return the bytes of image `i`."""
        shard, start, length = self.where[i].tolist()
        try:
            with open(self.shards[shard], "rb") as file:
                file.seek(start)
                return file.read(length)
        except OSError as error:
            raise BadImage(f"{self.names[i]}: cannot be read ({error.strerror}).") from error

    def excerpt(self, i: int, whole: bool) -> tuple[int, bytes]:
        """See Source."""
        shard, start, length = self.where[i].tolist()
        try:
            with open(self.shards[shard], "rb", buffering=0) as file:
                return length, excerpt(file, start, length, whole)
        except OSError:
            return -1, b""


def splits(place: str) -> Splits:
    """Return the splits of a folder of shards: train-*.tar and val-*.tar, train/*.tar and val/*.tar, or just *.tar.

    Args:
        place: the folder, or one .tar file.
    """
    path = Path(place).expanduser()
    if path.is_file():
        return {"all": partial(read_shards, [path], "all")}
    found: dict[str, list[Path]] = {}
    for split, words in SPLIT_FOLDERS.items():
        for word in words:
            files = sorted([*path.glob(f"{word}/*.tar"), *path.glob(f"{word}*.tar")], key=lambda f: natural(f.name))
            if files:
                found.setdefault(split, []).extend(f for f in files if f not in found.get(split, []))
    if "train" not in found:
        found = {"all": sorted(path.glob("*.tar"), key=lambda f: natural(f.name))}
    if not any(found.values()):
        raise DataError(f"Expected .tar files in {place!r}; there are none. Decompress .tar.gz files first.")
    first = partial(read_shards, found["train"], "train") if "train" in found else None
    return {
        split: partial(read_shards, files, split, first if split != "train" else None) for split, files in found.items()
    }


def read_shards(shards: list[Path], split: str, training: Callable[[], Shards] | None = None) -> Shards:
    """List the images in shards, or read the saved list.

    Args:
        shards: the tar files.
        split: the split, part of the saved list's name.
        training: opens the training split, which decides the classes.
    """
    kept = shards[0].parent / INDEX.format(split)
    stamp = [[s.name, s.stat().st_size, s.stat().st_mtime_ns] for s in shards]
    index: Any = None
    with contextlib.suppress(OSError, ValueError):
        index = json.loads(kept.read_text(encoding="utf-8"))
    if not isinstance(index, dict) or index.get("stamp") != stamp:
        index = {"stamp": stamp, "rows": [row for n, shard in enumerate(shards) for row in _list(n, shard)]}
        try:
            part = kept.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps(index), encoding="utf-8")
            part.replace(kept)
        except OSError:  # the folder cannot be written to, so the list is made again next time
            pass
    rows = index["rows"]
    given = _class_names(shards[0].parent) or (list(training().class_names) if training is not None else [])
    labels, class_names = labelled(rows, given, str(shards[0].parent))
    where = np.array([row[:3] for row in rows], np.int64).reshape(-1, 3)
    return Shards(shards, where, [f"{shards[row[0]].name}/{row[3]}" for row in rows], labels, class_names)


def labelled(rows: Sequence[Sequence[Any]], given: list[str], place: str) -> tuple[list[int], list[str]]:
    """Return the label of each image and the names of the classes.

    Args:
        rows: what `members` returns; the last item of each is the class.
        given: names of the classes, if a file or the training split gives them.
        place: where the shards are, for the message.
    """
    found = sorted({row[4] for row in rows}, key=natural)
    if given and all(c.isdecimal() and int(c) < len(given) for c in found):
        class_names, number = given, {c: int(c) for c in found}
    elif all(c.isdecimal() for c in found):  # a number is a class's index, even if other numbers are missing
        class_names = [str(n) for n in range(max((int(c) for c in found), default=-1) + 1)]
        number = {c: int(c) for c in found}
    else:
        class_names, number = given or found, {c: n for n, c in enumerate(given or found)}
        if unknown := [c for c in found if c not in number]:
            raise DataError(f"{place} has a class {unknown[0]!r} that is not in its list of classes.")
    return [number[row[4]] for row in rows], class_names


def _class_names(folder: Path) -> list[str]:
    for name in CLASS_FILES:
        for place in (folder, folder.parent):
            if (place / name).is_file():
                try:
                    lines = (place / name).read_text(encoding="utf-8-sig").splitlines()
                except (OSError, UnicodeDecodeError) as error:
                    raise DataError(f"Expected class names in UTF-8 at {place / name}: {error}.") from error
                return [line.strip() for line in lines if line.strip()]
    return []


def _list(number: int, shard: Path) -> list[tuple[int, int, int, str, str]]:
    """Return what `members` returns of one file."""
    try:
        if what := irregular(shard):
            raise DataError(f"Expected a tar file at {shard}; it is {what}.")
        with open(shard, "rb") as file:
            return members(number, str(shard), file)
    except OSError as error:
        raise DataError(f"Expected a complete, uncompressed tar file at {shard}: {error}.") from error


def members(number: int, shard: str, file: BinaryIO) -> list[tuple[int, int, int, str, str]]:
    """Return (shard, first byte, length, member, class) of each image in one shard.

    Args:
        number: the shard's number, the first item of each row.
        shard: its name, for messages.
        file: the tar file; only headers and labels are read.

    Raises:
        DataError: it is not a complete tar file, or an image has no class.
    """
    images: dict[str, tarfile.TarInfo] = {}
    classes: dict[str, str] = {}
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                folder, _, base = member.name.rpartition("/")
                stem, _, ending = base.partition(".")
                key = f"{folder}/{stem}"
                if f".{ending.lower().rpartition('.')[2]}" in ENDINGS:
                    if key in images:
                        raise DataError(f"{shard}: expected one image per key; got two for {key.strip('/')!r}.")
                    images[key] = member
                elif ending in ("cls", "txt", "json") and member.size < 1_000_000:
                    label = _label(ending, tar.extractfile(member).read())  # type: ignore[union-attr]
                    if label is not None:
                        classes.setdefault(key, label)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"Expected a complete, uncompressed tar file at {shard}: {error}.") from error
    rows = []
    for key, member in images.items():
        label = classes.get(key) or key.rpartition("/")[0].rpartition("/")[2]
        if not label:
            raise DataError(
                f"{shard}: expected {key.strip('/')}.cls next to {member.name}, or a folder named after its class; "
                f"it has neither."
            )
        rows.append((number, member.offset_data, member.size, member.name, label))
    return rows


def _label(ending: str, data: bytes) -> str | None:
    text = data.decode("utf-8", "replace").strip()
    if ending == "json":
        try:
            values = json.loads(text)
        except ValueError:
            return None
        found = [values[k] for k in ("label", "class", "cls") if k in values] if isinstance(values, dict) else []
        return str(found[0]) if found and found[0] is not None else None
    return text or None
