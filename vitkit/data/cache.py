"""Decoded images on disk: each JPEG is decoded once, and later epochs only copy bytes.

A cache is a folder with three files: images.u8 (the pixels of all images, one after the other), index.npy (offset,
height, width and channels of each image) and cache.json (what the cache was made from and how; written last, so that an
unfinished cache is never used).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitkit.data.base import Source
from vitkit.data.decode import JPEGS, Raw, decode, header, region, upright_size
from vitkit.data.preprocess import pixels
from vitkit.data.workers import default_workers, parallel_map
from vitkit.errors import BadImage, ConfigError, OutputError
from vitkit.model.config import InputSpec
from vitkit.types import Array, Progress

VERSION = 2
PIECE = 16  # images per task


class CachedSource(Source):
    """A source whose images are already decoded.

    Args:
        source: the source that was decoded; it provides names, labels and the fingerprint.
        folder: the cache.
    """

    def __init__(self, source: Source, folder: Path) -> None:
        super().__init__(source.labels, source.class_names, source.names)
        self.source, self.folder = source, folder
        about = json.loads((folder / "cache.json").read_text(encoding="utf-8"))
        self.bad: dict[str, str] = about["bad"]
        self.ready_for = InputSpec.from_dict(about["spec"]) if about["spec"] else None
        self._index = np.asarray(np.load(folder / "index.npy", mmap_mode="r"))
        self._map()

    def _map(self) -> None:
        # Nobody writes to it, but torch warns about read-only memory, so it is mapped copy-on-write.
        empty = not (self.folder / "images.u8").stat().st_size
        self._pixels = (
            np.zeros(0, np.uint8) if empty else np.asarray(np.memmap(self.folder / "images.u8", np.uint8, mode="c"))
        )

    def raw(self, i: int) -> Array:
        """Return the pixels of image `i`, [H, W, C] uint8."""
        if (why := self.bad.get(str(i))) is not None:
            raise BadImage(why)
        start, H, W, C = self._index[i].tolist()
        return self._pixels[start : start + H * W * C].reshape(H, W, C)

    def place(self, i: int) -> Path | None:
        """See Source."""
        return self.source.place(i)

    def fingerprint(self, *, whole: bool = False) -> str:
        """Return the source's fingerprint."""
        return self.source.fingerprint(whole=whole)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_pixels"}  # each worker maps the file itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()


def cached(
    source: Source,
    folder: str | Path,
    *,
    spec: InputSpec | None = None,
    short_side: int | None = None,
    verify: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> CachedSource:
    """Open the cache of a source; decode the source first if there is no cache or it is out of date.

    Args:
        source: where the images come from.
        folder: the cache's own folder; a cache of other data or other options is replaced.
        spec: store the input of evaluation (resized and cropped, bit-exact) instead of whole images.
        short_side: shrink larger images to this shorter side, in pixels, for training with a smaller cache
            (default: keep every pixel).
        verify: compare every byte of the source with what was decoded, not just a part of each image (default: False).
        workers: worker processes for decoding (default: one per core).
        progress: called with (images done, total).

    Raises:
        OutputError: the folder cannot be written to.
    """
    if spec is not None and short_side is not None:
        raise ConfigError("Expected spec or short_side, not both; give one of them.")
    folder = Path(folder)
    exact = spec.of_images if spec is not None else None
    about = {
        "version": VERSION,
        "fingerprint": source.fingerprint(whole=verify),
        "short_side": short_side,
        "spec": exact.to_dict() if exact is not None else None,
    }
    try:
        old = json.loads((folder / "cache.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        old = {}
    if {key: old.get(key) for key in about} != about:
        try:
            _make(source, folder, about, exact, short_side, workers, progress)
        except OSError as error:
            raise OutputError(
                f"The cache {folder} could not be written: {error.strerror or error}. Choose a folder on a disk with "
                f"enough space."
            ) from error
    return CachedSource(source, folder)


def _make(
    source: Source,
    folder: Path,
    about: dict[str, Any],
    spec: InputSpec | None,
    short_side: int | None,
    workers: int | None,
    progress: Progress | None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cache.json").unlink(missing_ok=True)
    index = np.zeros((len(source), 4), np.int64)
    bad: dict[str, str] = {}
    end, part = 0, folder / f"images.{os.getpid()}.part"
    try:
        with open(part, "wb") as file:
            for i, found in enumerate(_decoded(source, spec, short_side, workers)):
                if isinstance(found, str):
                    bad[str(i)] = found
                else:
                    index[i] = (end, *found.shape)
                    end += file.write(np.ascontiguousarray(found).data)
                if progress is not None:
                    progress(i + 1, len(source))
        os.replace(part, folder / "images.u8")
    finally:
        part.unlink(missing_ok=True)
    np.save(folder / "index.npy", index)
    (folder / "cache.json").write_text(json.dumps(about | {"bad": bad}, indent=1) + "\n", encoding="utf-8")


class _Decode:
    def __init__(self, source: Source, spec: InputSpec | None, short_side: int | None) -> None:
        self.source, self.spec, self.short_side = source, spec, short_side

    def __call__(self, rows: range) -> list[Array | str]:
        return [self.one(i) for i in rows]

    def one(self, i: int) -> Array | str:
        name = self.source.names[i]
        try:
            raw = self.source.raw(i)
            if self.spec is not None:
                return pixels(decode(raw, name), self.spec, name).permute(1, 2, 0).numpy()
            return shrunk(raw, name, self.short_side)
        except BadImage as error:
            return str(error)


def shrunk(raw: Raw, name: str, short_side: int | None) -> Array:
    """Decode an image and shrink it if its shorter side exceeds `short_side`: [H, W, C] uint8.

    Args:
        raw: the image as a source holds it.
        name: name of the image in error messages.
        short_side: in pixels; None keeps the size.
    """
    image: Image.Image | None = None
    if short_side is not None and isinstance(raw, bytes):
        opened = header(raw, name)
        if opened.format in JPEGS and opened.mode == "RGB":  # decode at a fraction of the size if that is enough
            width, height = upright_size(opened)
            at_least = (short_side, short_side)
            image = Image.fromarray(region(raw, name, (0, 0, width, height), at_least, "rgb", 3, opened))
    image = image or decode(raw, name)
    if short_side is not None and min(image.size) > short_side:
        ratio = short_side / min(image.size)
        image = image.resize((round(image.width * ratio), round(image.height * ratio)), Image.Resampling.BICUBIC)
    array = np.asarray(image)
    return array if array.ndim == 3 else array[:, :, None]


def _decoded(
    source: Source, spec: InputSpec | None, short_side: int | None, workers: int | None
) -> Iterator[Array | str]:
    work = _Decode(source, spec, short_side)
    rows = [range(i, min(i + PIECE, len(source))) for i in range(0, len(source), PIECE)]
    for piece in parallel_map(work, rows, default_workers(source) if workers is None else workers):
        yield from piece
