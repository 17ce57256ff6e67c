"""The README's picture of explanations: `python -m benchmarks.pictures WEIGHTS docs/pictures/explain.png`.

Both sample photos, each next to its maps, with test-time registers. Look at the result before you commit it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import vitkit
from vitkit.data.samples import PHOTOS, sample_photo
from vitkit.jobs.explain import explain

WIDTH = 1100  # pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    model = vitkit.load(args.weights)
    with tempfile.TemporaryDirectory() as folder:
        photos = [sample_photo(name) for name in PHOTOS]
        rows = [
            Image.open(one.folder / "overview.png").convert("RGB")
            for one in explain(model, photos, Path(folder), registers=True, occlusion=True)
        ]
        rows = [row.resize((WIDTH, round(row.height * WIDTH / row.width)), Image.Resampling.LANCZOS) for row in rows]
        picture = Image.fromarray(np.concatenate([np.asarray(row) for row in rows]))
    picture.quantize(192, dither=Image.Dither.NONE).save(args.out, optimize=True)


if __name__ == "__main__":
    main()
