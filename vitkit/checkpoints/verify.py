"""Verify a conversion: the original library reads its own file, and its outputs are compared with ours.

PEERS says which library reads which dialect. Libraries are imported when needed and may be missing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoints import external_configs
from vitkit.checkpoints.capabilities import PARTS
from vitkit.checkpoints.dialects import fill, skeleton
from vitkit.checkpoints.reading import Checkpoint, build, open_checkpoint
from vitkit.checkpoints.siglip import second
from vitkit.errors import CannotExpress
from vitkit.model.backbone import Backbone, Config
from vitkit.model.checks import pair
from vitkit.model.config import ViTConfig
from vitkit.model.parts.fit import unfit
from vitkit.model.parts.positions import RULES
from vitkit.model.resnet_config import STEM_DEPTHS, STEM_PIXELS, ResNetConfig

BAR = 5e-6  # relative to the largest logit: the difference between two orders of summation in float32
Peer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Comparison:
    """The comparison of one library with vitkit on one set of images.

    Args:
        library: the library whose outputs were compared with ours.
        images: `random` or `photos`.
        difference: largest difference, relative to the largest output.
        explanation: the property that causes the difference; empty if there is none.
    """

    library: str
    images: str
    difference: float
    explanation: str = ""

    @property
    def equal(self) -> bool:
        """Whether the two agree to within float32 rounding."""
        return self.difference <= BAR

    def __str__(self) -> str:
        verdict = "equal" if self.equal else self.explanation or "DIFFERENT, and no known property explains it"
        return (
            f"{self.library}, {self.images}: largest difference {self.difference:.1e} of the largest output: {verdict}"
        )


def _timm(checkpoint: Checkpoint) -> Any:
    timm, c = peer("timm"), checkpoint.config
    if isinstance(c, ResNetConfig):
        return _timm_resnet(checkpoint, c)
    if c.pre_logits:
        raise CannotExpress("timm has no pre-logits layer, so it cannot run all of this file.")
    if checkpoint.dialect.name == "timm" and (odd := unfit(c, PARTS["google"])):
        return _timm_by_name(checkpoint, c, odd)
    helpers = importlib.import_module("timm.models.vision_transformer")
    path, google, clip = (
        checkpoint.files.weights,
        checkpoint.dialect.name == "google",
        checkpoint.dialect.name == "clip",
    )
    raw = {} if google else checkpoint.raw()
    reg, stem = c.num_register_tokens, {}
    if c.stem != "none":
        hybrid = importlib.import_module("timm.models.vision_transformer_hybrid")
        backbone = hybrid._resnetv2(STEM_DEPTHS[c.stem], in_chans=c.num_channels)
        stem = {"embed_layer": partial(hybrid.HybridEmbed, backbone=backbone)}
    model = timm.models.VisionTransformer(
        img_size=c.image_hw,
        patch_size=c.patch_size // STEM_PIXELS.get(c.stem, 1),
        in_chans=c.num_channels,
        num_classes=c.num_classes,
        embed_dim=c.hidden_size,
        depth=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        mlp_ratio=c.intermediate_size / c.hidden_size,
        qkv_bias=c.qkv_bias,
        init_values=c.layer_scale,
        class_token=c.class_token,
        reg_tokens=reg,
        global_pool="token" if c.pool == "cls" else "avg",
        fc_norm=c.norm_after_pool,
        act_layer="gelu_tanh" if google else c.hidden_act if clip else None,
        **stem,
        **(
            {"pre_norm": True, "norm_layer": functools.partial(torch.nn.LayerNorm, eps=c.layer_norm_eps)}
            if clip
            else {}
        ),
        no_embed_class=(not google and not c.prefix_positions) or (checkpoint.dialect.name == "dinov2" and reg > 0),
    )
    if google:
        model.load_pretrained(str(path))
    else:
        state = helpers.checkpoint_filter_fn(raw, model)
        if clip:  # timm reads no layer scale here, and projects with a bias of zeros
            state = {re.sub(r"\.ls_(\d)\.", r".ls\1.", name): tensor for name, tensor in state.items()}
        model.load_state_dict(state, strict=True)
    return model.eval()


def _timm_by_name(checkpoint: Checkpoint, c: ViTConfig, odd: list[str]) -> Any:
    """Build timm's model of the architecture that config.json names, for parts that its plain class does not have."""
    name = str((checkpoint.files.config or {}).get("architecture", ""))
    if not name:
        raise CannotExpress(
            f"timm's name for a model with {', '.join(odd)} is not known, so timm cannot read this file. Put a "
            f'config.json with {{"architecture": "NAME"}} next to it.'
        )
    model = peer("timm").create_model(
        name, img_size=c.image_hw, in_chans=c.num_channels, num_classes=c.num_classes, depth=c.num_hidden_layers
    )
    model.load_state_dict(checkpoint.raw(), strict=True)
    return model.eval()


