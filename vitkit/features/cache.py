"""The feature cache: one SQLite file that any number of processes can share.

The key of a feature is (space, image). The space is a hash of everything that determines the numbers: the backbone's
weights and configuration, the preprocessing, the chosen feature and the precision. The image is the SHA-256 of its
file's bytes. Another model, another crop or an edited photo has another key, so a stale feature is never found.

Rows are written in transactions: a killed process leaves complete rows or none. Each row has a checksum of its key and
its numbers; a row whose checksum is wrong counts as missing and is computed again. A file that SQLite cannot read is
renamed and replaced. SQLite's locks need a local disk, so keep the cache off network file systems.
"""

from __future__ import annotations

import hashlib
import itertools
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

from vitkit.data.gpu import Decode, gpu_decoder
from vitkit.errors import OutputError
from vitkit.features.choice import Choice
from vitkit.model.backbone import Backbone
from vitkit.types import Array

T = TypeVar("T")

NAME = "features.sqlite"
FORMAT = 1  # part of every key: raise it, and all features are computed again
KEYS = 500  # images per query; old builds of SQLite allow 999 variables
ROWS = 240  # rows per statement, of four variables each
QUICK = 2047  # bytes that hashlib takes without letting Python's other threads run, for which it would then wait
PAGE, LOG = 2**14, 2**26  # bytes per page, and bytes of new rows after which SQLite waits for the disk
TIMEOUT = 60.0  # seconds to wait for another process's transaction

# Configuration fields that do not change the features of a frozen backbone.
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


def backbone_hash(model: Backbone) -> str:
    """Hash all weights except the head's, and the part of the configuration that changes features.

    Args:
        model: the backbone, on any device.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in IRRELEVANT}
    h = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith("head."):
            h.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            h.update(_bytes(tensor).data)
    return h.hexdigest()


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor).data).hexdigest()


def _bytes(tensor: Tensor) -> Array:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def space_of(model: Backbone, choice: Choice, precision: str = "fp32", decode: Decode = "cpu") -> dict[str, Any]:
    """Describe everything but the image that determines a feature.

    Args:
        model: the backbone.
        choice: the feature.
        precision: how it is computed: a precision, and the engine if it is not the plain model.
        decode: where images are decoded.
    """
    return {
        **outline(model, choice, precision, decode),
        "weights": backbone_hash(model),
        **({"projection": _hash(model.head.weight)} if choice.name == "projected" else {}),  # type: ignore[arg-type]
    }


def outline(model: Backbone, choice: Choice, precision: str, decode: Decode) -> dict[str, Any]:
    """Describe what `space_of` does except for the weights, which take time to hash; the arguments are the same."""
    return {
        "format": FORMAT,
        "preprocessing": model.input_spec.preprocessing,
        "decoder": PIL.__version__ if decode == "cpu" else gpu_decoder(),
        "features": choice.name,
        "precision": precision,
    }


@dataclass(frozen=True)
class Space:
    """The cache's record of what `space_of` describes: its row number, and the hash that is its key."""

    number: int
    key: str


