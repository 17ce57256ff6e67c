"""vitkit: the Vision Transformer (arXiv 2010.11929) as real software.

This file holds the public names. Each is imported on first use, so that `import vitkit` is instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitkit.api import card as card
    from vitkit.api import doctor as doctor
    from vitkit.api import embed as embed
    from vitkit.api import evaluate as evaluate
    from vitkit.api import explain as explain
    from vitkit.api import export as export
    from vitkit.api import near_duplicates as near_duplicates
    from vitkit.api import patches as patches
    from vitkit.api import plot as plot
    from vitkit.api import predict as predict
    from vitkit.api import pretrain as pretrain
    from vitkit.api import probe as probe
    from vitkit.api import push as push
    from vitkit.api import report as report
    from vitkit.api import save as save
    from vitkit.api import search as search
    from vitkit.api import serve as serve
    from vitkit.api import suggest as suggest
    from vitkit.api import summary as summary
    from vitkit.api import teach as teach
    from vitkit.api import train as train
    from vitkit.api import tune as tune
    from vitkit.api import walk as walk
    from vitkit.checkpoints import load as load
    from vitkit.interfaces import as_huggingface as as_huggingface
    from vitkit.interfaces import as_paper as as_paper
    from vitkit.interfaces import as_vit as as_vit
    from vitkit.model.config import InputSpec as InputSpec
    from vitkit.model.config import ViTConfig as ViTConfig
    from vitkit.model.create import create as create
    from vitkit.model.vit import ViT as ViT
    from vitkit.results import Run as Run
    from vitkit.seeds import set_seeds as set_seeds

__version__ = "0.1.0"

_HOME = {  # public name -> module that defines it
    "ViT": "vitkit.model.vit",
    "ViTConfig": "vitkit.model.config",
    "InputSpec": "vitkit.model.config",
    "create": "vitkit.model.create",
    "load": "vitkit.checkpoints",
    "as_vit": "vitkit.interfaces",
    "as_paper": "vitkit.interfaces",
    "as_huggingface": "vitkit.interfaces",
    "Run": "vitkit.results",
    **dict.fromkeys(
        (
            "save",
            "predict",
            "evaluate",
            "embed",
            "doctor",
            "search",
            "near_duplicates",
            "suggest",
            "card",
            "push",
            "probe",
            "explain",
            "plot",
            "report",
            "summary",
            "train",
            "tune",
            "pretrain",
            "patches",
            "walk",
            "export",
            "serve",
            "teach",
        ),
        "vitkit.api",
    ),
    "set_seeds": "vitkit.seeds",
}
_ROOMS = (
    "api",
    "checkpoints",
    "data",
    "errors",
    "evaluation",
    "explanations",
    "features",
    "huggingface",
    "learn",
    "model",
    "paper",
    "reports",
    "server",
    "speed",
    "training",
)

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _ROOMS:
        value = importlib.import_module(f"vitkit.{name}")
    else:
        raise AttributeError(f"module 'vitkit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_ROOMS])
