"""What was taught, as a fold over actions: the journal on disk is the list of actions, undo forgets the last one.

An action is a JSON object; `apply` returns the state after it and never changes a state that it is given.

    {"do": "class", "id": 1, "name": "pizza"}     a new class, or a new name for one
    {"do": "drop", "id": 1}                       a class goes, with its photos
    {"do": "photos", "photos": [{...}, ...],      photos are added; the fields of Photo
     "batch": 7}                                  those of one batch are undone together
    {"do": "move", "keys": [...], "to": 1}        photos change their class
    {"do": "remove", "keys": [...]}               photos go
    {"do": "undo"}                                the state before the last action comes back
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vitkit.errors import InputError, TooLarge, pick

PHOTOS, CLASSES = 5_000, 100  # per lesson
STEPS = 100  # that can be undone
LETTERS = 60  # of a class name
FORBIDDEN = re.compile(r'[/\\:*?"<>|]')  # in the name of a folder, on one system or another
FILE = re.compile(r"[0-9a-z]+\.[a-z0-9]+")  # of a photo
DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(1, 10))}

Action = dict[str, Any]


@dataclass(frozen=True)
class Photo:
    """One photo.

    Args:
        key: the start of its checksum, by which it is known.
        name: what its owner called it.
        file: its file name in the folder of its class.
        row: where its feature is in the file of features.
        of: id of its class.
        burst: number of the burst that it was taken in; 0 for a photo on its own.
    """

    key: str
    name: str
    file: str
    row: int
    of: int
    burst: int = 0

    def __post_init__(self) -> None:
        """Refuse what a damaged journal may hold; a file elsewhere must not be moved."""
        if not all(isinstance(text, str) for text in (self.key, self.name, self.file)):
            raise InputError(f"Expected words for a photo; got {self.key!r}, {self.name!r} and {self.file!r}.")
        if not FILE.fullmatch(self.file) or self.file.partition(".")[0] != self.key:
            raise InputError(f"Expected a photo whose file is named by its key, {self.key!r}; got {self.file!r}.")
        if not all(isinstance(value, int) and value >= 0 for value in (self.row, self.of, self.burst)):
            raise InputError(f"Expected whole numbers for a photo; got {self.row!r}, {self.of!r} and {self.burst!r}.")


@dataclass(frozen=True)
class State:
    """Classes by id, in the order in which they were made, and photos by key."""

    classes: Mapping[int, str] = field(default_factory=dict)
    photos: Mapping[str, Photo] = field(default_factory=dict)

    def counts(self) -> Counter[int]:
        """Return the number of photos of each class."""
        return Counter(photo.of for photo in self.photos.values())

    def name_of(self, number: int) -> str:
        """Return the name of a class.

        Raises:
            InputError: there is no such class.
        """
        if number not in self.classes:
            raise InputError(f"Expected one of your classes; there is none with the number {number}. Reload the page.")
        return self.classes[number]

    def checked(self, keys: list[str]) -> list[str]:
        """Return keys of photos; raise InputError if one is unknown."""
        for key in keys:
            if key not in self.photos:
                raise InputError(f"Expected one of your photos; there is none called {key[:20]!r}. Reload the page.")
        return keys


def class_name(text: str, state: State, number: int) -> str:
    """Return the name of a class as it is kept, which is also the name of a folder.

    Args:
        text: what the user typed.
        state: the other classes.
        number: the class's own id.

    Raises:
        InputError: it is empty, too long, taken, or cannot name a folder.
    """
    name = " ".join(unicodedata.normalize("NFC", text).split())
    if not name or len(name) > LETTERS:
        raise InputError(f"Expected a name of 1 to {LETTERS} characters; got {len(name)}.")
    if FORBIDDEN.search(name) or not name.isprintable() or name.startswith((".", "__")) or name.endswith("."):
        raise InputError(
            f'Expected a name that can name a folder; got {name!r}. Leave out / \\ : * ? " < > | and dots at the ends.'
        )
    if name.partition(".")[0].casefold() in DEVICES:
        raise InputError(f"Expected a name that can name a folder; {name!r} means a device on Windows.")
    for other, taken in state.classes.items():
        if other != number and taken.casefold() == name.casefold():
            raise InputError(f"Expected a new name; there is a class called {taken!r} already.")
    return name


def _class(state: State, action: Action) -> State:
    number = int(action["id"])
    if number not in state.classes and len(state.classes) >= CLASSES:
        raise TooLarge(f"Expected at most {CLASSES} classes in one lesson. Remove one first.")
    return replace(state, classes={**state.classes, number: class_name(str(action["name"]), state, number)})


def _drop(state: State, action: Action) -> State:
    number = int(action["id"])
    state.name_of(number)
    return State(
        {key: name for key, name in state.classes.items() if key != number},
        {key: photo for key, photo in state.photos.items() if photo.of != number},
    )


def _photos(state: State, action: Action) -> State:
    new = {one["key"]: Photo(**one) for one in action["photos"]}
    for photo in new.values():
        state.name_of(photo.of)
    if len(state.photos) + len(new) > PHOTOS:
        raise TooLarge(f"Expected at most {PHOTOS:,} photos in one lesson. Save it, and train on its photos.")
    return replace(state, photos={**state.photos, **new})


def _move(state: State, action: Action) -> State:
    state.name_of(int(action["to"]))
    moved = {key: replace(state.photos[key], of=int(action["to"])) for key in state.checked(action["keys"])}
    return replace(state, photos={**state.photos, **moved})


def _remove(state: State, action: Action) -> State:
    gone = set(state.checked(action["keys"]))
    return replace(state, photos={key: photo for key, photo in state.photos.items() if key not in gone})


ACTIONS: dict[str, Callable[[State, Action], State]] = {
    "class": _class,
    "drop": _drop,
    "photos": _photos,
    "move": _move,
    "remove": _remove,
}


@dataclass(frozen=True)
class Step:
    """The state before an action, what the action did in words, and the batch of the photos that it added."""

    state: State
    words: str
    batch: int = 0


class History:
    """The present state and those that undo goes back to.

    Args:
        state: the state to begin with.
    """

    def __init__(self, state: State | None = None) -> None:
        self.state = state or State()
        self.before: list[Step] = []  # the latest last

    def after(self, action: Action) -> State:
        """Return the state after an action, without taking it.

        Raises:
            InputError: it cannot be done.
        """
        if action["do"] == "undo":
            if not self.before:
                raise InputError("There is nothing to undo.")
            return self.before[-1].state
        return pick(ACTIONS, action["do"], "action")(self.state, action)

    def do(self, action: Action) -> State:
        """Take an action."""
        new = self.after(action)
        if action["do"] == "undo":
            self.before.pop()
        elif (batch := int(action.get("batch", 0))) and self.before and self.before[-1].batch == batch:
            start = self.before.pop().state
            keys = [photo for key, photo in new.photos.items() if key not in start.photos]
            more = {"do": "photos", "photos": [asdict(photo) for photo in keys]}
            self.before.append(Step(start, words(start, more), batch))
        else:
            self.before = [*self.before[-STEPS + 1 :], Step(self.state, words(self.state, action), batch)]
        self.state = new
        return new

    def new_id(self) -> int:
        """Return an id that no class has, nor one that undo can bring back."""
        return 1 + max(
            (of for state in (*(step.state for step in self.before), self.state) for of in state.classes), default=0
        )


def words(state: State, action: Action) -> str:
    """Say what an action does, for the button that undoes it."""
    kind = action["do"]
    if kind == "class":
        name = " ".join(str(action["name"]).split())
        old = state.classes.get(int(action["id"]))
        return f"new class {name}" if old is None else f"{old} renamed to {name}"
    if kind == "drop":
        return f"{state.name_of(int(action['id']))} removed"
    keys = action["photos"] if kind == "photos" else action["keys"]
    many = f"{len(keys)} photo{'' if len(keys) == 1 else 's'}"
    if kind == "remove":
        return f"{many} removed"
    to = state.name_of(int(keys[0]["of"] if kind == "photos" else action["to"]))
    return f"{many} {'added' if kind == 'photos' else 'moved'} to {to}"
