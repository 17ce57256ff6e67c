"""Inference on a CUDA device: our engines beside the peers at their defaults and at their best, taking turns.

    python -m benchmarks.cuda [--models vit-b/16 vit-l/16] [--batch 256] [--weights FILE --images FOLDER]

First every fused engine is held to the plain model in fp32 on fresh random inputs, at odd sizes and batches and from
Ti to H; then the device's own limit is measured, then images a second, then the latency of one image. With weights and
a folder of photos sorted by class index, fp8's answers are compared with the plain model's. Needs torch, numpy and the
peers that can be imported.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.training import cudnn_attention
from vitkit.jobs.bench.limit import LIMIT, graphed, products
from vitkit.jobs.peers import PEERS
from vitkit.model.config import ViTConfig, variant
from vitkit.model.create import create
from vitkit.model.vit import ViT
from vitkit.speed.engines import ENGINES

DEVICE = "cuda"
KERNELS = {
    "cuDNN": "cudnn.*(sdpa|flash)",
    "flash": "flash_fwd|pytorch_flash",
    "efficient": "fmha_cutlass",
    "ours": "^attention$",
}


def randomised(model: nn.Module) -> nn.Module:
    """No zeros: they hide what is not computed, and run faster than numbers do."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() < 2 or not p.abs().max():
                p.add_(torch.randn_like(p) * 0.02)
    return model.to(DEVICE).eval()


