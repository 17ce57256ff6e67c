"""How fast a model runs here: our engines and the peers' models in one process, taking turns.

The machines are noisy, so two things are compared only when they took turns: a ratio is the median over the rounds,
with the smallest and the largest beside it. The limit is measured in the same rounds: the matrix products of the
model's dense layers and nothing else. Weights are random; their values do not change the speed.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError, MissingDependency, OutputError, VitkitError, pick
from vitkit.jobs.peers import PEERS
from vitkit.model.config import ViTConfig, variant
from vitkit.model.vit import ViT
from vitkit.speed.engines import ENGINES
from vitkit.speed.exported import export, open_exported

log = logging.getLogger("vitkit")
Run = Callable[[Tensor], Any]
LIMIT = "matrix products alone"
OURS = {"cpu": ("torch", "cpu-fused", "onnx", "openvino", "openvino-int8"),      # what is measured when nobody says
        "cuda": ("torch", "compile", "cuda-fused", "fp8")}


@dataclass(frozen=True)
class Row:
    """One contender.

    Args:
        name: what it is.
        kind: `ours`, `peer` or `limit`.
        rate: images a second, the median of the rounds.
        milliseconds: of one batch.
        ratio: how many times the best peer's speed: median, smallest, largest; None without peers.
    """

    name: str
    kind: str
    rate: float
    milliseconds: float
    ratio: tuple[float, float, float] | None


@dataclass(frozen=True)
class Benchmark:
    """One table.

    Args:
        title: model, batch, device and precision.
        rows: the contenders, ours first.
        best_peer: its name; empty without peers.
        notes: contenders that did not run, and why.
        machine: where.
    """

    title: str
    rows: tuple[Row, ...]
    best_peer: str
    notes: tuple[str, ...]
    machine: str

    def markdown(self) -> str:
        """The table as docs/log.md holds it."""
        against = f"against {self.best_peer}" if self.best_peer else "against the best peer"
        lines = [f"| {self.title} | images/s | ms a batch | {against} (smallest to largest) |", "|---|---|---|---|"]
        for row in self.rows:
            ratio = "" if row.ratio is None else f"{row.ratio[0]:.2f}x ({row.ratio[1]:.2f} to {row.ratio[2]:.2f})"
            name = {"ours": f"**vitkit {row.name}**", "peer": row.name, "limit": f"limit: {row.name}"}[row.kind]
            lines.append(f"| {name} | {row.rate:,.1f} | {row.milliseconds:,.1f} | {ratio} |")
        return "\n".join([*lines, "", f"{self.machine}.", *(f"Not measured: {note}" for note in self.notes)])


@dataclass
class Contenders:
    """What takes part, and what does not.

    Args:
        ours: {name: run}.
        peers: {name: run}.
        notes: what could not be built, a sentence each.
    """

    ours: dict[str, Run] = field(default_factory=dict)
    peers: dict[str, Run] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def gather(model: ViT, engines: Sequence[str], peers: Sequence[str], merge: Sequence[int], compiled: bool,
           dtype: torch.dtype) -> Contenders:
    """Build every contender; one that cannot be built is named.

    Args:
        model: on its device, in its type.
        engines: rows of ENGINES.
        peers: rows of PEERS.
        merge: numbers of tokens to merge; each adds an int8 contender.
        compiled: whether peers run compiled by torch too.
        dtype: of the peers.
    """
    found, device = Contenders(), next(model.parameters()).device

    def attempt(into: dict[str, Run], name: str, build: Callable[[], Run]) -> None:
        try:
            into[name] = build()
        except (VitkitError, MissingDependency, ImportError) as error:
            found.notes.append(f"{name}: {error}")

    for name in engines:
        row = pick(ENGINES, name, "engine")
        attempt(found.ours, name, lambda row=row, name=name:  # type: ignore[misc]
                int8(model, 0) if name == "openvino-int8" else row.build(model))
    for r in merge:
        attempt(found.ours, f"openvino-int8, merge {r}", lambda r=r: int8(model, r))  # type: ignore[misc]
    for name in peers:
        def ready(name: str = name) -> nn.Module:
            return pick(PEERS, name, "peer")(model.config).eval().to(device, dtype)

        attempt(found.peers, name, ready)
        if compiled and name in found.peers:
            attempt(found.peers, f"{name}, compiled", lambda ready=ready: torch.compile(ready()))  # type: ignore[misc]
    return found


def int8(model: ViT, merge: int) -> Run:
    """OpenVINO int8, calibrated on random pixels: as fast as one that was calibrated well."""
    spec = model.input_spec
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pixels = [torch.randn(4, len(spec.mean), *spec.size)]
        export(model, "openvino-int8", path := Path(folder) / "model.xml", merge=merge, pixels=pixels)
        return open_exported(path)


def limit(c: ViTConfig, batch: int, device: torch.device, dtype: torch.dtype) -> Run:
    """The matrix products of all dense layers for one batch, and nothing else.

    Args:
        c: the architecture.
        batch: images.
        device: where.
        dtype: of the matrices.
    """
    M, D, H = batch * (c.num_prefix_tokens + c.num_patches), c.hidden_size, c.intermediate_size
    sides = [(D, 3 * D), (D, D), (D, H), (H, D)]
    x = {n: torch.randn(M, n, device=device, dtype=dtype) for n in {D, H}}
    W = [torch.randn(n, m, device=device, dtype=dtype) for n, m in sides]
    out = [torch.empty(M, m, device=device, dtype=dtype) for _, m in sides]

    def run(_: Tensor) -> None:
        for _layer in range(c.num_hidden_layers):
            for (n, _m), w, y in zip(sides, W, out, strict=True):
                torch.mm(x[n], w, out=y)

    return run


def alternate(runs: dict[str, Run], x: Tensor, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of one batch of each contender in each round, all of them taking one turn a round.

    Args:
        runs: the contenders.
        x: the batch.
        rounds: how many.
        seconds: that a turn takes at least, repeating the batch.
    """
    def turn(run: Run, times: int) -> float:
        if x.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            run(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / times

    times = {}
    with torch.inference_mode():
        for name, run in runs.items():
            turn(run, 2)                                            # compiling, choosing kernels
            times[name] = max(1, round(seconds / max(turn(run, 1), 1e-6)))
        found: dict[str, list[float]] = {name: [] for name in runs}
        order = list(runs)
        for n in range(rounds):
            for name in order[n % len(order):] + order[:n % len(order)]:
                found[name].append(turn(runs[name], times[name]))
    return found


def bench(name: str = "vit-b/16", *, batch: int = 8, device: str = "cpu", dtype: str | None = None,
          engines: Sequence[str] | None = None, peers: Sequence[str] | None = None, merge: Sequence[int] = (),
          compiled: bool | None = None, rounds: int = 7, seconds: float = 0.5) -> Benchmark:
    """Measure the inference of one model at one batch size.

    Args:
        name: a variant.
        batch: images at once; 1 measures latency.
        device: `cpu` or `cuda`.
        dtype: of plain models and peers; fp32 on the CPU, bf16 on CUDA, when not given.
        engines: rows of ENGINES; those of the device when not given.
        peers: rows of PEERS; all when not given.
        merge: numbers of tokens to merge; each adds an int8 contender (CPU).
        compiled: whether peers run compiled too; on CUDA when not given.
        rounds: turns of each contender.
        seconds: of one turn, at least.
    """
    where = torch.device(device)
    if where.type not in OURS or (where.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device must be cpu or cuda, and there; got {device!r}.")
    if batch < 1 or rounds < 1:
        raise ConfigError(f"batch and rounds must be at least 1; got {batch} and {rounds}.")
    kind = getattr(torch, dtype or ("bfloat16" if where.type == "cuda" else "float32"), None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ConfigError(f"dtype must be a floating-point type of torch, such as float32; got {dtype!r}.")
    c, load = variant(name), os.getloadavg()[0]         # before building: exporting is a load of our own
    model = ViT(c).eval().to(where, kind)
    found = gather(model, OURS[where.type] if engines is None else engines, list(PEERS) if peers is None else peers,
                   merge, compiled if compiled is not None else where.type == "cuda", kind)
    x = torch.randn(batch, c.num_channels, *c.image_hw, device=where, dtype=kind)
    runs = {**found.ours, **found.peers, LIMIT: limit(c, batch, where, kind)}
    gc.collect()
    took = alternate(runs, x, rounds, seconds)
    middle = {name: statistics.median(values) for name, values in took.items()}
    best = min(found.peers, key=lambda name: middle[name], default="")
    rows = [Row(name, "ours" if name in found.ours else "peer" if name in found.peers else "limit",
                batch / middle[name], 1e3 * middle[name], _ratio(took[best], values) if best else None)
            for name, values in took.items()]
    return Benchmark(f"{name}, batch {batch}, {where.type}, {str(kind).removeprefix('torch.')}", tuple(rows), best,
                     tuple(found.notes), machine(where, load))


def _ratio(theirs: Sequence[float], mine: Sequence[float]) -> tuple[float, float, float]:
    ratios = sorted(a / b for a, b in zip(theirs, mine, strict=True))
    return statistics.median(ratios), ratios[0], ratios[-1]


def machine(device: torch.device, load: float) -> str:
    """Where it was measured, in words."""
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else \
        f"{_processor()}, {torch.get_num_threads()} threads"
    return f"{what}, torch {torch.__version__}, load {load:.1f} before"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def append(path: Path, tables: Sequence[Benchmark]) -> None:
    """Add dated tables to the end of a log.

    Args:
        path: a Markdown file that is there.
        tables: what was measured.
    """
    if not path.is_file():
        raise OutputError(f"There is no log {str(path)!r} to add to; name a Markdown file that is there.")
    text = "\n\n".join(table.markdown() for table in tables)
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"\n## {datetime.now(UTC):%Y-%m-%d}: vitkit bench\n\n{text}\n")