class FeatureCache:
    """The feature cache in a folder. Several processes may use it at once; call `close` before a fork. Only one thread
    may use it at a time. It is closed when nothing holds it any more: results read their features from it later.

    Args:
        folder: created if it does not exist.
        note: called with a message when a damaged file has been renamed.

    Raises:
        OutputError: the folder cannot be written to.
    """

    _db: sqlite3.Connection | None = None

    def __init__(self, folder: str | Path, note: Callable[[str], None] | None = None) -> None:
        self.path = Path(folder).expanduser() / NAME
        self.note = note or (lambda sentence: None)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"Expected a writable folder for the feature cache; {folder} is not ({error.strerror}). Choose "
                f"another one with --cache."
            ) from error
        self._try(lambda db: None)

    def space(self, about: Mapping[str, Any]) -> Space:
        """Return the space with this description; create it if there is none yet.

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

    def holds(self, space: Space) -> bool:
        """Return whether there is a feature in a space, intact or not."""
        found = "SELECT EXISTS (SELECT 1 FROM features WHERE space = ?)"
        return self._try(lambda db: bool(db.execute(found, (space.number,)).fetchone()[0]))

    def knows(self, about: Mapping[str, Any]) -> bool:
        """Return whether any space has this outline.

        Args:
            about: see `outline`.
        """
        wanted = json.loads(json.dumps(dict(about)))

        def work(db: sqlite3.Connection) -> bool:
            spaces = (json.loads(text) for (text,) in db.execute("SELECT about FROM spaces"))
            return any(wanted.items() <= space.items() for space in spaces)

        return self._try(work)

    def read(self, space: Space, images: Array, width: int) -> tuple[Array, Array]:
        """Look up the features of images.

        Args:
            space: see `space`.
            images: [n, 32] uint8 digests.
            width: F, values per feature.

        Returns:
            features [n, F] float32, and whether each row was found intact, [n] bool; the other rows are zeros.
        """
        keys = [image.tobytes() for image in images]
        wanted = list(dict.fromkeys(keys))
        there: dict[bytes, Array] = {}

        def work(db: sqlite3.Connection) -> None:
            for start in range(0, len(wanted), KEYS):
                part = wanted[start : start + KEYS]
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
        """Store features in one transaction, replacing those with the same keys.

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
                # Not `executemany`, which would wait for Python's other threads after each row.
                for start in range(0, len(values), ROWS):
                    part = values[start : start + ROWS]
                    many = ", ".join(["(?, ?, ?, ?)"] * len(part))
                    db.execute(f"INSERT OR REPLACE INTO features VALUES {many}", list(itertools.chain(*part)))

        self._try(work)

    def count(self, space: Space | None = None) -> int:
        """Count the features in a space (default: in all spaces)."""
        where, values = ("WHERE space = ?", (space.number,)) if space is not None else ("", ())
        return self._try(lambda db: int(db.execute(f"SELECT COUNT(*) FROM features {where}", values).fetchone()[0]))

    def close(self) -> None:
        """Close the file; the next use opens it again. Needed before a fork, which must not share a connection."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def __del__(self) -> None:
        self.close()

    def _try(self, work: Callable[[sqlite3.Connection], T]) -> T:
        for last in (False, True):
            try:
                if self._db is None:
                    self._db = _open(self.path)
                return work(self._db)
            except sqlite3.OperationalError as error:
                self.close()
                raise OutputError(
                    f"Expected to read and write the feature cache {self.path}; SQLite says: {error}. Choose another "
                    f"folder with --cache."
                ) from error
            except sqlite3.DatabaseError:  # not a database, or malformed: nothing in it can be trusted
                self.close()
                if last:
                    raise
                self._move_aside()
        raise AssertionError

    def _move_aside(self) -> None:
        aside = self.path.with_name(f"{NAME}.damaged-{time.time_ns()}")
        try:
            for ending in ("", "-wal", "-shm"):
                part = self.path.with_name(self.path.name + ending)
                if part.exists():
                    os.replace(part, aside.with_name(aside.name + ending))
        except OSError as error:  # on Windows also while another process has the file open
            raise OutputError(
                f"The feature cache {self.path} is damaged and cannot be renamed ({error.strerror}). Delete it, or "
                f"choose another folder with --cache."
            ) from error
        self.note(
            f"The feature cache {self.path} was damaged and has been renamed to {aside.name}; its features are "
            f"computed again."
        )


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=TIMEOUT, isolation_level=None, check_same_thread=False)
    until = time.monotonic() + TIMEOUT
    while True:
        try:
            db.execute(f"PRAGMA page_size = {PAGE}")  # of a new file: few rows fit into SQLite's own 4096 bytes
            db.execute("PRAGMA journal_mode = WAL")  # readers and a writer do not block each other
            db.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose the last rows but never corrupts any
            db.execute(f"PRAGMA wal_autocheckpoint = {LOG // PAGE}")
            db.executescript(TABLES)
            return db
        except sqlite3.OperationalError as error:  # two processes create the file at the same moment
            if "locked" not in str(error) or time.monotonic() > until:
                db.close()
                raise
            time.sleep(0.02)
        except sqlite3.DatabaseError:
            db.close()
            raise


def _checksum(space: Space, image: bytes, numbers: bytes) -> bytes:
    h = hashlib.blake2b(space.key.encode() + image, digest_size=8)
    for start in range(0, len(numbers), QUICK):
        h.update(numbers[start : start + QUICK])
    return h.digest()
