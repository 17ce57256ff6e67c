"""Look at every image of a data set once, and at everything next to the images: what stops or misleads training.

A finding is about one image: `bad` (it cannot be read: training stops at it or skips it) or a `note` (it is read, by
one of decode.py's rules). A problem is about the data set: a folder, a class, files that are not read (see survey.py).
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitkit.data.base import Source
from vitkit.data.decode import count_frames, damage, decode, header, orientation
from vitkit.data.files import FORMATS
from vitkit.data.near import close_hashes, groups, perceptual_hash
from vitkit.data.sources import open_splits, parse
from vitkit.data.survey import Problem, Survey, empty_class, shown, survey, too_few
from vitkit.data.workers import default_workers, parallel_map
from vitkit.errors import BadImage, DataError
from vitkit.types import Progress

PIECE = 16  # images per task
LONG_SIDE = 10_000  # pixels; a longer side gets a note
TINY = 32  # pixels; a shorter side gets a note if most images are much larger
LONG = 5.0  # long side / short side; a longer shape gets a note, because resizing distorts it or crops most of it
UNEVEN = 10.0  # largest class / smallest class; more than this is a problem


class Place(NamedTuple):
    """One image of a data set: its split, its name and the name of its class, or its labels (`cat|dog`)."""

    split: str
    name: str
    label: str

    def __str__(self) -> str:
        return shown(self.split, self.name)


@dataclass(frozen=True)
class Finding:
    """One finding about one image.

    Args:
        split: the image's split.
        name: the image's name.
        level: `bad` or `note`.
        reason: what was found.
        path: the image's file, if it has one of its own.
        useless: whether the image cannot be read or shows nothing, so that a cleaned copy leaves it out.
    """

    split: str
    name: str
    level: str
    reason: str
    path: str | None = None
    useless: bool = False

    def __str__(self) -> str:
        return shown(self.split, self.name)


@dataclass(frozen=True)
class Suspect:
    """An image whose label is probably wrong.

    Args:
        image: the image, with its label.
        suggested: the class that its features suggest.
        confidence: probability of its own label, from a classifier that was not fitted to it.
    """

    image: Place
    suggested: str
    confidence: float


@dataclass
class Report:
    """The doctor's report on a data set.

    Args:
        data: the data set, as given to `examine`.
        images: number of images in each split.
        classes: number of images in each class of each split, or with each label.
        combinations: with several labels per image, {split: {labels such as `cat|dog`: number of images}}, the most
            frequent first; empty for classes.
        sizes: [minimum, median, maximum] of the width and the height, in pixels.
        modes: number of images in each format and mode.
        problems: what is wrong with the data set as a whole.
        unread: {file ending: files that are not read}.
        renames: {split: {misspelt class: the class it clearly stands for}}.
        findings: bad images and notes, in the order of the data.
        duplicates: groups of images with the same pixels.
        near: groups of images that are nearly the same, at least two of them with different pixels.
        suspects: images whose labels are probably wrong, the most doubtful first; None if not computed.
        seconds: how long the examination took.
        sources: the images themselves.
    """

    data: str
    images: dict[str, int] = field(default_factory=dict)
    classes: dict[str, dict[str, int]] = field(default_factory=dict)
    combinations: dict[str, dict[str, int]] = field(default_factory=dict)
    sizes: dict[str, list[float]] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unread: dict[str, list[str]] = field(default_factory=dict)
    renames: dict[str, dict[str, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    duplicates: list[list[Place]] = field(default_factory=list)
    near: list[list[Place]] = field(default_factory=list)
    suspects: list[Suspect] | None = None
    seconds: float = 0.0
    sources: dict[str, Source] = field(default_factory=dict, repr=False, compare=False)

    @property
    def bad(self) -> list[Finding]:
        """The images that cannot be read."""
        return [f for f in self.findings if f.level == "bad"]

    @property
    def notes(self) -> list[Finding]:
        """The images that are read by a special rule."""
        return [f for f in self.findings if f.level == "note"]

    @property
    def across(self) -> list[list[Place]]:
        """The duplicates in more than one split: a model would be evaluated on images it was trained on."""
        return [group for group in self.duplicates if len({place.split for place in group}) > 1]

    @property
    def conflicts(self) -> list[list[Place]]:
        """The duplicates with more than one label, of which at most one can be right."""
        return [group for group in self.duplicates if len({self.label(place) for place in group}) > 1]

    def label(self, image: Place) -> str:
        """The class of an image, with a misspelt class folder read as the class that it clearly stands for."""
        return self.renames.get(image.split, {}).get(image.label, image.label)

    @property
    def imbalance(self) -> float | None:
        """Size of the largest class of the first split divided by the smallest; None if a class is empty."""
        first: dict[str, int] = next(iter(self.classes.values()), {})
        least, most = min(first.values(), default=0), max(first.values(), default=0)
        return most / least if least else None

    @property
    def healthy(self) -> bool:
        """Whether nothing was found that stops or misleads training."""
        return not self.bad and not self.conflicts and all(problem.level != "bad" for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        values = {name: value for name, value in vars(self).items() if name != "sources"}
        suspects = self.suspects
        return values | {
            "problems": [asdict(problem) for problem in self.problems],
            "findings": [asdict(found) for found in self.findings],
            "duplicates": _plain(self.duplicates),
            "near": _plain(self.near),
            "suspects": None
            if suspects is None
            else [one.image._asdict() | {"suggested": one.suggested, "confidence": one.confidence} for one in suspects],
            "imbalance": self.imbalance,
            "duplicates_across_splits": _plain(self.across),
            "duplicates_with_two_labels": _plain(self.conflicts),
            "healthy": self.healthy,
        }


def _plain(found: list[list[Place]]) -> list[list[dict[str, str]]]:
    return [[place._asdict() for place in group] for group in found]


@dataclass(frozen=True)
class _Seen:
    """What a worker reports about one image."""

    row: tuple[str, int]
    size: tuple[int, int] | None
    mode: str
    digest: bytes
    hash: int | None
    bad: str | None
    notes: list[str]


def examine(spec: str | Path, *, workers: int | None = None, progress: Progress | None = None) -> Report:
    """Decode every image of every split, and look at everything next to them.

    Args:
        spec: the data set, as for `open_source`.
        workers: worker processes for decoding (default: one per core).
        progress: called with (images done, total).

    Raises:
        DataError: the data set cannot be opened at all, or has no images.
    """
    start = time.monotonic()
    found = surveyed(spec)
    sources = found.splits
    report = Report(
        str(spec),
        {split: len(source) for split, source in sources.items()},
        {split: source.counts() for split, source in sources.items()},
        {split: _combinations(source) for split, source in sources.items() if source.several},
        problems=found.problems,
        unread=found.unread,
        renames=found.renames,
        sources=sources,
    )
    total = sum(report.images.values())
    if not total:
        others = ", ".join(f"{len(names)} {ending}" for ending, names in found.unread.items())
        reasons = "".join(f" {p.where}: {p.reason}" for p in found.problems[:3])
        raise DataError(
            f"{spec} contains no images.{f' Files that are not read: {others}.' if others else ''}{reasons}"
        )
    pieces = [
        (split, range(i, min(i + PIECE, len(source))))
        for split, source in sources.items()
        for i in range(0, len(source), PIECE)
    ]
    if workers is None:
        workers = max(default_workers(source) for source in sources.values())
    readable: list[tuple[Place, _Seen]] = []
    done = 0
    for piece in parallel_map(_Look(sources), pieces, workers):
        for seen in piece:
            split, i = seen.row
            image, path = place_of(sources[split], split, i), _path(sources[split], i)
            if seen.bad is not None:
                report.findings.append(Finding(split, image.name, "bad", seen.bad, path, True))
            report.findings += [Finding(split, image.name, "note", note, path) for note in seen.notes]
            if seen.size is not None:
                readable.append((image, seen))
        done += len(piece)
        if progress is not None:
            progress(done, total)
    same: dict[bytes, list[Place]] = {}
    for image, seen in readable:
        same.setdefault(seen.digest, []).append(image)
    report.duplicates = [group for group in same.values() if len(group) > 1]
    report.near = near_duplicates(readable)
    report.modes = dict(Counter(seen.mode for _, seen in readable).most_common())
    _measure(report, readable)
    report.problems += too_few(_readable(report), bool(report.combinations)) + _uneven(report)
    report.seconds = time.monotonic() - start
    return report


def _combinations(source: Source) -> dict[str, int]:
    """Return how many images have each combination of labels, most frequent first."""
    rows, counts = np.unique(source.labels, axis=0, return_counts=True)
    first = {tuple(row): i for i, row in reversed(list(enumerate(source.labels.tolist())))}  # an image that has it
    order = np.argsort(-counts, kind="stable")
    return {source.said(first[tuple(rows[k].tolist())]): int(counts[k]) for k in order}


def surveyed(spec: str | Path) -> Survey:
    """Open every split that can be opened, and say what is wrong with the others.

    Args:
        spec: the data set, as for `open_source`.

    Raises:
        DataError: there is no such data set, or none of its splits can be opened.
    """
    kind, place = parse(spec)
    if kind == "folder":
        if not Path(place).expanduser().is_dir():
            raise DataError(f"Expected a folder of images; there is no folder {place!r}.")
        return survey(place)
    found, errors = Survey(), list[DataError]()
    for split, opened in open_splits(spec).items():
        try:
            found.splits[split] = opened()
        except DataError as error:
            errors.append(error)
            found.problems.append(Problem("bad", split, f"cannot be opened: {error}"))
    if not found.splits:
        raise errors[0]
    for split, source in found.splits.items():
        empty = [name for name, count in source.counts().items() if not count]
        found.problems += [empty_class(split, shown(split, name)) for name in empty]
    return found


def place_of(source: Source, split: str, i: int) -> Place:
    """Return image `i` of a source as a Place."""
    return Place(split, source.names[i], source.said(i))


def _path(source: Source, i: int) -> str | None:
    place = source.place(i)
    return str(place) if place is not None else None


def near_duplicates(readable: list[tuple[Place, Any]]) -> list[list[Place]]:
    """Return groups of images with close perceptual hashes, without groups of exact duplicates."""
    hashed = [(image, seen) for image, seen in readable if seen.hash is not None]
    once = {seen.digest: n for n, (_, seen) in reversed(list(enumerate(hashed)))}  # copies of one image meet once
    rows = sorted(once.values())
    pairs = close_hashes(np.array([hashed[n][1].hash for n in rows], np.uint64))
    copies: dict[bytes, list[Place]] = {}
    for image, seen in hashed:
        copies.setdefault(seen.digest, []).append(image)
    return [[image for n in group for image in copies[hashed[rows[n]][1].digest]] for group in groups(pairs)]


def _measure(report: Report, readable: list[tuple[Place, _Seen]]) -> None:
    """Add the sizes of the images, and notes on images that are much smaller or longer than usual."""
    if not readable:
        return
    sizes = [seen.size for _, seen in readable if seen.size is not None]
    for word, values in zip(("width", "height"), zip(*sizes), strict=True):
        report.sizes[word] = [min(values), statistics.median(values), max(values)]
    usual = statistics.median(min(size) for size in sizes)
    notes: dict[tuple[str, str], list[tuple[str, bool]]] = {}
    for (image, _), (width, height) in zip(readable, sizes, strict=True):
        short, long = min(width, height), max(width, height)
        if short <= 2 or (short < TINY and short * 4 <= usual):
            notes.setdefault(image[:2], []).append((f"tiny: {width} x {height} px", short <= 2))
        if long > LONG * short and short > 2:
            words = f"extreme aspect ratio: {width} x {height} px, {long / short:.3g} to 1"
            notes.setdefault(image[:2], []).append((words, False))
    report.findings = list(_in_order(report, notes))


def _in_order(report: Report, notes: dict[tuple[str, str], list[tuple[str, bool]]]) -> Iterator[Finding]:
    """Merge notes on sizes into the findings, in the order of the data."""
    before: dict[tuple[str, str], list[Finding]] = {}
    for found in report.findings:
        before.setdefault((found.split, found.name), []).append(found)
    for split, source in report.sources.items():
        for i, name in enumerate(source.names):
            yield from before.get((split, name), ())
            path = _path(source, i) if (split, name) in notes else None
            yield from (Finding(split, name, "note", *note[:1], path, note[1]) for note in notes.get((split, name), ()))


def _readable(report: Report) -> dict[str, dict[str, int]]:
    """Return the number of images in each class of each split that can be read."""
    bad = {(found.split, found.name) for found in report.bad}
    result = {split: dict(counts) for split, counts in report.classes.items()}
    for split, source in report.sources.items() if bad else ():
        for i, name in enumerate(source.names):
            if (split, name) in bad:
                present = np.flatnonzero(source.labels[i]) if source.several else [source.labels[i]]
                for k in present if source.class_names else ():
                    result[split][source.class_names[k]] -= 1
    return result


def _uneven(report: Report) -> list[Problem]:
    if report.imbalance is None or report.imbalance <= UNEVEN:
        return []
    split, counts = next(iter(report.classes.items()))
    least, most = min(counts, key=lambda n: counts[n]), max(counts, key=lambda n: counts[n])
    kind = "label" if report.combinations else "class"
    return [
        Problem(
            "note",
            split,
            f"{kind} imbalance: {most!r} has {counts[most]} images and {least!r} {counts[least]}. "
            f"{'mAP weighs both equally' if report.combinations else f'Accuracy says little about {least!r}'}; look at "
            f"the results per {kind}.",
        )
    ]


class _Look:
    def __init__(self, sources: dict[str, Source]) -> None:
        self.sources = sources

    def __call__(self, piece: tuple[str, range]) -> list[_Seen]:
        split, rows = piece
        return [self.one(split, i) for i in rows]

    def one(self, split: str, i: int) -> _Seen:
        source, row = self.sources[split], (split, i)
        name = source.names[i]
        try:
            raw = source.raw(i)
            notes, kind = describe(raw, name) if isinstance(raw, bytes) else ([], "pixels")
            image = decode(raw, name)
        except BadImage as error:
            return _Seen(row, None, "", b"", None, str(error).removeprefix(f"{name}: ").partition(". Repair")[0], [])
        digest = hashlib.blake2b(image.tobytes(), digest_size=16, person=repr(image.size).encode()[:16]).digest()
        return _Seen(row, image.size, f"{kind} {image.mode}".strip(), digest, perceptual_hash(image), None, notes)


def describe(raw: bytes, name: str) -> tuple[list[str], str]:
    """Return notes on what is unusual about an image file, and its format.

    Args:
        raw: the file's bytes.
        name: the file's name, whose ending is compared with the format.

    Raises:
        BadImage: the file cannot be opened.
    """
    image = header(raw, name)
    notes, kind, ending = [], image.format or "?", Path(name).suffix.lower()
    if kind in FORMATS and ending and ending not in FORMATS[kind]:
        notes.append(f"misnamed: a {kind} file with the ending {ending}")
    if image.mode == "CMYK":
        notes.append("CMYK: converted to RGB without its colour profile")
    elif image.mode.startswith("I") or image.mode == "F":
        notes.append(f"{'floating point' if image.mode == 'F' else '16-bit'} (mode {image.mode}): scaled to 8 bits")
    elif image.mode == "P":
        notes.append("palette: converted to RGB")
    elif image.mode in ("RGBA", "LA", "PA"):
        notes.append("transparency: the alpha channel is dropped")
    if (frames := count_frames(image)) > 1:
        notes.append(f"animated or multi-page: only the first of {frames} frames is used")
    if (turn := orientation(image)) != 1:
        notes.append(f"EXIF-rotated: orientation {turn} is applied")
    if max(image.size) >= LONG_SIDE:
        notes.append(f"very large: {image.width} x {image.height} px is slow to decode")
    if (hurt := damage(raw, image)) is not None:
        notes.append(f"damaged JPEG data ({hurt}): part of the image may be gray")
    return notes, kind
