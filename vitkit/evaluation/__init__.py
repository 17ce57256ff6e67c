"""From a model and data to numbers: logits of every image exactly once, measures of them, and single predictions.

What does not belong here: weight files (checkpoints), fitting anything (features, training), printing (cli).
"""

from __future__ import annotations

from vitkit.evaluation.logits import Outputs, logits_of
from vitkit.evaluation.match import match_classes
from vitkit.evaluation.measure import Measures, measure
from vitkit.evaluation.names import class_names
from vitkit.evaluation.predict import Guess, Prediction, Predictions, predict

__all__ = [
    "Guess",
    "Measures",
    "Outputs",
    "Prediction",
    "Predictions",
    "class_names",
    "logits_of",
    "match_classes",
    "measure",
    "predict",
]
