"""The doctor's report -> one page with the pictures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vitkit.data.base import Source
from vitkit.data.doctor import Place, Report
from vitkit.data.survey import why_unread
from vitkit.errors import BadImage
from vitkit.reports.render import duration, render, thumbnail

MOST = 60  # pictures per section; --json lists everything
MOST_NAMES = 12  # names of unread files per ending


def doctor_page(report: Report) -> str:
    """Render the doctor's report as a single file that needs no other file and no network.

    Args:
        report: the report.
    """
    rows = {split: {name: i for i, name in enumerate(source.names)} for split, source in report.sources.items()}

    def shown(image: Place) -> dict[str, Any]:
        i = rows[image.split][image.name]
        return {"image": image, "picture": _picture(report.sources[image.split], i)}

    def grouped(found: Iterable[list[Place]]) -> list[list[dict[str, Any]]]:
        result, left = [], MOST
        for group in found:
            if left <= 0:
                break
            result.append([shown(image) for image in group[:left]])
            left -= len(group)
        return result

    across, conflicts = report.across, report.conflicts
    inside = [group for group in report.duplicates if group not in across and group not in conflicts]
    names = list(dict.fromkeys(name for counts in report.classes.values() for name in counts))
    most = max((count for counts in report.classes.values() for count in counts.values()), default=1) or 1
    return render(
        "doctor.html",
        title=f"Doctor: {report.data}",
        report=report,
        cards=[
            ("images", f"{sum(report.images.values()):,}", ", ".join(f"{n:,} {s}" for s, n in report.images.items())),
            ("cannot be read", f"{len(report.bad):,}", "images"),
            ("duplicates", f"{sum(len(g) - 1 for g in report.duplicates):,}", "images with the same pixels as another"),
            (
                "suspected labels",
                "–" if report.suspects is None else f"{len(report.suspects):,}",
                "only for one class per image"
                if report.combinations
                else "needs --from WEIGHTS"
                if report.suspects is None
                else "another class is more probable",
            ),
            ("time", duration(report.seconds), "to look at everything"),
        ],
        problems=sorted(report.problems, key=lambda problem: problem.level),
        unread=[
            (ending, len(files), files[:MOST_NAMES], why_unread(ending)) for ending, files in report.unread.items()
        ],
        classes=[(name, [(c.get(name, 0), c.get(name, 0) / most) for c in report.classes.values()]) for name in names],
        bad=report.bad,
        sections=[
            (
                "conflicts",
                "The same photo with different labels" if report.combinations else "The same photo with two labels",
                "At most one of them can be right. A cleaned copy leaves out all of these.",
                grouped(conflicts),
            ),
            (
                "across",
                "The same photo in two splits",
                "A model would be evaluated on photos that it was trained on. "
                "A cleaned copy keeps them in one split only.",
                grouped(across),
            ),
            (
                "inside",
                "The same photo twice in one split",
                "Copies count twice in training and in evaluation.",
                grouped(inside),
            ),
            (
                "near",
                "Nearly the same photo",
                "Resized, recompressed, or taken a moment later. If a group spans two "
                "splits, the evaluation is too optimistic.",
                grouped(report.near),
            ),
        ],
        suspects=[
            shown(one.image) | {"suggested": one.suggested, "confidence": one.confidence}
            for one in (report.suspects or [])[:MOST]
        ],
        notes=[shown(Place(found.split, found.name, "")) | {"reason": found.reason} for found in report.notes[:MOST]],
    )


def _picture(source: Source, i: int) -> str | None:
    try:
        return thumbnail(source.read(i)[0], 160)
    except BadImage:
        return None
