"""The classifier of one lesson: refitted after each change, its settings chosen anew in the background.

Two threads serve all lessons, so that neither competes with itself: one refits, one chooses. What a lesson shows about
its photos is always said by a classifier that was not fitted to them.

Legend: n photos, K classes that take part (those with two photos or more).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from vitkit.features.head import Head
from vitkit.features.online import OnlineRidge, choose, softmax
from vitkit.server.teach_state import State
from vitkit.types import Array

LEAST = 2  # photos of a class that takes part
AGAIN = 0.1  # share of the photos that must have changed before the settings are chosen anew


@dataclass(frozen=True)
class Answers:
    """What the classifier says.

    Args:
        classes: ids of the classes that take part; the columns of `p`.
        head: the classifier, over raw features.
        keys: the photos; the rows of `y`, `p` and `logits`.
        y: [n] positions in `classes`.
        logits: [n, K] of each photo, from a classifier that was fitted without it.
        p: [n, K] their probabilities.
        seconds: what the refit took.
        l2: strength.
        factor: scale of the scores.
    """

    classes: tuple[int, ...]
    head: Head
    keys: tuple[str, ...]
    y: Array
    logits: Array
    p: Array
    seconds: float
    l2: float
    factor: float

    def predict(self, X: Array) -> Array:
        """Return the probabilities [m, K] of features [m, F]."""
        return softmax(self.head.logits(X))


def taking_part(state: State) -> tuple[int, ...]:
    """Return the ids of the classes with enough photos; empty if there are fewer than two of them."""
    counts = state.counts()
    found = tuple(number for number in state.classes if counts[number] >= LEAST)
    return found if len(found) > 1 else ()


def groups_of(state: State, keys: list[str]) -> Array:
    """Return a number for each photo, [n]: photos of one burst look alike, and are left out together.

    A class whose only photos are one burst has nothing else to be known by; its photos are left out one by one.
    """
    photos = [state.photos[key] for key in keys]
    kinds: dict[int, set[int | str]] = {}
    for photo in photos:
        kinds.setdefault(photo.of, set()).add(photo.burst or photo.key)
    numbers: dict[int | str, int] = {}
    return np.array(
        [
            numbers.setdefault(photo.burst if photo.burst and len(kinds[photo.of]) > 1 else photo.key, len(numbers))
            for photo in photos
        ],
        np.int64,
    )


class Fitting:
    """Follows the state of a lesson. `follow` and `adopt` run in the one thread that refits.

    Args:
        features: the feature of each photo, by key.
    """

    def __init__(self, features: Mapping[str, Array]) -> None:
        self.features = features
        self.online: OnlineRidge | None = None
        self.fitted: dict[str, int] = {}  # {photo: class} at the last choice

    def _rows(self, keys: list[str]) -> Array:
        return np.stack([self.features[key] for key in keys])

    def _asked(self, state: State) -> tuple[tuple[int, ...], dict[str, int]]:
        classes = taking_part(state)
        number = {of: i for i, of in enumerate(classes)}
        return classes, {key: number[photo.of] for key, photo in state.photos.items() if photo.of in number}

    def follow(self, state: State) -> Answers | None:
        """Refit to a state; None while fewer than two classes take part."""
        start = time.perf_counter()
        classes, wanted = self._asked(state)
        if not classes:
            self.online = None
            return None
        if self.online is None:
            self.adopt(self.choose(state))
        assert self.online is not None
        have = set(self.online.keys)
        if gone := [key for key in self.online.keys if key not in wanted]:
            self.online.remove(gone)
        if new := [key for key in wanted if key not in have]:
            self.online.add(new, self._rows(new))
        keys = self.online.keys
        y = np.array([wanted[key] for key in keys], np.int64)
        head, logits = self.online.answers(y, len(classes), groups_of(state, keys))
        seconds, c = time.perf_counter() - start, self.online.choices
        return Answers(classes, head, tuple(keys), y, logits, softmax(logits), seconds, c.l2, c.factor)

    def is_stale(self, state: State) -> bool:
        """Return whether so much has changed that the settings should be chosen anew."""
        _, wanted = self._asked(state)
        changed = len(wanted.items() ^ self.fitted.items())
        return bool(wanted) and changed > AGAIN * len(wanted)

    def choose(self, state: State) -> tuple[OnlineRidge, dict[str, int]]:
        """Choose the settings for a state, and fit from scratch; for the thread in the background."""
        classes, wanted = self._asked(state)
        keys = list(wanted)
        X, y = self._rows(keys), np.array(list(wanted.values()), np.int64)
        return OnlineRidge(choose(X, y, len(classes), groups_of(state, keys)), keys, X), wanted

    def adopt(self, chosen: tuple[OnlineRidge, dict[str, int]]) -> None:
        """Go on with what `choose` returned."""
        self.online, self.fitted = chosen


class Threads:
    """The two threads of all lessons."""

    def __init__(self) -> None:
        self.refit = ThreadPoolExecutor(1, thread_name_prefix="vitkit-refit")
        self.choose = ThreadPoolExecutor(1, thread_name_prefix="vitkit-choose")

    def close(self) -> None:
        """Finish what was begun, then end."""
        for pool in (self.refit, self.choose):
            pool.shutdown(cancel_futures=True)
