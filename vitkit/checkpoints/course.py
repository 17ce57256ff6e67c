"""course: the replication in the "learn PyTorch" course, and `vitkit.paper.ViT`, which uses the same names."""

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
    """Refuse the version on the course's slides, which leaves out the LayerNorm of Eq. 4."""
    first = tensors.get("classifier.0.weight", tensors.get("classifier.weight"))
    if first is not None and first.dim() == 2:
        raise CannotExpress(
            "Expected a LayerNorm and a Linear in the classifier; this course file has only the Linear, without the "
            "LayerNorm of Eq. 4 (the version on the slides), which is another model. Train and save the course's "
            "Sequential(LayerNorm, Linear)."
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
