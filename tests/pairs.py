"""Images with several labels: two of scikit-learn's digits side by side, one digit, or none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def pairs(folder: Path, train: int = 60, test: int = 20, *, columns: bool = False, classes: int = 10) -> Path:
    """Write images of 16 x 8 pixels and their table, and return the table.

    Digits of the test part occur in no training image. A tenth of the images show nothing, a fifth one digit.

    Args:
        folder: created if it does not exist.
        train: images in the training part.
        test: images in the test part; 0 for a table without parts.
        columns: whether the table has one column per label, and not labels separated by |.
        classes: digits to use, from 0.
    """
    digits = load_digits(n_class=classes)
    pixels, truth = (digits.images * 255 / 16).astype(np.uint8), digits.target
    rng = np.random.default_rng(0)
    order = rng.permutation(len(truth))
    pools = {"train": order[: len(order) * 3 // 4], "test": order[len(order) * 3 // 4 :]}
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for split, count in (("train", train), ("test", test)):
        for n in range(count):
            shown = rng.choice(pools[split], 2, replace=False)[: (0, 1, 1, 2, 2, 2, 2, 2, 2, 2)[n % 10]]
            image = np.zeros((8, 16), np.uint8)
            for side, i in enumerate(shown):
                image[:, 8 * side : 8 * side + 8] = pixels[i]
            Image.fromarray(image).save(folder / f"{split}-{n:04d}.png")
            rows.append((f"{split}-{n:04d}.png", sorted({int(truth[i]) for i in shown}), split))
    heading = [*map(str, range(classes))] if columns else ["labels"]
    lines = [",".join(["image", *heading, *(["split"] if test else [])])]
    for name, labels, split in rows:
        cells = [str(int(k in labels)) for k in range(classes)] if columns else ["|".join(map(str, labels))]
        lines.append(",".join([name, *cells, *([split] if test else [])]))
    table = folder / ("columns.csv" if columns else "labels.csv")
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return table
