"""`vitkit bench`: how fast models run here, ours and the peers'."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def bench(
    model: Annotated[str, typer.Argument(help="A variant, such as vit-b/16.")] = "vit-b/16",
    batch_size: Annotated[list[int] | None, typer.Option("--batch-size", min=1, help="Images at once; may be given "
                                                         "several times. 1 is latency; 1 and 8 (CUDA: 256) when not "
                                                         "given.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of plain models and peers: float32, bfloat16.")] = None,
    engine: Annotated[list[str] | None, typer.Option("--engine", help="One of ours; may be given several times. All "
                                                     "that fit the device when not given.")] = None,
    peer: Annotated[list[str] | None, typer.Option("--peer", help="timm, transformers, torchvision, vit-pytorch or "
                                                   "none; may be given several times. All when not given.")] = None,
    merge: Annotated[list[int] | None, typer.Option("--merge", min=1, help="Also int8 with so many tokens merged in "
                                                    "each block; may be given several times.")] = None,
    compiled: Annotated[bool | None, typer.Option("--compiled/--eager", help="Whether peers run compiled too; on CUDA "
                                                  "when not given.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of each contender.")] = 7,
    log: Annotated[Path | None, typer.Option("--log", help="Markdown file to add the tables to, such as "
                                                           "docs/log.md.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure inference: our engines, the peers, and the machine's own limit, taking turns in one run."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")     # before torch: spinning threads starve each other
    from vitkit.jobs import bench as job

    sizes = batch_size or [1, 256 if device.startswith("cuda") else 8]
    peers = [name for name in peer if name != "none"] if peer is not None else None
    tables = [job.bench(model, batch=size, device=device, dtype=dtype, engines=engine, peers=peers, merge=merge or (),
                        compiled=compiled, rounds=rounds) for size in sizes]
    if as_json:
        print(json.dumps([asdict(table) for table in tables], indent=1))
    else:
        print("\n\n".join(table.markdown() for table in tables))
    if log is not None:
        job.append(log, tables)
        if not as_json:
            print(f"\nadded to {log}")
