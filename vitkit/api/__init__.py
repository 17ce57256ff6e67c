"""The public functions: everything the command line does, in Python, for any of the three interfaces.

Each takes a model (a ViT, a paper.ViT, one of the twelve classes) or the name of weights, and returns an object that
shows itself in a notebook. They are grouped as the commands are in `vitkit --help`. What does not belong here: any work
of its own; these functions call jobs and rooms.
"""

from __future__ import annotations

from vitkit.api.data import doctor, near_duplicates, search, suggest
from vitkit.api.learn import patches, plot, summary, walk
from vitkit.api.models import config_of, model_of, save
from vitkit.api.ship import card, export, push, report, serve, teach
from vitkit.api.training import pretrain, probe, train, tune
from vitkit.api.use import embed, evaluate, explain, predict

__all__ = [
    "card",
    "config_of",
    "doctor",
    "embed",
    "evaluate",
    "explain",
    "export",
    "model_of",
    "near_duplicates",
    "patches",
    "plot",
    "predict",
    "pretrain",
    "probe",
    "push",
    "report",
    "save",
    "search",
    "serve",
    "suggest",
    "summary",
    "teach",
    "train",
    "tune",
    "walk",
]
