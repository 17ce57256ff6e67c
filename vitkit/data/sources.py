"""The table of all kinds of data sets, and `open_source`.

A data set is given as `kind:place` (`folder:photos`, `hf:cifar10`, `digits`) or as a path, whose kind is recognised.
Each kind returns its splits unopened: {"train": open, "val": open}, or {"all": open} if it has no splits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from vitkit.data import cifar10, digits, folder, food, hf, idx, remote, table, tar
from vitkit.data.base import Source, Splits, Subset, stratified
from vitkit.errors import DataError, pick

log = logging.getLogger("vitkit")

SOURCES: dict[str, Callable[[str], Splits]] = {
    "folder": folder.splits,  # train/<class>/*.jpg, or <class>/*.jpg
    "csv": table.splits_csv,  # path,label[,split]
    "parquet": table.splits_parquet,
    "hf": hf.splits,  # a Hugging Face data set, on disk or from the hub
    "tar": tar.splits,  # WebDataset shards
    "s3": remote.splits,  # s3://bucket/...: a folder, tar shards or a table
    "digits": digits.splits,  # scikit-learn's 1,797 digits, embedded
    "digit-pairs": digits.splits_pairs,  # up to two of them per image: several labels
    "idx": idx.splits,  # MNIST's file format
    "cifar10": cifar10.splits,  # its published binary files
    "food": food.splits,  # FoodVision Mini, downloaded once, or a local copy
}

# A folder is of the first kind here of which it has a matching file; otherwise it is a `folder`.
RECOGNISED: dict[str, tuple[str, ...]] = {
    "hf": ("dataset_dict.json", "state.json"),
    "idx": ("*-idx?-ubyte", "*-idx?-ubyte.gz"),
    "cifar10": ("data_batch_*.bin", "cifar-10-batches-bin/data_batch_*.bin"),
    "tar": ("*.tar", "train/*.tar"),
}


def open_splits(spec: str | Path) -> Splits:
    """Return a data set's own splits; calling one opens it.

    Args:
        spec: a path, or `kind:place` with a kind from SOURCES; a path that exists comes first.

    Raises:
        DataError: there is nothing, or nothing that is recognised.
    """
    if spec in SOURCES and _is_run(Path(spec)):
        log.warning("note: the folder %r is a run, which holds no data; the data source %r is used.", spec, spec)
    elif spec in SOURCES and Path(spec).exists():
        log.warning(
            "note: %r is a path as well as a data source; the path is used. The source is %r.", spec, f"{spec}:"
        )
    kind, place = parse(spec)
    return pick(SOURCES, kind, "data source")(place)


def open_source(spec: str | Path, split: str = "train", *, held_share: float = 0.1, seed: int = 0) -> Source:
    """Open one split of a data set.

    If a data set has neither `val` nor `test`, a stratified share of it is held out.

    Args:
        spec: `kind:place` with a kind from SOURCES, or a path: `photos`, `labels.csv`, `hf:cifar10`, `digits`, `food`.
        split: `train`; `val` or `test`, which mean the same if only one exists; or `all` if the data set has no splits
            (default: `train`).
        held_share: share to hold out if the data set has neither `val` nor `test` (default: 0.1).
        seed: chooses which images are held out (default: 0).

    Raises:
        DataError: there is no such data set or split; the message lists what there is.
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
            raise DataError(f"{spec} has splits of its own; choose one of: {', '.join(splits)}.")
        return _filled(whole(), spec, split)
    source = _filled(whole(), spec, split)
    if len(source) < 2:
        raise DataError(f"Expected at least two images, one to train on and one to hold out; {spec} has one.")
    kept, out = stratified(source.labels, held_share, seed)
    if not len(out):
        raise DataError(f"{spec} has one image per class, so none can be held out; use split 'all'.")
    return Subset(source, kept if split == "train" else out)


def _filled(source: Source, spec: str | Path, split: str) -> Source:
    if not len(source):
        raise DataError(f"{spec} contains no images in {split!r}.")
    return source


def _is_run(path: Path) -> bool:
    """Return whether a path is a run folder (`vitkit train`, `vitkit probe`)."""
    return (path / "run.json").is_file()


def parse(spec: str | Path) -> tuple[str, str]:
    """Return (kind, place) of a data set; the kind of a path is recognised by what is there."""
    text = str(spec)
    kind, _, place = text.partition(":")
    path = Path(text).expanduser()
    if not isinstance(spec, Path) and kind in SOURCES and (not path.exists() or (text == kind and _is_run(path))):
        return kind, place
    if path.is_file():
        for ending, of in {".csv": "csv", ".parquet": "parquet", ".tar": "tar"}.items():
            if path.suffix.lower() == ending:
                return of, str(path)
        raise DataError(f"Expected a folder of images, or a .csv, .parquet or .tar file; {text} is another file.")
    if not path.is_dir():
        raise DataError(
            f"Expected a folder, a .csv, .parquet or .tar file, or one of {', '.join(SOURCES)}; "
            f"there is no data at {text!r}."
        )
    if _is_run(path):
        raise DataError(
            f"Expected data; {text} is a run folder, which holds weights and numbers. Give the data's path."
        )
    for of, found in RECOGNISED.items():
        if any(next(path.glob(pattern), None) is not None for pattern in found):
            return of, str(path)
    return "folder", str(path)
