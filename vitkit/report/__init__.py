"""A RUN -> ONE HTML PAGE: what was run, on what, how it went, what it gets wrong; and runs beside each other.

What does not belong here: measuring (evaluation), computing pictures (explain), opening models and data (jobs).
"""

from __future__ import annotations

from vitkit.report.compare import comparison
from vitkit.report.page import Shown, page

__all__ = ["Shown", "comparison", "page"]
