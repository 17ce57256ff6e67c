"""The plan for many GPUs: its tables, and how far it is from what can be measured.

    python -m benchmarks.scale                       # the tables of docs/scale.md
    python -m benchmarks.scale check [--processes 2] # steps of 1 and of several CPU processes (gloo), next to the plan
    python -m benchmarks.scale gpu                   # steps of large models on one GPU, next to the plan

`check` measures one process with the batch and with half of it, and the link between several processes: the plan's
figures. Then it measures the steps of several processes, which the plan has to predict. On a busy machine, `--busy`
measures processor time instead.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import timing as _timing  # noqa: F401  # isort: skip  (sets OMP_WAIT_POLICY before torch is imported)

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from vitkit.model.config import ViTConfig, variant
from vitkit.model.count import parameters
from vitkit.model.vit import ViT
from vitkit.training.plan import FIGURES, Job, Machine, images_per_second, plan
from vitkit.training.shard import Sharded

JFT = 303_000_000  # images of JFT-300M
JOBS: dict[str, tuple[Job, tuple[int, ...]]] = {
    "ViT-B/16, 7 epochs": (
        Job(config=variant("vit-b/16", num_classes=18_291), batch=4096, steps=7 * JFT // 4096, images=JFT, micro=512),
        (1, 8, 32, 128),
    ),
    "ViT-H/14, 14 epochs": (
        Job(
            config=variant("vit-h/14", num_classes=18_291),
            batch=4096,
            steps=14 * JFT // 4096,
            images=JFT,
            micro=64,
            checkpointing=True,
        ),
        (8, 32, 128),
    ),
    "ViT-G/14, 14 epochs, --shard": (
        Job(
            config=variant("vit-G/14", num_classes=18_291),
            batch=4096,
            steps=14 * JFT // 4096,
            images=JFT,
            micro=64,
            checkpointing=True,
            shard=True,
        ),
        (8, 32, 128, 512),
    ),
}


def table() -> str:
    """The table of docs/scale.md."""
    lines = [
        "| | GPUs | images/s | days | GPU days | waiting | memory each | cores | read | sent per step |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (job, counts) in JOBS.items():
        for gpus in counts:
            p = plan(job, gpus)
            lines.append(
                f"| {name} | {gpus} | {p['images_per_second']:,.0f} | {p['hours'] / 24:,.1f} "
                f"| {p['gpu_hours'] / 24:,.0f} | {p['waiting']:.0%} | {p['memory']['all'] / 1e9:.0f} GB "
                f"| {p['cores']:,} | {p['read_per_second'] / 1e9:.2f} GB/s | {p['sent_per_step'] / 1e9:.1f} GB |"
            )
    return "\n".join(lines)


def figures() -> str:
    """The table of measured figures in docs/scale.md."""
    rows = [f"| {f.what} | {f.value:,g} {f.unit} | {f.date} |" for f in FIGURES.values()]
    return "\n".join(["| measured | value | date |", "|---|---|---|", *rows])


def median(step: Callable[[], Any], rounds: int, clock: Callable[[], float] = time.perf_counter) -> float:
    step()
    times = []
    for _ in range(rounds):
        began = clock()
        step()
        times.append(clock() - began)
    return statistics.median(times)


def worker(rank: int, ranks: int, port: int, given: dict[str, Any], results: Any) -> None:
    """Measure a step of `each` images in each process, and an all-reduce of all gradients."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    config = variant(given["model"], image_size=given["size"], num_classes=100)
    model = ViT(config)
    forward: nn.Module = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(given["batch"] // ranks, 3, given["size"], given["size"])

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(x).logsumexp(1).mean().backward()
        optimizer.step()

    clock = time.process_time if given["busy"] else time.perf_counter
    seconds = median(step, given["rounds"], clock)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    reduce = median(lambda: dist.all_reduce(flat), given["rounds"], clock)
    if rank == 0:
        results.put((seconds, reduce))
    dist.destroy_process_group()


def measure(ranks: int, given: dict[str, Any]) -> tuple[float, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("fork").SimpleQueue()
    mp.start_processes(worker, (ranks, port, given, results), nprocs=ranks, start_method="fork")
    return results.get()


def check(given: dict[str, Any]) -> None:
    config = variant(given["model"], image_size=given["size"], num_classes=100)
    job = Job(config=config, batch=given["batch"], steps=1, images=1)
    alone, half = (measure(1, {**given, "batch": given["batch"] // part})[0] for part in (1, 2))
    speed = given["batch"] / 2 / (alone - half)
    fixed = alone - given["batch"] / speed
    print(f"{given['model']}, {given['size']} px, batch {given['batch']}, load {os.getloadavg()[0]:.1f}")
    print(f"1 process: {alone:.3f} s per step, {half:.3f} with half the batch")
    for ranks in given["processes"]:
        seconds, reduce = measure(ranks, given)
        link = 8 * parameters(config) * (ranks - 1) / ranks / reduce
        # CPU processes communicate with the cores that compute, so nothing is hidden.
        machine = Machine(images_per_second=speed, fixed=fixed, link=link, overlap=0.0)
        expected = plan(job, ranks, machine)["seconds_per_step"]
        print(
            f"{ranks} processes: {seconds:.3f} s per step, planned {expected:.3f} ({expected / seconds - 1:+.0%}); "
            f"link {link / 1e9:.2f} GB/s",
            flush=True,
        )


def gpu(given: dict[str, Any]) -> None:
    """Steps of large models on one GPU: plain PyTorch, bf16, activation checkpointing, without and with FSDP2."""
    for name in ("vit-b/16", "vit-l/16", "vit-h/14", "vit-g/14", "vit-G/14"):
        config = variant(name, num_classes=1000)
        job = Job(config=config, batch=given["images"], steps=1, images=1, checkpointing=True)
        planned, expected = images_per_second(job), plan(job, 1)["memory"]["all"] / 1e9
        (rate, held), (sharded, _) = (large_steps(config, given, shard) for shard in (False, True))
        print(
            f"{name}: {rate:,.0f} images/s, planned {planned:,.0f} ({planned / rate - 1:+.0%}); {held:.1f} GB, planned "
            f"{expected:.1f}; as a group of one with FSDP2 {sharded:,.0f} images/s",
            flush=True,
        )


def large_steps(config: ViTConfig, given: dict[str, Any], shard: bool) -> tuple[float, float]:
    """Return images/s of training steps, and the largest memory used in GB."""
    gc.collect()  # the model before this one
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = ViT(config).train()
    model.gradient_checkpointing = True
    if shard:
        divide(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(given["images"], 3, 224, 224, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).float().logsumexp(1).mean()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()

    torch.cuda.reset_peak_memory_stats()
    rate, held = given["images"] / median(step, given["rounds"]), torch.cuda.max_memory_allocated() / 1e9
    return rate, held


def divide(model: ViT) -> None:
    """Shard a model as --shard does, in a group of this one process, which gathers and frees what it holds itself."""
    if not dist.is_initialized():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    runtime = Sharded("cuda", "bf16")
    runtime.distribute(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("tables", "check", "gpu"), default="tables")
    parser.add_argument("--busy", action="store_true", help="processor time, for a machine that others use too")
    parser.add_argument("--model", default="vit-s/16")
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--processes", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=7)
    given = vars(parser.parse_args())
    if given["what"] == "tables":
        print(f"{figures()}\n\n{table()}")
    else:
        {"check": check, "gpu": gpu}[given["what"]](given)


if __name__ == "__main__":
    main()
