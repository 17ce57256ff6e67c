"""A FINISHED MODEL -> THE SAME MODEL, FASTER: one row of ENGINES per way to run it.

What does not belong here: how a model computes (model), and anything that changes answers beyond a row's tolerance.
"""

from __future__ import annotations

from vitkit.speed.engines import ENGINES, Engine, Forward, chosen, usual

__all__ = ["ENGINES", "Engine", "Forward", "chosen", "usual"]
