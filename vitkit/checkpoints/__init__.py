"""Files of weights <-> model: one file a dialect, a dialect is a table of rules; safe reading, whole writing, the hub.

What does not belong here: how a model computes (model), how images are prepared (data), training state (training).
"""

from __future__ import annotations

from vitkit.checkpoints.dialects import DIALECTS, from_dialect, recognise, to_dialect
from vitkit.checkpoints.inspection import inspect
from vitkit.checkpoints.reading import Checkpoint, load, open_checkpoint
from vitkit.checkpoints.writing import convert, save

__all__ = [
    "DIALECTS",
    "Checkpoint",
    "convert",
    "from_dialect",
    "inspect",
    "load",
    "open_checkpoint",
    "recognise",
    "save",
    "to_dialect",
]
