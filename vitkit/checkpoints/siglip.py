"""siglip-hf: `SiglipVisionModel` and, on its own grid, `Siglip2VisionModel` of transformers.

Attention pooling (`head.`) makes the feature. Of a whole SigLIP, the text tower is left out. The classifiers of both
use the mean of the patches instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoints.clip import TEXT
from vitkit.checkpoints.rules import ASIDE, TABLE, Dialect, Form, Rule, Tensors, both, same, three
from vitkit.errors import TensorMismatch
from vitkit.model.config import ViTConfig


def _kernel(t: Tensor) -> Tensor:
    """Read E from a kernel, or from a linear layer over patches [P, P, C], as SigLIP 2 has it."""
    if t.dim() != 2:
        return t
    for channels in (3, 1, 4):
        side = math.isqrt(t.shape[1] // channels)
        if side * side * channels == t.shape[1]:
            return t.unflatten(1, (side, side, channels)).permute(0, 3, 1, 2)  # [D, C, P, P]
    raise TensorMismatch(
        f"A patch of SigLIP 2 has P x P x C numbers; {t.shape[1]} are not that for 1, 3 or 4 channels."
    )


def _written(t: Tensor, c: ViTConfig) -> tuple[Tensor]:
    return (t.permute(0, 2, 3, 1).flatten(1),) if second(c) else (t,)


def second(c: ViTConfig) -> bool:
    """Whether a model is written as SigLIP 2: the rule for resizing positions is what tells it from SigLIP."""
    return c.position_resize == "siglip2"


LAYER = "encoder.layers.{i}"
RULES = (
    Rule("patch_embedding.projection.weight", ("embeddings.patch_embedding.weight",), Form(_kernel, _written)),
    *same("patch_embedding.projection.bias", "embeddings.patch_embedding.bias"),
    Rule("positions.table", ("embeddings.position_embedding.weight",), TABLE),
    *both("blocks.{i}.norm1", f"{LAYER}.layer_norm1"),
    *three("blocks.{i}.msa.qkv", *(f"{LAYER}.self_attn.{part}_proj" for part in "qkv")),
    *both("blocks.{i}.msa.out", f"{LAYER}.self_attn.out_proj"),
    *both("blocks.{i}.norm2", f"{LAYER}.layer_norm2"),
    *both("blocks.{i}.mlp.fc1", f"{LAYER}.mlp.fc1"),
    *both("blocks.{i}.mlp.fc2", f"{LAYER}.mlp.fc2"),
    *both("norm", "post_layernorm"),
    *same("pool.query", "head.probe"),
    *both("pool.q", "head.attention.q"),  # `_prepare` splits in_proj
    *both("pool.kv", "head.attention.kv"),
    *both("pool.out", "head.attention.out_proj"),
    *both("pool.norm", "head.layernorm"),
    *both("pool.mlp.fc1", "head.mlp.fc1"),
    *both("pool.mlp.fc2", "head.mlp.fc2"),
    *both("head", "classifier"),
)


def _prepare(tensors: Tensors) -> Tensors:
    """Split the pool's projection into that of the query and that of the tokens; a classifier leaves the pool out."""
    if "classifier.weight" in tensors:
        return {re.sub(r"^head\.", ASIDE + r"\g<0>", name): tensor for name, tensor in tensors.items()}
    result = Tensors()
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"head\.attention\.in_proj_(weight|bias)", name):
            D = tensor.shape[0] // 3
            result[f"head.attention.q.{match[1]}"], result[f"head.attention.kv.{match[1]}"] = tensor[:D], tensor[D:]
        else:
            result[name] = tensor
    return result


def _hints(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    patches = tensors.get("embeddings.patch_embedding.weight")
    rule = {"position_resize": "siglip2"} if patches is not None and patches.dim() == 2 else {}
    pooled = "head.probe" in tensors and "classifier.weight" not in tensors
    return {"pool": "map" if pooled else "mean", **rule}


def _finish(tensors: Tensors, config: ViTConfig) -> Tensors:
    result = Tensors()
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"head\.attention\.q\.(weight|bias)", name):
            kv = tensors[f"head.attention.kv.{match[1]}"]
            result[f"head.attention.in_proj_{match[1]}"] = torch.cat([tensor, kv])
        elif not name.startswith("head.attention.kv."):
            result[name] = tensor
    if not config.num_classes:
        return result
    return {name if name.startswith("classifier.") else f"vision_model.{name}": t for name, t in result.items()}


SIGLIP_HF = Dialect(
    name="siglip-hf",
    later=True,
    numerics="siglip",
    suffixes=("",),
    signature=(
        "embeddings.position_embedding.weight",
        "encoder.layers.0.self_attn.q_proj.weight",
        "post_layernorm.weight",
    ),
    unless=lambda names: "embeddings.class_embedding" in names,
    rules=RULES,
    respell=((r"^vision_model\.", ""),),
    prepare=_prepare,
    finish=_finish,
    hints=_hints,
    needs=("num_attention_heads",),
    unused={
        r"^text_model\.": TEXT,
        r"^logit_(scale|bias)$": "the scale of image-text scores",
        r"(^|\.)position_ids$": "the numbers of positions",
    },
    refused={},
)
