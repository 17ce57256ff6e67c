"""Which parts of a model something takes: everything that is not the model itself lists the rows that it computes.

A row that is not listed is refused with a sentence, or the plain model is used and a message says so once, so that a
new part is never silently wrong. `tests/test_parts.py` runs every row against everything that takes models.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import get_args

from vitkit.model.config import SETS, WORDS, NormPlace, ViTConfig

Takes = Mapping[str, Collection[str]]  # field of ViTConfig -> rows of its table, besides the paper's

EVERY_PART: Takes = {
    **{name: get_args(rows) for name, rows in (WORDS | SETS).items()},
    "norms": (*get_args(NormPlace), "no final"),
}

OF_PAPER: Takes = {"hidden_act": ("gelu_tanh",)}  # the five classes of vitkit.paper


def unfit(c: ViTConfig, takes: Takes) -> list[str]:
    """List the parts of a model that something does not take, such as `relative=eva02`.

    Args:
        c: the architecture.
        takes: the rows that it takes; the paper's are always taken. `no final` among its `norms` says that the norm
            after the last block may be missing.
    """
    parts = {name: {getattr(c, name)} - {get_args(rows)[0]} for name, rows in WORDS.items()}
    parts |= {"norms": {*c.norms} - {"final"}, "without_bias": {*c.without_bias}}
    if "final" not in c.norms:
        parts["norms"].add("no final")
    return [f"{name}={row}" for name, rows in parts.items() for row in sorted(rows) if row not in takes.get(name, ())]


def unfit_of_paper(c: ViTConfig) -> list[str]:
    """List what the five classes of vitkit.paper have no place for, such as `layer_scale=0.1`.

    Args:
        c: the architecture.
    """
    fixed = {
        "pool": "cls",
        "class_token": True,
        "layer_scale": None,
        "num_register_tokens": 0,
        "qkv_bias": True,
        "pruned_heads": (),
    }
    odd = [f"{name}={getattr(c, name)!r}" for name, value in fixed.items() if getattr(c, name) != value]
    return odd + [part for part in unfit(c, OF_PAPER) if part.partition("=")[0] not in fixed]
