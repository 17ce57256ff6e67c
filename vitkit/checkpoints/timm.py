"""timm: `timm.models.VisionTransformer`; DINO, MAE and DeiT (without distillation token) use the same names."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoints.rules import Dialect, Tensors, both, same
from vitkit.model.config import ViTConfig

RULES = (
    *both("patch_embedding.projection", "patch_embed.proj"),
    *same("class_token", "cls_token"),
    *same("register_tokens", "reg_token"),
    *same("positions.table", "pos_embed"),
    *both("blocks.{i}.norm1", "blocks.{i}.norm1"),
    *both("blocks.{i}.msa.qkv", "blocks.{i}.attn.qkv"),
    *both("blocks.{i}.msa.out", "blocks.{i}.attn.proj"),
    *same("blocks.{i}.residual1.gamma", "blocks.{i}.ls1.gamma"),
    *both("blocks.{i}.norm2", "blocks.{i}.norm2"),
    *both("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.fc1"),
    *both("blocks.{i}.mlp.fc2", "blocks.{i}.mlp.fc2"),
    *same("blocks.{i}.residual2.gamma", "blocks.{i}.ls2.gamma"),
    *both("norm", "norm"),
    *both("head", "head"),
)


def _prepare(tensors: Tensors) -> Tensors:
    if "norm.weight" not in tensors:
        tensors = {name.removeprefix("fc_") if name.startswith("fc_norm.") else name: t for name, t in tensors.items()}
    return tensors


def _finish(tensors: Tensors, config: ViTConfig) -> Tensors:
    """Add positions for registers, and rename a LayerNorm after the mean to `fc_norm`, as timm has it."""
    if config.num_register_tokens:
        table, n = tensors["pos_embed"], int(config.class_token)
        none = table.new_zeros(1, config.num_register_tokens, config.hidden_size)
        tensors["pos_embed"] = torch.cat([table[:, :n], none, table[:, n:]], dim=1)
    if config.norm_after_pool:
        return {(f"fc_{name}" if name.startswith("norm.") else name): t for name, t in tensors.items()}
    return tensors


def _hints(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"pool": "mean", "norm_after_pool": True} if "fc_norm.weight" in tensors else {}


def of_dinov2(names: AbstractSet[str]) -> bool:
    """Whether names in timm's spelling belong to Meta's DINOv2. (Full MAE files have a mask token and a decoder.)"""
    return "register_tokens" in names or ("mask_token" in names and "decoder_pos_embed" not in names)


TIMM = Dialect(
    name="timm",
    numerics="timm",
    suffixes=(".pth", ".pt", ".bin", ".safetensors"),
    signature=("patch_embed.proj.weight", "blocks.0.attn.qkv.weight"),
    unless=of_dinov2,
    rules=RULES,
    respell=((r"^backbone\.", ""),),
    prepare=_prepare,
    finish=_finish,
    hints=_hints,
    unused={r"^head\.(mlp|last_layer)\.": "DINO's projection head", r"^(decoder_|mask_token$)": "MAE's decoder"},
)
