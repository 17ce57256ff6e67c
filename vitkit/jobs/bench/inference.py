"""Pixels to logits: our engines, the peers' models and the machine's limit. Random weights: values change no speed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.jobs.bench.limit import LIMIT, products
from vitkit.jobs.bench.options import Options
from vitkit.jobs.bench.table import Benchmark
from vitkit.jobs.bench.turns import Contenders, Run
from vitkit.jobs.peers import PEERS
from vitkit.model.vit import ViT
from vitkit.speed.engines import ENGINES, chosen
from vitkit.speed.exported import export, open_exported

OURS = {
    "cpu": ("torch", "cpu-fused", "onnx", "openvino", "openvino-int8"),  # what is measured when nobody says
    "cuda": ("torch", "compile", "cuda-fused", "fp8"),
}
BATCHES = {"cpu": (1, 8), "cuda": (1, 256)}


def measure(options: Options) -> Iterator[Benchmark]:
    """A table for each batch size.

    Args:
        options: of what, how, and beside whom.
    """
    for batch in options.batches(BATCHES[options.place.type]):
        yield measure_batch(options, batch)


def measure_batch(options: Options, batch: int) -> Benchmark:
    """The table of one batch size.

    Args:
        options: of what, how, and beside whom.
        batch: images.
    """
    c, device, dtype = options.config, options.place, options.type
    ours = OURS[device.type] if options.engine is None else options.engine
    found = Contenders(device)
    model = ViT(c).eval().to(device, dtype)

    def on_batch(forward: Callable[[Tensor], Any]) -> Run:
        x = torch.randn(batch, c.num_channels, *c.image_hw, device=device, dtype=dtype)  # its own: some mark it

        @torch.inference_mode()
        def run() -> Any:
            return forward(x)

        return run

    for name in dict.fromkeys(chosen(name, model) for name in ours):
        found.add(
            "ours",
            name,
            lambda name=name: on_batch(  # type: ignore[misc]
                int8(model, 0) if name == "openvino-int8" else ENGINES[name].build(model)
            ),
        )
    for r in options.merge or ():
        found.add("ours", f"openvino-int8, merge {r}", lambda r=r: on_batch(int8(model, r)))  # type: ignore[misc]
    graph = device.type == "cuda" and batch == 1  # a single image is slow to launch: the peers' best is a graph
    for name in PEERS if options.peer is None else options.peer:

        def eager(name: str = name) -> Run:
            return on_batch(PEERS[name](c).eval().to(device, dtype))

        def compiled(name: str = name) -> Run:
            theirs = PEERS[name](c).eval().to(device, dtype)
            return on_batch(torch.compile(theirs, dynamic=False, mode="reduce-overhead" if graph else "default"))

        found.add("peer", name, eager)
        if options.compiling and name in found.runs:
            found.add("peer", f"{name}, compiled" + ", CUDA graph" * graph, compiled)
    found.add("limit", LIMIT, lambda: products(c, batch, device, dtype))
    return found.table(
        f"{options.model}, batch {batch}, {device.type}, {options.precision}", batch, options.rounds, options.seconds
    )


def int8(model: ViT, merge: int) -> Callable[[Tensor], Tensor]:
    """OpenVINO int8, calibrated on random pixels: as fast as one that was calibrated well."""
    spec = model.input_spec
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pixels = [torch.randn(4, len(spec.mean), *spec.size)]
        export(model, "openvino-int8", path := Path(folder) / "model.xml", merge=merge, pixels=pixels)
        return open_exported(path)
