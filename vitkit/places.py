"""Where vitkit keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder: $VITKIT_CACHE, or vitkit in the user's cache folder."""
    own = os.environ.get("VITKIT_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitkit"
