"""A million names in one block of memory.

A list of Python strings takes a hundred bytes per name, and every worker that touches it copies it, because reference
counts are stored with the text. Here all text is in one tensor and the borders are in another, and torch shares both
with workers without a copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np
import torch


class StringTable(Sequence[str]):
    """A read-only sequence of strings.

    Args:
        names: the strings; surrogate escapes (file names that are not UTF-8) are kept.
    """

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        borders = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(name) for name in encoded], out=borders[1:])
        self._text = torch.frombuffer(bytearray(b"".join(encoded) or b"\0"), dtype=torch.uint8)
        self._borders = torch.from_numpy(borders)

    def __len__(self) -> int:
        return len(self._borders) - 1

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        start, stop = self._borders.numpy()[i : i + 2]
        return self._text.numpy()[start:stop].tobytes().decode("utf-8", "surrogateescape")

    @property
    def nbytes(self) -> int:
        """Size of the table in bytes."""
        return self._text.nbytes + self._borders.nbytes

    def buffers(self) -> tuple[np.ndarray[Any, np.dtype[Any]], ...]:
        """Return the text and its borders, to be hashed for a fingerprint."""
        return self._text.numpy()[: int(self._borders[-1])], self._borders.numpy()


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts '2' before '10', and 'img2' before 'img10'."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(p), p) if p.isdecimal() and p.isascii() else (1, 0, p) for p in parts if p)