def _timm_resnet(checkpoint: Checkpoint, c: ResNetConfig) -> Any:
    resnetv2, layers = importlib.import_module("timm.models.resnetv2"), importlib.import_module("timm.layers")
    model = resnetv2.ResNetV2(
        layers=c.depths,
        channels=c.hidden_sizes,
        stem_chs=c.embedding_size,
        num_classes=c.num_classes,
        in_chans=c.num_channels,
        stem_type="fixed",
        conv_layer=partial(layers.StdConv2d, eps=1e-8),
    )
    if checkpoint.dialect.name == "google":
        model.load_pretrained(str(checkpoint.files.weights))
    else:
        model.load_state_dict(checkpoint.raw(), strict=True)
    return model.eval()


def _transformers(checkpoint: Checkpoint) -> Any:
    library, c, files = peer("transformers"), checkpoint.config, checkpoint.files
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    beside = files.config or external_configs.write_config(c, checkpoint.input_spec, checkpoint.dialect.name)
    if isinstance(c, ResNetConfig):
        return _transformers_resnet(library, checkpoint, beside)
    config = library.AutoConfig.for_model(**{k: v for k, v in beside.items() if k != "vitkit"})
    kind = (beside.get("architectures") or ["ViTForImageClassification" if c.num_classes else "ViTModel"])[0]
    pooler = {"add_pooling_layer": c.pre_logits} if kind in ("ViTModel", "DeiTModel", "IJepaModel") else {}
    model = (
        getattr(library, kind)
        .from_pretrained(None, config=config, state_dict=checkpoint.raw(), dtype=torch.float32, **pooler)
        .eval()
    )
    if isinstance(beside.get("vision_config"), Mapping) and "ForImageClassification" not in kind:
        model = model.vision_model if not c.num_classes else _Projected(model)
    resized = kind.startswith(("ViT", "DeiT", "CLIP", "SiglipV"))

    def run(x: Tensor) -> Any:
        if second(c):  # SigLIP 2 takes patches
            out = model(**patches(x, c.patch_size))
        else:
            other = resized and tuple(x.shape[-2:]) != pair(config.image_size)
            out = model(x, **{"interpolate_pos_encoding": True} if other else {})
        for name in ("logits", "image_embeds", "pooler_output"):
            if getattr(out, name, None) is not None:
                return getattr(out, name)
        tokens = out.last_hidden_state
        return tokens[:, c.num_prefix_tokens :].mean(1) if c.pool == "mean" else tokens[:, 0]

    return run


def _transformers_resnet(library: Any, checkpoint: Checkpoint, beside: Mapping[str, Any]) -> Any:
    config = library.AutoConfig.for_model(**{k: v for k, v in beside.items() if k != "vitkit"})
    kind = library.BitForImageClassification if checkpoint.config.num_classes else library.BitModel
    model = kind.from_pretrained(None, config=config, state_dict=checkpoint.raw(), dtype=torch.float32).eval()

    def run(x: Tensor) -> Any:
        out = model(x)
        return out.logits if checkpoint.config.num_classes else out.pooler_output.flatten(1)

    return run


class _Projected(torch.nn.Module):
    """The image half of a whole CLIP, with its projection."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.vision, self.projection = whole.vision_model, whole.visual_projection

    def forward(self, x: Tensor, **how: Any) -> Any:
        """Return what the vision model returns, with the projected features as its pooled ones."""
        out = self.vision(x, **how)
        out.pooler_output = self.projection(out.pooler_output)
        return out


def patches(x: Tensor, P: int) -> dict[str, Tensor]:
    """Return pixels [B, C, H, W] as the arguments of transformers' SigLIP 2: patches [B, N, P P C] and their grid."""
    B, C, H, W = x.shape
    grid = H // P, W // P
    cut = x.reshape(B, C, grid[0], P, grid[1], P).permute(0, 2, 4, 3, 5, 1).reshape(B, -1, P * P * C)
    whole = torch.ones(cut.shape[:2], dtype=torch.long)
    return {"pixel_values": cut, "pixel_attention_mask": whole, "spatial_shapes": torch.tensor([grid] * B)}


def _torchvision(checkpoint: Checkpoint) -> Any:
    library, c = peer("torchvision"), checkpoint.config
    assert isinstance(c, ViTConfig)  # torchvision has no dialect for ResNets here
    module = importlib.import_module("torchvision.models.vision_transformer")
    model = library.models.VisionTransformer(
        image_size=c.image_hw[0],
        patch_size=c.patch_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        hidden_dim=c.hidden_size,
        mlp_dim=c.intermediate_size,
        num_classes=c.num_classes,
        representation_size=c.hidden_size if c.pre_logits else None,
    )
    raw = checkpoint.raw()
    model.load_state_dict(module.interpolate_embeddings(c.image_hw[0], c.patch_size, raw))
    return model.eval()


