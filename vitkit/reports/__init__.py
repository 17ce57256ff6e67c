"""A run -> one HTML page: its settings, data, curves, results and errors; a page that compares several runs; and
the pages of the doctor and of tuning.

What does not belong here: measuring (evaluation), computing figures (explain), opening models and data (jobs).
"""

from __future__ import annotations

from vitkit.reports.compare import comparison
from vitkit.reports.doctor import doctor_page
from vitkit.reports.page import PageInputs, page
from vitkit.reports.tune import tune_page

__all__ = ["PageInputs", "comparison", "doctor_page", "page", "tune_page"]
