"""The table of all kinds of data sets, and `open_source`.

A spec is `kind:place` (`folder:photos`, `hf:cifar10`, `digits`) or a plain path, whose kind is then recognised.
Every kind answers with its splits, unread: {"train": open, "val": open}, or {"all": open} where it has none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vitkit.data import digits, folder, food, hf, idx, table, tar
from vitkit.data.base import Source, Splits, Subset, stratified
from vitkit.errors import DataError, pick

SOURCES: dict[str, Callable[[str], Splits]] = {
    "folder": folder.splits,  # train/<class>/*.jpg, or <class>/*.jpg
    "csv": table.splits_csv,  # path,label[,split]
    "parquet": table.splits_parquet,
    "hf": hf.splits,  # a Hugging Face data set, on disk or from the hub
    "tar": tar.splits,  # WebDataset shards
    "digits": digits.splits,  # scikit-learn's 1,797 digits, embedded
    "idx": idx.splits,  # MNIST's file format
    "food": food.splits,  # FoodVision Mini, fetched once, or from a local path
}

# The kind of a folder is that of the first row one of whose patterns it has a file for; else it is `folder`.
RECOGNISED: dict[str, tuple[str, ...]] = {
    "hf": ("dataset_dict.json", "state.json"),
    "idx": ("*-idx?-ubyte", "*-idx?-ubyte.gz"),
    "tar": ("*.tar", "train/*.tar"),
}


def open_splits(spec: str | Path) -> Splits:
    """The splits a data set has by itself, each opened only when called.

    Args:
        spec: `kind:place` with a kind of SOURCES, or a path.

    Raises:
        DataError: nothing there, or nothing that is recognised.
    """
    kind, place = parse(spec)
    return pick(SOURCES, kind, "data source")(place)


def open_source(spec: str | Path, split: str = "train", *, held_share: float = 0.1, seed: int = 0) -> Source:
    """Open one split of a data set.

    A data set without a held-out part gets one: a stratified share of it, a function of `seed`.

    Args:
        spec: `kind:place` with a kind of SOURCES, or a path: `photos`, `labels.csv`, `hf:cifar10`, `digits`, `food`.
        split: `train`; `val` or `test` (each stands in for the other where only one exists); `all` for a data set
            that has no splits of its own.
        held_share: share that is held out where the data set has no held-out part.
        seed: chooses that share.

    Raises:
        DataError: no such place, or no such split; the message lists what there is.
    """
    splits = open_splits(spec)
    whole = splits.get("all", splits.get("train"))
    held = {"val": ("val", "test"), "test": ("test", "val")}
    for name in held.get(split, (split,)):
        if name in splits and (name != "train" or "val" in splits or "test" in splits):
            return _filled(splits[name](), spec, name)
    if whole is None or split not in ("train", "val", "test", "all"):
        raise DataError(f"{spec} has no split {split!r}; it has: {', '.join(splits)}.")
    if split == "all":
        if len(splits) > 1:
            raise DataError(f"{spec} is split already; choose one of: {', '.join(splits)}.")
        return _filled(whole(), spec, split)
    source = _filled(whole(), spec, split)
    if len(source) < 2:
        raise DataError(f"{spec} holds one image; at least two are needed for a training and a held-out part.")
    kept, out = stratified(source.labels, held_share, seed)
    if not len(out):
        raise DataError(f"{spec} has one image for each class, so none can be held out; use split 'all'.")
    return Subset(source, kept if split == "train" else out)


def _filled(source: Source, spec: str | Path, split: str) -> Source:
    if not len(source):
        raise DataError(f"{spec} holds no images in {split!r}.")
    return source


def parse(spec: str | Path) -> tuple[str, str]:
    """(kind, place) of a spec; the kind of a plain path is recognised by what lies there."""
    text = str(spec)
    kind, colon, place = text.partition(":")
    if not isinstance(spec, Path) and (text in SOURCES or (colon and kind in SOURCES)):
        return kind, place
    path = Path(text).expanduser()
    if path.is_file():
        for ending, of in {".csv": "csv", ".parquet": "parquet", ".tar": "tar"}.items():
            if path.suffix.lower() == ending:
                return of, str(path)
        raise DataError(f"{text} is one file; expected a folder of images, or a .csv, .parquet or .tar file.")
    if not path.is_dir():
        raise DataError(
            f"There is no data at {text!r}: expected a folder, a .csv, .parquet or .tar file, or one of: "
            f"{', '.join(SOURCES)}."
        )
    for of, found in RECOGNISED.items():
        if any(next(path.glob(pattern), None) is not None for pattern in found):
            return of, str(path)
    return "folder", str(path)
