"""Which exercises were solved, in a small file of the user's."""

from __future__ import annotations

import json
import os
from pathlib import Path


def place() -> Path:
    """Return the file: below XDG_STATE_HOME, or below ~/.local/state."""
    root = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(root) / "vitkit" / "learn.json"


def passed() -> list[str]:
    """Return the names of the exercises that were solved."""
    try:
        found = json.loads(place().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def remember(name: str) -> None:
    """Add an exercise to those that were solved; do nothing if the folder is not writable."""
    write(sorted({*passed(), name}))


def write(names: list[str]) -> None:
    """Make these the exercises that were solved."""
    try:
        place().parent.mkdir(parents=True, exist_ok=True)
        part = place().with_suffix(".part")
        part.write_text(json.dumps(names), encoding="utf-8")
        part.replace(place())
    except OSError:
        return
