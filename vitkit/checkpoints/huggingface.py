"""huggingface: `ViTModel` and `ViTForImageClassification` of transformers, with the names of files on the hub (v4).

Base-model files have no `vit.` prefix, and transformers 5 uses other names in memory; both are read.
"""

from __future__ import annotations

import re

from vitkit.checkpoints.rules import Dialect, Tensors, both, same, three
from vitkit.model.config import ViTConfig

RULES = (
    *both("patch_embedding.projection", "vit.embeddings.patch_embeddings.projection"),
    *same("class_token", "vit.embeddings.cls_token"),
    *same("positions.table", "vit.embeddings.position_embeddings"),
    *both("blocks.{i}.norm1", "vit.encoder.layer.{i}.layernorm_before"),
    *three(
        "blocks.{i}.msa.qkv",
        *(f"vit.encoder.layer.{{i}}.attention.attention.{part}" for part in ("query", "key", "value")),
    ),
    *both("blocks.{i}.msa.out", "vit.encoder.layer.{i}.attention.output.dense"),
    *both("blocks.{i}.norm2", "vit.encoder.layer.{i}.layernorm_after"),
    *both("blocks.{i}.mlp.fc1", "vit.encoder.layer.{i}.intermediate.dense"),
    *both("blocks.{i}.mlp.fc2", "vit.encoder.layer.{i}.output.dense"),
    *both("norm", "vit.layernorm"),
    *both("pre_logits", "vit.pooler.dense"),
    *both("head", "classifier"),
)

RESPELL = (
    (r"^(?=(embeddings|encoder|layers|layernorm|pooler)\.)", "vit."),  # base-model files
    (r"^vit\.layers\.", "vit.encoder.layer."),  # transformers 5, in memory
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)


def _finish(tensors: Tensors, config: ViTConfig) -> Tensors:
    """Drop the prefix for a model without a head: it becomes a base-model file."""
    if config.num_classes:
        return tensors
    return {re.sub(r"^vit\.", "", name): tensor for name, tensor in tensors.items()}


HUGGINGFACE = Dialect(
    name="huggingface",
    numerics="huggingface",
    suffixes=("",),
    signature=("vit.embeddings.patch_embeddings.projection.weight", "vit.encoder.layer.0.layernorm_before.weight"),
    rules=RULES,
    respell=RESPELL,
    finish=_finish,
    unused={r"^vit\.embeddings\.mask_token$": "a mask token", r"^decoder\.": "a decoder of masked pre-training"},
)
