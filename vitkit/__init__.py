"""vitkit: the Vision Transformer (arXiv 2010.11929) as real software.

This file holds the public names. Each is imported on first use, so that `import vitkit` is instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitkit.checkpoints import load as load
    from vitkit.checkpoints import save as save
    from vitkit.evaluation.predict import predict as predict
    from vitkit.model.config import InputSpec as InputSpec
    from vitkit.model.config import ViTConfig as ViTConfig
    from vitkit.model.create import create as create
    from vitkit.model.vit import ViT as ViT
    from vitkit.seeds import set_seeds as set_seeds

__version__ = "0.1.0"

_HOME = {  # public name -> module that defines it
    "ViT": "vitkit.model.vit",
    "ViTConfig": "vitkit.model.config",
    "InputSpec": "vitkit.model.config",
    "create": "vitkit.model.create",
    "load": "vitkit.checkpoints",
    "save": "vitkit.checkpoints",
    "predict": "vitkit.evaluation.predict",
    "set_seeds": "vitkit.seeds",
}
_ROOMS = (
    "checkpoints",
    "data",
    "errors",
    "evaluation",
    "explain",
    "features",
    "huggingface",
    "model",
    "paper",
    "report",
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
