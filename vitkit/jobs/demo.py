"""`vitkit demo`: train a small Vision Transformer from scratch on scikit-learn's digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vitkit.checkpoints import load
from vitkit.data.sources import open_source
from vitkit.evaluation.logits import logits_of
from vitkit.evaluation.measure import measure
from vitkit.jobs.train import train
from vitkit.training.loop import Watch


def demo(out: Path, *, seed: int = 0, epochs: float | None = None, watch: Watch | None = None) -> dict[str, Any]:
    """Train on nine tenths of the digits, then measure the last weights on the held-out tenth.

    The last weights, not the best on that tenth: otherwise it would have chosen the weights that it measures.

    Args:
        out: the run folder.
        seed: random seed (default: 0).
        epochs: passes over the data (default: the recipe's).
        watch: called with every event.

    Returns:
        {"stopped", "seconds", "right", "images", "accuracy", "run"}; "stopped" is the number of a signal, or 0.
    """
    run, outcome = train(
        "digits", out, recipe="digits", changes={"epochs": epochs}, settings={"seed": seed}, watch=watch
    )
    if outcome.stopped:
        return {"stopped": outcome.signal, "run": str(run.path)}
    outputs = logits_of(load(run.weights("last")), open_source("digits", "test"))
    found = measure(outputs, run.info["data"]["classes"])
    result = {
        "stopped": 0,
        "seconds": outcome.seconds,
        "right": round(found.top1 * found.n),
        "images": found.n,
        "accuracy": found.top1,
        "run": str(run.path),
    }
    (run.path / "demo.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result
