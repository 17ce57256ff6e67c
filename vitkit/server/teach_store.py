"""A lesson on disk. What was answered as kept survives `kill -9`, and the photos are a class folder at any time.

    RUN/photos/<class>/<key>.jpg      every photo, where the journal says that it belongs
    RUN/.teach/journal.jsonl          one action per line (see teach_state.py); the first line names the model
    RUN/.teach/features-<n>.bin       the feature of every photo, float32, one after the other
    RUN/.teach/new/, RUN/.teach/removed/   photos on their way in, and those that undo can bring back

A photo is written to `new`, its feature is appended, then its line, and only then it moves to its class: the journal
decides, and `settle` makes the files follow it. Opening a lesson again writes the journal anew without what was undone,
and deletes what was removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.checkpoints.atomic import reason, staging
from vitkit.data.files import read_file
from vitkit.errors import OutputError, UnreadableFile
from vitkit.server.teach_state import Action, History, Photo, State
from vitkit.training.lock import locked
from vitkit.types import Array

log = logging.getLogger("vitkit")
HIDDEN, JOURNAL = ".teach", "journal.jsonl"
FORMAT = 1
KEY = 24  # characters of a photo's key
START = {
    "key": str,
    "weights": str,
    "backbone": str,
    "features": str,
    "width": int,
    "generation": int,
    "input_spec": dict,
}
SAME = ("backbone", "features", "width", "input_spec")  # features of another model mean something else


def is_lesson(folder: str | Path) -> bool:
    """Return whether a folder holds a lesson."""
    return (Path(folder).expanduser() / HIDDEN / JOURNAL).is_file()


def start_of(folder: str | Path) -> dict[str, Any]:
    """Return the first line of a lesson's journal: its key and the model that it was begun with.

    Raises:
        UnreadableFile: there is no lesson, or its first line is damaged.
    """
    path = Path(folder).expanduser() / HIDDEN / JOURNAL
    if not is_lesson(folder):
        raise UnreadableFile(
            f"Expected a folder made by `vitkit teach`; {folder} has no lesson. Begin one with --from WEIGHTS."
        )
    try:
        with open(path, encoding="utf-8") as file:
            start = json.loads(file.readline())
        if start["format"] == FORMAT:
            wrong = [name for name, kind in START.items() if not isinstance(start.get(name), kind)]
            if wrong:
                raise ValueError(f"{wrong[0]} is missing or wrong")
            return dict(start)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableFile(
            f"The first line of {path} is damaged ({error}); the photos are in {folder}/photos."
        ) from None
    raise UnreadableFile(f"{path} was written by another version of vitkit; the photos are in {folder}/photos.")


def key_of(raw: bytes) -> str:
    """Return the key of a photo: the start of its checksum, so that a copy is recognised."""
    return hashlib.sha256(raw).hexdigest()[:KEY]


class Store:
    """The folder of one lesson, locked for this process until `close`.

    Args:
        folder: the run folder; created if it does not exist.
        start: what the journal's first line says: the lesson's `key` and the model. A lesson that exists must agree.

    Raises:
        OutputError: another process has it, or it cannot be written to.
        UnreadableFile: it belongs to another model, or is damaged.
    """

    def __init__(self, folder: Path, start: Mapping[str, Any]) -> None:
        self.folder = Path(folder).expanduser()
        self.photos, self.hidden = self.folder / "photos", self.folder / HIDDEN
        self.width = int(start["width"])
        self._stack, self._moving = ExitStack(), threading.Lock()
        self._stack.enter_context(locked(self.folder))
        try:
            old = start_of(self.folder) if is_lesson(self.folder) else None
            for name in SAME:
                if old is not None and old[name] != start[name]:
                    raise UnreadableFile(
                        f"{self.folder} was taught with {old['weights']}; its {name} is not that of "
                        f"{start['weights']}. Use the original weights, or begin another lesson with a new --out."
                    )
            self.start = dict(old or start) | {"format": FORMAT, "generation": (old or {}).get("generation", 0) + 1}
            self.features: dict[str, Array] = {}
            self._known: set[str] = set()  # keys of all photos in the journal; any other photo is left alone
            self.history = History(self._read(old) if old else None)
            self.saved = bool(old) and (self.folder / "run.json").is_file()
            self._begin()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise OutputError(f"Could not write to {self.folder}: {reason(error)}.") from error
            raise

    def _read(self, old: Mapping[str, Any]) -> State:
        """Replay the journal. A last line that was cut short was never answered, so nobody misses it."""
        history, lines = History(), (self.hidden / JOURNAL).read_bytes().split(b"\n")
        for number, line in enumerate(lines[1:-1], start=2):
            try:
                action = json.loads(line)
                history.do(action)
                self._known.update(one["key"] for one in action.get("photos", ()))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise UnreadableFile(
                    f"Line {number} of {self.hidden / JOURNAL} is damaged ({error}); the photos are in {self.photos}."
                ) from None
        kept = self.hidden / f"features-{old['generation']}.bin"
        if not kept.is_file():
            raise UnreadableFile(
                f"{kept}, the features of this lesson's photos, is missing. Begin another lesson with a new --out; the "
                f"photos are in {self.photos}."
            )
        raw = kept.read_bytes()
        size = 4 * self.width
        rows = np.frombuffer(raw[: len(raw) // size * size], np.float32).reshape(-1, self.width)
        places = self._places()
        here = {key: photo for key, photo in history.state.photos.items() if key in places and photo.row < len(rows)}
        if lost := history.state.photos.keys() - here.keys():
            self._known -= lost
            log.warning(
                "The lesson goes on without %d photos of %s: they, or their features, are missing",
                len(lost),
                self.photos,
            )
        self.features = {key: rows[photo.row].copy() for key, photo in here.items()}
        return replace(
            history.state, photos={key: replace(photo, row=i) for i, (key, photo) in enumerate(here.items())}
        )

    def _begin(self) -> None:
        """Write the journal and the features anew, and put every file where it belongs."""
        state, name = self.history.state, f"features-{self.start['generation']}.bin"
        actions: list[Action] = [{"do": "class", "id": number, "name": text} for number, text in state.classes.items()]
        if state.photos:
            actions.append({"do": "photos", "photos": [asdict(photo) for photo in state.photos.values()]})
        with staging(self.hidden, last=JOURNAL) as private:
            (private / name).write_bytes(b"".join(self.features[key].tobytes() for key in state.photos))
            lines = [json.dumps(one) for one in (self.start, *actions)]
            (private / JOURNAL).write_text("\n".join(lines) + "\n", encoding="utf-8")
        for other in self.hidden.glob("features-*.bin"):
            if other.name != name:
                other.unlink()
        (self.hidden / "new").mkdir(exist_ok=True)
        self.places = self._places()
        self.settle()
        for folder in (self.hidden / "removed", self.hidden / "new"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        self.places = {key: path for key, path in self.places.items() if key in state.photos}
        if left := sum(len(path.stem) == KEY and path.stem not in self.places for path in self.photos.glob("*/*")):
            log.warning("Left alone in %s: %d photos that are not part of the lesson", self.photos, left)
        enter = self._stack.enter_context
        self._journal, self._features = (
            enter((self.hidden / file).open("ab", buffering=0)) for file in (JOURNAL, name)
        )
        self.rows = len(state.photos)

    def _places(self) -> dict[str, str]:
        """{key: path in the folder} of every photo that is on disk."""
        passing = [*(self.hidden / "new").glob("*"), *(self.hidden / "removed").glob("*")]
        found = [*passing, *(path for path in self.photos.glob("*/*") if path.stem in self._known)]
        return {path.stem: path.relative_to(self.folder).as_posix() for path in found if len(path.stem) == KEY}

    def keep(self, raws: Sequence[tuple[Photo, bytes]], features: Sequence[Array]) -> list[Photo]:
        """Write photos and their features to disk, and return the photos with their rows; `do` makes them count.

        Args:
            raws: photos, and the bytes of their files.
            features: the feature of each.
        """
        kept = []
        with self._writing():
            for (photo, raw), feature in zip(raws, features, strict=True):
                if photo.key not in self.places:  # a photo that was removed is still there
                    with open(self.hidden / "new" / photo.file, "wb") as file:
                        file.write(raw)
                        file.flush()
                        os.fsync(file.fileno())
                    self.places[photo.key] = f"{HIDDEN}/new/{photo.file}"
                self.features[photo.key] = np.ascontiguousarray(feature, np.float32)
                kept.append(replace(photo, row=self.rows))
                _append(self._features, self.features[photo.key].tobytes())
                self.rows += 1
            os.fsync(self._features.fileno())
        return kept

    def do(self, action: Action) -> State:
        """Take an action: it is on disk when this returns.

        Raises:
            InputError: it cannot be done.
            OutputError: the disk refused; nothing has changed.
        """
        self.history.after(action)  # refuses before anything is written
        with self._writing():
            _append(self._journal, json.dumps(action).encode() + b"\n")
            os.fsync(self._journal.fileno())
        state = self.history.do(action)
        try:
            self.settle()
        except OSError as error:  # the action is kept; the files follow with the next one, or when the lesson is opened
            log.warning("Could not move photos in %s: %s", self.folder, reason(error))
        return state

    def settle(self) -> None:
        """Move every file to where the present state wants it."""
        state = self.history.state
        for key, path in list(self.places.items()):
            photo = state.photos.get(key)
            to = (
                f"photos/{state.classes[photo.of]}/{photo.file}"
                if photo
                else f"{HIDDEN}/removed/{path.rpartition('/')[2]}"
            )
            if path != to:
                (self.folder / to).parent.mkdir(parents=True, exist_ok=True)
                with self._moving:
                    os.replace(self.folder / path, self.folder / to)
                    self.places[key] = to
        for folder in self.photos.glob("*/"):
            if folder.name not in state.classes.values() and not any(folder.iterdir()):
                folder.rmdir()

    def read(self, key: str) -> bytes:
        """Return the bytes of a photo, in any thread: another one may be moving it."""
        with self._moving:
            place = self.folder / self.places[key]
            return read_file(place, place.name)

    def close(self) -> None:
        """Release the folder."""
        self._stack.close()

    def _writing(self) -> _Writing:
        return _Writing(self.folder)


class _Writing:
    """A context in which what the operating system refuses becomes an OutputError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise OutputError(
                f"Could not write to {self.folder}: {reason(error)}. What was kept before is still there."
            ) from error


def _append(file: Any, data: bytes) -> None:
    """Append all of it or nothing: half a line would spoil the next one."""
    start = os.fstat(file.fileno()).st_size
    try:
        while data:
            data = data[file.write(data) :]
    except OSError:
        os.ftruncate(file.fileno(), start)
        raise
