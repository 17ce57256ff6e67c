"""Decode every image of a data set once and report unreadable images, unusual ones and duplicates.

A finding is `bad` (the image cannot be read: training stops at it or skips it) or a `note` (the image is read by one of
decode.py's rules).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vitkit.data.base import Source
from vitkit.data.decode import damage, decode, header, orientation
from vitkit.data.files import FORMATS
from vitkit.data.sources import open_splits, parse
from vitkit.data.workers import default_workers, parallel_map
from vitkit.errors import BadImage, DataError, OutputError
from vitkit.types import Progress

PIECE = 16  # images per task
LONG_SIDE = 10_000  # pixels; a longer side gets a note


@dataclass(frozen=True)
class Finding:
    """One finding about one image.

    Args:
        split: the image's split.
        name: the image's name.
        level: `bad` or `note`.
        reason: what was found.
        path: the image's file, if it has one of its own.
        moved_to: where `move_aside` put the file.
    """

    split: str
    name: str
    level: str
    reason: str
    path: str | None = None
    moved_to: str | None = None


@dataclass
class Report:
    """The doctor's report on a data set.

    Args:
        data: the data set, as given to `examine`.
        images: number of images in each split.
        classes: number of images in each class of each split.
        sizes: [minimum, median, maximum] of the width and the height, in pixels.
        modes: number of images in each format and mode.
        findings: bad images and notes, in the order of the data.
        duplicates: groups of images with the same pixels, each image as [split, name].
        seconds: how long the examination took.
    """

    data: str
    images: dict[str, int] = field(default_factory=dict)
    classes: dict[str, dict[str, int]] = field(default_factory=dict)
    sizes: dict[str, list[float]] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    duplicates: list[list[list[str]]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def bad(self) -> list[Finding]:
        """The images that cannot be read."""
        return [f for f in self.findings if f.level == "bad"]

    @property
    def notes(self) -> list[Finding]:
        """The images that are read by a special rule."""
        return [f for f in self.findings if f.level == "note"]

    @property
    def across(self) -> list[list[list[str]]]:
        """The duplicates in more than one split: a model would be evaluated on images it was trained on."""
        return [group for group in self.duplicates if len({split for split, _ in group}) > 1]

    @property
    def imbalance(self) -> float | None:
        """Size of the largest class of the first split divided by the smallest; None if a class is empty."""
        first: dict[str, int] = next(iter(self.classes.values()), {})
        least, most = min(first.values(), default=0), max(first.values(), default=0)
        return most / least if least else None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        return asdict(self) | {"imbalance": self.imbalance, "duplicates_across_splits": self.across}


@dataclass(frozen=True)
class _Seen:
    """What a worker reports about one image."""

    row: tuple[str, int]
    size: tuple[int, int] | None
    mode: str
    digest: bytes
    bad: str | None
    notes: list[str]


def examine(spec: str | Path, *, workers: int | None = None, progress: Progress | None = None) -> Report:
    """Decode every image of every split.

    Args:
        spec: the data set, as for `open_source`.
        workers: worker processes for decoding (default: one per core).
        progress: called with (images done, total).

    Raises:
        DataError: the data set cannot be opened, or is empty.
    """
    start = time.monotonic()
    sources = {split: opened() for split, opened in open_splits(spec).items()}
    report = Report(
        str(spec),
        {split: len(source) for split, source in sources.items()},
        {split: source.counts() for split, source in sources.items()},
    )
    total = sum(report.images.values())
    if not total:
        raise DataError(f"{spec} contains no images.")
    pieces = [
        (split, range(i, min(i + PIECE, len(source))))
        for split, source in sources.items()
        for i in range(0, len(source), PIECE)
    ]
    if workers is None:
        workers = max(default_workers(source) for source in sources.values())
    widths: list[int] = []
    heights: list[int] = []
    done = 0
    same: dict[bytes, list[list[str]]] = {}
    modes: Counter[str] = Counter()
    for piece in parallel_map(_Look(sources), pieces, workers):
        for seen in piece:
            split, i = seen.row
            name, place = sources[split].names[i], sources[split].place(i)
            path = str(place) if place is not None else None
            if seen.bad is not None:
                report.findings.append(Finding(split, name, "bad", seen.bad, path))
            report.findings += [Finding(split, name, "note", note, path) for note in seen.notes]
            if seen.size is not None:
                widths.append(seen.size[0])
                heights.append(seen.size[1])
                modes[seen.mode] += 1
                same.setdefault(seen.digest, []).append([split, name])
        done += len(piece)
        if progress is not None:
            progress(done, total)
    report.duplicates = [group for group in same.values() if len(group) > 1]
    report.modes = dict(modes.most_common())
    if widths:
        report.sizes = {
            word: [min(v), statistics.median(v), max(v)] for word, v in (("width", widths), ("height", heights))
        }
    report.seconds = time.monotonic() - start
    return report


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
            return _Seen(row, None, "", b"", str(error).removeprefix(f"{name}: ").partition(". Repair")[0], [])
        digest = hashlib.blake2b(image.tobytes(), digest_size=16, person=repr(image.size).encode()[:16]).digest()
        return _Seen(row, image.size, f"{kind} {image.mode}".strip(), digest, None, notes)


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
    if (frames := getattr(image, "n_frames", 1)) > 1:
        notes.append(f"animated or multi-page: only the first of {frames} frames is used")
    if (turn := orientation(image)) != 1:
        notes.append(f"EXIF-rotated: orientation {turn} is applied")
    if max(image.size) >= LONG_SIDE:
        notes.append(f"very large: {image.width} x {image.height} px is slow to decode")
    if (hurt := damage(raw, image)) is not None:
        notes.append(f"damaged JPEG data ({hurt}): part of the image may be gray")
    return notes, kind


def move_aside(report: Report, folder: str | Path | None = None) -> Path | None:
    """Move bad files out of a data folder; nothing is deleted, and moved.json records where each file was.

    Args:
        report: the report of `examine`; its findings are updated.
        folder: where to move the files (default: the data folder's name with `.bad` appended).

    Returns:
        The folder, or None if there was nothing to move.

    Raises:
        DataError: the data set is not a folder of files.
        OutputError: a file could not be moved.
    """
    if not report.bad:
        return None
    kind, place = parse(report.data)
    if kind not in ("folder", "food") or any(f.path is None for f in report.bad):
        raise DataError(
            f"Expected a folder to move bad images out of; {report.data} is a {kind!r} source. Remove the rows "
            f"that the report names."
        )
    root = Path(place).expanduser().absolute()
    aside = Path(folder) if folder is not None else root.with_name(f"{root.name}.bad")
    moved: dict[str, dict[str, str]] = {}
    record = aside / "moved.json"
    try:
        if record.is_file():
            moved = json.loads(record.read_text(encoding="utf-8"))
        for n, found in enumerate(report.findings):
            if found.level != "bad" or found.path is None or found.moved_to is not None:
                continue
            source = Path(found.path).absolute()
            target = aside / source.relative_to(root)
            while target.exists():
                target = target.with_name(f"{target.stem}-again{target.suffix}")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source, target)
            moved[str(target.relative_to(aside))] = {"from": str(source), "reason": found.reason}
            record.write_text(json.dumps(moved, indent=1) + "\n", encoding="utf-8")  # after each file, in case it stops
            report.findings[n] = Finding(found.split, found.name, "bad", found.reason, found.path, str(target))
    except (OSError, ValueError) as error:
        raise OutputError(f"Bad images could not be moved to {aside}: {error}.") from error
    return aside
