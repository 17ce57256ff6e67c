"""A FINISHED MODEL -> THE SAME MODEL, FASTER: one row of ENGINES for each way, and a file where it needs one.

What does not belong here: how a model computes (model), and anything that changes its answers beyond a row's tolerance.
"""

from __future__ import annotations

from vitkit.speed.engines import ENGINES, Engine, Forward, chosen, usual

__all__ = ["ENGINES", "Engine", "Forward", "chosen", "usual"]
