"""List everything in a folder of images, whatever is wrong with it: nothing is hidden by one bad folder.

`folder.splits` is strict, because training must not start on a folder that is not what it seems. The doctor uses this
listing instead: it finds the same images in the same order, and says what else is there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitkit.data.base import Source
from vitkit.data.decode import header
from vitkit.data.files import ENDINGS, FORMATS, HEIF, NEEDS_HEIF, irregular
from vitkit.data.folder import SPLIT_FOLDERS, Files, files_below
from vitkit.data.string_table import natural
from vitkit.errors import BadImage, nearest

MOST = 5  # names of classes in one problem
HEAD = 64 * 1024  # bytes of a file with another ending that decide whether it is an image


def images_of(count: int) -> str:
    """Return `1 image`, `2 images`."""
    return f"{count} image{'s' * (count != 1)}"


@dataclass(frozen=True)
class Problem:
    """Something about a data set as a whole.

    Args:
        level: `bad` if training would stop or be misled, otherwise `note`.
        where: the folder, class or file it is about.
        reason: what was found, and what to do.
    """

    level: str
    where: str
    reason: str


@dataclass
class Survey:
    """What there is in a data set.

    Args:
        splits: the images of each split; classes that the training split lacks come last.
        problems: what is wrong.
        unread: {file ending: files that are not read}, relative to the folder.
        renames: {split: {misspelt class: the class it clearly stands for}}.
    """

    splits: dict[str, Source] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unread: dict[str, list[str]] = field(default_factory=dict)
    renames: dict[str, dict[str, str]] = field(default_factory=dict)


def survey(place: str | Path) -> Survey:
    """List a folder of images without giving up on anything.

    Args:
        place: the folder.
    """
    root, found = Path(place).expanduser(), Survey()
    chosen: dict[str, str] = {}
    for split, words in SPLIT_FOLDERS.items():
        here = [word for word in words if (root / word).is_dir()]
        chosen |= dict.fromkeys([split] if here else [], here[0] if here else "")
        for other in here[1:]:
            found.problems.append(
                Problem("note", other, f"not read: {here[0]}/ is used as the {split} split. Merge them, or rename one.")
            )
    if "train" not in chosen:
        for word in chosen.values():
            found.problems.append(
                Problem("bad", word, "taken for a class, because there is no train/ folder next to it. Add train/.")
            )
        _split(root, "", "all", None, found)
        return found
    known = {word for words in SPLIT_FOLDERS.values() for word in words}
    for name in _folders(root, found, ""):
        if name not in known:
            count = sum(image for _, image in files_below(root, name, []))
            hint = nearest(name, sorted(known)).removeprefix(", ")
            reason = f"not read: {images_of(count)} in a folder that is not one of the splits"
            found.problems.append(Problem("note", name, f"{reason}; {hint}" if hint else f"{reason}."))
    _loose(root, "", found)
    classes = _split(root, chosen["train"], "train", None, found)
    for split, word in chosen.items():
        if split != "train":
            _split(root, word, split, classes, found)
    return found


def _split(root: Path, word: str, split: str, classes: Sequence[str] | None, found: Survey) -> list[str]:
    """Add one split to the survey, and return the names of its classes."""
    place = root / word
    here = _folders(place, found, word)
    if not here:
        found.problems.append(
            Problem(
                "bad",
                _called(root, word),
                "has no class folders; expected one folder per class, with its images in it.",
            )
        )
    order = here if classes is None else [*classes, *(name for name in here if name not in classes)]
    if renames := _same_words(here, classes or here):
        found.renames[split] = renames
    _loose(root, word, found)
    names: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(order):
        closed: list[tuple[str, str]] = []
        files = list(files_below(place, name, closed)) if name in here else []
        images = sorted(file for file, image in files if image)
        for file in sorted(file for file, image in files if not image):
            _unread(root, f"{word}/{file}".removeprefix("/"), found)
        for folder, why in closed:
            where = f"{word}/{folder}".removeprefix("/")
            found.problems.append(Problem("bad", where, f"cannot be opened ({why}); its images are missing."))
        if classes is not None and name not in classes:
            hint = nearest(name, list(classes)).removeprefix(", ")
            found.problems.append(
                Problem(
                    "bad",
                    f"{word}/{name}",
                    f"the training split has no class {name!r} ({images_of(len(images))}); "
                    f"{hint or 'add training images, or remove it.'}",
                )
            )
        elif not images and not closed and name not in renames.values():
            found.problems.append(empty_class(split, f"{word}/{name}".removeprefix("/")))
        names += images
        labels += [label] * len(images)
    found.splits[split] = Files(place, names, labels, order)
    return list(order)


def shown(split: str, name: str) -> str:
    """Return `split/name`, or the name alone where the data has no splits: there is no folder `all`."""
    return name if split == "all" else f"{split}/{name}"


def _called(root: Path, word: str) -> str:
    """Return what a problem calls a folder: its path below the root, or the root's own name."""
    return word or root.resolve().name or str(root)


