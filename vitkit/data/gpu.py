"""Finish images on a GPU: resize and crop them there, and on request decode JPEG files there too.

--decode cpu    workers decode with Pillow and leave the pixels as they are; the GPU resizes them, to the bit as Pillow
                would. Images that are too large for their slot, or that are not resized by Pillow's filters in
                Pillow's usual order, workers resize themselves: the pixels are the same.
--decode gpu    workers read and hash files and look at their headers; nvJPEG decodes, through torchvision. What it is
                not meant for (other formats, gray and CMYK JPEGs, files that end early) workers decode with Pillow. A
                file that nvJPEG refuses is decoded with Pillow too. So the bytes of an image alone determine how it
                is decoded. The difference is nvJPEG's: `python -m benchmarks.fed` measures it, in pixels and answers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor

from vitkit.data import resize
from vitkit.data.base import Source
from vitkit.data.decode import decode, decoded, digest, header, orientation, to_channels
from vitkit.data.preprocess import cropped
from vitkit.data.resize import FILTERS, Resize
from vitkit.data.sample_worker import Bad, EvalWorker, Piece
from vitkit.errors import BadImage, ConfigError, MissingDependency
from vitkit.model.config import InputSpec
from vitkit.types import Array

Decode = Literal["cpu", "gpu"]
Decoder = Callable[[list[Tensor]], list[Tensor]]  # encoded files -> [3, h, w] uint8 on the device

ROOM = 600_000  # bytes of a slot for each image that is to be resized: 500 x 400 pixels
PIECE = 16  # such images per task
NEEDS = "Decoding on the GPU needs a torchvision that fits torch: pip install torchvision. Or use --decode cpu."
END = b"\xff\xd9"  # the last bytes of a JPEG

# For each EXIF orientation: an image as it is stored -> upright, as `decode.TURNED` does it; [3, h, w].
TURNED: dict[int, Callable[[Tensor], Tensor]] = {
    1: lambda x: x,
    2: lambda x: x.flip(2),
    3: lambda x: x.flip(1, 2),
    4: lambda x: x.flip(1),
    5: lambda x: x.transpose(1, 2),
    6: lambda x: x.transpose(1, 2).flip(2),
    7: lambda x: x.transpose(1, 2).flip(1, 2),
    8: lambda x: x.transpose(1, 2).flip(1),
}


class Placed(NamedTuple):
    """Where an image is in its slot.

    Args:
        start: first byte.
        stop: the byte after its last one.
        turn: the EXIF orientation of an encoded file; 0 for pixels [height, width, C].
        size: (height, width) of pixels that are still to be resized; None for those of the model's size.
        data: the file itself, if the slot has no room for it.
    """

    start: int
    stop: int
    turn: int = 0
    size: tuple[int, int] | None = None
    data: bytes | None = None


@dataclass(frozen=True)
class PlacedPiece(Piece):
    """A piece whose images may still be encoded, or not resized.

    Args:
        images: one for each image that could be read.
    """

    images: tuple[Placed, ...] = ()


class DeviceWorker(EvalWorker):
    """Prepare pieces of a data set for a GPU.

    Args:
        source: see EvalWorker.
        spec: see EvalWorker.
        pieces: see EvalWorker.
        hashed: see EvalWorker.
        encoded: whether JPEG files are left to the GPU; otherwise only resizing is.
    """

    def __init__(self, source: Source, spec: InputSpec, pieces: Sequence[range], hashed: bool, encoded: bool) -> None:
        super().__init__(source, spec, pieces, hashed)
        self.encoded = encoded
        if not encoded and not self.ready:
            self.size = max(self.size, max(map(len, pieces), default=0) * ROOM)

    def __call__(self, piece: int, slot: Array) -> PlacedPiece:
        """Prepare one piece.

        Args:
            piece: its number.
            slot: where its pixels or files go, [size] uint8.
        """
        index, each = self.pieces[piece], math.prod(self.shape)
        digests = np.empty((len(index), 32), np.uint8) if self.hashed else None
        images: list[Placed] = []
        bad: list[Bad] = []
        end = 0
        for position, i in enumerate(index):
            room = len(slot) - end - (len(index) - position - 1) * each  # the others may all have the model's size
            try:
                raw, name = self.source.raw(i), self.source.names[i]
                if digests is not None:
                    digests[len(images)] = digest(raw)
                turn, size = takes(raw, name) if self.encoded and isinstance(raw, bytes) else 0, None
                if turn:
                    data = np.frombuffer(raw, np.uint8)  # type: ignore[arg-type]
                elif self.ready and isinstance(raw, np.ndarray):
                    data = raw
                elif self.encoded:
                    data = cropped(decode(raw, name), self.spec, name)
                else:
                    data, size = self._pixels(decoded(raw, name), room, name)
                data = data.reshape(-1)
                if len(data) <= room:
                    slot[end : end + len(data)] = data
                    images.append(Placed(end, end + len(data), turn, size))
                    end += len(data)
                else:
                    images.append(Placed(0, 0, turn, size, data.tobytes()))
            except BadImage as error:
                bad.append((position, str(error)))
        kept = digests[: len(images)] if digests is not None else None
        return PlacedPiece(len(images), bad, kept, tuple(images))

    def _pixels(self, image: Image.Image | Array, room: int, name: str) -> tuple[Array, tuple[int, int] | None]:
        """Return an image's own pixels and their (height, width), or those of the model's size and None."""
        if isinstance(image, np.ndarray) and (self.spec.channels != "rgb" or image.shape[2:] != (3,)):
            image = Image.fromarray(image)
        if isinstance(image, Image.Image):
            image = to_channels(image, self.spec.channels, len(self.spec.mean), name)
            (width, height), plain = image.size, image.mode in ("RGB", "L")
        else:
            (height, width), plain = image.shape[:2], True
        fits = plain and height * width * self.shape[2] <= room
        if fits and resize.width_first(*resize.axes(width, height, self.spec)):
            own = image if isinstance(image, np.ndarray) else np.frombuffer(image.tobytes(), np.uint8)
            return own, (height, width)
        return cropped(image if isinstance(image, Image.Image) else Image.fromarray(image), self.spec, name), None


def takes(raw: bytes, name: str) -> int:
    """Return the EXIF orientation of a file that nvJPEG decodes, or 0 for any other file.

    Args:
        raw: the file's bytes.
        name: name of the image in error messages.

    Raises:
        BadImage: the file is not an image.
    """
    image = header(raw, name)
    whole = raw.rstrip(b"\0").endswith(END)  # nvJPEG would return a part of a file that ends early
    return orientation(image) if image.format == "JPEG" and image.mode == "RGB" and whole else 0


class GpuPixels:
    """Turn pieces into the model's input size on a device.

    Args:
        source: names the images in error messages.
        spec: the input that the model expects.
        device: where images are decoded and resized.
        decoder: decodes files there (default: torchvision's, by nvJPEG).
        encoded: whether it gets files (the default), or only pixels.

    Raises:
        ConfigError: the device or the preprocessing does not suit.
        MissingDependency: torchvision is not installed, or cannot decode on a GPU.
    """

    def __init__(
        self,
        source: Source,
        spec: InputSpec,
        device: torch.device,
        decoder: Decoder | None = None,
        encoded: bool = True,
    ) -> None:
        if encoded and decoder is None and device.type != "cuda":
            raise ConfigError(f"Decoding on the GPU needs CUDA; the device is {device.type}. Use --decode cpu.")
        if encoded and (spec.channels != "rgb" or not resize.takes(spec)):
            raise ConfigError(
                f"Decoding on the GPU resizes RGB images as Pillow does, with {', '.join(FILTERS)}; the model expects "
                f"{spec.channels}, {spec.backend} and {spec.interpolation}. Use --decode cpu."
            )
        self.source, self.spec, self.device, self.encoded = source, spec, device, encoded
        self.decoder = decoder or (nvjpeg(device) if encoded else None)
        self.resize = Resize(spec, device)

    def decode(self, pieces: Sequence[tuple[PlacedPiece, Tensor]]) -> list[Tensor | None]:
        """Decode the files of a batch; None for those that the GPU refuses.

        nvJPEG writes by a stream of its own, which knows nothing of who still reads the memory that it gets: free the
        images only after the GPU has read them.

        Args:
            pieces: what the workers say, and their slots.
        """
        return self._decoded([_file(slot, e) for piece, slot in pieces for e in piece.images if e.turn])

    def __call__(
        self, pieces: Sequence[tuple[PlacedPiece, Tensor]], index: Sequence[int], decoded: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Bad]]:
        """Resize the images of a batch.

        Args:
            pieces: what the workers say, and their slots.
            index: position in the source of each image that they could read.
            decoded: see `decode`.

        Returns:
            [n, C, H, W] uint8, and what could not be decoded after all, by its place in `index`.
        """
        images: list[Tensor | None] = []
        ready: list[bool] = []
        files: list[tuple[int, Tensor, int]] = []  # place, bytes, orientation
        for piece, slot in pieces:
            pixels = [e for e in piece.images if not e.turn]
            there = slot[: max(e.stop for e in pixels)].to(self.device, non_blocking=True) if pixels else slot
            for e in piece.images:
                if e.turn:
                    files.append((len(images), _file(slot, e), e.turn))
                    images.append(None)
                else:
                    images.append(self._pixels(there if e.data is None else _tensor(e.data).to(self.device), e))
                ready.append(not e.turn and e.size is None)
        bad: list[Bad] = []
        for (n, file, turn), image in zip(files, decoded, strict=True):
            if image is not None:
                images[n] = TURNED[turn](image)
                continue
            try:  # Pillow decides
                name = self.source.names[index[n]]
                own = np.array(cropped(decode(file.numpy().tobytes(), name), self.spec, name))
                images[n], ready[n] = torch.from_numpy(own).to(self.device).permute(2, 0, 1), True
            except BadImage as error:
                bad.append((n, str(error)))
        found = [n for n, image in enumerate(images) if image is not None]
        return self.resize([images[n] for n in found], [ready[n] for n in found]), bad  # type: ignore[misc]

    def _pixels(self, there: Tensor, e: Placed) -> Tensor:
        """View an image in its slot as [C, height, width]."""
        C, (height, width) = len(self.spec.mean), e.size or self.spec.size
        return there.as_strided((C, height, width), (1, width * C, C), there.storage_offset() + e.start)

    def _decoded(self, files: list[Tensor]) -> list[Tensor | None]:
        """Decode files, all at once or, if one of them is refused, each alone; None for those that are refused."""
        if not files or self.decoder is None:
            return []
        try:
            return list(self.decoder(files))
        except RuntimeError:
            if len(files) == 1:
                return [None]
            return [self._decoded([file])[0] for file in files]


def _file(slot: Tensor, e: Placed) -> Tensor:
    return slot[e.start : e.stop] if e.data is None else _tensor(e.data)


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def nvjpeg(device: torch.device) -> Decoder:
    """Return torchvision's decoder on a GPU.

    Args:
        device: the GPU.

    Raises:
        MissingDependency: torchvision is not installed, or was built without nvJPEG.
    """
    try:
        from torchvision.io import ImageReadMode, decode_jpeg  # type: ignore[import-untyped]
    except Exception as error:  # a build that does not fit torch raises RuntimeError
        raise MissingDependency(NEEDS) from error
    return functools.partial(decode_jpeg, mode=ImageReadMode.RGB, device=device)


def gpu_decoder() -> str:
    """Return what decodes images when a GPU does, with versions: part of the feature cache's key.

    Raises:
        MissingDependency: torchvision is not installed.
    """
    try:
        return f"nvJPEG by torchvision {version('torchvision')}, resized as by Pillow {PIL.__version__}"
    except PackageNotFoundError as error:
        raise MissingDependency(NEEDS) from error
