"""An evaluation of several labels per image -> what the page says first: how good, what it misses and invents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitkit.reports.render import images_of, share

MAP_CURVE = (
    "Mean of the labels' average precisions on the validation split. It depends on the order of the images by "
    "probability, not on the thresholds."
)


def verdict(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headline of an evaluation: mAP, images, interval, and sentences that say what they mean."""
    n, (low, high) = found["n"], found["ci95"]
    exact = round(found["exact"] * n)
    return {
        "accuracy": share(found["mean_ap"]),
        "unit": "mAP",
        "low": low,
        "high": high,
        "at": found["mean_ap"],
        "says": f"{exact:,} of {n:,} image{'' if n == 1 else 's'} of {images_of(found)} get exactly their labels.",
        "means": f"On other images of this kind, expect an mAP of {low:.1%} to {high:.1%} (95% confidence interval).",
        "facts": [
            ("What it misses", _most(found["missed"], "missed on {} of {} image{} that have it", "It misses nothing.")),
            (
                "What it invents",
                _most(found["invented"], "wrong on {} of {} image{} that get it", "It invents nothing."),
            ),
        ],
    }


def _most(rows: Sequence[Sequence[Any]], words: str, nothing: str) -> str:
    """Say which label is the most frequent, in words with a count, a total and a plural."""
    if not rows:
        return nothing
    label, count, of = rows[0]
    return f"{label}: {words.format(f'{count:,}', f'{of:,}', '' if of == 1 else 's')}."


def results(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of an evaluation; the page's own table shows the labels, so there are no figures."""
    low, high = found["micro_f1_ci95"]
    table = [
        ("images", f"{found['n']:,}"),
        ("mAP (mean of the labels' average precisions)", f"{found['mean_ap']:.2%}"),
        ("95% confidence interval of mAP", f"{found['ci95'][0]:.2%} to {found['ci95'][1]:.2%}"),
        ("micro F1 (all labels together)", f"{found['micro_f1']:.4f}"),
        ("95% confidence interval of micro F1", f"{low:.4f} to {high:.4f}"),
        ("macro F1 (mean over the labels)", f"{found['macro_f1']:.4f}"),
        ("images with exactly their labels", f"{found['exact']:.2%}"),
        ("binary cross-entropy, summed over the labels", f"{found['nll']:.4f}"),
        ("labels without an image", ", ".join(found["without"]) or "none"),
        ("seconds", f"{found['seconds']:.2f}"),
        ("skipped images", str(len(found.get("skipped", [])))),
    ]
    return {"table": table, "drawn": []}


def rows(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of the table of labels, the lowest average precision first, labels without images last."""
    return sorted(found["per_class"], key=lambda row: (row["ap"] is None, row["ap"] or 0.0))
