"""Save what was taught as an ordinary run folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.checkpoints.atomic import reason
from vitkit.data.folder import read_folder
from vitkit.errors import OutputError
from vitkit.evaluation.logits import Outputs
from vitkit.evaluation.measure import measure
from vitkit.features.choice import choose
from vitkit.features.head import attach
from vitkit.features.online import Taught
from vitkit.jobs.evaluate import Evaluation, write
from vitkit.jobs.splits import absolute
from vitkit.model.backbone import Backbone
from vitkit.training.run_folder import RunFolder

PART = "its own photos, each by a classifier that was fitted without it"


def save(model: Backbone, weights: str, out: Path, taught: Taught) -> RunFolder:
    """Write the run of a lesson next to its photos; a run that was saved there before is replaced.

    Args:
        model: the backbone.
        weights: name of the backbone, for the record.
        out: folder of the lesson, whose photos are in `photos`.
        taught: what was taught.

    Raises:
        OutputError: the folder cannot be written to.
    """
    choice, data = choose(None, model.config), f"folder:{out / 'photos'}"
    best = attach(model, taught.head, taught.names, choice)
    images = read_folder(out / "photos", taught.names)
    logits, n = taught.logits.astype(np.float32), len(taught.labels)
    place = {name: i for i, name in enumerate(images.names)}
    outputs = Outputs(logits, taught.labels, np.array([place[name] for name in taught.images]), taught.images)
    measures = measure(outputs, taught.names)
    found = Evaluation(str(out), data, PART, measures, outputs, taught.names, taught.seconds)
    info: dict[str, Any] = {
        "kind": "probe",
        "recipe_name": "teach",
        "weights": weights,
        "methods": ["ridge"],
        "features": choice.name,
        "settings": {"seed": 0},
        "input_spec": best.input_spec.to_dict(),
        "config": best.config.to_dict(),
        "parameters": sum(p.numel() for p in best.parameters()),
        "trained": int(taught.head.W.size + taught.head.b.size),
        "data": {
            "spec": data,
            "path": absolute(data),
            "train": n,
            "test": n,
            "classes": list(taught.names),
            "counts": images.counts(),
            "held": PART,
            "held_share": 0.0,
            "seed": 0,
            "fingerprint": images.fingerprint(),
        },
        "notes": [
            "Taught with `vitkit teach`. The evaluation is an exact leave-one-out: every photo was judged by a "
            "classifier that was not fitted to it, nor to other photos of its burst."
        ],
    }
    row = {
        "method": "ridge",
        "top1": measures.top1,
        "correct": int((logits.argmax(1) == taught.labels).sum()),
        "head_top1": measures.top1,
        "chosen": taught.chosen,
    }
    try:
        with tempfile.TemporaryDirectory(prefix=".vitkit-", dir=out) as private:
            run = RunFolder.create(Path(private) / "run", info)
            run.log({"event": "probe", **row, "time": {"seconds": taught.seconds}})
            run.log({"event": "val", "step": 0, "weights": "last", "top1": measures.top1, "n": n})
            run.save(best, "best", {"probe": "ridge", "features": choice.name})
            # After the weights: results older than the weights are taken for those of other weights.
            write(run.path, found, {"methods": [row]})
            files = sorted((path for path in run.path.iterdir()), key=lambda path: path.stat().st_mtime_ns)
            for path in files:
                os.replace(path, out / path.name)
    except OSError as error:
        raise OutputError(f"Could not write to {out}: {reason(error)}.") from error
    return RunFolder.open(out)
