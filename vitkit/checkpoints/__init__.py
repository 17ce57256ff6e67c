"""Read and write weights: one file per dialect, each a table of rules; safe reading, atomic writing, the hub.

What does not belong here: how a model computes (model), how images are prepared (data), training state (training).
"""

from __future__ import annotations

from vitkit.checkpoints.dialects import DIALECTS, from_dialect, recognise, to_dialect
from vitkit.checkpoints.reading import Checkpoint, inspect, load, open_checkpoint
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
