"""The training and validation parts of a data set, with or without labels. Only `eval` opens the test part."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vitkit.data.base import Source, Subset, Unlabelled, stratified, subset
from vitkit.data.folder import SPLIT_FOLDERS, read_images
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
    kind = "Label" if train.several else "Class"
    if empty := [name for name, count in train.counts().items() if not count]:
        raise DataError(
            f"{kind} {empty[0]!r} of {spec} has no images to train on; add some or remove the {kind.lower()}."
        )
    if train.several:
        notes.append(f"{spec} has {train.spoken()}. The loss is the sigmoid's, and mAP decides which weights are best.")
    elif len(train.class_names) < 2:
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
            f"{kind} {missing[0]!r} has no images to validate on ({images} "
            f"image{'s' if images > 1 else ''} in total); add images, or use --val 0."
        )
    return kept, val, notes


def unlabelled(spec: str | Path, share: float, seed: int) -> tuple[Source, Source | None, list[str]]:
    """Open the training and validation parts of a data set without its labels; a folder needs no class folders.

    Args:
        spec: a folder of images at any depth, or any data set of `open_splits`, whose labels are ignored.
        share: share of the training part to hold out; 0 trains on everything, without validation.
        seed: chooses which images are held out.

    Raises:
        DataError: there are no images to train on.
    """
    kind, place = parse(spec)
    if kind == "folder":
        root = Path(place).expanduser()
        train_folder, val_folder = (
            next((root / name for name in SPLIT_FOLDERS[part] if (root / name).is_dir()), None)
            for part in ("train", "val")
        )
        train: Source = read_images(train_folder or root)
        val: Source | None = read_images(val_folder) if train_folder and val_folder else None
    else:
        splits = open_splits(spec)
        if "train" not in splits and "all" not in splits:
            raise DataError(f"Expected a training part in {spec}; it has only: {', '.join(splits)}.")
        train = splits["train" if "train" in splits else "all"]()
        val = splits["val"]() if "val" in splits and "train" in splits else None
    if not len(train):
        raise DataError(f"{spec} contains no images to train on.")
    if share == 0:
        return Unlabelled(train), None, []
    if val is not None and len(val):
        return Unlabelled(train), Unlabelled(val), []
    if len(train) < 2:
        raise DataError(f"Expected at least two images, one of them to validate on; {spec} has one. Use --val 0.")
    kept, held = stratified(np.zeros(len(train), int), share, seed)
    return Unlabelled(train, kept), Unlabelled(train, held), []


def some(train: Source, images: float | None, seed: int) -> Source:
    """Return the training images that a recipe asks for, see `data.base.subset`; all of them for None."""
    return train if images is None else Subset(train, subset(train.labels, images, seed))
