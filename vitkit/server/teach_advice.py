"""What a teacher wants to know: what is confused, which photos to look at again, what to photograph next.

All of it comes from answers about photos that were left out (see features/online.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vitkit.server.teach_fit import LEAST, Answers
from vitkit.server.teach_state import State

SHOWN = 12  # photos of a list
FEW = 5  # photos of a class, below which it needs more before anything else
TIMES = 3  # a label is suspected if another class is so many times as likely
UNSURE = 0.35  # difference of the two highest probabilities below which a photo is uncertain
GOOD = 0.9  # accuracy of a class that needs no advice


@dataclass(frozen=True)
class Advice:
    """One sentence about what to do next, and the class that it is about."""

    text: str
    of: int | None = None


def look(state: State, found: Answers | None) -> dict[str, Any]:
    """Return what the page shows about the photos, as JSON values."""
    if found is None:
        return {
            "ready": False,
            "accuracy": None,
            "right": 0,
            "judged": 0,
            "recall": {},
            "confusion": [],
            "classes": [],
        } | {
            "unsure": [],
            "suspects": [],
        }
    K = len(found.classes)
    guess = found.p.argmax(1)
    confusion = np.zeros((K, K), np.int64)
    np.add.at(confusion, (found.y, guess), 1)
    two = np.sort(found.p, axis=1)[:, -2:]
    margin = two[:, 1] - two[:, 0]
    unsure = [int(i) for i in np.argsort(margin, kind="stable")[: 2 * SHOWN] if margin[i] < UNSURE]
    wrong = [int(i) for i in np.flatnonzero(guess != found.y) if found.p[i, guess[i]] >= TIMES * found.p[i, found.y[i]]]
    wrong.sort(key=lambda i: found.p[i, found.y[i]])
    suspects = {i for i in wrong[:SHOWN] if confusion[found.y[i]].sum() >= FEW}

    def row(i: int) -> dict[str, Any]:
        return {
            "key": found.keys[i],
            "guess": found.classes[guess[i]],
            "p": round(float(found.p[i, guess[i]]), 4),
            "own": round(float(found.p[i, found.y[i]]), 4),
        }

    right = int((guess == found.y).sum())
    return {
        "ready": True,
        "accuracy": right / len(found.y),
        "right": right,
        "judged": len(found.y),
        "classes": list(found.classes),
        "recall": {of: float(confusion[k, k] / confusion[k].sum()) for k, of in enumerate(found.classes)},
        "confusion": confusion.tolist(),
        "unsure": [row(i) for i in [i for i in unsure if i not in suspects][:SHOWN]],
        "suspects": [row(i) for i in wrong[:SHOWN] if i in suspects],
    }


def advise(state: State, seen: dict[str, Any]) -> list[Advice]:
    """Return what to photograph next, the most useful first; at most three sentences."""
    counts = state.counts()
    if not state.classes:
        return [Advice("Name two things that you want to tell apart.")]
    if len(state.classes) == 1:
        return [Advice("Name a second class: telling apart takes two.")]
    found = [
        Advice(
            f"Add {LEAST - counts[of]} {'photos' if LEAST - counts[of] > 1 else 'more photo'} of {name}: it takes part "
            f"from the second photo on.",
            of,
        )
        for of, name in state.classes.items()
        if counts[of] < LEAST
    ]
    usual = int(np.median([counts[of] for of in state.classes]))
    for of in sorted(state.classes, key=lambda of: counts[of]):
        if LEAST <= counts[of] < max(FEW, usual / 2):
            more = max(FEW, usual // 2) - counts[of]
            others = f", and the others have about {usual}" if usual > counts[of] else ""
            found.append(
                Advice(
                    f"Add {more} more {_plural(more)} of {state.classes[of]}: it has only {counts[of]}{others}.",
                    of,
                )
            )
    found += _one_sided(state)
    if seen["ready"]:
        found += _confused(state, seen)
    if not found:
        found.append(
            Advice(
                "Every class is recognised. Try it with photos that it has not seen: other light, other backgrounds, "
                "from farther away. Add those that it gets wrong."
            )
        )
    return found[:3]


def _plural(count: int) -> str:
    return "photo" if count == 1 else "photos"


def _one_sided(state: State) -> list[Advice]:
    """Classes whose only photos are one burst: nobody can say how well they are known."""
    bursts: dict[int, set[int | str]] = {}
    for photo in state.photos.values():
        bursts.setdefault(photo.of, set()).add(photo.burst or photo.key)
    return [
        Advice(
            f"Photograph {state.classes[of]} again, somewhere else: all its photos are from one burst and look alike, "
            f"so its score means little.",
            of,
        )
        for of, kinds in bursts.items()
        if len(kinds) == 1 and state.counts()[of] > 1
    ]


def _confused(state: State, seen: dict[str, Any]) -> list[Advice]:
    """The pair that is confused most often, then the class that is known least."""
    table, classes = np.array(seen["confusion"]), seen["classes"]
    off = table - np.diag(np.diag(table))
    found = []
    if off.max() > 0:
        k, other = np.unravel_index(off.argmax(), off.shape)
        name, taken = state.classes[classes[k]], state.classes[classes[other]]
        found.append(
            Advice(
                f"Photograph {name} that looks like {taken}: {off[k, other]} of {table[k].sum()} photos of {name} are "
                f"taken for {taken}. Use the same background and light for both.",
                classes[k],
            )
        )
    least = min(classes, key=lambda of: seen["recall"][of])
    if seen["recall"][least] < GOOD and (not found or found[0].of != least):
        share = seen["recall"][least]
        found.append(
            Advice(
                f"Add different photos of {state.classes[least]}: only {share:.0%} of its photos are recognised "
                f"without having been seen. Change the angle, the distance and the light.",
                least,
            )
        )
    return found
