"""A checkpoint file to a model: ours on the same files that the peers read.

Each contender loads the file and then reads every weight once, so that a memory-mapped file does not count as loaded.
The files are temporary, lie in the page cache, and hold nothing that only vitkit reads.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from vitkit.checkpoints import containers, load, save, to_dialect
from vitkit.jobs.bench.options import Options
from vitkit.jobs.bench.table import Benchmark
from vitkit.jobs.bench.turns import Contenders, Run
from vitkit.jobs.peers import PEERS, library
from vitkit.model.config import NUMERICS, ViTConfig
from vitkit.model.vit import ViT

Load = Callable[[], nn.Module]


def ours(path: Path, c: ViTConfig) -> Load:
    """Load as vitkit does."""
    return lambda: load(path, num_attention_heads=c.num_attention_heads)


def by_transformers(path: Path, c: ViTConfig) -> Load:
    """Load as transformers does: `from_pretrained` of a folder."""
    hub = library("transformers")
    hub.utils.logging.disable_progress_bar()
    kind = hub.ViTForImageClassification
    return lambda: kind.from_pretrained(path)


def by_timm(path: Path, c: ViTConfig) -> Load:
    """Load as timm's `create_model(checkpoint_path=...)` does: build, then `load_checkpoint`."""
    fill = library("timm.models").load_checkpoint

    def run() -> nn.Module:
        model = PEERS["timm"](c)
        fill(model, str(path))
        return model

    return run


LOADERS: dict[str, tuple[str, Callable[[Path, ViTConfig], Load]]] = {  # peer -> (dialect of its files, its loader)
    "transformers": ("huggingface", by_transformers),
    "timm": ("timm", by_timm),
}


def write(c: ViTConfig, dialect: str, folder: Path) -> Path:
    """Write a file of random weights, without a sidecar.

    Args:
        c: the architecture, with the dialect's numerics.
        dialect: the naming of the tensors.
        folder: where to write.

    Returns:
        What to load: a folder for Hugging Face, otherwise a file with a name such as timm gives its own.
    """
    model = ViT(c)
    if dialect == "huggingface":
        save(model, folder / "hub", dialect)
        return folder / "hub"
    path = folder / f"vit_random_patch{c.patch_size}_{c.image_hw[0]}.augreg_in1k.safetensors"
    containers.write(to_dialect(model, dialect), path)
    return path


def reading(loading: Load) -> Run:
    """Return a function that loads a model and reads every weight."""

    @torch.no_grad()
    def run() -> nn.Module:
        model = loading()
        for p in model.parameters():
            p.sum()
        return model

    return run


def measure(options: Options) -> Iterator[Benchmark]:
    """Yield one table per peer, on that peer's files."""
    asked = [name for name in options.peers if name in LOADERS]
    for name in asked or LOADERS:
        dialect, theirs = LOADERS[name]
        c = dataclasses.replace(options.config, **NUMERICS[dialect])
        found = Contenders(options, torch.device("cpu"))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            path = write(c, dialect, Path(folder))
            found.add("ours", "load", lambda path=path, c=c: reading(ours(path, c)))  # type: ignore[misc]
            if name in asked:
                found.add("peer", name, lambda path=path, c=c, how=theirs: reading(how(path, c)))  # type: ignore[misc]
            for other in options.peer or ():
                if other not in LOADERS:
                    found.note(other, "has no loader of its own for a file of weights.")
            yield found.table(f"{options.model}, loading, {dialect} file", 1, unit="loads/s", run="load")
