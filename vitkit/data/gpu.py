"""Decode and resize JPEG files on a GPU: nvJPEG through torchvision, then Pillow's filters as two matrix products.

Worker processes read and hash files and look at their headers. What nvJPEG is not meant for (other formats, gray and
CMYK JPEGs, files that end early) they decode with Pillow, as usual. A file that nvJPEG refuses is decoded with Pillow
too. So the bytes of an image alone determine how it is decoded.

The resize repeats Pillow's: the same 22-bit weights, first the width, then the height, each rounded to 8 bits. Sums in
fp32 round a tie to either side, so a pixel may be one level off; the rest of the difference is nvJPEG's.
`python -m benchmarks.fed` measures it, in pixels and in answers.
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
from torch import Tensor

from vitkit.data.base import Source
from vitkit.data.decode import decode, digest, header, orientation
from vitkit.data.preprocess import cropped, resized
from vitkit.data.sample_worker import Bad, EvalWorker, Piece
from vitkit.errors import BadImage, ConfigError, MissingDependency
from vitkit.model.config import InputSpec, Interpolation
from vitkit.types import Array

Decode = Literal["cpu", "gpu"]
Decoder = Callable[[list[Tensor]], list[Tensor]]  # encoded files -> [3, h, w] uint8 on the device

AT_ONCE = 2**26  # numbers that are resized at once
BITS = 22  # of Pillow's weights
NEEDS = "Decoding on the GPU needs a torchvision that fits torch: pip install torchvision. Or use --decode cpu."
END = b"\xff\xd9"  # the last bytes of a JPEG


def _bicubic(x: Array) -> Array:
    a, x = -0.5, np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    return np.where(x < 1, near, np.where(x < 2, (((x - 5) * x + 8) * x - 4) * a, 0.0))


def _lanczos(x: Array) -> Array:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


# Pillow's filters: the function, and how far it reaches.
FILTERS: dict[Interpolation, tuple[Callable[[Array], Array], float]] = {
    "bilinear": (lambda x: np.maximum(1 - np.abs(x), 0.0), 1.0),
    "bicubic": (_bicubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}

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


class Encoded(NamedTuple):
    """Where an image is in its slot.

    Args:
        start: first byte.
        stop: the byte after its last one.
        turn: the EXIF orientation of an encoded file; 0 for pixels that are ready, [H, W, C].
        data: the file itself, if the slot has no room for it.
    """

    start: int
    stop: int
    turn: int
    data: bytes | None = None


@dataclass(frozen=True)
class EncodedPiece(Piece):
    """A piece whose images may still be encoded.

    Args:
        images: one for each image that could be read.
    """

    images: tuple[Encoded, ...] = ()


class EncodedWorker(EvalWorker):
    """Read and hash pieces of a data set for a GPU that decodes them; the arguments are those of EvalWorker."""

    def __call__(self, piece: int, slot: Array) -> EncodedPiece:
        """Read one piece.

        Args:
            piece: its number.
            slot: where its files go, or their pixels, [size] uint8.
        """
        index, each = self.pieces[piece], math.prod(self.shape)
        digests = np.empty((len(index), 32), np.uint8) if self.hashed else None
        images: list[Encoded] = []
        bad: list[Bad] = []
        end = 0
        for position, i in enumerate(index):
            try:
                raw, name = self.source.raw(i), self.source.names[i]
                if digests is not None:
                    digests[len(images)] = digest(raw)
                turn = takes(raw, name) if isinstance(raw, bytes) else 0
                if turn:
                    data = np.frombuffer(raw, np.uint8)  # type: ignore[arg-type]
                elif self.ready and isinstance(raw, np.ndarray):
                    data = raw.reshape(-1)
                else:
                    data = cropped(decode(raw, name), self.spec, name).reshape(-1)
                left = (len(index) - position - 1) * each  # the others may all be pixels
                if end + len(data) <= len(slot) - left:
                    slot[end : end + len(data)] = data
                    images.append(Encoded(end, end + len(data), turn))
                    end += len(data)
                else:
                    images.append(Encoded(0, 0, turn, data.tobytes()))
            except BadImage as error:
                bad.append((position, str(error)))
        kept = digests[: len(images)] if digests is not None else None
        return EncodedPiece(len(images), bad, kept, tuple(images))


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

    Raises:
        ConfigError: the device or the preprocessing does not suit.
        MissingDependency: torchvision is not installed, or cannot decode on a GPU.
    """

    def __init__(self, source: Source, spec: InputSpec, device: torch.device, decoder: Decoder | None = None) -> None:
        if decoder is None and device.type != "cuda":
            raise ConfigError(f"Decoding on the GPU needs CUDA; the device is {device.type}. Use --decode cpu.")
        if spec.channels != "rgb" or spec.backend != "pillow" or spec.interpolation not in FILTERS:
            raise ConfigError(
                f"Decoding on the GPU resizes RGB images as Pillow does, with {', '.join(FILTERS)}; the model expects "
                f"{spec.channels}, {spec.backend} and {spec.interpolation}. Use --decode cpu."
            )
        self.source, self.spec, self.device = source, spec, device
        self.decoder = decoder or nvjpeg(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._weights = functools.lru_cache(maxsize=256)(self._weights_of)

    def __call__(self, pieces: Sequence[tuple[EncodedPiece, Tensor]], index: Sequence[int]) -> tuple[Tensor, list[Bad]]:
        """Decode and resize the images of a batch; on a GPU, beside what is queued there already.

        Args:
            pieces: what the workers say, and their slots.
            index: position in the source of each image that they could read.

        Returns:
            [n, C, H, W] uint8, and what could not be decoded after all, by its place in `index`.
        """
        if self._stream is None:
            return self._pixels(pieces, index)
        with torch.cuda.stream(self._stream):
            out, bad = self._pixels(pieces, index)
        now = torch.cuda.current_stream(self.device)
        now.wait_stream(self._stream)
        out.record_stream(now)
        return out, bad

    def _pixels(self, pieces: Sequence[tuple[EncodedPiece, Tensor]], index: Sequence[int]) -> tuple[Tensor, list[Bad]]:
        (H, W), C = self.spec.size, len(self.spec.mean)
        turns = [e.turn for piece, _ in pieces for e in piece.images]
        data = [
            slot[e.start : e.stop] if e.data is None else _tensor(e.data)
            for piece, slot in pieces
            for e in piece.images
        ]
        out = torch.empty((len(data), C, H, W), dtype=torch.uint8, device=self.device)
        if ready := [n for n, turn in enumerate(turns) if not turn]:
            there = torch.stack([data[n] for n in ready]).view(-1, H, W, C).to(self.device)
            out[self._index(ready)] = there.permute(0, 3, 1, 2)
        bad: list[Bad] = []
        if files := [n for n, turn in enumerate(turns) if turn]:
            found: list[int] = []
            upright: list[Tensor] = []
            for n, image in zip(files, self._decoded([data[n] for n in files]), strict=True):
                if image is not None:
                    found.append(n)
                    upright.append(TURNED[turns[n]](image))
                    continue
                try:  # Pillow decides
                    name = self.source.names[index[n]]
                    pixels = np.array(cropped(decode(data[n].numpy().tobytes(), name), self.spec, name))
                    out[n] = torch.from_numpy(pixels).to(self.device).permute(2, 0, 1)
                except BadImage as error:
                    bad.append((n, str(error)))
            if found:
                out[self._index(found)] = self.resize(upright)
        if bad:
            left_out = {n for n, _ in bad}
            out = out[self._index([n for n in range(len(data)) if n not in left_out])]
        return out, bad

    def _index(self, places: list[int]) -> Tensor:
        """Return places on the device; pinned, because a copy from other memory would wait for the device."""
        found = torch.tensor(places, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return found.to(self.device, non_blocking=True)

    def _decoded(self, files: list[Tensor]) -> list[Tensor | None]:
        """Decode files, all at once or, if one of them is refused, each alone; None for those that are refused."""
        try:
            return list(self.decoder(files))
        except RuntimeError:
            if len(files) == 1:
                return [None]
            return [self._decoded([file])[0] for file in files]

    def resize(self, images: list[Tensor]) -> Tensor:
        """Resize and crop images as the InputSpec says, [n, C, H, W] uint8.

        Args:
            images: [C, h, w] uint8 of any sizes, on the device.
        """
        order = sorted(range(len(images)), key=lambda n: images[n].numel())  # similar sizes waste little room
        parts: list[Tensor] = []
        start = 0
        while start < len(order):
            stop, h, w = start, 0, 0
            while stop < len(order):
                C, height, width = images[order[stop]].shape
                if stop > start and (stop - start + 1) * C * max(h, height) * max(w, width) > AT_ONCE:
                    break
                h, w, stop = max(h, height), max(w, width), stop + 1
            parts.append(self._resize_some([images[n] for n in order[start:stop]], h, w))
            start = stop
        return torch.cat(parts)[self._index(np.argsort(order).tolist())]

    def _resize_some(self, images: list[Tensor], h: int, w: int) -> Tensor:
        (H, W), n, C = self.spec.size, len(images), len(self.spec.mean)
        x = torch.zeros((n, h, C, w), dtype=torch.float32, device=self.device)
        across: list[tuple[int, int, int]] = []
        down: list[tuple[int, int, int]] = []
        for k, image in enumerate(images):
            _, height, width = image.shape
            x[k, :height, :, :width] = image.transpose(0, 1)
            wide, high = resized(width, height, self.spec)
            across.append((width, wide, round((wide - W) / 2)))
            down.append((height, high, round((high - H) / 2)))
        x = _eight_bits(x.view(n, h * C, w) @ self._stack(across, W, w).mT)  # [n, h C, W]
        x = _eight_bits(self._stack(down, H, h) @ x.view(n, h, C * W))  # [n, H, C W]
        return x.view(n, H, C, W).transpose(1, 2).to(torch.uint8)

    def _stack(self, axes: list[tuple[int, int, int]], out: int, room: int) -> Tensor:
        """The weights of each image along an axis, [n, out, room]."""
        kinds = list(dict.fromkeys(axes))
        table = torch.zeros((len(kinds), out, room), device=self.device)
        for k, (size, to, first) in enumerate(kinds):
            table[k, :, :size] = self._weights(size, to, first, out)
        place = {axis: k for k, axis in enumerate(kinds)}
        return table if len(kinds) == len(axes) else table[self._index([place[axis] for axis in axes])]

    def _weights_of(self, size: int, to: int, first: int, count: int) -> Tensor:
        return torch.from_numpy(weights(size, to, first, count, self.spec.interpolation)).to(self.device)


def weights(size: int, to: int, first: int, count: int, interpolation: Interpolation) -> Array:
    """Return Pillow's weights for resizing an axis: outputs first, first + 1, ... by inputs, [count, size] float32.

    Args:
        size: pixels of the axis.
        to: pixels after resizing.
        first: the first output that is needed.
        count: how many are needed.
        interpolation: a row of FILTERS.
    """
    if size == to:  # Pillow skips this pass
        return np.eye(size, dtype=np.float32)[first : first + count]
    function, reach = FILTERS[interpolation]
    scale = size / to
    stretch = max(scale, 1.0)
    center = (np.arange(first, first + count) + 0.5) * scale
    low = np.maximum((center - reach * stretch + 0.5).astype(np.int64), 0)
    high = np.minimum((center + reach * stretch + 0.5).astype(np.int64), size)
    at = np.arange(size)
    inside = (at >= low[:, None]) & (at < high[:, None])
    k = np.where(inside, function((at - center[:, None] + 0.5) / stretch), 0.0)
    k /= k.sum(1, keepdims=True)
    return (np.trunc(k * 2**BITS + np.where(k < 0, -0.5, 0.5)) / 2**BITS).astype(np.float32)


def _eight_bits(x: Tensor) -> Tensor:
    return x.add_(0.5).floor_().clamp_(0, 255)


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
        return f"nvJPEG by torchvision {version('torchvision')}, Pillow {PIL.__version__}"
    except PackageNotFoundError as error:
        raise MissingDependency(NEEDS) from error
