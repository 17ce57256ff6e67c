"""FoodVision Mini: 300 photos of pizza, steak and sushi, fetched once from the repository of its course."""

from __future__ import annotations

import json
import os
from pathlib import Path

from vitkit.data import folder
from vitkit.data.base import Splits
from vitkit.data.fetch import fetch, unzip
from vitkit.errors import DataError

URL = "https://raw.githubusercontent.com/mrdbourke/pytorch-deep-learning/main/data/pizza_steak_sushi.zip"
MANIFEST: dict[str, dict[str, int]] = {
    "train": {"pizza": 78, "steak": 75, "sushi": 72},
    "test": {"pizza": 25, "steak": 19, "sushi": 31},
}


def cache_folder() -> Path:
    """Where fetched data is kept: $VITKIT_CACHE, or vitkit below the user's cache folder."""
    own = os.environ.get("VITKIT_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitkit"


def splits(place: str) -> Splits:
    """The splits of FoodVision Mini.

    Args:
        place: a folder that holds train/ and test/ already; nothing to fetch it.
    """
    root = Path(place).expanduser() if place else fetched()
    if not root.is_dir():
        raise DataError(
            f"There is no folder {place!r}; give the folder that holds train/ and test/, or 'food' alone to fetch it."
        )
    found = folder.splits(str(root))
    check(root, found)
    return found


def fetched(url: str = URL, manifest: dict[str, dict[str, int]] | None = None) -> Path:
    """The folder of the photos, fetched and unpacked the first time; what came is recorded in source.json.

    Args:
        url: the zip file.
        manifest: what must be inside; MANIFEST when not given.
    """
    home = cache_folder()
    root, archive = home / "pizza_steak_sushi", home / "pizza_steak_sushi.zip"
    if root.is_dir():
        return root
    sha256 = fetch(
        url, archive, advice=f"Download it by hand and save it as {archive}, or unpack it anywhere and use food:FOLDER."
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
    """Refuse a folder whose splits, class names or counts are not those of the manifest.

    Args:
        root: what to call it.
        found: its splits.
        manifest: what is expected; MANIFEST when not given.
    """
    for split, expected in (manifest or MANIFEST).items():
        counts = found[split]().counts() if split in found else {}
        if counts != expected:
            raise DataError(
                f"{root} is not FoodVision Mini: expected {split} to hold {expected}; got {counts}. "
                f"Use folder:{root} if that is what you want."
            )
