"""`vitkit doctor`: check every image of a data set, and everything next to the images."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitkit.cli.options import BatchSize, Cache, Device, Precision, Workers, loads_weights

if TYPE_CHECKING:
    from vitkit.data.clean import Cleaned
    from vitkit.data.doctor import Finding, Place, Report

SHOWN = 20  # maximum number of lines per section; --json prints all

CONFLICT = "The same photo with more than one label"


@loads_weights
def doctor(
    data: Annotated[str, typer.Argument(help="Folder, .csv, .parquet or .tar file, or kind:place.")],
    weights: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Pre-trained weights, to find near-duplicates by their features and suspected wrong labels (default: "
            "near-duplicates by a perceptual hash, no labels).",
        ),
    ] = None,
    fix: Annotated[
        Path | None,
        typer.Option(
            "--fix",
            help="Write a cleaned copy to this new folder, or a list of the good images to this new .csv file; the "
            "data itself is never changed (default: neither).",
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--page", help="Write an HTML page with the pictures to this file (default: none).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    cache: Cache = None,
    batch_size: BatchSize = None,
    workers: Workers = None,
    device: Device = "auto",
    precision: Precision = "auto",
    *,
    overrides: dict[str, Any],
) -> None:
    """Check a data set: unreadable images, files that are not read, classes, duplicates, sizes, and doubtful labels.

    The exit code is 1 if something would stop or mislead training; with --fix, if it still would in the cleaned data.
    """
    from vitkit.cli import options as common
    from vitkit.data.clean import check_place, clean
    from vitkit.data.doctor import examine
    from vitkit.errors import ConfigError

    if fix is not None:
        check_place(data, fix)
    if page is not None:
        from vitkit.checkpoints.outputs import check_page

        check_page(page, "--page")
    if weights is None and overrides:
        raise ConfigError(f"--{next(iter(overrides)).replace('_', '-')} needs weights: give them with --from.")
    if weights is not None:  # before the images are decoded, which may take longer
        from vitkit.jobs.doctor import look_at_features
        from vitkit.jobs.embed import open_cache
        from vitkit.runtime import Runtime

        runtime = Runtime(device, precision)
        model = common.load(weights, runtime, overrides)
        kept = open_cache(cache, lambda sentence: print(f"vitkit: {sentence}", file=sys.stderr))
    with common.progress_bar("decoding") as tell:
        report = examine(data, workers=workers, progress=tell)
    if weights is not None:
        with common.counting("embedding", sum(report.images.values())) as tick:
            look_at_features(
                report, model, kept, batch_size=batch_size, workers=workers, runtime=runtime, progress=tick
            )
    cleaned: Cleaned | None = None
    if fix is not None:
        with common.progress_bar("copying") as tell:
            cleaned = clean(report, fix, progress=tell)
    if as_json:
        more = {} if cleaned is None else {"cleaned": str(cleaned.out), "left_out": cleaned.left_out}
        print(json.dumps(report.to_dict() | more, indent=1))
    else:
        show(report)
    said = sys.stderr if as_json else sys.stdout
    if page is not None:
        from vitkit.jobs.doctor import write_page

        print(f"wrote {write_page(report, page)}", file=said)
    if cleaned is not None:
        print(
            f"wrote {cleaned.out}: {cleaned.kept} images, {len(cleaned.left_out)} left out "
            f"({cleaned.record} says which and why)",
            file=said,
        )
        for split, renames in cleaned.renamed.items():
            for old, new in renames.items():
                print(f"  {split}/{old} became {split}/{new}", file=said)
        for problem in cleaned.problems:
            print(f"still a problem: {problem.where}: {problem.reason}", file=said)
    if cleaned.problems if cleaned is not None else not report.healthy:
        raise typer.Exit(1)


def show(report: Report) -> None:
    """Print a report as text.

    Args:
        report: the doctor's report.
    """
    from vitkit.cli.text import print_table
    from vitkit.data.survey import why_unread

    classes = list(dict.fromkeys(name for counts in report.classes.values() for name in counts))
    largest = max(classes, key=lambda n: max(counts.get(n, 0) for counts in report.classes.values()), default="")
    shown = classes if len(classes) <= SHOWN else [*classes[: SHOWN - 1], largest]
    word = "label" if report.combinations else "class"
    print_table(
        [word, *(f"{split}#" for split in report.images)],
        [[name, *(counts.get(name, 0) for counts in report.classes.values())] for name in dict.fromkeys(shown)]
        + [["all", *report.images.values()]],
    )
    if len(classes) > SHOWN:
        print(f"({len(classes)} in all; only the first ones and the largest are shown)")
    for split, counts in report.combinations.items():
        print(f"{split}: {report.sources[split].spoken()}.")
        common = ", ".join(f"{name} ({count})" for name, count in list(counts.items())[:5])
        print(f"{split}: {len(counts)} combinations of labels; the most frequent: {common}.")
    if report.imbalance is not None:
        print(
            f"{word.capitalize()} balance: the largest {word} has {report.imbalance:.3g} times as many images as the "
            f"smallest."
        )
    for word, (least, median, most) in report.sizes.items():
        print(f"{word.capitalize()}: {least:g} to {most:g} px, median {median:g}.")
    print("Formats: " + ", ".join(f"{count} {kind}" for kind, count in report.modes.items()) + ".")
    if report.unread:
        print("\nFiles that are not read:")
        for ending, files in report.unread.items():
            why = why_unread(ending)
            names = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
            print(f"  {len(files)} {ending}: {names}{f' ({why})' if why else ''}")
    _findings(f"{len(report.notes)} notes (these images can be read, by a special rule)", report.notes, SHOWN)
    across, conflicts = report.across, report.conflicts
    inside = [group for group in report.duplicates if group not in across and group not in conflicts]
    _groups("The same photo in more than one split", across)
    _groups("The same photo twice in one split", inside)
    _groups("Nearly the same photo", report.near)
    if not report.duplicates and not report.near:
        print("\nNo duplicate images.")
    if report.suspects is not None:
        print(f"\n{len(report.suspects)} suspected wrong labels (another class is more probable), most doubtful first:")
        for one in report.suspects[:SHOWN]:
            print(f"  {one.image}: {one.image.label} ({one.confidence:.1%}), looks like {one.suggested}")
        if len(report.suspects) > SHOWN:
            print(f"  ... and {len(report.suspects) - SHOWN} more (--json lists all)")
    _groups("The same photo with different labels" if report.combinations else CONFLICT, conflicts)
    for level, title in (("note", "About the data set"), ("bad", "Problems of the data set")):
        problems = [problem for problem in report.problems if problem.level == level]
        if problems:
            print(f"\n{title}:")
            for problem in problems:
                print(f"  {problem.where}: {problem.reason}")
    if report.bad:
        _findings(
            f"{len(report.bad)} bad image{'s' * (len(report.bad) != 1)} (training stops there without "
            f"--bad-images skip)",
            report.bad,
            len(report.bad),
        )
    else:
        print(f"\nAll {sum(report.images.values())} images can be read ({report.seconds:.1f} s).")


def _groups(title: str, groups: Sequence[Sequence[Place]]) -> None:
    if not groups:
        return
    print(f"\n{title}:")
    for group in groups[:SHOWN]:
        print("  " + " = ".join(map(str, group)))
    if len(groups) > SHOWN:
        print(f"  ... and {len(groups) - SHOWN} more (--json lists all)")


def _findings(title: str, findings: list[Finding], most: int) -> None:
    if not findings:
        return
    print(f"\n{title}:")
    for found in findings[:most]:
        print(f"  {found}: {found.reason}")
    if len(findings) > most:
        print(f"  ... and {len(findings) - most} more (--json lists all)")
