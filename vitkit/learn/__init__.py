"""Exercises that answer: write a step of the paper yourself, and learn what is wrong with it in your own terms.

    >>> import vitkit
    >>> vitkit.learn.check("scores", lambda q, k: (q @ k.mT).softmax(-1))
    scores: not yet. The scale is missing: divide q k^T by sqrt(d) before the softmax.
    False

What does not belong here: models that are used for anything else (model, paper), and lessons in prose (docs).
"""

from __future__ import annotations

from vitkit.learn.exercise import EXERCISES, Exercise, Feedback, check, feedback
from vitkit.learn.progress import passed

__all__ = ["EXERCISES", "Exercise", "Feedback", "check", "feedback", "passed"]
