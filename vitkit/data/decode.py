"""Bytes -> an 8-bit image, by these rules; an unreadable image is an error that names it, never a black image.

    EXIF orientation    applied
    animation           the first frame
    alpha               dropped, keeping the stored colours, as timm and torchvision do
    palette, CMYK, ...  converted by Pillow; colour profiles are ignored
    16-bit gray         divided by 257 and rounded (65535 becomes 255); 32-bit integers are treated as 16-bit ones
    floating point      0..1 becomes 0..255
    over MAX_PIXELS     refused before any pixel is decoded
    other formats       only those of files.FORMATS are read, whatever a file's name ends in

Evaluation uses the pixels that Pillow decodes at full size. Training may decode a JPEG at 1/2, 1/4 or 1/8 of its size,
but never below the size it needs: see `region`. If simplejpeg is installed, it does both, with the same pixels.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import io
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
from PIL import Image, UnidentifiedImageError

from vitkit.data.files import FORMATS, HEIF_BRANDS, NEEDS_HEIF, READS_HEIF
from vitkit.errors import BadImage
from vitkit.model.config import Channels
from vitkit.types import Array

try:
    import simplejpeg  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError:  # optional: it only makes decoding faster
    simplejpeg = None

Raw = bytes | Image.Image | Array  # an image as a source holds it: encoded bytes, a Pillow image, or pixels [H, W, C]
Box = tuple[int, int, int, int]  # left, top, right, bottom

MAX_PIXELS = 178_956_970  # the limit above which Pillow itself refuses to open a file
ORIENTATION = 0x0112  # the EXIF tag
JPEGS = ("JPEG", "MPO")  # MPO: a JPEG followed by a second picture, as phones write it
REPAIR = "Repair or remove it; `vitkit doctor` finds all such files."
READY = ("RGB", "L", "RGBA", "LA")  # the modes that `decode` returns
TURNED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# For each orientation: upright (X, Y) -> stored (x, y), in an image stored as w x h.
STORED: dict[int, Callable[[int, int, int, int], tuple[int, int]]] = {
    1: lambda X, Y, w, h: (X, Y),
    2: lambda X, Y, w, h: (w - X, Y),
    3: lambda X, Y, w, h: (w - X, h - Y),
    4: lambda X, Y, w, h: (X, h - Y),
    5: lambda X, Y, w, h: (Y, X),
    6: lambda X, Y, w, h: (Y, h - X),
    7: lambda X, Y, w, h: (w - Y, h - X),
    8: lambda X, Y, w, h: (w - Y, X),
}
_locks: dict[int, threading.Lock] = {}  # by process: a forked worker must not wait for a thread that it does not have


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Pillow's warnings; warning filters are global, so only one thread at a time."""
    with _locks.setdefault(os.getpid(), threading.Lock()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def formats() -> tuple[str, ...]:
    """Return the formats of FORMATS that this Pillow knows, and silence what Pillow and libtiff print by themselves."""
    Image.init()
    logging.getLogger("PIL").addHandler(logging.NullHandler())  # without any handler Python prints to stderr
    from PIL import _imaging

    # Only where Pillow's libtiff is a shared library; elsewhere its lines are harmless, though not ours.
    with suppress(OSError, AttributeError, TypeError):
        libtiff = ctypes.CDLL(_imaging.__file__)
        for handler in ("TIFFSetWarningHandler", "TIFFSetErrorHandler"):
            getattr(libtiff, handler)(None)
    return tuple(name for name in FORMATS if name in Image.OPEN)


def reason(error: BaseException) -> str:
    """Describe why a file could not be decoded."""
    text = str(error).strip().replace("\n", " ")
    if isinstance(error, UnidentifiedImageError):
        return f"not an image in a format that vitkit reads ({', '.join(formats())})"
    if isinstance(error, Image.DecompressionBombError):
        return f"declares more than {MAX_PIXELS // 10**6} megapixels (a decompression bomb?)"
    if isinstance(error, EOFError) or "truncated" in text.lower() or "unexpected end" in text.lower():
        return "truncated: the file is incomplete; copy it again from where it came from"
    return f"{text or type(error).__name__}"


def bad(name: str, why: str) -> BadImage:
    """Make the error for one image: its name, the reason, and what to do."""
    return BadImage(f"{name}: {why}.", REPAIR)


def header(raw: bytes, name: str) -> Image.Image:
    """Open an encoded image without decoding it.

    Args:
        raw: the file's bytes.
        name: name of the image in error messages.

    Raises:
        BadImage: the file is empty, in an unknown format, or larger than MAX_PIXELS.
    """
    if not raw:
        raise bad(name, "the file is empty (0 bytes)")
    try:
        with _quiet():  # Pillow warns about large sizes that we allow, and about damaged metadata
            image = Image.open(io.BytesIO(raw), formats=formats())
    except Exception as error:
        if not READS_HEIF and raw[4:8] == b"ftyp" and raw[8:12] in HEIF_BRANDS:
            raise BadImage(f"{name}: {NEEDS_HEIF}.") from error
        raise bad(name, reason(error)) from error
    if image.width * image.height > MAX_PIXELS:
        raise bad(
            name,
            f"declares {image.width} x {image.height} pixels, more than {MAX_PIXELS // 10**6} megapixels "
            f"(a decompression bomb?)",
        )
    return image


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if it is missing or invalid."""
    if "exif" not in image.info and image.format in JPEGS:
        return 1
    try:
        with _quiet():
            value = image.getexif().get(ORIENTATION, 1)
    except Exception:  # the pixels may be fine even if the metadata is damaged
        return 1
    return value if value in TURNED else 1


def count_frames(image: Image.Image) -> int:
    """Return the number of frames or pages; 1 if the file is damaged behind the first, which is all that is read."""
    try:
        with _quiet():
            return int(getattr(image, "n_frames", 1))
    except Exception:
        return 1


def eight_bit(image: Image.Image, name: str) -> Image.Image:
    """Convert a decoded image to 8 bits and one of the READY modes, by the rules above."""
    mode = image.mode
    if mode in READY:
        return image
    if mode == "P":  # by way of RGBA, because Pillow warns if a direct conversion loses transparency
        return image.convert("RGBA") if "transparency" in image.info else image.convert("RGB")
    if mode == "1":
        return image.convert("L")
    if mode.startswith("I") or mode == "F":
        values = np.asarray(image, dtype=np.float64)
        top = 1.0 if mode == "F" else 65535.0
        if not np.isfinite(values).all():
            raise bad(name, f"mode {mode} has NaN or infinite values; only values from 0 to {top:g} can be converted")
        if values.min() < 0 or values.max() > top:
            raise bad(
                name,
                f"mode {mode} has values from {values.min():g} to {values.max():g}; only values from "
                f"0 to {top:g} can be converted to 8 bits",
            )
        return Image.fromarray(np.rint(values * (255.0 / top)).astype(np.uint8))
    return image.convert("RGB")


def decode(raw: Raw, name: str = "image") -> Image.Image:
    """Decode an image at full size, upright, in 8 bits (mode RGB, L, RGBA or LA).

    Args:
        raw: the bytes of an encoded file, or an image or pixels that are already decoded.
        name: name of the image in error messages.

    Raises:
        BadImage: the image cannot be decoded; the message names it and says why.
    """
    image = decoded(raw, name)
    return Image.fromarray(image) if isinstance(image, np.ndarray) else image


def decoded(raw: Raw, name: str = "image") -> Image.Image | Array:
    """Decode an image like `decode`, but leave it as pixels [H, W, 3] or [H, W] if they are what the decoder gives.

    Args:
        raw: see `decode`.
        name: see `decode`.
    """
    if isinstance(raw, np.ndarray):
        return raw if raw.shape[2] > 1 else raw[:, :, 0]
    image = header(raw, name) if isinstance(raw, bytes) else raw
    try:
        if isinstance(raw, bytes) and (pixels := _turbo(raw, image, 1)) is not None:
            turn = orientation(image)
            return Image.fromarray(pixels).transpose(TURNED[turn]) if turn != 1 else pixels
        image.load()
        turn = orientation(image)  # after load, because a PNG's metadata may follow its pixels
        image = eight_bit(image, name)
        return image.transpose(TURNED[turn]) if turn != 1 else image
    except BadImage:
        raise
    except Exception as error:
        raise bad(name, reason(error)) from error


def digest(raw: Raw) -> Array:
    """Return the SHA-256 of an image, [32] uint8: of its file's bytes, or of its pixels and their shape.

    Args:
        raw: what `Source.raw` returns.
    """
    if isinstance(raw, bytes):
        h = hashlib.sha256(raw)
    elif isinstance(raw, Image.Image):
        h = hashlib.sha256(f"{raw.mode} {raw.size} ".encode() + raw.tobytes())
    else:
        h = hashlib.sha256(f"{raw.dtype} {raw.shape} ".encode() + raw.tobytes())
    return np.frombuffer(h.digest(), np.uint8)


def to_channels(image: Image.Image, channels: Channels, count: int, name: str = "image") -> Image.Image:
    """Convert a decoded image to the channels that a model takes.

    Args:
        image: an image in one of the READY modes.
        channels: `rgb`, `gray`, or `raw` for the image's own channels, of which there must be `count`.
        count: number of channels that the model takes.
        name: name of the image in error messages.
    """
    mode = {"rgb": "RGB", "gray": "L"}.get(channels, image.mode)
    if channels == "raw" and len(image.getbands()) != count:
        raise bad(name, f"has {len(image.getbands())} channels ({image.mode}), but the model takes {count}")
    return image if image.mode == mode else image.convert(mode)


def upright_size(image: Raw) -> tuple[int, int]:
    """Return the (width, height) of the image that `decode` would return."""
    if isinstance(image, bytes):
        image = header(image, "image")
    if isinstance(image, np.ndarray):
        return image.shape[1], image.shape[0]
    width, height = image.size
    return (height, width) if orientation(image) >= 5 else (width, height)


def region(
    raw: Raw,
    name: str,
    box: Box,
    size: tuple[int, int],
    channels: Channels,
    count: int,
    opened: Image.Image | None = None,
) -> Array:
    """Decode one region for training; a JPEG much larger than needed is decoded at a fraction of its size.

    Args:
        raw: the bytes of an encoded file, or a decoded image or pixels.
        name: name of the image in error messages.
        box: the region, in pixels of the upright image at full size.
        size: (height, width) that the region will be resized to.
        channels: see `to_channels`.
        count: see `to_channels`.
        opened: `header(raw, name)`, if the caller already has it.

    Returns:
        [height, width, channels] uint8, not yet resized.
    """
    if isinstance(raw, np.ndarray):
        part = np.ascontiguousarray(raw[box[1] : box[3], box[0] : box[2]])  # torch's resize would copy it, slower
        fits = channels == {1: "gray", 3: "rgb"}.get(raw.shape[2])
        return part if fits else _array(to_channels(decode(part, name), channels, count, name))
    if isinstance(raw, bytes):
        image = opened or header(raw, name)
        plain = image.format in JPEGS and image.mode in ("RGB", "L")
        left, top, right, bottom = box
        s = max((s for s in (8, 4, 2) if right - left >= s * size[1] and bottom - top >= s * size[0]), default=1)
        if plain and (s > 1 or (simplejpeg is not None and image.mode == "RGB")):
            full, turn = image.size, orientation(image)
            (x0, y0), (x1, y1) = (STORED[turn](X, Y, *full) for X, Y in (box[:2], box[2:]))
            left, right, top, bottom = min(x0, x1), max(x0, x1), min(y0, y1), max(y0, y1)
            try:
                pixels = _turbo(raw, image, s) if channels == "rgb" else None
                if pixels is None:
                    image.draft(image.mode, (full[0] // s, full[1] // s))
                    image.load()
            except Exception as error:
                raise bad(name, reason(error)) from error
            now = (pixels.shape[1], pixels.shape[0]) if pixels is not None else image.size
            box = (
                left * now[0] // full[0],
                top * now[1] // full[1],
                -(-right * now[0] // full[0]),
                -(-bottom * now[1] // full[1]),
            )
            if pixels is not None and turn == 1:
                return pixels[box[1] : box[3], box[0] : box[2]]
            cut = Image.fromarray(pixels[box[1] : box[3], box[0] : box[2]]) if pixels is not None else image.crop(box)
            return _array(to_channels(cut.transpose(TURNED[turn]) if turn != 1 else cut, channels, count, name))
    return _array(to_channels(decode(raw, name).crop(box), channels, count, name))


def _array(image: Image.Image) -> Array:
    array = np.array(image)
    return array[:, :, None] if array.ndim == 2 else array


def _turbo(raw: bytes, image: Image.Image, s: int) -> Array | None:
    """Decode an RGB JPEG at 1/s of its size with simplejpeg, or return None to leave it to Pillow."""
    if simplejpeg is None or image.format not in JPEGS or image.mode != "RGB":
        return None
    try:
        return simplejpeg.decode_jpeg(
            raw,
            "RGB",
            min_width=-(-image.width // s) if s > 1 else 0,
            min_height=-(-image.height // s) if s > 1 else 0,
            strict=True,
        )
    except ValueError:  # damaged: Pillow decides whether this is an error, and which
        return None


def damage(raw: bytes, image: Image.Image) -> str | None:
    """Return libjpeg's complaint about a JPEG that Pillow decodes nevertheless, or None.

    Args:
        raw: the file's bytes.
        image: `header(raw, name)`.
    """
    if simplejpeg is None or image.format not in JPEGS or image.mode != "RGB":
        return None
    try:
        simplejpeg.decode_jpeg(raw, "RGB", min_width=1, min_height=1, strict=True)
    except ValueError as error:
        return str(error)
    return None
