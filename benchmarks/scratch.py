"""Train FoodVision Mini from scratch in four ways, from a lesson's recipe to ours: the curves of chapter 7 of the book.

    python -m benchmarks.scratch --data pizza_steak_sushi --out book/scratch.json

One small ViT (that of the recipe `foodvision-scratch`), one seed, all 225 photos. Each way changes one thing more than
the way before it. The 75 test photos are measured every few epochs to draw a curve; nothing is chosen by them.
"""

from __future__ import annotations

from benchmarks import timing as _timing  # noqa: F401  # isort: skip  (sets OMP_WAIT_POLICY before torch is imported)

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

import vitkit
from vitkit.data.augment import Augment
from vitkit.data.mix import Mix
from vitkit.training.recipes import RECIPES

PLAIN = {"augment": Augment(scale=None, flip=0.0), "mix": Mix(), "label_smoothing": 0.0}
LESSON = {**PLAIN, "epochs": 30, "lr": 3e-3, "weight_decay": 0.3, "decay": "constant", "warmup": 0, "clip": None}
WAYS = {  # words -> what differs from `foodvision-scratch`; at a constant rate, 30 epochs show all there is to see
    "the lesson's recipe: Adam, 0.003, L2 of 0.3": {**LESSON, "optimizer": "adam"},
    "decay apart from the gradient: AdamW": LESSON,
    "and warm-up, a third of the rate, cosine": PLAIN,
    "and augmentation": {},
}


def curve(data: Path, changes: dict[str, object], every: int, seed: int) -> dict[str, list[float]]:
    recipe = dataclasses.replace(RECIPES["foodvision-scratch"], **changes)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        both = Path(folder) / "data"
        both.mkdir()
        (both / "train").symlink_to(data.resolve() / "train")
        (both / "val").symlink_to(data.resolve() / "test")  # measured during the run, to draw it
        run = vitkit.train(
            both,
            f"{folder}/run",
            recipe=recipe,
            seed=seed,
            workers=0,
            trackers=(),
            evaluate_every=every,
            save_every=10**6,
            report=False,
            progress=False,
        )
        steps, right = run.curves()["test_acc"]
        return {"step": steps, "accuracy": [round(value, 4) for value in right]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--out", type=Path, help="JSON file to write (default: print only)")
    parser.add_argument("--every", type=int, default=40, help="steps between measurements (default: 40)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = {}
    for words, changes in WAYS.items():
        found[words] = curve(args.data, changes, args.every, args.seed)
        print(f"{words}: {found[words]['accuracy'][-1]:.1%} of the test photos", flush=True)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
