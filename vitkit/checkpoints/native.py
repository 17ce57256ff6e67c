"""native: the model's own names, in a single safetensors file whose metadata holds everything else."""

from __future__ import annotations

from vitkit.checkpoints.rules import Dialect, both, same

RULES = (
    *both("patch_embedding.projection", "patch_embedding.projection"),
    *same("class_token", "class_token"),
    *same("register_tokens", "register_tokens"),
    *same("positions.table", "positions.table"),
    *both("blocks.{i}.norm1", "blocks.{i}.norm1"),
    *both("blocks.{i}.msa.qkv", "blocks.{i}.msa.qkv"),
    *both("blocks.{i}.msa.out", "blocks.{i}.msa.out"),
    *same("blocks.{i}.residual1.gamma", "blocks.{i}.residual1.gamma"),
    *both("blocks.{i}.norm2", "blocks.{i}.norm2"),
    *both("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.fc1"),
    *both("blocks.{i}.mlp.fc2", "blocks.{i}.mlp.fc2"),
    *same("blocks.{i}.residual2.gamma", "blocks.{i}.residual2.gamma"),
    *both("norm", "norm"),
    *both("pre_logits", "pre_logits"),
    *both("head", "head"),
)

NATIVE = Dialect(
    name="native",
    numerics="paper",
    suffixes=(".safetensors",),
    signature=("patch_embedding.projection.weight", "positions.table", "blocks.0.msa.qkv.weight"),
    rules=RULES,
)
