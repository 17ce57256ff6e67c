"""`vitkit doctor`: check every image of a data set."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from vitkit.cli.options import progress_bar

if TYPE_CHECKING:
    from vitkit.data.doctor import Finding, Report

SHOWN = 20  # maximum number of notes and duplicates to print; --json prints all


def doctor(
    data: Annotated[str, typer.Argument(help="Folder, .csv, .parquet or .tar file, or kind:place.")],
    fix: Annotated[bool, typer.Option("--fix", help="Move bad files to DATA.bad; nothing is deleted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    workers: Annotated[int | None, typer.Option(help="Worker processes for decoding (default: one per core).")] = None,
) -> None:
    """Check a data set: unreadable images, duplicates, class balance, image sizes.

    The exit code is 1 if bad images remain.
    """
    from vitkit.data.doctor import examine, move_aside

    with progress_bar("decoding") as tell:
        report = examine(data, workers=workers, progress=tell)
    aside = move_aside(report) if fix else None
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        show(report)
        if aside is not None:
            print(f"\nMoved {len(report.bad)} bad files to {aside}; {aside / 'moved.json'} records where each one was.")
    if any(found.moved_to is None for found in report.bad):
        raise typer.Exit(1)


def show(report: Report) -> None:
    """Print a report as text.

    Args:
        report: the doctor's report.
    """
    from vitkit.cli.text import print_table

    classes = list(dict.fromkeys(name for counts in report.classes.values() for name in counts))
    largest = max(classes, key=lambda n: max(counts.get(n, 0) for counts in report.classes.values()), default="")
    shown = classes if len(classes) <= SHOWN else [*classes[: SHOWN - 1], largest]
    print_table(
        ["class", *(f"{split}#" for split in report.images)],
        [[name, *(counts.get(name, 0) for counts in report.classes.values())] for name in dict.fromkeys(shown)]
        + [["all", *report.images.values()]],
    )
    if len(classes) > SHOWN:
        print(f"({len(classes)} classes; only the first ones and the largest are shown)")
    if report.imbalance is None:
        print("A class has no images.")
    else:
        print(f"Class balance: the largest class has {report.imbalance:.3g} times as many images as the smallest.")
    for word, (least, median, most) in report.sizes.items():
        print(f"{word.capitalize()}: {least:g} to {most:g} px, median {median:g}.")
    print("Formats: " + ", ".join(f"{count} {kind}" for kind, count in report.modes.items()) + ".")
    _list(f"{len(report.notes)} notes (these images can be read, by a special rule)", report.notes, SHOWN)
    across = report.across
    inside = len(report.duplicates) - len(across)
    if report.duplicates:
        print(f"\n{len(across)} images are in more than one split; {inside} more are duplicated within a split:")
        for group in (across or report.duplicates)[:SHOWN]:
            print("  " + " = ".join("/".join(place) for place in group))
        if len(across) > SHOWN:
            print(f"  ... and {len(across) - SHOWN} more (--json lists all)")
    else:
        print("\nNo duplicate images.")
    if report.bad:
        _list(
            f"{len(report.bad)} bad images (training stops at them, or skips them with --bad-images skip)",
            report.bad,
            len(report.bad),
        )
    else:
        print(f"All {sum(report.images.values())} images can be read ({report.seconds:.1f} s).")


def _list(title: str, findings: list[Finding], most: int) -> None:
    if not findings:
        return
    print(f"\n{title}:")
    for found in findings[:most]:
        print(f"  {found.split}/{found.name}: {found.reason}")
    if len(findings) > most:
        print(f"  ... and {len(findings) - most} more (--json lists all)")
