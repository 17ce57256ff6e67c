"""native: the model's own names, in a single safetensors file whose metadata holds everything else."""

from __future__ import annotations

from vitkit.checkpoints.resnets import TORCH, stem
from vitkit.checkpoints.rules import Dialect, both, same

PRETRAINING = "pretraining/"  # before the names of tensors that pre-training has beside the model
# Modules with a weight, and perhaps a bias, and tensors: those of the paper, then those of other parts.
MODULES = (
    *("patch_embedding.projection", "norm", "pre_logits", "head"),
    *(f"blocks.{{i}}.{name}" for name in ("norm1", "msa.qkv", "msa.out", "norm2", "mlp.fc1", "mlp.fc2")),
    *("patch_embedding.norm", "first_norm", "head.cls", "head.distilled"),
    *(f"blocks.{{i}}.{name}" for name in ("msa.norm_q", "msa.norm_k", "msa.norm", "mlp.norm")),
    *(f"pool.{name}" for name in ("q", "kv", "out", "norm", "mlp.fc1", "mlp.norm", "mlp.fc2")),
)
TENSORS = (
    *("class_token", "register_tokens", "positions.table"),
    *("blocks.{i}.residual1.gamma", "blocks.{i}.residual2.gamma"),
    *("positions.rows", "positions.columns", "positions.first", "pool.query"),
    *(f"blocks.{{i}}.positions.{name}" for name in ("table", "rows", "columns", "first")),
    *(f"blocks.{{i}}.msa.{name}" for name in ("qkv.bias_q", "qkv.bias_v", "relative.table", "relative.frequencies")),
)
RULES = (
    *stem(
        "patch_embedding.stem.root.conv",
        "patch_embedding.stem.root.norm",
        "patch_embedding.stem.stages.STAGE.{i}.",
        "convNUMBER",
        "gnNUMBER",
        "projection",
        "projection_norm",
        TORCH,
    ),
    *(rule for name in MODULES for rule in both(name, name)),
    *(rule for name in TENSORS for rule in same(name, name)),
)

NATIVE = Dialect(
    name="native",
    numerics="paper",
    suffixes=(".safetensors",),
    signature=("patch_embedding.projection.weight", "blocks.0.msa.qkv.weight"),
    rules=RULES,
    prefix_positions=lambda config: config.prefix_positions,
)
