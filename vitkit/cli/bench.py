"""`vitkit bench`: how fast things are here, ours and the peers'."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vitkit.cli.options import ENGINES


def bench(
    model: Annotated[str, typer.Argument(help="A variant, such as vit-b/16.")] = "vit-b/16",
    what: Annotated[
        list[str] | None,
        typer.Option(
            "--what",
            help="inference, training (a step), loading (a file of "
            "weights) or data (photos to batches); may be given several times. "
            "inference when not given.",
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            "--batch-size",
            min=1,
            help="Images at once; may be given "
            "several times. 1 is latency; 1 and 8 (CUDA: 256) when not "
            "given, in training 8 (CUDA: 256).",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda; cpu when not given.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of plain models and peers: float32, bfloat16.")] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            help=f"One of ours: {ENGINES}; may be given several times. All that fit the device when not given.",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            help="timm, transformers, torchvision, vit-pytorch or "
            "none; may be given several times. All when not given.",
        ),
    ] = None,
    merge: Annotated[
        list[int] | None,
        typer.Option(
            "--merge", min=1, help="Also int8 with so many tokens merged in each block; may be given several times."
        ),
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compiled/--eager", help="Whether peers (and in training we) run compiled too; on CUDA when not given."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="For --what data: a folder of your photos; a few sample photos when not given."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of each contender.")] = 7,
    log: Annotated[
        Path | None, typer.Option("--log", help="Markdown file to add the tables to, such as docs/log.md.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure ours, the peers, and the machine's own limit, taking turns in one run."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve each other
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
            print(f"added to {log}")
