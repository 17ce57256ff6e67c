"""Images made for the tests: a photo-like picture, and every kind of file that a folder may hold."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def picture(seed: int = 0, size: tuple[int, int] = (96, 80)) -> Image.Image:
    """Smooth colours with some noise, so that JPEG has something to do."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    array = np.asarray(small.resize(size, Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray((array + rng.integers(-9, 10, array.shape)).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"quality": 90} if kind == "JPEG" else {}), **options)
    return buffer.getvalue()


def class_folder(root: Path, counts: dict[str, int], size: tuple[int, int] = (64, 48)) -> Path:
    """root/<class>/<n>.jpg, every image different."""
    seed = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for n in range(count):
            seed += 1
            (root / name / f"{n:03d}.jpg").write_bytes(encoded(picture(seed, size)))
    return root


def png_header(width: int, height: int) -> bytes:
    """A PNG that only claims a size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def odd_files() -> dict[str, bytes]:
    """One file of every kind that a policy is needed for, by name."""
    image = picture(7, (120, 90))
    exif = Image.Exif()
    exif[0x0112] = 6
    gray16 = Image.fromarray((np.arange(90 * 120, dtype=np.uint16) * 6).reshape(90, 120))
    frames = [picture(i, (40, 30)).quantize(32) for i in range(3)]
    return {
        "good.jpg": encoded(image),
        "truncated.jpg": encoded(image)[:1500],
        "truncated.png": encoded(image, "PNG")[:3000],
        "empty.jpg": b"",
        "text.jpg": b"this is not an image, whatever its name says",
        "bomb.png": png_header(60_000, 60_000),
        "cmyk.jpg": encoded(image.convert("CMYK")),
        "sixteen.png": encoded(gray16, "PNG"),
        "palette.png": encoded(image.quantize(64), "PNG"),
        "animated.gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "misnamed.png": encoded(image),
        "rotated.jpg": encoded(image, exif=exif.tobytes()),
        "huge.jpg": encoded(Image.new("RGB", (20_000, 40), (200, 10, 10))),
        "rgba.png": encoded(image.convert("RGBA"), "PNG"),
        "gray.jpg": encoded(image.convert("L")),
    }


BAD = {"truncated.jpg", "truncated.png", "empty.jpg", "text.jpg", "bomb.png"}
