"""The fused engines and the fused training step against the plain model in fp32, on a CUDA device.

    python -m benchmarks.check [--weights FILE --images FOLDER]

Random weights and inputs from Ti to H, at odd sizes and batch sizes. With weights and photos in folders named by class
index, each engine's top-1 and its agreement with the plain model are printed too. Stops where a tolerance is exceeded.
"""

from __future__ import annotations

import argparse
import threading
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from vitkit.jobs.peers import randomize
from vitkit.model.config import variant
from vitkit.model.create import create
from vitkit.model.vit import ViT
from vitkit.speed.accuracy import compare
from vitkit.speed.engines import ENGINES
from vitkit.speed.training import TrainingForward
from vitkit.training.adamw import OnePassAdamW

NAMES = ("cuda-fused", "fp8")


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
                off += [distance(built[key](x), reference) for key in NAMES]
            print(f"| {name} | {size} | {batch} | " + " | ".join(f"{value:.1e}" for value in off) + " |", flush=True)
            for key, value in zip(NAMES, off[1:], strict=True):
                assert value <= ENGINES[key].tolerance, f"{key} is off by {value:.3g} on {name}"


def gradients() -> None:
    """Compare the gradients of all parameters as one vector."""
    print("\n| gradients | batch | plain, autocast | fused, CUDA graph | fused, fp8 |\n|---|---|---|---|---|")
    for name, batch, changes in (
        ("vit-ti/16", 5, {}),
        ("vit-s/32", 3, {"image_size": (160, 256)}),
        ("vit-ti/16", 4, {"pool": "mean"}),
        ("vit-ti/16", 4, {"layer_scale": 0.1}),
        ("vit-b/16", 8, {}),
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
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    engines()
    gradients()
    updates()
    captures()
    if args.weights and args.images:
        accuracy(args.weights, args.images)


if __name__ == "__main__":
    main()
