"""A tiny backbone and a small folder of coloured squares, shared by the tests of this room and of its commands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitkit import ViT, ViTConfig, save

CONFIG = ViTConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    image_size=32,
    patch_size=8,
    num_classes=4,
    hidden_dropout_prob=0.3,
)
COLOURS = {"blue": (40, 60, 200), "green": (40, 180, 60), "red": (210, 40, 40)}


def tiny(**changes) -> ViT:
    import dataclasses

    torch.manual_seed(1)
    model = ViT(dataclasses.replace(CONFIG, **changes)).eval()
    for parameter in model.parameters():  # far from the zeros of an untrained head and from constant features
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def saved(folder: Path, **changes) -> Path:
    """The tiny model in a native file."""
    save(tiny(**changes), folder / "tiny.safetensors")
    return folder / "tiny.safetensors"


def photos(root: Path, counts: dict[str, int], colours=COLOURS, seed: int = 0) -> Path:
    """Write `{split: images of each class}` of noisy squares; a split "" stands for none."""
    rng = np.random.default_rng(seed)
    for split, count in counts.items():
        for name, colour in colours.items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(np.array(colour) + rng.normal(0, 25, (36, 40, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root
