"""A Hugging Face data set: `hf:folder`, written by save_to_disk, or `hf:owner/name[:configuration]` from the hub."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from vitkit.data.base import Source, Splits
from vitkit.data.decode import Raw
from vitkit.data.files import read_file
from vitkit.data.folder import SPLIT_FOLDERS
from vitkit.data.string_table import natural
from vitkit.errors import BadImage, DataError, MissingDependency


class Rows(Source):
    """One split of a Hugging Face data set; images stay in its memory-mapped files.

    Args:
        rows: a `datasets.Dataset` with a column of images and a column of classes.
        where: name of the split in error messages.
        training: the training split, which decides the classes if the data set does not name them.
    """

    def __init__(self, rows: Any, where: str, training: Any = None) -> None:
        import datasets

        self.image = _column(rows, (datasets.Image,), ("image", "img"), "images", where)
        label = _column(
            rows, (datasets.ClassLabel,), ("label", "labels", "fine_label", "class", "target"), "classes", where
        )
        feature = rows.features[label]
        values = list(rows[label])
        if isinstance(feature, datasets.ClassLabel):
            class_names, numbers = list(feature.names), values
        else:
            known = values if training is None else training[label]
            class_names = sorted({str(v) for v in known if v is not None}, key=natural)
            number = {name: n for n, name in enumerate(class_names)}
            numbers = [None if v is None else number.get(str(v)) for v in values]
        if any(n is None or not 0 <= n < len(class_names) for n in numbers):
            raise DataError(
                f"Expected a class of the training split in column {label!r} of every row; {where} has rows "
                f"without one. Remove those rows."
            )
        super().__init__(numbers, class_names)
        self.rows = rows.select_columns([self.image]).cast_column(self.image, datasets.Image(decode=False))

    def raw(self, i: int) -> Raw:
        """Return the encoded bytes of row `i`."""
        cell = self.rows[i][self.image]
        if cell["bytes"] is not None:
            return bytes(cell["bytes"])
        if cell["path"] is None:
            raise BadImage(f"{self.names[i]}: has neither bytes nor a path.")
        return read_file(cell["path"], f"{self.names[i]} ({cell['path']})")


def _column(rows: Any, types: tuple[type, ...], usual: tuple[str, ...], what: str, where: str) -> str:
    of_type = [name for name, feature in rows.features.items() if isinstance(feature, types)]
    named = [name for name in usual if name in rows.features]
    for name in [n for n in usual if n in of_type] + of_type + named:
        return name
    raise DataError(f"Expected a column of {what} in {where}; its columns are: {', '.join(rows.features)}.")


def splits(place: str) -> Splits:
    """Return the splits of a Hugging Face data set.

    Args:
        place: a folder written by save_to_disk, or a name on the hub, with `:configuration` if it has several.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency("Hugging Face data sets need datasets: pip install 'vitkit[data]'.") from error
    library: Any = datasets
    if not place:
        raise DataError("Expected hf:folder or hf:owner/name; got 'hf' alone.")
    try:
        if Path(place).expanduser().is_dir():
            found = library.load_from_disk(str(Path(place).expanduser()))
        else:
            name, _, configuration = place.partition(":")
            found = library.load_dataset(name, configuration or None)
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        raise DataError(
            f"Expected a folder written by save_to_disk, or the name of a data set on the hub; {place!r} could not "
            f"be opened: {text}"
        ) from error
    if not isinstance(found, library.DatasetDict):
        return {"all": partial(Rows, found, place)}
    meaning = {word: split for split, words in SPLIT_FOLDERS.items() for word in words}
    training = found.get("train")
    return {
        meaning.get(name, name): partial(Rows, rows, f"{place}, split {name}", training) for name, rows in found.items()
    }
