"""Serve a model over HTTP: the app, batching, limits, and the web page.

What does not belong here: how a model computes, how images are preprocessed, and how explanations are made.
"""

from __future__ import annotations

from vitkit.server.batching import Batcher
from vitkit.server.settings import Settings

__all__ = ["Batcher", "Settings"]