PEERS: dict[str, tuple[str, Callable[[Checkpoint], Peer]]] = {  # dialect -> the library that reads it, and how
    "huggingface": ("transformers", _transformers),
    "timm": ("timm", _timm),
    "torchvision": ("torchvision", _torchvision),
    "google": ("timm", _timm),
    "dinov2": ("timm", _timm),
    "dinov2-hf": ("transformers", _transformers),
    "clip": ("timm", _timm),
    "clip-hf": ("transformers", _transformers),
    "siglip-hf": ("transformers", _transformers),
    "dinov3-hf": ("transformers", _transformers),
    "beit-hf": ("transformers", _transformers),
    "aimv2-hf": ("transformers", _transformers),
}
CANDIDATES: dict[str, tuple[Any, ...]] = {  # properties that may explain a difference
    "layer_norm_eps": (1e-6, 1e-12, 1e-5),
    "hidden_act": ("gelu", "gelu_tanh", "quick_gelu"),
    "position_resize": tuple(RULES),
    "standardisation": ("timm", "bit", "google"),
}


def peer(name: str) -> Any:
    """Import another library. If torchvision's compiled operators do not load, its Python models still work."""
    if importlib.util.find_spec("torchvision") is not None:  # the other libraries import it too
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            if "torchvision::" not in str(error):
                raise
            for module in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
                del sys.modules[module]
            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _KEPT.append(library)
    return importlib.import_module(name)


_KEPT: list[Any] = []  # definitions last as long as their library object


def noise(config: Config) -> Tensor:
    """Return two images of random pixels, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, config.num_channels, *config.image_hw, generator=generator)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference relative to the largest output."""
    return float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-30))


@torch.inference_mode()
def compare(
    source: str | Path, model: Backbone | None = None, photos: Tensor | None = None, **overrides: Any
) -> list[Comparison]:
    """Compare the outputs of a file in its own library with those in vitkit.

    Args:
        source: as for `load`.
        model: the model to compare the file with (default: what vitkit loads from it).
        photos: real pixels to compare on in addition to random ones, [n, C, H, W] between -1 and 1.
        overrides: as for `load`.

    Returns:
        One row for each set of images; empty if the dialect has no library to compare with.

    Raises:
        ImportError: the library is not installed.
        CannotExpress: the library cannot run such a model.
    """
    checkpoint = open_checkpoint(source, **overrides)
    if checkpoint.dialect.name not in PEERS:
        return []
    library, read = PEERS[checkpoint.dialect.name]
    theirs, ours = read(checkpoint), model or build(checkpoint, torch.float32)
    rows = []
    for name, x in {"random": noise(checkpoint.config), "photos": photos}.items():
        if x is None:
            continue
        outputs = theirs(x).float()
        found = difference(ours(x), outputs)
        why = _explain(source, overrides, ours, x, outputs) if found > BAR else ""
        rows.append(Comparison(library, name, found, why))
    return rows


def _explain(source: str | Path, overrides: dict[str, Any], model: Backbone, x: Tensor, outputs: Tensor) -> str:
    """Find the fewest properties that, changed in our model, make it equal to theirs; empty if there are none."""
    config, state = model.config, model.state_dict()
    for changes in _changes(config):
        table: dict[str, Tensor] = {}
        if "position_resize" in changes:  # matters only if positions were resized on loading
            if "positions.table" not in state:
                continue
            table = {"positions.table": open_checkpoint(source, **{**overrides, **changes}).state["positions.table"]}
            if torch.equal(table["positions.table"], state["positions.table"]):
                continue
        other = fill(skeleton(dataclasses.replace(config, **changes)).eval(), {**state, **table})
        if difference(other(x), outputs) <= BAR:
            return "explained by " + " and ".join(
                f"{name}: the library uses {value}, vitkit {getattr(config, name)}" for name, value in changes.items()
            )
    return ""


def _changes(config: Config) -> Iterator[dict[str, Any]]:
    known = [name for name in CANDIDATES if hasattr(config, name)]
    if isinstance(config, ViTConfig) and config.stem == "none":
        known.remove("standardisation")
    for count in range(1, len(known) + 1):
        for names in itertools.combinations(known, count):
            for values in itertools.product(*(CANDIDATES[name] for name in names)):
                if all(value != getattr(config, name) for name, value in zip(names, values, strict=True)):
                    yield dict(zip(names, values, strict=True))
