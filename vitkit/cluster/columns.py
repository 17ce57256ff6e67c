"""The columns of a shard: what each image is, what the model said of it, and reading both again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vitkit.cluster.plan import Shard
from vitkit.cluster.results import Manifest
from vitkit.data.base import Source
from vitkit.errors import DataError
from vitkit.evaluation.logits import Outputs
from vitkit.evaluation.names import answer_names
from vitkit.evaluation.predict import answer
from vitkit.model.backbone import Backbone
from vitkit.model.classifier import probabilities
from vitkit.optional import library
from vitkit.types import Array

Columns = dict[str, Any]  # name of each column of a shard -> its Arrow array


def parquet(columns: Columns) -> bytes:
    """Return a table as the bytes of a Parquet file."""
    file = library("pyarrow", "data").BufferOutputStream()
    library("pyarrow.parquet", "data").write_table(library("pyarrow", "data").table(columns), file)
    return bytes(file.getvalue())


def text(words: Sequence[str | None]) -> Any:
    """Return an Arrow column of text; a file name that is not UTF-8 is written with escapes."""
    arrow = library("pyarrow", "data")

    clean = [
        None if word is None else word.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        for word in words
    ]
    return arrow.array(clean, arrow.string())


def vectors(rows: Array, readable: Array) -> Any:
    """Return an Arrow column of vectors: one per readable image, and none for the others.

    Args:
        rows: [n, F] float32, of the readable images.
        readable: [N] whether each image could be read.
    """
    arrow = library("pyarrow", "data")

    ends = np.cumsum(np.append(0, readable)) * rows.shape[1]  # of lists, not of fixed sizes: those cannot be missing
    return arrow.ListArray.from_arrays(
        arrow.array(ends, arrow.int32()), arrow.array(rows.ravel()), mask=arrow.array(~readable)
    )


def about(source: Source, shard: Shard, sha256: Sequence[str], errors: Sequence[str]) -> Columns:
    """Return the columns that every task has.

    Args:
        source: the images.
        shard: which of them.
        sha256: hash of each image's bytes; empty if there were none.
        errors: why each image could not be read; empty if it could.
    """
    arrow = library("pyarrow", "data")

    places = range(shard.start, shard.stop)
    columns: Columns = {
        "name": text([source.names[i] for i in places]),
        "part": text([shard.part] * len(shard)),
        "sha256": text([one or None for one in sha256]),
        "error": text([one or None for one in errors]),
    }
    if not source.class_names:
        return columns
    labels, names = source.labels[shard.start : shard.stop], source.class_names
    if source.several:
        said = [[names[k] for k in np.flatnonzero(row)] for row in labels]
        return columns | {"labels": arrow.array(said, arrow.list_(arrow.string()))}
    return columns | {
        "label": arrow.array(labels.astype(np.int32)),
        "class": text([names[int(k)] for k in labels]),
    }


def answers(model: Backbone, logits: Array, far: Array | None, readable: Array) -> Columns:
    """Return the columns of answers: a class with its probability, or any number of labels with theirs.

    Args:
        model: the model.
        logits: [n, K] of the readable images.
        far: [n] their distance to the known classes, if the model knows them.
        readable: [N] whether each image could be read.
    """
    arrow = library("pyarrow", "data")

    names, spec = answer_names(model), model.input_spec
    p = probabilities(torch.from_numpy(logits), spec).numpy()
    given: list[Any] = [None] * len(readable)
    for row, place in enumerate(np.flatnonzero(readable)):
        distance = None if far is None else float(far[row])
        given[place] = answer("", p[row], names, spec, 1, distance=distance)
    if spec.several:
        return {
            "answers": arrow.array(
                [None if one is None else [label.name for label in one.labels] for one in given],
                arrow.list_(arrow.string()),
            ),
            "probabilities": arrow.array(
                [None if one is None else [label.probability for label in one.labels] for one in given],
                arrow.list_(arrow.float64()),
            ),
        }
    columns: Columns = {
        "answer": text([None if one is None else one.name for one in given]),
        "index": arrow.array(
            [None if one is None or one.none_of_these else one.guesses[0].index for one in given], arrow.int32()
        ),
        "probability": arrow.array([None if one is None else one.probability for one in given], arrow.float64()),
    }
    if far is not None:
        columns["distance"] = arrow.array([None if one is None else one.distance for one in given])
    return columns


def read_outputs(manifest: Manifest, shards: Sequence[Shard], source: Source) -> Outputs:
    """Return the logits that `eval` wrote, as one machine would have computed them.

    Args:
        manifest: the finished shards.
        shards: all shards of the source.
        source: the images.
    """
    rows, places = list[Array](), list[Array]()
    for shard, table in zip(shards, _tables(manifest, shards, ["logits", "error"]), strict=True):
        readable = np.array([error is None for error in table["error"].to_pylist()], bool)
        flat = np.asarray(table["logits"].combine_chunks().flatten())
        rows.append(flat.reshape(int(readable.sum()), -1) if len(flat) else flat)
        places.append(shard.start + np.flatnonzero(readable))
    index = np.concatenate(places)
    skipped = read_errors(manifest, shards)
    if not len(index):
        raise DataError(f"Expected at least one readable image; got none. The first: {skipped[0][1]}")
    logits = np.concatenate([part for part in rows if len(part)])
    names = tuple(source.names[int(i)] for i in index)
    return Outputs(logits, source.labels[index].astype(np.int64), index, names, tuple(skipped))


def read_errors(manifest: Manifest, shards: Sequence[Shard]) -> list[tuple[str, str]]:
    """Return (name, reason) of every image that could not be read."""
    bad = [shard for shard in shards if manifest.entries[shard.name].errors]
    found: list[tuple[str, str]] = []
    for table in _tables(manifest, bad, ["name", "error"]):
        pairs = zip(table["name"].to_pylist(), table["error"].to_pylist(), strict=True)
        found += [(name, error) for name, error in pairs if error is not None]
    return found


def _tables(manifest: Manifest, shards: Sequence[Shard], columns: list[str]) -> Iterator[Any]:
    arrow, parquet = library("pyarrow", "data"), library("pyarrow.parquet", "data")
    for _, data in manifest.read(shard.name for shard in shards):
        yield parquet.read_table(arrow.BufferReader(data), columns=columns)
