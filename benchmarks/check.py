"""The fused engines, the fused training step and our own kernels against plain torch in fp32, on a CUDA device.

    python -m benchmarks.check [--seconds 20] [--weights FILE --images FOLDER]

Random weights and inputs from Ti to H, at odd sizes and batch sizes. The kernels for Hopper also run in several streams
at once for a while, next to other work, and must repeat their results. With weights and photos in folders named by
class index, each engine's top-1 and its agreement with the plain model are printed too. Stops where a tolerance is
exceeded.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from vitkit.jobs.peers import randomize
from vitkit.model.config import variant
from vitkit.model.create import create
from vitkit.model.vit import ViT
from vitkit.speed import attention_gradient, gelu_products, hopper
from vitkit.speed.accuracy import compare
from vitkit.speed.engines import ENGINES, Forward
from vitkit.speed.kernels import attention_loop
from vitkit.speed.training import TrainingForward
from vitkit.training.adamw import OnePassAdamW

NAMES = ("cuda-fused", "fp8")
PRODUCTS = (  # M rows of tokens, K inputs, N outputs
    (25216, 1024, 4096),
    (50432, 768, 3072),
    (12608, 384, 1536),
    (16448, 1280, 5120),
    (4097, 192, 768),
    (4160, 64, 128),
)
HEADS = (  # images, tokens, heads
    (128, 197, 16),
    (7, 197, 3),
    (5, 196, 12),
    (5, 201, 12),
    (33, 145, 6),
    (3, 129, 2),
    (9, 208, 4),
)


def distance(found: Tensor, reference: Tensor) -> float:
    return ((found.float() - reference).norm() / reference.norm()).item()


def engines() -> None:
    print(f"| model | pixels | batch | plain bf16 | {' | '.join(NAMES)} |\n|---|---|---|---|---|---|")
    for name, size, batches in (
        ("vit-ti/16", 224, (1, 3, 64)),
        ("vit-s/32", (160, 256), (1, 5)),
        ("vit-b/16", 224, (1, 33)),
        ("vit-b/16", 384, (2,)),
        ("vit-l/16", 224, (3,)),
        ("vit-h/14", 224, (1, 40)),
    ):
        model = randomize(create(name, image_size=size)).cuda().eval()
        built = {key: ENGINES[key].build(model) for key in NAMES}
        for batch in batches:
            x = torch.randn(batch, 3, *model.config.image_hw, device="cuda")
            with torch.no_grad():
                reference = model(x)
                with torch.autocast("cuda", torch.bfloat16):
                    off = [distance(model(x), reference)]
                off += [distance(answers(built[key], x), reference) for key in NAMES]
            print(f"| {name} | {size} | {batch} | " + " | ".join(f"{value:.1e}" for value in off) + " |", flush=True)
            for key, value in zip(NAMES, off[1:], strict=True):
                assert value <= ENGINES[key].tolerance, f"{key} is off by {value:.3g} on {name}"


def answers(run: Forward, x: Tensor) -> Tensor:
    """Return what an engine answers kernel by kernel, once a graph has answered the same."""
    first = run(x).clone()
    run(torch.randn_like(x))  # captures a graph, whose next replay must not remember these pixels
    assert distance(run(x), first) < 0.01, "a replayed graph gives other logits"
    return first


def gradients() -> None:
    """Compare the gradients of all parameters as one vector."""
    print("\n| gradients | batch | plain, autocast | fused, CUDA graph | fused, fp8 |\n|---|---|---|---|---|")
    for name, batch, changes in (
        ("vit-ti/16", 5, {}),
        ("vit-s/32", 3, {"image_size": (160, 256)}),
        ("vit-ti/16", 4, {"pool": "mean"}),
        ("vit-ti/16", 4, {"layer_scale": 0.1}),
        ("vit-b/16", 8, {}),
        ("vit-h/14", 3, {"num_hidden_layers": 2}),
    ):
        torch.manual_seed(0)
        model = ViT(variant(name, num_classes=1000, **changes)).cuda().train()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.02)  # zeros would hide what is not computed
        x, y = torch.randn(batch, 3, *model.config.image_hw, device="cuda"), torch.arange(batch, device="cuda")
        found = []
        for forward, enabled in (
            (model, False),
            (model, True),
            (TrainingForward(model, graph=True), True),
            (TrainingForward(model, graph=True, fp8=True), True),
        ):
            for _ in range(2):  # the second step replays the graph that the first one captured
                model.zero_grad(set_to_none=True)
                with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
                    logits = forward(x)
                nn.functional.cross_entropy(logits.float(), y).backward()
            found.append(torch.cat([p.grad.float().flatten() for p in model.parameters()]))
        off = [distance(one, found[0]) for one in found[1:]]
        print(f"| {name} {changes or ''} | {batch} | " + " | ".join(f"{value:.1e}" for value in off) + " |", flush=True)
        assert off[1] < 1.5 * off[0] + 1e-3, "gradients of the fused parts are off"
        assert off[2] < 0.25, "gradients of fp8 are off"


def updates() -> None:
    """Compare updates that clip as they read with torch's, which clips first."""
    torch.manual_seed(0)
    models = [create("vit-ti/16").cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours = OnePassAdamW(models[0].parameters(), lr=torch.tensor(1e-3, device="cuda"), fused=True, capturable=True)
    theirs = torch.optim.AdamW(models[1].parameters(), lr=1e-3, fused=True)
    pairs = list(zip(*(model.parameters() for model in models), strict=True))
    for _ in range(10):
        for p, q in pairs:
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        norm = ours.measure(1.0)
        assert torch.equal(norm, nn.utils.clip_grad_norm_([q for _, q in pairs], 1.0))
        ours.step()
        theirs.step()
    off = max((p - q).abs().max().item() for p, q in pairs)
    print(f"\nweights after 10 updates that clip as they read: within {off:.1e} of torch's")
    assert off < 1e-6, "updates are off"


def own_kernels(seconds: float) -> None:
    """Compare the kernels for Hopper with plain torch, then let them run next to each other."""
    if not hopper.available(torch.device("cuda", 0)):
        print("\nThe kernels for Hopper do not run on this device.")
        return
    again: list[tuple[Callable[[], Tensor], Tensor]] = []
    print("\n| GELU between products | GELU(h) | gradient of h | its sums |\n|---|---|---|---|")
    for M, K, N in PRODUCTS:
        u, dy = (torch.randn(M, K, device="cuda").bfloat16() for _ in range(2))
        W1, W2, b = torch.randn(N, K, device="cuda"), torch.randn(K, N, device="cuda"), torch.randn(N, device="cuda")
        W1, W2, b = (W1 / K**0.5).bfloat16(), (W2 / K**0.5).bfloat16(), b.bfloat16()
        for tanh in (False, True):
            h, how = u.float() @ W1.float().mT + b.float(), "tanh" if tanh else "none"
            g, slopes = gelu_products.linear_gelu(u, W1.mT, b, tanh)
            dh, sums = gelu_products.product_dgelu(dy, W2, slopes)
            want = torch.ops.aten.gelu_backward(dy.float() @ W2.float(), h, approximate=how)
            off = [distance(g, nn.functional.gelu(h, approximate=how)), distance(dh, want), distance(sums, want.sum(0))]
            print(f"| {M} x {K} x {N}, {how} | " + " | ".join(f"{value:.1e}" for value in off) + " |", flush=True)
            assert off[0] < 2e-3, "GELU is off"
            assert max(off[1:]) < 4e-3, "its gradient is off"
        again.append((lambda u=u, W=W1.mT, b=b: gelu_products.linear_gelu(u, W, b, True)[0], g))
        again.append((lambda x=dy, W=W2, slopes=slopes: gelu_products.product_dgelu(x, W, slopes)[0], dh))
    print("\n| attention backward | q | k | v | biases |\n|---|---|---|---|---|")
    for B, T, heads in HEADS:
        width, lse = 64 * heads, torch.empty(B, heads, T, device="cuda")
        qkv, dsa = (torch.randn(B * T, n * width, device="cuda").bfloat16() for n in (3, 1))
        sa = attention_loop(qkv, heads, B, T, lse)
        exact = qkv.float().requires_grad_()
        q, k, v = exact.view(B, T, 3, heads, 64).permute(2, 0, 3, 1, 4)
        out = ((q @ k.mT / 8).softmax(-1) @ v).transpose(1, 2).reshape(B * T, width)
        (want,) = torch.autograd.grad(out, exact, dsa.float())
        found, sums = attention_gradient.attention_gradient(qkv, sa, dsa, lse)
        pairs = zip(found.chunk(3, 1), want.chunk(3, 1), strict=True)
        off = [distance(a, b) for a, b in pairs] + [distance(sums, want.sum(0))]
        print(f"| {B} x {T} x {heads} | " + " | ".join(f"{value:.1e}" for value in off) + " |", flush=True)
        assert max(off) < 6e-3, "attention's gradient is off"
        again.append((lambda a=(qkv, sa, dsa, lse): attention_gradient.attention_gradient(*a)[0], found))
    torch.cuda.synchronize()
    streams, other, count = [torch.cuda.Stream() for _ in range(3)], torch.zeros(1 << 28, device="cuda"), 0
    end, rng = time.time() + seconds, random.Random(0)
    while time.time() < end:
        results = []
        for work, want in rng.choices(again, k=40):
            with torch.cuda.stream(rng.choice(streams)):
                if rng.random() < 0.1:
                    other[: rng.randrange(len(other))].add_(1)
                results.append((work(), want))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in results), "a kernel did not repeat its result"
        count += len(results)
    print(f"\n{count:,} launches in three streams repeated their results")


