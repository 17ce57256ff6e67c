"""A tiny model with answers that differ, its service, and a client without a network."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

from vitkit import ViT, ViTConfig
from vitkit.model.config import InputSpec
from vitkit.server.app import create_app
from vitkit.server.service import Service
from vitkit.server.settings import Settings

NAMES = ("ant", "bee", "cat", "dog", "elk")


def tiny(**changes: object) -> ViT:
    """Depth 2, width 32, 32 px, five classes; the same weights every time."""
    torch.manual_seed(7)
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
        "num_classes": 5,
    } | changes
    model = ViT(ViTConfig(**config), InputSpec(size=(32, 32), class_names=NAMES if config["num_classes"] == 5 else ()))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    return model.eval()


def photo(seed: int = 0, size: tuple[int, int] = (48, 40), format: str = "PNG", mode: str = "RGB") -> bytes:
    """An encoded image of noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8).numpy()
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, format)
    return out.getvalue()


def files(*images: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    return [("files", (f"photo{i}.png", raw)) for i, raw in enumerate(images)]


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    made = Service(tiny(), source="tiny", sha256="0" * 64)
    made.warm()
    yield made
    made.close()


@pytest.fixture
def client(service: Service) -> TestClient:
    return TestClient(create_app(service))  # without its lifespan: the service outlives the test


@pytest.fixture
def client_with() -> Iterator[object]:
    """A client of a service with other settings."""
    made: list[Service] = []

    def make(model: ViT | None = None, **settings: object) -> TestClient:
        made.append(Service(model or tiny(), Settings(**settings)))  # type: ignore[arg-type]
        made[-1].warm()
        return TestClient(create_app(made[-1]))

    yield make
    for one in made:
        one.close()
