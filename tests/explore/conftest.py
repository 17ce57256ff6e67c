"""A tiny model with three classes, its page in a folder, and a plain file server for it."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit import ViT, ViTConfig
from vitkit.jobs.explore import Built, build
from vitkit.model.config import InputSpec

NAMES = ("ant", "<b>bee</b>", "cat_{1}")  # a page that does not escape names shows it


def tiny(**changes: object) -> ViT:
    """Depth 2, width 32, 32 px, three classes whose probabilities differ; the same weights every time."""
    torch.manual_seed(7)
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
        "num_classes": 3,
        "layer_norm_eps": 1e-6,
    } | changes
    spec = InputSpec(
        size=(32, 32),
        resize="crop",
        crop=0.9,
        interpolation="bicubic",
        class_names=NAMES if config["num_classes"] else (),
    )
    model = ViT(ViTConfig(**config), spec)  # type: ignore[arg-type]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    return model.eval()


def noise(seed: int, width: int = 60, height: int = 48) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photos")
    for i in range(4):
        noise(i, *((60, 48), (40, 70), (33, 33), (90, 50))[i]).save(folder / f"photo {i}.png")
    return sorted(folder.iterdir())


@pytest.fixture(scope="session")
def given() -> ViT:
    return tiny().train()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, photos: list[Path], given: ViT) -> Built:
    return build(given, tmp_path_factory.mktemp("page"), photos[:2], name="tiny")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Python's own file server, which prints nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="session")
def url(built: Built) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=built.folder)) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
