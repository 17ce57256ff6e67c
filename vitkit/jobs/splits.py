"""Which images a run trains on and which it validates on. The test part is not opened here: `eval` alone touches it."""

from __future__ import annotations

from pathlib import Path

from vitkit.data.base import Source, Subset, stratified
from vitkit.data.sources import open_splits
from vitkit.errors import DataError


def train_and_val(spec: str | Path, share: float, seed: int) -> tuple[Source, Source | None, list[str]]:
    """The training part and the validation part of a data set, and what there is to say about them.

    A data set with a validation part of its own keeps it. Else a share of each class of train is held out, chosen by
    `seed`. A data set without any parts has the same images held out that `vitkit eval` measures on by itself.

    Args:
        spec: what `open_splits` takes.
        share: part of train that is held out; 0 trains on all of it, and validates on nothing.
        seed: the run's.

    Raises:
        DataError: no training part, or a class that one of the parts lacks.
    """
    splits, notes = open_splits(spec), list[str]()
    if "train" not in splits and "all" not in splits:
        raise DataError(f"{spec} has no training part; it has: {', '.join(splits)}.")
    train = splits["train" if "train" in splits else "all"]()
    if not len(train):
        raise DataError(f"{spec} holds no images to train on.")
    if empty := [name for name, count in train.counts().items() if not count]:
        raise DataError(f"Class {empty[0]!r} of {spec} has no image to train on; add some or remove the class.")
    if len(train.class_names) < 2:
        raise DataError(f"{spec} has one class, {train.class_names[0]!r}; a classifier needs at least two.")
    if share == 0:
        if "all" in splits:
            notes.append(
                "All images are trained on: `vitkit eval` on the same data would measure what was learnt by heart."
            )
        return train, None, notes
    if "val" in splits and "train" in splits:
        val = splits["val"]()
        if val.class_names != train.class_names:
            other = sorted(set(train.class_names) ^ set(val.class_names))
            raise DataError(
                f"The validation part of {spec} has other classes than train: {', '.join(other[:5])}. Make "
                f"them the same, or use --val 0."
            )
        kept: Source = train
    else:
        inside, held = stratified(train.labels, share, seed if "train" in splits else 0)
        kept, val = Subset(train, inside), Subset(train, held)
    if missing := [name for name, count in val.counts().items() if not count]:
        images = train.counts()[missing[0]]
        raise DataError(
            f"Class {missing[0]!r} is missing from the validation part ({images} "
            f"image{'s' if images > 1 else ''} in all); add images of it, or use --val 0."
        )
    return kept, val, notes