def empty_class(split: str, where: str) -> Problem:
    """Return the problem of a class without images; training refuses to start without images to train or validate on.

    Args:
        split: the split.
        where: the class folder.
    """
    what = {"val": "validate on", "test": "test on"}.get(split, "train on")
    return Problem("note" if split == "test" else "bad", where, f"empty class: no images to {what}.")


def too_few(counts: Mapping[str, Mapping[str, int]], several: bool) -> list[Problem]:
    """Return the problems of classes with so few images that training would stop.

    Args:
        counts: {split: {class: images that can be read}}; classes without any have a problem of their own.
        several: whether images have several labels; then one label is enough.
    """
    split = next((name for name in ("train", "all") if name in counts), None)
    if split is None:  # only to evaluate on
        return []
    here = {name: count for name, count in counts[split].items() if count}
    if len(here) == 1 and not several:
        reason = f"only one, {next(iter(here))!r}; a classifier needs at least two. Add images of another class."
        return [Problem("bad", "classes", reason)]
    single = [name for name, count in here.items() if count == 1]
    others = {name for name in ("val", "test") if any(counts.get(name, {}).values())}
    if not single or ("val" in others and not several):
        return []
    kind = ("label" if several else "class") if len(single) == 1 else ("labels" if several else "classes")
    more = f" and {len(single) - MOST} more" if len(single) > MOST else ""
    where, each = f"{kind} {', '.join(map(repr, single[:MOST]))}{more}", "" if len(single) == 1 else " each"
    if not others:
        needed = "one to train on and one to hold out are needed"
        return [Problem("bad", where, f"only one image{each}; {needed}. Add images, or remove the {kind}.")]
    needed = "`vitkit probe` needs two" if several else "`vitkit train` needs another to validate on, or --val 0"
    return [Problem("note", where, f"only one training image{each}; {needed}.")]


def _same_words(here: Sequence[str], classes: Sequence[str]) -> dict[str, str]:
    """Return {misspelt class: class} where only case, punctuation or a plural s differ and nothing else is meant."""

    def plain(name: str) -> str:
        return "".join(c for c in name.casefold() if c.isalnum()).rstrip("s")

    missing = [name for name in classes if name not in here]
    odd = [name for name in here if name not in classes]
    meant = {name: [one for one in classes if plain(one) == plain(name)] for name in odd}
    return {
        name: found[0]
        for name, found in meant.items()
        if len(found) == 1 and found[0] in missing and sum(other == found for other in meant.values()) == 1
    }


def _folders(place: Path, found: Survey, word: str) -> list[str]:
    try:
        with os.scandir(place) as entries:
            names = [entry.name for entry in entries if os.path.isdir(entry.path)]
    except OSError as error:
        found.problems.append(Problem("bad", _called(place, word), f"cannot be opened ({error.strerror})."))
        return []
    return sorted((name for name in names if not name.startswith((".", "__"))), key=natural)


def _loose(root: Path, word: str, found: Survey) -> None:
    """Report files next to the class folders: they belong to no class."""
    try:
        names = sorted(p.name for p in (root / word).iterdir() if p.is_file() and not p.name.startswith("."))
    except OSError:
        return
    images = [name for name in names if name.lower().endswith(ENDINGS)]
    if images:
        found.problems.append(
            Problem(
                "note",
                _called(root, word),
                f"not read: {images_of(len(images))} outside of any class folder ({', '.join(images[:3])}"
                f"{', ...' if len(images) > 3 else ''}). Put each into the folder of its class.",
            )
        )
    for name in names:
        if name not in images:
            _unread(root, f"{word}/{name}".removeprefix("/"), found)


def _unread(root: Path, name: str, found: Survey) -> None:
    ending = Path(name).suffix.lower()
    found.unread.setdefault(ending or "no ending", []).append(name)
    if (kind := _format(root / name)) in FORMATS and ending not in HEIF:
        found.problems.append(
            Problem(
                "note",
                name,
                f"not read because of its ending, but it is a {kind} image. Rename it to "
                f"{Path(name).stem}{FORMATS[kind][0]}.",
            )
        )


def _format(path: Path) -> str:
    """Return the format of a file whatever its ending; empty if it is not an image. Any file may pass for a TGA."""
    try:
        if irregular(path):
            return ""
        with open(path, "rb") as file:
            found = header(file.read(HEAD), path.name).format or ""
    except (OSError, BadImage):
        return ""
    return "" if found == "TGA" else found


def why_unread(ending: str) -> str:
    """Return what to do about files with this ending; empty if nothing."""
    return NEEDS_HEIF if ending in HEIF else ""
