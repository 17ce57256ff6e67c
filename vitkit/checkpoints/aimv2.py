"""aimv2-hf: `Aimv2VisionModel` of transformers, and the image half of `Aimv2Model`.

RMSNorms, one of them on the patches, a gated MLP, and hardly a bias. A learned query pools the patches; with `use_head`
off, the feature is their mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitkit.checkpoints.clip import TEXT
from vitkit.checkpoints.rules import TABLE, Dialect, Rule, Tensors, both, same, three, two
from vitkit.model.config import ViTConfig

LAYER = "encoder.layers.{i}"
RULES = (
    *both("patch_embedding.projection", "embeddings.patch_embed"),
    *both("patch_embedding.norm", "embeddings.rms_norm"),
    Rule("positions.table", ("embeddings.position_embedding.weight",), TABLE),
    *both("blocks.{i}.norm1", f"{LAYER}.rms_norm1"),
    *three("blocks.{i}.msa.qkv", *(f"{LAYER}.attention.{part}_proj" for part in "qkv")),
    *both("blocks.{i}.msa.out", f"{LAYER}.attention.out_proj"),
    *both("blocks.{i}.norm2", f"{LAYER}.rms_norm2"),
    *two("blocks.{i}.mlp.fc1", f"{LAYER}.ffn.gate_proj", f"{LAYER}.ffn.up_proj"),
    *both("blocks.{i}.mlp.fc2", f"{LAYER}.ffn.down_proj"),
    *both("norm", "rms_norm"),
    *same("pool.query", "head.cls_token"),
    *two("pool.kv", "head.k_proj", "head.v_proj"),
    *both("pool.out", "head.output_proj"),
    *both("head", "visual_projection"),
)


def _finish(tensors: Tensors, config: ViTConfig) -> Tensors:
    """Put the vision model under its prefix where a projection is next to it."""
    if not config.num_classes:
        return tensors
    return {name if name.startswith("visual_") else f"vision_model.{name}": t for name, t in tensors.items()}


def _hints(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"pool": "aimv2" if "head.cls_token" in tensors else "mean"}


AIMV2_HF = Dialect(
    name="aimv2-hf",
    later=True,
    numerics="aimv2",
    suffixes=("",),
    signature=("embeddings.patch_embed.weight", "embeddings.rms_norm.weight", "encoder.layers.0.rms_norm1.weight"),
    rules=RULES,
    respell=((r"^vision_model\.", ""),),
    finish=_finish,
    hints=_hints,
    needs=("num_attention_heads",),
    unused={r"^text_(model|projection)\.": TEXT, r"^logit_scale$": "the scale of image-text scores"},
    refused={},
)