def milliseconds(run: Callable[[], object], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def check() -> None:
    print("| model | pixels | batch | plain bf16 | cuda-fused | fp8 |\n|---|---|---|---|---|---|")
    for name, size, batches in (
        ("vit-ti/16", 224, (1, 3, 64)),
        ("vit-s/32", (160, 256), (1, 5)),
        ("vit-b/16", 224, (1, 33)),
        ("vit-b/16", 384, (2,)),
        ("vit-l/16", 224, (3,)),
        ("vit-h/14", 224, (1, 40)),
    ):
        model = randomised(create(name, image_size=size))
        engines = {key: ENGINES[key].build(model) for key in ("cuda-fused", "fp8")}
        for batch in batches:
            x = torch.randn(batch, 3, *model.config.image_hw, device=DEVICE)
            with torch.no_grad():
                reference = model(x)
                with torch.autocast(DEVICE, torch.bfloat16):
                    found = {"plain": model(x).float()}
                found |= {key: engine(x).float() for key, engine in engines.items()}
            off = {key: ((value - reference).norm() / reference.norm()).item() for key, value in found.items()}
            for key in engines:
                assert off[key] <= ENGINES[key].tolerance, f"{key} is off by {off[key]:.3g} on {name}"
            print(f"| {name} | {size} | {batch} | " + " | ".join(f"{v:.1e}" for v in off.values()) + " |", flush=True)


def attention_kernel(run: Callable[[], object]) -> str:
    """What computes Eqs. 6 and 7, by the name of its kernel: settings are easily lost on the way there."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    found = [kind for kind, pattern in KERNELS.items() if any(re.search(pattern, name) for name in names)]
    return ", ".join(found) or "products and softmax"


def contenders(c: ViTConfig, name: str, x: Tensor, peers: list[str]) -> dict[str, Callable[[], object]]:
    model = randomised(create(name))
    assert isinstance(model, ViT)
    runs: dict[str, Callable[[], object]] = {}

    def add(label: str, forward: Callable[[Tensor], Tensor], graph: bool = False) -> None:
        def run() -> object:
            with torch.no_grad():
                return forward(x)

        try:
            run()
            runs[label] = graphed(run) if graph else run
        except Exception as error:
            print(f"{label} is left out: {type(error).__name__}: {str(error).splitlines()[0][:120]}")

    single = len(x) == 1
    for peer in peers:
        try:
            theirs = randomised(PEERS[peer](c)).bfloat16()
        except Exception as error:
            print(f"{peer} is left out: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            continue
        if not single:
            add(f"{peer}, eager", theirs)
        add(f"{peer}, compiled" + ", CUDA graph" * single, torch.compile(theirs), graph=single)
        with cudnn_attention():
            # An option that changes nothing but the compiler's name: else what is compiled above would be taken again.
            forward = torch.compile(theirs, options={"triton.unique_kernel_names": False})
            if not single:
                add(f"{peer}, compiled, cuDNN attention", forward)
            add(f"{peer}, compiled, cuDNN attention, CUDA graph", forward, graph=True)
    for engine in ("cuda-fused", "fp8"):
        add(f"vitkit, {engine}", ENGINES[engine].build(model))
    runs[LIMIT] = products(c, len(x), x.device, x.dtype)
    return runs


def compare(name: str, batch: int, rounds: int, peers: list[str]) -> None:
    c = variant(name)
    x = torch.randn(batch, 3, *c.image_hw, device=DEVICE, dtype=torch.bfloat16)
    torch.compiler.reset()
    runs = contenders(c, name, x, peers)
    kernels = {label: "" if label == LIMIT else attention_kernel(run) for label, run in runs.items()}
    times: dict[str, list[float]] = {label: [] for label in runs}
    for _ in range(rounds):
        for label, run in runs.items():
            times[label].append(milliseconds(run, 10 if batch > 1 else 100))
    base = next((label for label in times if label.startswith("timm, compiled")), next(iter(times)))
    print(
        f"\n{name}, batch {batch}, bf16, {c.image_hw[0]} px\n\n| | images/s | against {base} | attention |\n"
        "|---|---|---|---|"
    )
    for label, values in times.items():
        ratios = sorted(b / v for b, v in zip(times[base], values, strict=True))
        print(
            f"| {label} | {batch / statistics.median(values) * 1e3:,.0f} | {statistics.median(ratios):.2f}x "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}) | {kernels[label]} |",
            flush=True,
        )


def accuracy(weights: str, images: Path) -> None:
    from vitkit.checkpoints import load
    from vitkit.data.decode import decode
    from vitkit.data.preprocess import preprocess

    model = load(weights).to(DEVICE).eval()
    files = sorted(images.glob("*/*.jpg"))
    x = torch.stack([preprocess(decode(f.read_bytes(), f.name), model.input_spec) for f in files]).to(DEVICE)
    y = torch.tensor([int(f.parent.name) for f in files], device=DEVICE)
    with torch.no_grad():
        plain = model(x).argmax(1)
        print(f"\n{model.input_spec}\n\n| {len(files)} photos | top-1 | agrees with fp32 |\n|---|---|---|")
        print(f"| plain fp32 | {(plain == y).float().mean():.3f} | |")
        for name in ("cuda-fused", "fp8"):
            found = ENGINES[name].build(model)(x).argmax(1)
            print(f"| {name} | {(found == y).float().mean():.3f} | {(found == plain).float().mean():.3f} |")
        from vitkit.speed.fp8 import Fp8

        for full in (0, 2, 4, 6):
            found = Fp8(model, full=full)(x).argmax(1)
            print(
                f"| fp8, first {full} blocks in full | {(found == y).float().mean():.3f} "
                f"| {(found == plain).float().mean():.3f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["vit-b/16", "vit-l/16"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="*", default=list(PEERS))
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-latency", action="store_true")
    parser.add_argument("--weights")
    parser.add_argument("--images", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if not args.no_check:
        check()
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    print(f"\na large matrix product: {2 * 8192**3 / milliseconds(lambda: a @ a, 10) / 1e9:.0f} TFLOP/s")
    if args.weights:
        accuracy(args.weights, args.images)
    for name in args.models:
        compare(name, args.batch, args.rounds, args.peers)
    if not args.no_latency:
        compare(args.models[0], 1, args.rounds, args.peers)
    print(f"\n{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
