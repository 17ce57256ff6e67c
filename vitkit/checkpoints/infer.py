"""Infer the model that a file holds from its tensors' shapes, what its JSON files state, and what the user adds.

In order, weakest first: the dialect's numerics, the shapes, hints in the names, what is stated next to the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoints.rules import Dialect
from vitkit.errors import CannotExpress, ConfigError, TensorMismatch
from vitkit.model.checks import pair
from vitkit.model.config import NUMERICS, SHAPES, ViTConfig

Fields = dict[str, Any]


def infer(state: Mapping[str, Tensor], dialect: Dialect, stated: Fields, given: Fields, notes: list[str]) -> ViTConfig:
    """Infer the configuration of a file.

    Args:
        state: its tensors, by the model's names.
        dialect: supplies the numerics that nothing else states.
        stated: fields that the tensor names reveal or that are stated next to the weights.
        given: the user's overrides; heads and image size count as facts if the file does not state them.
        notes: receives a sentence for each assumption.

    Raises:
        TensorMismatch: a tensor that every model has is missing.
        ConfigError: something cannot be inferred and must be given.
    """
    kernel, rows = (
        _needed(state, name, rank, dialect)
        for name, rank in (("patch_embedding.projection.weight", 4), ("positions.table", 3))
    )
    D, C, P, other = kernel.shape
    if other != P:
        raise CannotExpress(
            f"Expected square patches; this checkpoint has patches of {P} x {other} pixels, which vitkit does not "
            f"support."
        )
    L = 1 + max((int(m[1]) for name in state if (m := re.match(r"blocks\.(\d+)\.", name))), default=-1)
    if len(state) < L:
        raise TensorMismatch(f"The file names block {L - 1} but holds only {len(state)} tensors; blocks are missing.")
    head = state.get("head.weight")
    fields: Fields = {
        **NUMERICS[dialect.numerics],
        "hidden_size": D,
        "num_channels": C,
        "patch_size": P,
        "num_hidden_layers": L,
        "intermediate_size": _needed(state, "blocks.0.mlp.fc1.weight", 2, dialect).shape[0],
        "qkv_bias": "blocks.0.msa.qkv.bias" in state,
        "class_token": "class_token" in state,
        "num_register_tokens": state["register_tokens"].shape[1] if "register_tokens" in state else 0,
        "pre_logits": "pre_logits.weight" in state,
        "layer_scale": 1.0 if "blocks.0.residual1.gamma" in state else None,
        "num_classes": 0 if head is None else head.shape[0],
    }
    if not fields["class_token"]:
        fields["pool"] = "mean"
    classes = stated.get("num_classes", fields["num_classes"])
    stated = {**stated, "num_classes": fields["num_classes"]}  # a base model's JSON may list classes too
    if head is not None and classes != head.shape[0] and "num_classes" not in given:
        raise TensorMismatch(
            f"The file's head has {head.shape[0]} classes, but its JSON file states {classes}; "
            f"give num_classes= to replace the head, or correct the JSON file."
        )
    fields |= {name: value for name, value in stated.items() if value is not None}
    if "num_attention_heads" not in fields:
        fields["num_attention_heads"] = given.get("num_attention_heads") or _heads(D, L, notes)
    if "image_size" not in stated:
        fields["image_size"] = _image_size(rows.shape[1], fields, given.get("image_size"), notes)
    try:
        return ViTConfig(**fields)
    except TypeError as error:
        raise ConfigError(f"The JSON next to the weights is not a valid configuration ({error}).") from None


def _needed(state: Mapping[str, Tensor], name: str, rank: int, dialect: Dialect) -> Tensor:
    if name not in state:
        raise TensorMismatch(f"The file lacks {dialect.in_file(name)!r}, which every model has; it is incomplete.")
    if state[name].dim() != rank:
        raise TensorMismatch(f"Expected {dialect.in_file(name)!r} to have {rank} axes; got {list(state[name].shape)}.")
    return state[name]


def _heads(D: int, L: int, notes: list[str]) -> int:
    for shape in SHAPES.values():
        if (shape["hidden_size"], shape["num_hidden_layers"]) == (D, L):
            return shape["num_attention_heads"]
    if D % 64 == 0:
        notes.append(
            f"The file does not state its number of heads, and no variant has width {D} and {L} layers; "
            f"{D // 64} heads of width 64 are assumed. Give num_attention_heads= if that is wrong."
        )
        return D // 64
    raise ConfigError(
        f"The file does not state its number of heads, no variant has width {D} and {L} layers, and "
        f"{D} is not a multiple of 64; give num_attention_heads=."
    )


def _image_size(rows: int, fields: Fields, given: Any, notes: list[str]) -> int | tuple[int, int]:
    """Infer the image size that a table of `rows` positions was made for.

    Usually one row is for the class token; timm and big_vision can leave it out, and timm can have rows for registers
    too. A square grid is recognised; for any other the size must be given.
    """
    P, usual = fields["patch_size"], int(fields["class_token"])
    readings = [usual, usual + fields["num_register_tokens"], 0]
    for prefix in dict.fromkeys(readings):
        side = math.isqrt(max(rows - prefix, 0))
        if side and side * side == rows - prefix:
            if prefix == 0 and usual:
                notes.append(
                    f"The {rows} positions are taken to be {side} x {side} patches and none for the class token; "
                    f"give image_size=(height, width) if the grid is not square."
                )
            return side * P
        if given is not None:
            size = pair(given)
            if -(-size[0] // P) * -(-size[1] // P) == rows - prefix:
                return size
    raise ConfigError(
        f"The {rows} positions of this file do not form a square grid of patches; give image_size=(height, "
        f"width) in pixels, with height / {P} x width / {P} = {rows - usual} patches."
    )


def adapt(state: dict[str, Tensor], own: ViTConfig, wanted: ViTConfig, notes: list[str]) -> None:
    """Adapt a file's tensors, in place, to another image size, number of channels or number of classes.

    Args:
        state: tensors by the model's names.
        own: the configuration of the file.
        wanted: the configuration of the model.
        notes: receives a sentence for each change.
    """
    from vitkit.model.parts.positions import resize

    if own.grid != wanted.grid:
        state["positions.table"] = resize(state["positions.table"], own.grid, wanted.grid, wanted.position_resize)
        notes.append(
            f"Positions were resized from {own.grid[0]} x {own.grid[1]} to {wanted.grid[0]} x "
            f"{wanted.grid[1]} patches by the rule {wanted.position_resize!r}."
        )
    if own.num_channels != wanted.num_channels:
        name, (old, new) = "patch_embedding.projection.weight", (own.num_channels, wanted.num_channels)
        state[name] = to_channels(state[name], new)
        notes.append(
            f"The patch kernel was changed from {old} to {new} channels: "
            + ("the sum over all channels." if new == 1 else f"repeated in turn and scaled by {old}/{new}.")
        )
    if own.num_classes != wanted.num_classes or (own.pre_logits and not wanted.pre_logits):
        kernel = state["norm.weight"]
        for name in [n for n in state if n.startswith(("head.", "pre_logits."))]:
            if name.startswith("head.") or not wanted.pre_logits:
                del state[name]
        if wanted.num_classes:
            state["head.weight"] = kernel.new_zeros(wanted.num_classes, wanted.hidden_size)
            state["head.bias"] = kernel.new_zeros(wanted.num_classes)
            notes.append(
                f"The head is new and zero, with {wanted.num_classes} classes instead of {own.num_classes}; "
                f"train it before using its outputs."
            )
        else:
            notes.append(f"The head with {own.num_classes} classes was left out.")


def to_channels(kernel: Tensor, new: int) -> Tensor:
    """Adapt the patch kernel to another number of channels.

    One channel gets the sum, so that a gray image gives what it gave as equal R, G and B; more channels repeat the old
    ones in turn, scaled so that equal channels give what they gave before.

    Args:
        kernel: [D, C, P, P].
        new: number of channels wanted.
    """
    old = kernel.shape[1]
    if new == 1:
        return kernel.sum(1, keepdim=True)
    return kernel[:, torch.arange(new) % old] * (old / new)
