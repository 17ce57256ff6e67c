"""`vitkit models`."""

from __future__ import annotations


def models() -> None:
    """List the variants."""
