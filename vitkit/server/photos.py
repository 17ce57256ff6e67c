"""The photos that a model was made with, as the page shows them: some to try, and those to search for similar ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from PIL.Image import Image

from vitkit.types import Array


class Photos(Protocol):
    """Photos by number. A request names a photo by its number only, and never by a path."""

    @property
    def samples(self) -> Sequence[int]:
        """The photos that the page offers to try."""

    @property
    def searchable(self) -> bool:
        """Whether `nearest` works: the features of the photos are known."""

    def __len__(self) -> int: ...

    def label(self, number: int) -> str:
        """Return the class of a photo."""

    def file(self, number: int) -> tuple[bytes, str]:
        """Return a photo and its content type."""

    def image(self, number: int) -> Image:
        """Return a decoded photo."""

    def thumbnail(self, number: int) -> bytes:
        """Return a small JPEG of a photo."""

    def nearest(self, features: Array, count: int) -> list[list[tuple[int, float]]]:
        """Return the most similar photos for each row of features [m, F], and their cosine similarities."""
