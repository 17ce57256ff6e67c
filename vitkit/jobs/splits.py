"""The training and validation parts of a data set. The test part is not opened here: only `eval` uses it."""

from __future__ import annotations

from pathlib import Path

from vitkit.data.base import Source, Subset, stratified
from vitkit.data.sources import open_splits, parse
from vitkit.errors import DataError


def absolute(spec: str | Path) -> str | None:
    """Return a data set's `kind:place` with an absolute path, or None if it is not a file or folder."""
    kind, place = parse(spec)
    return f"{kind}:{Path(place).absolute()}" if place and Path(place).exists() else None


def train_and_val(spec: str | Path, share: float, seed: int) -> tuple[Source, Source | None, list[str]]:
    """Open the training and validation parts of a data set; also return notes for the user.

    If the data set has no validation part, a share of each training class is held out, chosen by `seed`. If it has no
    parts at all, the held-out images do not depend on `seed`: they are the ones that `vitkit eval` measures on.

    Args:
        spec: the data set, as for `open_splits`.
        share: share of the training part to hold out; 0 trains on everything, without validation.
        seed: the run's seed.

    Raises:
        DataError: there is no training part, or one of the parts lacks a class.
    """
    splits, notes = open_splits(spec), list[str]()
    if "train" not in splits and "all" not in splits:
        raise DataError(f"Expected a training part in {spec}; it has only: {', '.join(splits)}.")
    train = splits["train" if "train" in splits else "all"]()
    if not len(train):
        raise DataError(f"{spec} contains no images to train on.")
    if empty := [name for name, count in train.counts().items() if not count]:
        raise DataError(f"Class {empty[0]!r} of {spec} has no images to train on; add some or remove the class.")
    if len(train.class_names) < 2:
        raise DataError(f"Expected at least two classes; {spec} has only {train.class_names[0]!r}.")
    if share == 0:
        if "all" in splits:
            notes.append(
                "The run trains on all images, so `vitkit eval` on the same data would only measure memorisation."
            )
        return train, None, notes
    if "val" in splits and "train" in splits:
        val = splits["val"]()
        if val.class_names != train.class_names:
            other = sorted(set(train.class_names) ^ set(val.class_names))
            raise DataError(
                f"Expected the same classes in the training and validation parts of {spec}; only one of them has: "
                f"{', '.join(other[:5])}. Make them the same, or use --val 0."
            )
        kept: Source = train
    else:
        inside, held = stratified(train.labels, share, seed if "train" in splits else 0)
        kept, val = Subset(train, inside), Subset(train, held)
    if missing := [name for name, count in val.counts().items() if not count]:
        images = train.counts()[missing[0]]
        raise DataError(
            f"Class {missing[0]!r} has no images to validate on ({images} "
            f"image{'s' if images > 1 else ''} in total); add images, or use --val 0."
        )
    return kept, val, notes
