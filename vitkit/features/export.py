"""Export features from the cache to NumPy's .npz or to Parquet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.errors import ConfigError, MissingDependency
from vitkit.features.filled import CHUNK, Filled

ARRAYS = ("features", "labels", "names", "parts", "class_names")  # of an .npz file
COLUMNS = ("name", "part", "label", "class", "feature")  # of a .parquet file
LABEL_COLUMNS = ("name", "part", "labels", "feature")  # the same where an image may have several labels


def export(parts: Mapping[str, Filled], path: str | Path) -> None:
    """Write features with their names, labels and parts to a file.

    An `.npz` file holds ARRAYS, `features` being [n, F] float32, and none of them pickled; a `.parquet` file has the
    columns COLUMNS or LABEL_COLUMNS, and is written in chunks.

    Args:
        parts: {name of the part: its features}, all of the same feature.
        path: the file; its extension selects the format.
    """
    path = Path(path)
    check(path)
    if path.suffix == ".npz":
        found = {name: filled.read() for name, filled in parts.items()}
        np.savez(
            path,
            features=np.concatenate([e.features for e in found.values()]),
            labels=np.concatenate([e.labels for e in found.values()]),
            names=np.array([name for e in found.values() for name in e.names], dtype=np.str_),
            parts=np.array([part for part, e in found.items() for _ in e.names], dtype=np.str_),
            class_names=np.array(next(iter(found.values())).class_names, dtype=np.str_),
        )
        return
    import pyarrow.parquet

    arrow: Any = pyarrow  # mypy cannot see functions that are created at run time
    width = next(iter(parts.values())).choice.width
    several = next(iter(parts.values())).source.several
    one_class = [("label", arrow.int32()), ("class", arrow.string())]
    schema = arrow.schema(
        [
            ("name", arrow.string()),
            ("part", arrow.string()),
            *([("labels", arrow.list_(arrow.string()))] if several else one_class),
            ("feature", arrow.list_(arrow.float32(), width)),
        ]
    )
    with arrow.parquet.ParquetWriter(path, schema) as writer:
        for part, filled in parts.items():
            places = np.flatnonzero(filled.readable)
            for start in range(0, len(places), CHUNK):
                index = places[start : start + CHUNK]
                labels, names = filled.source.labels[index], filled.source.class_names
                said: list[Any]
                if several:
                    said = [[[names[k] for k in np.flatnonzero(row)] for row in labels]]
                else:
                    said = [labels.astype(np.int32), [names[int(k)] for k in labels]]
                flat = arrow.array(filled.rows(index).ravel())
                writer.write_table(
                    arrow.table(
                        [
                            [filled.source.names[int(i)] for i in index],
                            [part] * len(index),
                            *said,
                            arrow.FixedSizeListArray.from_arrays(flat, width),
                        ],
                        schema=schema,
                    )
                )


def check(path: Path) -> None:
    """Refuse a file that cannot be written, before any work is done.

    Args:
        path: the file.
    """
    if path.suffix not in (".npz", ".parquet"):
        raise ConfigError(f"Expected a file name that ends in .npz or .parquet; got {str(path)!r}.")
    if path.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise MissingDependency("Writing Parquet needs pyarrow: pip install 'vitkit[data]'") from error
