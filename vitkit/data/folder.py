"""A folder of images: train/<class>/*.jpg next to val/ or test/, or just <class>/*.jpg."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from vitkit.data.base import Source, Splits, excerpt
from vitkit.data.files import ENDINGS, irregular, read_file
from vitkit.data.string_table import StringTable, natural
from vitkit.errors import DataError, nearest
from vitkit.types import Array

# The folder names of each split, in the order in which they are tried.
SPLIT_FOLDERS: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}


class Files(Source):
    """Images in files.

    Args:
        root: the folder that `names` are relative to.
        names: path of each file, relative to `root`, with forward slashes.
        labels: see Source.
        class_names: see Source.
    """

    def __init__(
        self, root: Path, names: Sequence[str], labels: Sequence[int] | Array, class_names: Sequence[str]
    ) -> None:
        super().__init__(labels, class_names, StringTable(names))
        self.root = root

    def raw(self, i: int) -> bytes:
        """Return the bytes of file `i`."""
        name = self.names[i]
        return read_file(os.path.join(self.root, name), name)

    def place(self, i: int) -> Path:
        """Return the file of image `i`."""
        return self.root / self.names[i]

    def excerpt(self, i: int, whole: bool) -> tuple[int, bytes]:
        """See Source."""
        path = os.path.join(self.root, self.names[i])
        try:
            if irregular(path):
                return -1, b""
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                return size, excerpt(file, 0, size, whole)
        except OSError:
            return -1, b""


def splits(place: str) -> Splits:
    """Return the splits of a folder.

    Args:
        place: the folder.
    """
    root = Path(place).expanduser()
    if not root.is_dir():
        raise DataError(f"Expected a folder of images; there is no folder {place!r}.")
    found: dict[str, Callable[[], Source]] = {}
    folders = {
        split: next((root / n for n in names if (root / n).is_dir()), None) for split, names in SPLIT_FOLDERS.items()
    }
    if folders["train"] is None:
        return {"all": partial(read_folder, root)}
    names = class_folders(folders["train"])
    for split, folder in folders.items():
        if folder is not None:
            found[split] = partial(read_folder, folder, names)
    return found


def class_folders(root: Path) -> list[str]:
    """Return the names of the class folders in `root`, numbers in numeric order."""
    try:
        with os.scandir(root) as entries:
            found = [entry.name for entry in entries if os.path.isdir(entry.path)]
    except OSError as error:
        raise DataError(f"The folder {root} cannot be opened ({error.strerror}).") from error
    names = sorted((name for name in found if not name.startswith((".", "__"))), key=natural)
    if not names:
        raise DataError(f"Expected {root}/<class>/<image>, one folder per class; {root} has no class folders.")
    return names


def read_folder(root: Path, class_names: Sequence[str] | None = None) -> Files:
    """List <class>/**/<image> in a folder, in an order that does not depend on the file system.

    Args:
        root: the folder of class folders.
        class_names: the classes of the training split (default: the class folders).

    Raises:
        DataError: there are no class folders, or one that is not in `class_names`.
    """
    here = class_folders(root)
    return Files(
        root,
        *arranged(str(root), here, class_names, lambda name: [n for n, image in files_below(root, name) if image]),
    )


def arranged(
    place: str, here: Sequence[str], class_names: Sequence[str] | None, files: Callable[[str], list[str]]
) -> tuple[list[str], list[int], list[str]]:
    """Return (names, labels, classes) of the images in class folders: class by class, each sorted by name.

    Args:
        place: where the class folders are, for the message.
        here: their names.
        class_names: the classes of the training split (default: `here`).
        files: class folder -> its images.

    Raises:
        DataError: a class is not in `class_names`.
    """
    order = list(here if class_names is None else class_names)
    if unknown := [name for name in here if name not in set(order)]:
        raise DataError(
            f"{place} has a class {unknown[0]!r} that the training folder does not have"
            f"{nearest(unknown[0], order) or '.'} Its classes are: "
            f"{', '.join(order[:20])}{', ...' if len(order) > 20 else ''}."
        )
    names: list[str] = []
    labels: list[int] = []
    for label, class_name in enumerate(order):
        found = sorted(files(class_name)) if class_name in here else []
        names += found
        labels += [label] * len(found)
    return names, labels, order


def read_images(root: Path) -> Files:
    """List every image in a folder and its subfolders, without classes.

    Args:
        root: the folder.
    """
    names = sorted(name.removeprefix("./") for name, image in files_below(root, ".") if image)
    return Files(root, names, [0] * len(names), ())


def files_below(
    root: Path, folder: str, closed: list[tuple[str, str]] | None = None, above: tuple[str, ...] = ()
) -> Iterator[tuple[str, bool]]:
    """Yield (path relative to `root`, whether it is read as an image) of every file below a folder.

    Hidden files, pipes and loops of links are left out.

    Args:
        root: the folder that paths are relative to.
        folder: where to start, relative to `root`.
        closed: receives (folder, reason) of every folder that cannot be opened (default: such a folder is an error).
        above: the folders passed on the way, so that links make no loop.

    Raises:
        DataError: a folder cannot be opened.
    """
    here = os.path.realpath(root / folder)
    if here in above:
        return
    try:
        with os.scandir(here) as opened:
            entries = list(opened)
    except OSError as error:
        if closed is None:
            raise DataError(f"The folder {root / folder} cannot be opened ({error.strerror}).") from error
        closed.append((folder, error.strerror or str(error)))
        return
    for entry in entries:
        name, link = f"{folder}/{entry.name}", entry.is_symlink()
        if entry.name.startswith("."):
            continue
        if os.path.isdir(entry.path) if link else entry.is_dir():
            if not (link and Path(here).is_relative_to(os.path.realpath(entry.path))):  # it leads back up
                yield from files_below(root, name, closed, (*above, here))
        elif link or entry.is_file():  # not a named pipe
            yield name, entry.name.lower().endswith(ENDINGS)
