"""A training step, ours against the peers', taking turns: model, loss, backward, clip to 1, fused AdamW.

    python -m benchmarks.training --model vit-ti/16 --batch 16
    python -m benchmarks.training --device cuda --model vit-b/16 --batch 256 --precision bf16 --compile
    python -m benchmarks.training --memory            # resident memory over 1,000 steps of our whole loop

Needs torch, numpy and the peers (timm, transformers, torchvision: those that can be imported). Every contender has the
same batch, the same number of classes, the same optimiser and the same precision; compiled ones are compiled alike.
`vitkit bench --what training` measures the same step, eager and compiled in one run.
"""

from __future__ import annotations

from benchmarks import timing  # isort: skip  (sets OMP_WAIT_POLICY before torch is imported)

import argparse
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vitkit.jobs.bench.training import adamw, step_of
from vitkit.jobs.peers import PEERS
from vitkit.model.config import ViTConfig, variant
from vitkit.model.vit import ViT
from vitkit.speed.training import Lean

K = 1000


def ours(c: ViTConfig) -> nn.Module:
    return Lean(ViT(c), graph=True)         # as our loop runs it


MODELS: dict[str, Callable[[ViTConfig], nn.Module]] = {"vitkit": ours, **PEERS}


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, precision: str, compiled: bool) -> Callable[[], None]:
    """`vitkit bench`'s step, that waits for the device."""
    model.to(x.device)
    run = step_of(model, adamw(model), x, y, {"fp32": torch.float32, "bf16": torch.bfloat16}[precision], compiled)

    def waited() -> None:
        run()
        if x.device.type == "cuda":
            torch.cuda.synchronize()

    return waited


def compare(args: argparse.Namespace) -> None:
    c = variant(args.model, num_classes=K, **({"image_size": args.image_size} if args.image_size else {}))
    torch.manual_seed(0)
    x = torch.randn(args.batch, 3, *c.image_hw, device=args.device)
    y = torch.randint(0, K, (args.batch,), device=args.device)
    contenders = {}
    for name in args.only.split(",") if args.only else MODELS:
        try:
            contenders[name] = step(MODELS[name](c), x, y, args.precision, args.compile)
            contenders[name]()
        except Exception as error:
            contenders.pop(name, None)
            print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"{args.model}, batch {args.batch}, {c.image_hw[0]} px, {args.precision}, "
          f"{'compiled' if args.compile else 'eager'}, {args.device}, torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads, load {load:.1f}")
    seconds = timing.alternate(contenders, rounds=args.rounds, warmup=args.warmup)
    print(timing.table(seconds, "vitkit", args.batch, "images/s"))
    if args.device.startswith("cuda"):
        print(f"most memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB (all contenders together)")


def memory(steps: int) -> None:
    """Resident memory of our whole loop on the digits, at the start and after many steps."""
    from pathlib import Path

    from vitkit.jobs.train import train

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    seen: dict[int, float] = {}

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] % (steps // 10) == 0:
            seen[event["step"]] = resident()

    with tempfile.TemporaryDirectory() as folder:
        run, _ = train("digits", f"{folder}/r", recipe="digits", changes={"steps": steps}, watch=watch)
        waiting = [row["time"]["waiting"] for row in run.metrics() if row["event"] == "train"]
    print("resident memory, MiB: " + ", ".join(f"{size:.0f} at {step}" for step, size in seen.items()))
    print(f"share of the time that the device waited for data: {sum(waiting) / len(waiting):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit-ti/16")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--only", help="contenders, with commas between them")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--steps", type=int, default=1000, help="with --memory")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.memory:
        memory(args.steps)
    else:
        compare(args)


if __name__ == "__main__":
    main()
