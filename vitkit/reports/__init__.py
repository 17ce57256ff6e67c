"""A run -> one HTML page: its settings, data, curves, results and errors; and a page that compares several runs.

What does not belong here: measuring (evaluation), computing figures (explain), opening models and data (jobs).
"""

from __future__ import annotations

from vitkit.reports.compare import comparison
from vitkit.reports.page import PageInputs, page

__all__ = ["PageInputs", "comparison", "page"]
