"""What the CPU's fast forms cost and gain: accuracy of int8 and of merging on real weights and photos, speed on B/16.

    python -m benchmarks.cpu accuracy WEIGHTS PHOTOS     # curves of int8 and of merging
    python -m benchmarks.cpu speed [--rounds 7]          # vit-b/16, batch 8 and 1, beside the peers, eager and compiled

Accuracy is measured on the weights at hand and speed on vit-b/16 with random weights: they are two statements.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve each other

import vitkit
from vitkit.evaluation import logits_of
from vitkit.jobs.bench import Options, bench
from vitkit.jobs.export import export_file, images_for
from vitkit.speed.accuracy import compare
from vitkit.speed.graph import Graph

MERGE = (0, 8, 13, 16)


def accuracy(weights: str, photos: str, calibrate: int) -> None:
    model = vitkit.load(weights)
    shown = images_for(photos, "", model, calibrate, 10**6)
    assert shown.report is not None
    plain = logits_of(model, shown.report)
    print(f"{weights}, {shown.words}\n\n| | top-1 | points | agreement |\n|---|---|---|---|")
    for r in MERGE:
        if r:
            from vitkit.evaluation import class_names, match_classes

            outputs = match_classes(shown.report.class_names, class_names(model))
            row(
                f"fp32, merge {r}",
                compare(plain.logits, logits_of(Graph(model, r), shown.report).logits, outputs[plain.labels]),
            )
        with tempfile.TemporaryDirectory() as folder:
            done = export_file(model, "openvino-int8", Path(folder) / "model.xml", shown, merge=r)
        row(f"int8, merge {r}", done.report)


def row(name: str, found) -> None:
    print(
        f"| {name} | {found.fast:.4f} (plain {found.plain:.4f}) | {100 * (found.fast - found.plain):+.2f} | "
        f"{found.agreement:.4f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("accuracy")
    one.add_argument("weights")
    one.add_argument("photos")
    one.add_argument("--calibrate", type=int, default=128)
    two = commands.add_parser("speed")
    two.add_argument("--rounds", type=int, default=7)
    two.add_argument("--batch", type=int, nargs="*", default=[8, 1])
    args = parser.parse_args()
    if args.what == "accuracy":
        accuracy(args.weights, args.photos, args.calibrate)
        return
    for batch in args.batch:
        how = Options(batch_size=[batch], merge=MERGE[1:] if batch > 1 else None, compiled=True, rounds=args.rounds)
        for table in bench(["inference"], how):
            print(table.markdown(), "\n", flush=True)


if __name__ == "__main__":
    main()
