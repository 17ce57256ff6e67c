"""A tiny model, a few photos with a broken one among them, and an engine that needs no Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.data.images import class_folder
from tests.server.conftest import tiny
from vitkit import save
from vitkit.cluster.plan import Shard
from vitkit.cluster.results import Entry
from vitkit.cluster.work import Computer, Decoder, Settings
from vitkit.data.base import Source
from vitkit.model.vit import ViT

NAMES = ("ant", "bee", "cat", "dog", "elk")


def model(**changes: Any) -> ViT:
    found = tiny(**changes)
    found.input_spec = replace(found.input_spec, class_names=NAMES)
    return found


def place(root: Path) -> Path:
    """Write tiny.safetensors and photos/<class>/*.jpg, one of them broken, below a folder."""
    save(model(), root / "tiny.safetensors")
    class_folder(root / "photos", {"ant": 11, "bee": 9, "cat": 10})
    (root / "photos/bee/003.jpg").write_bytes(b"not an image")
    return root


def inline(
    settings: Settings,
    model: ViT,
    sources: Mapping[str, Source],
    shards: Sequence[Shard],
    *,
    decoders: int | None = None,
    apart: bool | None = None,
) -> Iterator[Entry]:
    """`cluster.on_ray.run` in this process."""
    decode, compute = Decoder(sources, model.input_spec), Computer(settings, model, sources)
    for shard in shards:
        yield compute(shard, decode(shard))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run jobs in this process instead of on a cluster."""
    from vitkit.cluster import on_ray

    monkeypatch.setattr(on_ray, "run", inline)
    monkeypatch.setattr(on_ray, "gpus", lambda: 0)
