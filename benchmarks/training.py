"""A training step, ours against the peers', taking turns: model, loss, backward, clip to 1, fused AdamW.

    python -m benchmarks.training --model vit-ti/16 --batch 16
    python -m benchmarks.training --device cuda --model vit-b/16 --batch 256 --precision bf16 --compile --best --check
    python -m benchmarks.training --memory            # resident memory over 1,000 steps of our whole loop

Needs torch, numpy and the peers (timm, transformers, torchvision: those that can be imported). Every contender has the
same batch, the same number of classes, the same optimiser and the same precision; compiled ones are compiled alike.
On CUDA, `--best` runs every peer a second time with cuDNN's attention and CUDA graphs, and `--check` first holds our
gradients to those of the plain model in fp32. `vitkit bench --what training` measures the same step, eager and compiled
in one run.
"""

from __future__ import annotations

from benchmarks import timing  # isort: skip  (sets OMP_WAIT_POLICY before torch is imported)

import argparse
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vitkit.jobs.bench.training import adamw, step_of
from vitkit.jobs.peers import PEERS
from vitkit.model.config import ViTConfig, variant
from vitkit.model.vit import ViT
from vitkit.speed.training import TrainingForward

K = 1000


def ours(c: ViTConfig) -> nn.Module:
    return TrainingForward(ViT(c), graph=True)  # as our loop runs it


def ours_fp8(c: ViTConfig) -> nn.Module:
    return TrainingForward(ViT(c), graph=True, fp8=True)


MODELS: dict[str, Callable[[ViTConfig], nn.Module]] = {"vitkit": ours, "vitkit-fp8": ours_fp8, **PEERS}
BEST = ", cuDNN attention, CUDA graphs"


@contextmanager
def cudnn_attention() -> Iterator[None]:
    """What is compiled in here has cuDNN's attention, and keeps it."""
    others = (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_math_sdp,
    )
    for enable in others:
        enable(False)
    try:
        yield
    finally:
        for enable in others:
            enable(True)


def step(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, precision: str, compiled: bool, mode: str | None = None
) -> Callable[[], None]:
    """`vitkit bench`'s step, that waits for the device."""
    model.to(x.device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    run = step_of(model, adamw(model), x, y, dtype, compiled, mode)

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
    contenders: dict[str, Callable[[], None]] = {}

    def add(label: str, build: Callable[[], Callable[[], None]]) -> None:
        try:
            run = build()
            run()
            contenders[label] = run
        except Exception as error:
            print(f"{label} is left out: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)

    cuda = args.device.startswith("cuda")
    for name in args.only.split(",") if args.only else MODELS:
        if name == "vitkit-fp8" and not (cuda and args.precision == "bf16"):
            continue
        add(name, lambda name=name: step(MODELS[name](c), x, y, args.precision, args.compile))
        if args.best and name in PEERS:
            with cudnn_attention():
                add(name + BEST, lambda name=name: step(MODELS[name](c), x, y, args.precision, True, "reduce-overhead"))
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(
        f"{args.model}, batch {args.batch}, {c.image_hw[0]} px, {args.precision}, "
        f"{'compiled' if args.compile else 'eager'}, {args.device}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, load {load:.1f}"
    )
    seconds = timing.alternate(contenders, rounds=args.rounds, warmup=args.warmup)
    print(timing.table(seconds, "vitkit", args.batch, "images/s"))
    if cuda:
        print(f"most memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB (all contenders together)")


def check(device: str) -> None:
    """How far gradients are from those of the plain model in fp32, all parameters as one vector."""
    print("| model | batch | plain, autocast | fused, from a graph | fused, fp8 |\n|---|---|---|---|---|")
    for name, batch, changes in (
        ("vit-ti/16", 5, {}),
        ("vit-s/32", 3, {"image_size": (160, 256)}),
        ("vit-ti/16", 4, {"pool": "mean"}),
        ("vit-b/16", 8, {}),
    ):
        torch.manual_seed(0)
        model = ViT(variant(name, num_classes=K, **changes)).to(device).train()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.02)  # zeros would hide what is not computed
        x, y = torch.randn(batch, 3, *model.config.image_hw, device=device), torch.arange(batch, device=device)
        found = []
        for forward, enabled in (
            (model, False),
            (model, True),
            (TrainingForward(model, graph=True), True),
            (TrainingForward(model, graph=True, fp8=True), True),
        ):
            for _ in range(2):  # the second from what the first has recorded
                model.zero_grad(set_to_none=True)
                with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
                    logits = forward(x)
                nn.functional.cross_entropy(logits.float(), y).backward()
            found.append(torch.cat([p.grad.float().flatten() for p in model.parameters()]))
        off = [((mine - found[0]).norm() / found[0].norm()).item() for mine in found[1:]]
        print(f"| {name} {changes or ''} | {batch} | " + " | ".join(f"{value:.1e}" for value in off) + " |", flush=True)
        assert off[1] < 1.5 * off[0] + 1e-3, "gradients of the fused parts are off"
        assert off[2] < 0.25, "gradients of fp8 are off"


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
    parser.add_argument("--best", action="store_true", help="peers with cuDNN's attention and CUDA graphs too")
    parser.add_argument("--check", action="store_true", help="hold our gradients to the plain model's first")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--steps", type=int, default=1000, help="with --memory")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.memory:
        memory(args.steps)
    else:
        if args.check:
            check(args.device)
        compare(args)


if __name__ == "__main__":
    main()
