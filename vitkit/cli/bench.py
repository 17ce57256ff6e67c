"""`vitkit bench`: measure speed next to other libraries."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vitkit.cli.options import ENGINES


def bench(
    model: Annotated[str, typer.Argument(help="Variant, such as vit-b/16.")] = "vit-b/16",
    what: Annotated[
        list[str] | None,
        typer.Option(
            "--what",
            help="What to measure: inference, training (a step), loading (a file of weights) or data (photos to "
            "batches). Repeatable (default: inference).",
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            "--batch-size",
            min=1,
            help="Images per batch; 1 measures latency. Repeatable (default: 1 and 8, on CUDA 1 and 256; for training "
            "8, on CUDA 256).",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="Device: cpu, cuda or cuda:1 (default: cpu).")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="Precision of plain models and peers: float32 or bfloat16 (default: float32, on CUDA bfloat16).",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help=f"Engine: {ENGINES}. Repeatable (default: all that fit the device)."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            help="Library to compare with: timm, transformers, torchvision, vit-pytorch or none. Repeatable (default: "
            "all that are installed).",
        ),
    ] = None,
    merge: Annotated[
        list[int] | None,
        typer.Option(
            "--merge", min=1, help="Also measure int8 with N tokens merged per block. Repeatable (default: none)."
        ),
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compiled/--eager",
            help="Also measure with torch.compile; on CUDA also with cuDNN attention and CUDA graphs (default: only on "
            "CUDA).",
        ),
    ] = None,
    dropout: Annotated[
        float | None,
        typer.Option("--dropout", help="Dropout rate of the models, with --what training (default: 0)."),
    ] = None,
    drop_path: Annotated[
        float | None,
        typer.Option("--drop-path", help="Rate of stochastic depth, with --what training (default: 0)."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Folder of photos for --what data (default: a few sample photos)."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns per contender (default: 7).")] = 7,
    log: Annotated[
        Path | None, typer.Option("--log", help="Existing Markdown file to append the tables to (default: none).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array and nothing else.")] = False,
) -> None:
    """Measure speed next to timm, transformers, torchvision and vit-pytorch, and to the matrix products alone.

    All contenders take turns in one run. A contender that cannot run is named with the reason.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads would starve each other
    from vitkit.jobs import bench as job

    if log is not None:
        job.check_log(log)
    options = job.Options(
        model=model,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        engine=engine,
        peer=None if peer is None else [name for name in peer if name != "none"],
        merge=merge,
        compiled=compiled,
        dropout=dropout,
        drop_path=drop_path,
        data=data,
        rounds=rounds,
    )
    tables = []
    for table in job.bench(what or ["inference"], options):
        tables.append(table)
        if not as_json:
            print(table.markdown(), end="\n\n", flush=True)
    if as_json:
        print(json.dumps([asdict(table) for table in tables], indent=1))
    if log is not None:
        job.append(log, tables)
        if not as_json:
            print(f"appended to {log}")
