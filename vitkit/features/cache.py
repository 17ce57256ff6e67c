"""Features on disk: one SQLite file, shared by any number of processes.

A feature's key is (space, image). The space is a hash of everything that decides the numbers: the backbone's weights
and configuration, the preprocessing, the chosen feature, the precision. The image is the sha256 of its file's bytes.
So another model, another crop or an edited photo is another key, and nothing stale can be found.

Rows are written in transactions: a killed process leaves whole rows or none. Each row carries a checksum over its key
and its numbers; one that does not fit is treated as missing and computed again. A file that SQLite cannot read at all
is moved aside. SQLite's locks need a local disk: keep the cache off network file systems.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL
import torch
from torch import Tensor

from vitkit.errors import OutputError
from vitkit.features.choice import Choice
from vitkit.model.vit import ViT
from vitkit.types import Array

T = TypeVar("T")

NAME = "features.sqlite"
FORMAT = 1  # part of every key: another one, and everything is computed anew
MANY = 500  # keys of one question
PATIENCE = 60.0  # seconds that a process waits for another one's transaction

# Fields of a configuration that do not change what a frozen backbone gives.
IRRELEVANT = (
    "num_classes",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "drop_path_rate",
    "initializer_range",
    "chunk_size_feed_forward",
    "layer_scale",
)

TABLES = """
CREATE TABLE IF NOT EXISTS spaces (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, about TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS features (space INTEGER NOT NULL, image BLOB NOT NULL, numbers BLOB NOT NULL,
                                     checksum BLOB NOT NULL, UNIQUE (space, image));
"""


def backbone_hash(model: ViT) -> str:
    """A hash of all weights but the head's, and of the configuration as far as it changes features.

    Args:
        model: on any device.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in IRRELEVANT}
    h = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith("head."):
            h.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            h.update(_bytes(tensor).data)
    return h.hexdigest()


def _bytes(tensor: Tensor) -> Array:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def space_of(model: ViT, choice: Choice, precision: str = "fp32") -> dict[str, Any]:
    """Everything that decides a feature of a given file.

    Args:
        model: the backbone.
        choice: which vector.
        precision: a row of the runtime's PRECISIONS.
    """
    spec = {name: value for name, value in model.input_spec.to_dict().items() if name != "class_names"}
    return {
        "format": FORMAT,
        "weights": backbone_hash(model),
        "preprocessing": spec,
        "decoder": PIL.__version__,
        "features": choice.name,
        "precision": precision,
    }


@dataclass(frozen=True)
class Space:
    """What `space_of` describes, as the cache knows it: the number of its row, and the hash that is its key."""

    number: int
    key: str


