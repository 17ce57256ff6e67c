"""transformers' classes of plain Vision Transformers, each as a tiny model with random weights, and what it answers.

`CLASSES` is what docs/proof.md and the tests compare with. The library is passed in, so that listing imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.checkpoints.verify import patches

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
RATIO = {name: value for name, value in SHAPE.items() if name != "intermediate_size"} | {"mlp_ratio": 2}
GRID = {name: value for name, value in SHAPE.items() if name != "image_size"} | {"num_patches": 16}
TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BIAS = {"use_relative_position_bias": True}
DECODER = {
    "decoder_hidden_size": 16,
    "decoder_num_attention_heads": 2,
    "decoder_num_hidden_layers": 1,
    "decoder_intermediate_size": 32,
}


@dataclass(frozen=True)
class Class:
    """One class of transformers.

    Args:
        kind: its name.
        config: the name of its configuration's class.
        fields: of that configuration.
        out: the output that vitkit's model(x) equals; empty if the class gives tokens only.
        labels: whether it classifies; it then has five classes.
    """

    kind: str
    config: str
    fields: dict[str, Any]
    out: str = ""
    labels: bool = False

    def make(self, library: Any, seed: int = 0) -> Any:
        """Return the model, in eval mode, with attention that can be shown."""
        config = getattr(library, self.config)(**self.fields, **({"num_labels": 5} if self.labels else {}))
        config._attn_implementation = "eager"
        torch.manual_seed(seed)
        model: nn.Module = getattr(library, self.kind)(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                norm = "norm" in name and name.endswith("weight")
                parameter.normal_(1.0 if norm else 0.0, 0.3)
        return model.eval()

    @torch.no_grad()
    def answer(self, model: Any, x: Tensor) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, ...]]:
        """Return what the class's model says of pixels: its output, its tokens before any norm after them, attention.

        Args:
            model: what `make` returned.
            x: pixels [B, C, H, W].
        """
        whole = model.vision_model if "text_config" in self.fields and not self.labels else model
        if self.kind.startswith("ViTMAE"):
            encoder = getattr(model, "vit", model)
            encoder.config.mask_ratio = 0.0  # all patches, in their order
            out = encoder(x, noise=torch.arange(16.0).expand(x.shape[0], -1), output_attentions=True)
        elif self.kind.startswith("Siglip2"):
            out = whole(**patches(x, 8), output_attentions=True)
        else:
            out = whole(x, output_attentions=True)
        found = getattr(out, self.out, None) if self.out else None
        if hasattr(model, "visual_projection") and "text_config" in self.fields:
            found = model.visual_projection(found)
        attention = tuple(A for A in getattr(out, "attentions", None) or () if A is not None)
        return found, getattr(out, "last_hidden_state", None), attention


def _class(kind: str, config: str, out: str = "", *, labels: bool = False, **fields: Any) -> Class:
    return Class(kind, config, fields, out, labels)


_BOTH = {"vision_config": SHAPE, "text_config": TEXT}
_BOTH2 = {"vision_config": GRID, "text_config": TEXT}
CLASSES: dict[str, Class] = {
    "ViTModel": _class("ViTModel", "ViTConfig", "pooler_output", **SHAPE),
    "ViTForImageClassification": _class("ViTForImageClassification", "ViTConfig", "logits", labels=True, **SHAPE),
    "ViTMAEModel": _class("ViTMAEModel", "ViTMAEConfig", **SHAPE),
    "ViTMAEForPreTraining": _class("ViTMAEForPreTraining", "ViTMAEConfig", **SHAPE, **DECODER),
    "ViTMSNModel": _class("ViTMSNModel", "ViTMSNConfig", **SHAPE),
    "ViTMSNForImageClassification": _class(
        "ViTMSNForImageClassification", "ViTMSNConfig", "logits", labels=True, **SHAPE
    ),
    "IJepaModel": _class("IJepaModel", "IJepaConfig", **SHAPE),
    "IJepaForImageClassification": _class("IJepaForImageClassification", "IJepaConfig", "logits", labels=True, **SHAPE),
    "DeiTModel": _class("DeiTModel", "DeiTConfig", "pooler_output", **SHAPE),
    "DeiTForImageClassification": _class("DeiTForImageClassification", "DeiTConfig", "logits", labels=True, **SHAPE),
    "DeiTForImageClassificationWithTeacher": _class(
        "DeiTForImageClassificationWithTeacher", "DeiTConfig", "logits", labels=True, **SHAPE
    ),
    "CLIPVisionModel": _class("CLIPVisionModel", "CLIPVisionConfig", "pooler_output", **SHAPE),
    "CLIPVisionModelWithProjection": _class(
        "CLIPVisionModelWithProjection", "CLIPVisionConfig", "image_embeds", projection_dim=24, **SHAPE
    ),
    "CLIPModel": _class("CLIPModel", "CLIPConfig", "pooler_output", projection_dim=24, **_BOTH),
    "CLIPForImageClassification": _class("CLIPForImageClassification", "CLIPConfig", "logits", labels=True, **_BOTH),
    "SiglipVisionModel": _class("SiglipVisionModel", "SiglipVisionConfig", "pooler_output", **SHAPE),
    "SiglipModel": _class("SiglipModel", "SiglipConfig", "pooler_output", **_BOTH),
    "SiglipForImageClassification": _class(
        "SiglipForImageClassification", "SiglipConfig", "logits", labels=True, **_BOTH
    ),
    "Siglip2VisionModel": _class("Siglip2VisionModel", "Siglip2VisionConfig", "pooler_output", **GRID),
    "Siglip2Model": _class("Siglip2Model", "Siglip2Config", "pooler_output", **_BOTH2),
    "Siglip2ForImageClassification": _class(
        "Siglip2ForImageClassification", "Siglip2Config", "logits", labels=True, **_BOTH2
    ),
    "Dinov2Model": _class("Dinov2Model", "Dinov2Config", "pooler_output", **RATIO),
    "Dinov2Model, SwiGLU": _class("Dinov2Model", "Dinov2Config", "pooler_output", use_swiglu_ffn=True, **RATIO),
    "Dinov2ForImageClassification": _class(
        "Dinov2ForImageClassification", "Dinov2Config", "logits", labels=True, **RATIO
    ),
    "Dinov2WithRegistersModel": _class(
        "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", "pooler_output", **RATIO
    ),
    "Dinov2WithRegistersForImageClassification": _class(
        "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", "logits", labels=True, **RATIO
    ),
    "DINOv3ViTModel": _class("DINOv3ViTModel", "DINOv3ViTConfig", "pooler_output", num_register_tokens=2, **SHAPE),
    "DINOv3ViTModel, SwiGLU": _class(
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        "pooler_output",
        num_register_tokens=2,
        use_gated_mlp=True,
        hidden_act="silu",
        **SHAPE,
    ),
    "Aimv2VisionModel": _class("Aimv2VisionModel", "Aimv2VisionConfig", "pooler_output", **SHAPE),
    "Aimv2VisionModel, without a head": _class("Aimv2VisionModel", "Aimv2VisionConfig", use_head=False, **SHAPE),
    "Aimv2Model": _class("Aimv2Model", "Aimv2Config", "pooler_output", projection_dim=24, **_BOTH),
    "BeitModel": _class("BeitModel", "BeitConfig", "pooler_output", vocab_size=10, **BIAS, **SHAPE),
    "BeitModel, one table for all layers": _class(
        "BeitModel",
        "BeitConfig",
        "pooler_output",
        vocab_size=10,
        use_shared_relative_position_bias=True,
        use_mask_token=True,
        use_mean_pooling=False,
        **SHAPE,
    ),
    "BeitForImageClassification": _class(
        "BeitForImageClassification", "BeitConfig", "logits", labels=True, vocab_size=10, **BIAS, **SHAPE
    ),
    "Data2VecVisionModel": _class("Data2VecVisionModel", "Data2VecVisionConfig", **BIAS, **SHAPE),
    "Data2VecVisionForImageClassification": _class(
        "Data2VecVisionForImageClassification", "Data2VecVisionConfig", "logits", labels=True, **BIAS, **SHAPE
    ),
}
