"""Match the classes of a data set to a model's outputs: by name, by WordNet ID or by index, never by guessing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from vitkit.errors import DataError
from vitkit.evaluation.names import imagenet
from vitkit.types import Array

MOST = 10  # classes that a message lists in full


def match_classes(data: Sequence[str], outputs: Sequence[str]) -> Array:
    """Find the model's output for each class of a data set.

    Args:
        data: the data set's class names.
        outputs: names of the model's K outputs; see `class_names`.

    Returns:
        [classes of the data] output indices.

    Raises:
        DataError: the classes match neither the names nor the WordNet IDs nor the indices of the outputs.
    """
    K = len(outputs)
    tables = {"name": by_name(outputs), "WordNet ID": by_wnid(outputs), "index": {str(k): k for k in range(K)}}
    matched = {}
    for kind, table in tables.items():
        found = [table.get(_number(name) if kind == "index" else normal(name)) for name in data]
        if None not in found and len(set(found)) == len(found):
            return np.array(found, np.int64)
        matched[kind] = found
    kind = max(matched, key=lambda kind: sum(k is not None for k in matched[kind]))
    lost = next((name for name, k in zip(data, matched[kind]) if k is None), None)
    listed = ", ".join(outputs if K <= MOST else [*outputs[:3], "..."])
    raise DataError(
        f"Expected each class of the data to be one of the model's {K}; {sum(k is not None for k in matched[kind])} of "
        f"the data's {len(data)} classes match by {kind}, "
        + (f"but {lost!r} does not" if lost is not None else "but two of them match the same class")
        + f". The model's classes are {listed}: use matching data or weights, "
        + ("" if len(data) == K else "or ")
        + "rename the data's classes to the model's names or indices"
        + (", or pass --in-order if both list the same classes in the same order." if len(data) == K else ".")
    )


def in_order(data: Sequence[str], K: int) -> Array:
    """Return the outputs for a data set whose classes are in the model's order, whatever their names.

    Args:
        data: the data set's class names.
        K: number of the model's outputs.
    """
    if len(data) != K:
        raise DataError(f"--in-order needs as many classes as outputs; the data has {len(data)}, the model {K}.")
    return np.arange(K)


def normal(name: str) -> str:
    """Return the name in lower case with single spaces in place of underscores, hyphens and runs of spaces."""
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


def by_name(outputs: Sequence[str]) -> Mapping[str, int]:
    """Map names to outputs. The first of several synonyms ("tench, Tinca tinca") also counts if it is unique."""
    first = {normal(name.partition(",")[0]): k for k, name in enumerate(outputs)}
    times = Counter(normal(name.partition(",")[0]) for name in outputs)
    return {name: k for name, k in first.items() if times[name] == 1} | {normal(n): k for k, n in enumerate(outputs)}


def by_wnid(outputs: Sequence[str]) -> Mapping[str, int]:
    """Map WordNet IDs to outputs if these are ImageNet's classes in ImageNet's order; otherwise return nothing."""
    known = imagenet()
    if len(outputs) != len(known.names):
        return {}
    same = sum(normal(a.partition(",")[0]) == normal(b.partition(" (")[0]) for a, b in zip(outputs, known.names))
    return {wnid: k for k, wnid in enumerate(known.wnids)} if same >= 0.9 * len(outputs) else {}


def _number(name: str) -> str:
    return str(int(name)) if name.isascii() and name.isdecimal() else name
