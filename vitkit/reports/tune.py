"""A tuning run -> one page: what was tried, what each gave, and why one was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitkit.reports.render import duration, figure, render

WORDS = {  # what a name of the table means
    "probe": "logistic regression on frozen features",
    "probe-balanced": "the same, every class counting equally",
    "from-probe": "fine-tuning from the probe, short and gentle",
    "from-probe-long": "fine-tuning from the probe, longer",
    "from-probe-lora": "low-rank adapters, from the probe",
}


def tune_page(
    info: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    tried: Sequence[Mapping[str, Any]],
    drawing: Any,
    seconds: float,
) -> str:
    """Render the page as a single file that needs no other file and no network.

    Args:
        info: the contents of run.json.
        evaluation: the contents of evaluation.json.
        tried: everything that was considered, with `seconds`.
        drawing: a figure of the gains, or None.
        seconds: time of the whole run.
    """
    low, high = evaluation["ci95"]
    calibration = info["calibration"]
    return render(
        "tune.html",
        title=f"Tuned: {info['data']['spec']}",
        info=info,
        evaluation=evaluation,
        cards=[
            ("accuracy", f"{evaluation['top1']:.1%}", f"of {evaluation['n']:,} images: {evaluation['part']}"),
            ("95% interval", f"{low:.1%} to {high:.1%}", "of that accuracy"),
            ("chosen", info["chosen"], WORDS.get(info["chosen"], "")),
            ("time", duration(seconds), f"of {info['minutes']:g} min"),
        ],
        tried=tried,
        words=WORDS,
        drawing=figure(drawing, "Gain of every candidate over the probe") if drawing is not None else None,
        nll=calibration["nll"],
        factor=calibration["factor"],
    )
