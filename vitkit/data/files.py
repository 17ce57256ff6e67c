"""FORMATS, the images that every command and the server read, and `read_file`, which reads regular files only."""

from __future__ import annotations

import os
import stat

from vitkit.errors import BadImage

try:
    import pillow_heif  # type: ignore[import-untyped,import-not-found,unused-ignore]

    pillow_heif.register_heif_opener()
except ImportError:  # optional: it reads the photos of phones
    pillow_heif = None  # type: ignore[assignment,unused-ignore]

READS_HEIF = pillow_heif is not None
NEEDS_HEIF = "HEIC, which needs pillow-heif: pip install 'vitkit[heif]'"
HEIF = (".heic", ".heif")
HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")  # bytes 8 to 12 of a HEIC file

# The formats that are read, by Pillow's names, and the endings of their files; any other ending gets a note from
# `vitkit doctor`. Formats whose decoders start another program (EPS starts Ghostscript) or fetch something stay out.
# A row whose format Pillow does not know, because a plugin for it is not installed, is skipped. TGA files begin with
# no signature, so TGA comes last.
FORMATS: dict[str, tuple[str, ...]] = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "MPO": (".jpg", ".jpeg", ".jpe", ".mpo"),
    "PNG": (".png", ".apng"),
    "GIF": (".gif",),
    "BMP": (".bmp", ".dib"),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "AVIF": (".avif",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "JPEG2000": (".jp2",),
    "ICO": (".ico",),
    **({"HEIF": HEIF} if READS_HEIF else {}),
    "TGA": (".tga",),
}
ENDINGS = tuple(dict.fromkeys(ending for endings in FORMATS.values() for ending in endings))
MAX_BYTES = 2**31  # of one image; a larger file is something else
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def irregular(path: str | os.PathLike[str]) -> str:
    """Return what is at a path if it is not a regular file ("a named pipe"), or an empty string if it is.

    Reading a pipe would wait for ever, and reading a device may never end.
    """
    mode = os.stat(path).st_mode
    return "" if stat.S_ISREG(mode) else KINDS.get(stat.S_IFMT(mode), "not a file")


def read_file(path: str | os.PathLike[str], name: str) -> bytes:
    """Return the bytes of an image file.

    Args:
        path: the file.
        name: name of the image in error messages.

    Raises:
        BadImage: it cannot be read, is not a regular file, or is larger than MAX_BYTES.
    """
    try:
        if what := irregular(path):
            raise BadImage(f"{name}: expected a file; it is {what}.")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_BYTES:
                raise BadImage(f"{name}: expected an image of at most {MAX_BYTES:,} bytes; the file has {size:,}.")
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise BadImage(f"{name}: cannot be read ({getattr(error, 'strerror', None) or error}).") from error
