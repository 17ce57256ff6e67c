"""FoodVision Mini: 300 photos of pizza, steak and sushi, downloaded once from the repository of its course."""

from __future__ import annotations

import json
import os
from pathlib import Path

from vitkit.data import folder
from vitkit.data.base import Splits
from vitkit.data.fetch import fetch, unzip
from vitkit.errors import DataError
from vitkit.places import cache_folder

URL = "https://raw.githubusercontent.com/mrdbourke/pytorch-deep-learning/main/data/pizza_steak_sushi.zip"
MANIFEST: dict[str, dict[str, int]] = {
    "train": {"pizza": 78, "steak": 75, "sushi": 72},
    "test": {"pizza": 25, "steak": 19, "sushi": 31},
}


def splits(place: str) -> Splits:
    """Return the splits of FoodVision Mini.

    Args:
        place: a folder with train/ and test/; empty to download it.
    """
    root = Path(place).expanduser() if place else fetched()
    if not root.is_dir():
        raise DataError(
            f"Expected a folder with train/ and test/; there is no folder {place!r}. Use 'food' alone to download it."
        )
    found = folder.splits(str(root))
    check(root, found)
    return found


def fetched(url: str = URL, manifest: dict[str, dict[str, int]] | None = None) -> Path:
    """Return the folder of the photos, after downloading it if necessary; source.json records the URL and the SHA-256.

    Args:
        url: the zip file.
        manifest: the expected number of images per split and class (default: MANIFEST).
    """
    home = cache_folder()
    root, archive = home / "pizza_steak_sushi", home / "pizza_steak_sushi.zip"
    if root.is_dir():
        return root
    sha256 = fetch(
        url, archive, advice=f"Download it yourself and save it as {archive}, or unpack it and use food:FOLDER."
    )
    unzip(archive, root)
    try:
        check(root, folder.splits(str(root)), manifest)
    except DataError:
        os.replace(root, root.with_name(f"{root.name}.refused"))
        os.replace(archive, archive.with_name(f"{archive.name}.refused"))
        raise
    (home / "pizza_steak_sushi.source.json").write_text(
        json.dumps({"url": url, "sha256": sha256, "bytes": archive.stat().st_size}, indent=1) + "\n", encoding="utf-8"
    )
    return root


def check(root: Path, found: Splits, manifest: dict[str, dict[str, int]] | None = None) -> None:
    """Raise a DataError unless a folder's splits, classes and counts are those of the manifest.

    Args:
        root: the folder, for the error message.
        found: its splits.
        manifest: the expected number of images per split and class (default: MANIFEST).
    """
    for split, expected in (manifest or MANIFEST).items():
        counts = found[split]().counts() if split in found else {}
        if counts != expected:
            raise DataError(
                f"{root} is not FoodVision Mini: expected {split} to contain {expected}; got {counts}. "
                f"To use it anyway, give folder:{root}."
            )
