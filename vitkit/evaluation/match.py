"""Which output of a model is which class of a data set: by name, by WordNet number, or by index; never by guess."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from vitkit.errors import DataError
from vitkit.evaluation.names import class_names, imagenet
from vitkit.model.config import InputSpec
from vitkit.types import Array


def match_classes(data: Sequence[str], spec: InputSpec, K: int) -> Array:
    """The model's output for each class of a data set.

    Args:
        data: the data set's class names.
        spec: the predictor's InputSpec.
        K: its outputs.

    Returns:
        [classes of the data] numbers of outputs.

    Raises:
        DataError: not all classes are names, WordNet numbers or indices of the model's; says how many are.
    """
    names = class_names(spec, K)
    tables = {"names": spelt(names), "WordNet numbers": wnids(names), "indices": {str(k): k for k in range(K)}}
    matched = {}
    for kind, table in tables.items():
        found = [table.get(_number(name) if kind == "indices" else plain(name)) for name in data]
        if None not in found and len(set(found)) == len(found):
            return np.array(found, np.int64)
        matched[kind] = sum(k is not None for k in found)
    kind = max(matched, key=lambda kind: matched[kind])
    lost = next((name for name in data if plain(name) not in tables["names"]), data[0])
    raise DataError(
        f"{matched[kind]} of the data's {len(data)} classes match the model's {K} classes (by {kind}); {lost!r}, for "
        f"one, does not. The model's are {', '.join(names[:3])}, ...: use data or weights whose classes agree, rename "
        f"the data's classes to the model's names or indices, or say --in-order if they stand in the same order."
    )


def in_order(data: Sequence[str], K: int) -> Array:
    """The outputs of a data set whose classes stand in the model's order, whatever they are called.

    Args:
        data: the data set's class names.
        K: the model's outputs.
    """
    if len(data) != K:
        raise DataError(f"Classes in the same order must be equally many; the data has {len(data)}, the model {K}.")
    return np.arange(K)


def plain(name: str) -> str:
    """A name without what spellings differ in: case, underscores, hyphens, spaces."""
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


def spelt(names: Sequence[str]) -> Mapping[str, int]:
    """{name: output}; of a list of synonyms ("tench, Tinca tinca") the first counts too, where only one has it."""
    table = {plain(name.partition(",")[0]): k for k, name in enumerate(names)}
    times = Counter(plain(name.partition(",")[0]) for name in names)
    return {name: k for name, k in table.items() if times[name] == 1} | {plain(n): k for k, n in enumerate(names)}


def wnids(names: Sequence[str]) -> Mapping[str, int]:
    """{WordNet number: output} where the outputs are ImageNet's classes in ImageNet's order; else empty."""
    known = imagenet()
    if len(names) != len(known.names):
        return {}
    same = sum(plain(a.partition(",")[0]) == plain(b.partition(" (")[0]) for a, b in zip(names, known.names))
    return {wnid: k for k, wnid in enumerate(known.wnids)} if same >= 0.9 * len(names) else {}


def _number(name: str) -> str:
    return str(int(name)) if name.isascii() and name.isdecimal() else name
