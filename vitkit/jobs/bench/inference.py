"""Pixels to logits: our engines, the peers' models and the matrix products alone, all with random weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.jobs.bench.limit import LIMIT, graphed, products
from vitkit.jobs.bench.options import Options
from vitkit.jobs.bench.table import Benchmark
from vitkit.jobs.bench.turns import Contenders, Run
from vitkit.jobs.peers import PEERS, cudnn_attention, randomize
from vitkit.model.vit import ViT
from vitkit.speed.engines import ENGINES, chosen
from vitkit.speed.exported import export, open_exported

OURS = {  # the engines to measure by default
    "cpu": ("torch", "cpu-fused", "onnx", "openvino", "openvino-int8"),
    "cuda": ("torch", "compile", "cuda-fused", "fp8"),
}
BATCHES = {"cpu": (1, 8), "cuda": (1, 256)}
# Two compilations of the same code share their result unless an option differs; this one changes nothing else.
APART = {"triton.unique_kernel_names": False}


def measure(options: Options) -> Iterator[Benchmark]:
    """Yield one table per batch size."""
    for batch in options.batches(BATCHES[options.torch_device.type]):
        yield measure_batch(options, batch)


def measure_batch(options: Options, batch: int) -> Benchmark:
    """Measure one batch size."""
    c, device, dtype = options.config, options.torch_device, options.torch_dtype
    cuda = device.type == "cuda"
    found = Contenders(options)
    model = randomize(ViT(c)).eval().to(device, dtype)

    def on_batch(forward: Callable[[Tensor], Any], graph: bool = False) -> Run:
        x = torch.randn(
            batch, c.num_channels, *c.image_hw, device=device, dtype=dtype
        )  # one each: some engines mark it

        @torch.inference_mode()
        def run() -> Any:
            return forward(x)

        if graph:
            run()  # compiled before it is captured
            return graphed(run)
        return run

    built: dict[str, Callable[[Tensor], Any]] = {}

    def engine(name: str) -> Run:
        built[name] = int8(model, 0) if name == "openvino-int8" else ENGINES[name].build(model)
        return on_batch(built[name])

    def eager(name: str) -> Run:
        return on_batch(randomize(PEERS[name](c)).eval().to(device, dtype))

    def compiled(name: str, graph: bool, **how: Any) -> Run:
        theirs = randomize(PEERS[name](c)).eval().to(device, dtype)
        return on_batch(torch.compile(theirs, dynamic=False, **how), graph)

    for name in dict.fromkeys(chosen(name, model) for name in options.engine or OURS[device.type]):
        if found.add("ours", name, partial(engine, name)):
            found.notes += [f"{name}: {said}" for said in getattr(built[name], "remarks", {}).values() if said]
    for r in options.merge or ():
        found.add("ours", f"openvino-int8, merge {r}", lambda r=r: on_batch(int8(model, r)))  # type: ignore[misc]
    single = cuda and batch == 1  # launching kernels takes most of the time, so compiled models run as CUDA graphs
    for name in options.peers:
        if not found.add("peer", name, partial(eager, name)) or not options.compiling:
            continue
        found.add("peer", f"{name}, compiled" + ", CUDA graph" * single, partial(compiled, name, single))
        if cuda:
            with cudnn_attention():
                best = partial(compiled, name, True, options=APART)
                found.add("peer", f"{name}, compiled, cuDNN attention, CUDA graph", best)
    found.add("limit", LIMIT, lambda: products(c, batch, device, dtype))
    return found.table(f"{options.model}, batch {batch}, {options.words()}", batch)


def int8(model: ViT, merge: int) -> Callable[[Tensor], Tensor]:
    """Return OpenVINO int8, calibrated on random pixels: as fast as one calibrated on photos."""
    spec = model.input_spec
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pixels = [torch.randn(4, len(spec.mean), *spec.size)]
        export(model, "openvino-int8", path := Path(folder) / "model.xml", merge=merge, pixels=pixels)
        return open_exported(path)