def captures() -> None:
    """Capture training steps while another thread allocates pinned memory, as the loader's thread does."""
    done = threading.Event()

    def pin() -> None:
        kept = []  # so that torch asks CUDA for every block, instead of its own cache
        while not done.is_set():
            kept.append(torch.empty(1 << 14, pin_memory=True))

    thread = threading.Thread(target=pin, daemon=True)
    thread.start()
    try:
        for _ in range(20):
            model = create("vit-ti/16", num_hidden_layers=2).cuda().train()
            with torch.autocast("cuda", torch.bfloat16):
                TrainingForward(model, graph=True)(torch.randn(4, 3, 224, 224, device="cuda")).sum().backward()
    finally:
        done.set()
        thread.join()
    print("\n20 training steps captured next to a thread that allocates pinned memory")


def accuracy(weights: str, images: Path) -> None:
    from vitkit.checkpoints import load
    from vitkit.data.decode import decode
    from vitkit.data.preprocess import preprocess

    model = load(weights).cuda().eval()
    files = sorted(images.glob("*/*.jpg"))
    x = torch.stack([preprocess(decode(f.read_bytes(), f.name), model.input_spec) for f in files]).cuda()
    labels = torch.tensor([int(f.parent.name) for f in files]).numpy()
    with torch.no_grad():
        plain = model(x).cpu().numpy()
        for name in NAMES:
            found = compare(plain, ENGINES[name].build(model)(x).float().cpu().numpy(), labels)
            print(f"\n{name}:", *found.sentences(), sep="\n  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights")
    parser.add_argument("--images", type=Path)
    parser.add_argument("--seconds", type=float, default=20, help="How long kernels run in streams (default: 20).")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    engines()
    gradients()
    updates()
    own_kernels(args.seconds)
    captures()
    if args.weights and args.images:
        accuracy(args.weights, args.images)


if __name__ == "__main__":
    main()
