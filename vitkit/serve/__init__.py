"""HTTP -> predict, embed, explain: the app, its batching, its limits, and the web page.

What does not belong here: how a model computes, how an image is prepared, what an explanation is; those are asked for.
"""

from __future__ import annotations

from vitkit.serve.batching import Batcher
from vitkit.serve.settings import Settings

__all__ = ["Batcher", "Settings"]
