"""A run -> one HTML page: its settings, data, curves, results and errors; and a page that compares several runs.

What does not belong here: measuring (evaluation), computing figures (explain), opening models and data (jobs).
"""

from __future__ import annotations

from vitkit.report.compare import comparison
from vitkit.report.page import PageInputs, page

__all__ = ["PageInputs", "comparison", "page"]
