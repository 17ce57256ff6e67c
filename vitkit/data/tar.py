"""WebDataset shards: tar files in which `key.jpg` stands beside `key.cls` (a number), or in which folders are classes.

The shards are listed once; the list is kept beside them (where that can be written) and images are then read at
random, straight from their place in the shard.
"""

from __future__ import annotations

import contextlib
import json
import os
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.data.base import Source, Splits
from vitkit.data.folder import ENDINGS, SPLIT_FOLDERS
from vitkit.data.string_table import StringTable, natural
from vitkit.errors import BadImage, DataError
from vitkit.types import Array

INDEX = ".vitkit-index-{}.json"  # beside the shards, one for each split


class Shards(Source):
    """Images inside tar files.

    Args:
        shards: the tar files.
        where: [N, 3] int64: shard, first byte and length of each image.
        names: `shard/member` of each image.
        labels: see Source.
        class_names: see Source.
    """

    def __init__(
        self, shards: list[Path], where: Array, names: list[str], labels: list[int], class_names: list[str]
    ) -> None:
        super().__init__(labels, class_names, StringTable(names))
        self.shards, self.where = shards, torch.from_numpy(where)
        self._open: dict[int, int] = {}  # shard -> open file

    def raw(self, i: int) -> bytes:
        """The bytes of image `i`."""
        shard, start, length = self.where[i].tolist()
        try:
            if shard not in self._open:
                self._open[shard] = os.open(self.shards[shard], os.O_RDONLY)
            # pread has no position: processes that were forked from one another share the open file safely.
            return os.pread(self._open[shard], length, start)
        except OSError as error:
            raise BadImage(f"{self.names[i]}: cannot be read ({error.strerror}).") from error

    def sizes(self) -> Array:
        """Bytes of each image."""
        return self.where[:, 2].numpy()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def __del__(self) -> None:
        for file in self.__dict__.get("_open", {}).values():
            os.close(file)


def splits(place: str) -> Splits:
    """The splits of a folder of shards: train-*.tar and val-*.tar, or train/*.tar and val/*.tar, or all of them.

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
        raise DataError(f"No .tar shards in {place!r} (compressed ones cannot be read at random: decompress them).")
    first = partial(read_shards, found["train"], "train") if "train" in found else None
    return {
        split: partial(read_shards, files, split, first if split != "train" else None) for split, files in found.items()
    }


def read_shards(shards: list[Path], split: str, training: Callable[[], Shards] | None = None) -> Shards:
    """List the images of shards, or take the list that was kept.

    Args:
        shards: the tar files.
        split: part of the kept list's name.
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
        except OSError:  # a place that cannot be written to: the list is made again next time
            pass
    rows = index["rows"]
    given = _class_names(shards[0].parent) or (list(training().class_names) if training is not None else [])
    found = sorted({row[4] for row in rows}, key=natural)
    if given and all(c.isdecimal() and int(c) < len(given) for c in found):
        class_names, number = given, {c: int(c) for c in found}
    elif all(c.isdecimal() for c in found):  # numbers are what they say, also where some are missing
        class_names = [str(n) for n in range(max((int(c) for c in found), default=-1) + 1)]
        number = {c: int(c) for c in found}
    else:
        class_names, number = given or found, {c: n for n, c in enumerate(given or found)}
        if unknown := [c for c in found if c not in number]:
            raise DataError(f"{shards[0].parent} has a class {unknown[0]!r} that is not in its list of class names.")
    where = np.array([row[:3] for row in rows], np.int64).reshape(-1, 3)
    return Shards(
        shards, where, [f"{shards[row[0]].name}/{row[3]}" for row in rows], [number[r[4]] for r in rows], class_names
    )


def _class_names(folder: Path) -> list[str]:
    for name in ("class_names.txt", "classnames.txt", "classes.txt"):
        for place in (folder, folder.parent):
            if (place / name).is_file():
                return [
                    line.strip() for line in (place / name).read_text(encoding="utf-8").splitlines() if line.strip()
                ]
    return []


def _list(number: int, shard: Path) -> list[tuple[int, int, int, str, str]]:
    """(shard, first byte, length, member, class) of each image of one shard."""
    images: dict[str, tarfile.TarInfo] = {}
    classes: dict[str, str] = {}
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                folder, _, base = member.name.rpartition("/")
                stem, _, ending = base.partition(".")
                key = f"{folder}/{stem}"
                if f".{ending.lower().rpartition('.')[2]}" in ENDINGS:
                    if key in images:
                        raise DataError(f"{shard} holds two images with the key {key.strip('/')!r}; one is expected.")
                    images[key] = member
                elif ending in ("cls", "txt", "json") and member.size < 1_000_000:
                    label = _label(ending, tar.extractfile(member).read())  # type: ignore[union-attr]
                    if label is not None:
                        classes.setdefault(key, label)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{shard} is not a complete, uncompressed tar file: {error}.") from error
    rows = []
    for key, member in images.items():
        label = classes.get(key) or key.rpartition("/")[0].rpartition("/")[2]
        if not label:
            raise DataError(
                f"{shard}: {member.name} has no class; expected {key.strip('/')}.cls beside it, or a "
                f"folder named after the class."
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
        return str(found[0]) if found else None
    return text or None
