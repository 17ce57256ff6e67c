"""course: the replication of the "learn PyTorch" course, and `vitkit.paper.ViT`, which has the same names."""

from __future__ import annotations

from vitkit.checkpoints.rules import Dialect, Rule, Tensors, both, same
from vitkit.errors import CannotExpress

BLOCK = "transformer_encoder.{i}"
RULES = (
    *both("patch_embedding.projection", "patch_embedding.patcher"),
    *same("class_token", "class_embedding"),
    *same("positions.table", "position_embedding"),
    *both("blocks.{i}.norm1", f"{BLOCK}.msa_block.layer_norm"),
    Rule("blocks.{i}.msa.qkv.weight", (f"{BLOCK}.msa_block.multihead_attn.in_proj_weight",)),
    Rule("blocks.{i}.msa.qkv.bias", (f"{BLOCK}.msa_block.multihead_attn.in_proj_bias",)),
    *both("blocks.{i}.msa.out", f"{BLOCK}.msa_block.multihead_attn.out_proj"),
    *both("blocks.{i}.norm2", f"{BLOCK}.mlp_block.layer_norm"),
    *both("blocks.{i}.mlp.fc1", f"{BLOCK}.mlp_block.mlp.0"),
    *both("blocks.{i}.mlp.fc2", f"{BLOCK}.mlp_block.mlp.3"),
    *both("norm", "classifier.0"),
    *both("head", "classifier.1"),
)


def _prepare(tensors: Tensors) -> Tensors:
    """Refuse the form on the course's slides, which leaves the LayerNorm of Eq. 4 out."""
    first = tensors.get("classifier.0.weight", tensors.get("classifier.weight"))
    if first is not None and first.dim() == 2:
        raise CannotExpress(
            "The classifier of this course file is a Linear without the LayerNorm of Eq. 4 before it (the form on the "
            "slides); that is another model. Train the course's Sequential(LayerNorm, Linear) and save that."
        )
    return tensors


COURSE = Dialect(
    name="course",
    numerics="course",
    suffixes=(".pth", ".pt", ".safetensors"),
    signature=("patch_embedding.patcher.weight", "class_embedding"),
    rules=RULES,
    prepare=_prepare,
)
