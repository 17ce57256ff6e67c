"""How public checkpoints expect images to be prepared. Wrong statistics cost more accuracy than anything else here.

KNOWN is matched from the start of the hub id or the file name; the first match counts. DEFAULTS is what each dialect's
library does, for checkpoints that are not in KNOWN; using it always leaves a note.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
OPENAI = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
NONE = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
SQUASH = {"resize": "squash", "crop": 1.0, "interpolation": "bilinear"}


def _crop(share: float, interpolation: str = "bicubic") -> dict[str, Any]:
    return {"resize": "crop", "crop": share, "interpolation": interpolation}


@dataclass(frozen=True)
class Known:
    """The preprocessing of a family of public checkpoints.

    Args:
        pattern: regular expression that their hub ids or file names begin with.
        spec: fields of InputSpec.
        source: where this is documented.
    """

    pattern: str
    spec: dict[str, Any]
    source: str


_TIMM = "timm/models/vision_transformer.py, default_cfgs"
_HYBRID = "timm/models/vision_transformer_hybrid.py, default_cfgs"
_BIT = "timm/models/resnetv2.py, default_cfgs"
_TORCHVISION = "torchvision/models/vision_transformer.py, the weights' transforms"
KNOWN: tuple[Known, ...] = (
    Known(r"(timm/)?vit_\w+_patch14_(reg4_)?dinov2\.lvd142m", IMAGENET | _crop(1.0), _TIMM),
    Known(
        r"facebook/dinov2-|dinov2_vit[slbg]14_(reg4_)?pretrain",
        IMAGENET | _crop(224 / 256),
        "facebook/dinov2-base, preprocessor_config.json; github.com/facebookresearch/dinov2, data/transforms.py",
    ),
    Known(
        r"facebook/dinov3-\w+-pretrain-sat493m|dinov3_vit\w+_pretrain_sat493m",
        {"mean": (0.430, 0.411, 0.296), "std": (0.213, 0.156, 0.143)} | SQUASH,
        "github.com/facebookresearch/dinov3, README.md",
    ),
    Known(r"facebook/deit-", IMAGENET | _crop(224 / 256), "facebook/deit-base-patch16-224, preprocessor_config.json"),
    Known(r"(timm/)?vit_\w+_patch\d+_224\.(dino|mae)\b", IMAGENET | _crop(0.9), _TIMM),
    Known(
        r"dino_(deit|vit)\w*_pretrain", IMAGENET | _crop(224 / 256), "github.com/facebookresearch/dino, eval_linear.py"
    ),
    Known(
        r"mae_(pretrain|finetuned|visualize)_vit",
        IMAGENET | _crop(224 / 256),
        "github.com/facebookresearch/mae, main_linprobe.py, util/datasets.py",
    ),
    Known(r"(timm/)?deit3?_\w+_patch\d+_384\.fb_", IMAGENET | _crop(1.0), "timm/models/deit.py, default_cfgs"),
    Known(r"(timm/)?deit3?_\w+_patch\d+_224\.fb_", IMAGENET | _crop(0.9), "timm/models/deit.py, default_cfgs"),
    Known(
        r"deit_(tiny|small|base)_patch16_224-[0-9a-f]{8}\.pth|deit_3_\w+_224_\w+\.pth",
        IMAGENET | _crop(224 / 256),
        "github.com/facebookresearch/deit, datasets.py",
    ),
    Known(r"(timm/)?vit_\w+_r(26|50)?_s(16|32)(_p8)?_384\.(augreg|orig)", HALF | _crop(1.0), _HYBRID),
    Known(r"(timm/)?vit_\w+_r(26|50)?_s(16|32)(_p8)?_224\.(augreg|orig)", HALF | _crop(0.9), _HYBRID),
    Known(r"(timm/)?vit_\w+_patch\d+_384\.(augreg|orig)", HALF | _crop(1.0), _TIMM),
    Known(r"(timm/)?vit_\w+_patch\d+_\d+\.(augreg|orig|sam)", HALF | _crop(0.9), _TIMM),
    Known(r"vit_[blh]_\d+(_lc)?_swag-[0-9a-f]{8}\.pth", IMAGENET | _crop(1.0), _TORCHVISION),
    Known(r"vit_l_16-852ce7e3", IMAGENET | _crop(224 / 242, "bilinear"), _TORCHVISION),
    Known(r"vit_(b_16-c867db91|b_32-d86f8d99|l_32-c7638314)", IMAGENET | _crop(224 / 256, "bilinear"), _TORCHVISION),
    Known(
        r"(timm/)?resnetv2_\d+x\d_bit\.(goog_distilled_in1k|goog_teacher_in21k_ft_in1k\b(?!_384))",
        HALF | _crop(0.875),
        _BIT,
    ),
    Known(r"(timm/)?resnetv2_\d+x\d_bit\.goog_teacher_in21k_ft_in1k_384", HALF | _crop(1.0), _BIT),
    Known(r"(timm/)?resnetv2_\d+x\d_bit\.goog_in21k_ft_in1k", HALF | _crop(1.0, "bilinear"), _BIT),
    Known(r"(timm/)?resnetv2_\d+x\d_bit\.goog_in21k", HALF | _crop(0.875, "bilinear"), _BIT),
    Known(
        r"BiT-[SM]-R\d+x\d[^/]*\.npz", HALF | SQUASH, "github.com/google-research/big_transfer, bit_pytorch/train.py"
    ),
    Known(r"google/vit-", HALF | SQUASH, "google/vit-base-patch16-224, preprocessor_config.json"),
    Known(
        r"(R(26|50)?_)?(Ti|S|B|L|H)_(8|14|16|32)(-[^/]*)?\.npz|(imagenet21k[^/]*[/_])?R50\+ViT-[BL]_(16|32)\.npz|"
        r"(imagenet21k[^/]*[/_])?ViT-[BLH]_(14|16|32)(-224)?\.npz",
        HALF | SQUASH,
        "github.com/google-research/vision_transformer, vit_jax/input_pipeline.py",
    ),
)

DEFAULTS: dict[str, dict[str, Any]] = {  # by dialect
    "native": HALF | SQUASH,
    "huggingface": HALF | SQUASH,
    "timm": HALF | _crop(0.9),
    "torchvision": IMAGENET | _crop(224 / 256, "bilinear"),
    "google": HALF | SQUASH,
    "dinov2": IMAGENET | _crop(224 / 256),
    "dinov2-hf": IMAGENET | _crop(224 / 256),
    "course": NONE | SQUASH,
    "clip": OPENAI | _crop(1.0),
    "clip-hf": OPENAI | _crop(1.0),
    "siglip-hf": HALF | SQUASH | {"interpolation": "bicubic"},
    "dinov3": IMAGENET | SQUASH,
    "dinov3-hf": IMAGENET | SQUASH,
    "beit-hf": HALF | SQUASH,
    "aimv2-hf": OPENAI | _crop(1.0),
}

RESNET_DEFAULTS: dict[str, dict[str, Any]] = {  # by dialect, for ResNets (Big Transfer)
    "native": HALF | SQUASH,
    "huggingface": HALF | _crop(1.0),
    "timm": HALF | _crop(0.875, "bilinear"),
    "google": HALF | SQUASH,
}


def preprocessing(*names: str) -> Known | None:
    """Return the first row of KNOWN that matches one of the names (a hub id, a path, a file name), or None."""
    starts = dict.fromkeys(start for name in names for start in (name, Path(name).name))
    return next((row for row in KNOWN for start in starts if re.match(row.pattern, start)), None)