class FeatureCache:
    """The cache in a folder. It may be used by many processes at once, and by a process after a fork.

    Args:
        folder: made when it is not there.
        note: called with a sentence when a damaged file was moved aside.
    """

    def __init__(self, folder: str | Path, note: Callable[[str], None] | None = None) -> None:
        self.path = Path(folder).expanduser() / NAME
        self.note = note or (lambda sentence: None)
        self._db: sqlite3.Connection | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"Expected a folder for the feature cache that can be written to; {folder} cannot "
                f"({error.strerror}). Choose another with --cache."
            ) from error
        self._try(lambda db: None)

    def space(self, about: Mapping[str, Any]) -> Space:
        """The space of what is described; made the first time it is asked for.

        Args:
            about: see `space_of`.
        """
        text = json.dumps(dict(about), sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()

        def work(db: sqlite3.Connection) -> Space:
            with db:
                db.execute("INSERT OR IGNORE INTO spaces (key, about) VALUES (?, ?)", (key, text))
            return Space(int(db.execute("SELECT id FROM spaces WHERE key = ?", (key,)).fetchone()[0]), key)

        return self._try(work)

    def read(self, space: Space, images: Array, width: int) -> tuple[Array, Array]:
        """Features of images, as far as they are there and whole.

        Args:
            space: see `space`.
            images: [n, 32] uint8 digests.
            width: F.

        Returns:
            [n, F] float32 and [n] booleans: whether that row is there.
        """
        keys = [image.tobytes() for image in images]
        wanted = list(dict.fromkeys(keys))
        there: dict[bytes, Array] = {}

        def work(db: sqlite3.Connection) -> None:
            for start in range(0, len(wanted), MANY):
                part = wanted[start : start + MANY]
                for image, numbers, checksum in db.execute(
                    f"SELECT image, numbers, checksum FROM features WHERE space = ? AND image IN "
                    f"({','.join('?' * len(part))})",
                    (space.number, *part),
                ):
                    if len(numbers) == 4 * width and checksum == _checksum(space, image, numbers):
                        there[image] = np.frombuffer(numbers, "<f4")

        self._try(work)
        found = np.array([key in there for key in keys], bool)
        rows = np.zeros((len(keys), width), np.float32)
        for i, key in enumerate(keys):
            if found[i]:
                rows[i] = there[key]
        return rows, found

    def write(self, space: Space, images: Array, rows: Array) -> None:
        """Keep features, all of them or (when killed meanwhile) none; what was there under their keys is replaced.

        Args:
            space: see `space`.
            images: [n, 32] uint8 digests.
            rows: [n, F].
        """
        keys = [image.tobytes() for image in images]
        blobs = [row.tobytes() for row in np.ascontiguousarray(rows, "<f4")]
        values = [(space.number, k, blob, _checksum(space, k, blob)) for k, blob in zip(keys, blobs, strict=True)]

        def work(db: sqlite3.Connection) -> None:
            with db:
                db.execute("BEGIN IMMEDIATE")
                db.executemany("INSERT OR REPLACE INTO features VALUES (?, ?, ?, ?)", values)

        self._try(work)

    def count(self, space: Space | None = None) -> int:
        """Features in a space, or in all of them."""
        where, values = ("WHERE space = ?", (space.number,)) if space is not None else ("", ())
        return self._try(lambda db: int(db.execute(f"SELECT COUNT(*) FROM features {where}", values).fetchone()[0]))

    def close(self) -> None:
        """Let go of the file; the next use opens it again. Before a fork: a connection must not be shared."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _try(self, work: Callable[[sqlite3.Connection], T]) -> T:
        for last in (False, True):
            try:
                if self._db is None:
                    self._db = _open(self.path)
                return work(self._db)
            except sqlite3.OperationalError as error:
                self.close()
                raise OutputError(
                    f"The feature cache {self.path} cannot be used ({error}); choose another place with --cache."
                ) from error
            except sqlite3.DatabaseError:  # not a database, or malformed: its content is worth nothing
                self.close()
                if last:
                    raise
                self._move_aside()
        raise AssertionError

    def _move_aside(self) -> None:
        aside = self.path.with_name(f"{NAME}.damaged-{time.time_ns()}")
        for ending in ("", "-wal", "-shm"):
            part = self.path.with_name(self.path.name + ending)
            if part.exists():
                os.replace(part, aside.with_name(aside.name + ending))
        self.note(f"The feature cache {self.path} was damaged and is now {aside.name}; features are computed anew.")


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
    until = time.monotonic() + PATIENCE
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")  # readers and a writer do not wait for each other
            db.execute("PRAGMA synchronous = NORMAL")  # a power cut may cost the last rows, never spoil them
            db.executescript(TABLES)
            return db
        except sqlite3.OperationalError as error:  # two processes that make the file at the same moment
            if "locked" not in str(error) or time.monotonic() > until:
                db.close()
                raise
            time.sleep(0.02)
        except sqlite3.DatabaseError:
            db.close()
            raise


def _checksum(space: Space, image: bytes, numbers: bytes) -> bytes:
    return hashlib.blake2b(space.key.encode() + image + numbers, digest_size=8).digest()
