"""Arrays -> pictures. The only file that imports matplotlib; it needs no display and no global state (pyplot).

Each function draws one kind of figure (tiles, points, lines, bars, a matrix) and knows nothing about models. Text and
axes have one colour, INK, which is readable on white; inside an HTML page it becomes the page's own text colour.
"""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure as BareFigure
from matplotlib.legend import Legend
from matplotlib.text import Text
from numpy.typing import NDArray
from PIL import Image

from vitkit.errors import OutputError
from vitkit.explanations.pixels import (
    FRAME,
    enlarged,
    framed,
    jpeg,
    overlay,
    png,
    shrunk,
    to_unit_range,
)
from vitkit.types import Array

# Callers need only this module: it re-exports the pixel operations.
__all__ = [
    "FRAME",
    "Figure",
    "enlarged",
    "framed",
    "jpeg",
    "overlay",
    "png",
    "shrunk",
    "to_unit_range",
]


INK = "#3d4658"
LIGHT_INK = "#d5d9e6"  # the same on a dark page
SERIES = ("#3b7dd8", "#e07b39", "#4aa564", "#b05cc6", "#d05573", "#3aa6a6", "#9a8b2f", "#7d86e0")
HEAT, SIGNED = "inferno", "viridis"
# From nothing to dark blue: the background shows through, so that it suits light and dark pages.
SHARES = LinearSegmentedColormap.from_list(
    "shares", [(0.23, 0.49, 0.85, 0.0), (0.23, 0.49, 0.85, 0.6), (0.05, 0.26, 0.55, 1.0)]
)
DPI = 110


class Figure(BareFigure):
    """A Matplotlib figure that a notebook shows by itself: without pyplot, nothing else would."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        with _quiet("vitkit"):
            _ink(self).savefig(out, format="png", bbox_inches="tight", dpi=DPI, facecolor="white")
        return out.getvalue()


LARGE = 60_000  # bytes; larger images inside a page are compressed


def _axes(figure: Figure, rows: int = 1, columns: int = 1, **how: Any) -> NDArray[Any]:
    axes: NDArray[Any] = figure.subplots(rows, columns, squeeze=False, **how)
    return axes


def _ink(figure: Figure, ink: str = INK) -> Figure:
    """Draw black text and frames in one colour, and show a $ as a dollar sign instead of parsing it as a formula."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)
        if to_hex(text.get_color()) in ("#000000", INK):
            text.set_color(ink)
    for axis in figure.axes:
        axis.tick_params(which="both", color=ink, labelcolor=ink)
        for spine in axis.spines.values():
            spine.set_color(ink)
    return figure


@contextmanager
def _quiet(salt: str) -> Iterator[None]:
    """Keep SVG text as text, make the output reproducible, and silence warnings about glyphs the font lacks."""
    with warnings.catch_warnings(), mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def save(figure: Figure, *paths: Path) -> Path:
    """Write a figure to each path, in the format of its suffix (.png, .svg, .pdf), and return the first path."""
    _ink(figure)
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _quiet("vitkit"):
                figure.savefig(
                    path,
                    bbox_inches="tight",
                    dpi=DPI,
                    facecolor="white",
                    metadata={"Date": None} if path.suffix == ".svg" else None,
                )
        except OSError as error:
            raise OutputError(
                f"Expected a writable folder; cannot write {path} ({error.strerror}). Choose another one with --out."
            ) from error
    return paths[0]


def figure_png(figure: Figure, theme: Literal["light", "dark"] | None = None) -> bytes:
    """Render a figure as a PNG.

    Args:
        figure: the figure.
        theme: for a page with a light or a dark background: transparent, and without the title, which the page shows as
            text (default: opaque and white, with the title).
    """
    if theme:
        without_title(figure)
    _ink(figure, LIGHT_INK if theme == "dark" else INK)
    for legend in figure.findobj(Legend):
        legend.get_frame().set_facecolor("none" if theme else "white")
    out = io.BytesIO()
    how: dict[str, Any] = {"transparent": True} if theme else {"facecolor": "white"}
    with _quiet("vitkit"):
        figure.savefig(out, format="png", bbox_inches="tight", dpi=DPI, **how)
    return out.getvalue()


def without_title(figure: Figure) -> str:
    """Remove the title of a figure and return its text, for a page that shows it as text."""
    axis = figure.axes[0]
    said = figure.get_suptitle() or axis.get_title()
    figure.suptitle("")
    axis.set_title("")
    return said


def inline(figure: Figure, label: str) -> str:
    """Render a figure as an <svg> element for a page: transparent, and in the page's own text colour.

    Args:
        figure: the figure.
        label: what it shows, for screen readers.
    """
    out = io.StringIO()
    _ink(figure)
    with _quiet(label):
        figure.savefig(out, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"data:image/png;base64,([A-Za-z0-9+/=\s]+)", _compressed, text)
    # Identifiers must be unique within the page.
    mark = re.sub(r"\W+", "-", label.lower())
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{mark}-", text)
    head, _, rest = text.partition(">")
    wide = float(re.search(r' width="([\d.]+)pt"', head)[1])  # type: ignore[index]
    head = re.sub(r' (?:width|height)="[^"]*pt"', "", head) + f' style="max-width:{wide * 1.4:.0f}px"'
    words = label.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return f'{head} role="img" aria-label="{words}">{rest}'


def _compressed(found: re.Match[str]) -> str:
    """Compress a large image inside a drawing, keeping its transparency."""
    raw, out = base64.b64decode(found[1]), io.BytesIO()
    if len(raw) < LARGE:
        return found[0]
    with Image.open(io.BytesIO(raw)) as image:
        image.save(out, "WEBP", quality=82)
    return f"data:image/webp;base64,{base64.b64encode(out.getvalue()).decode()}"


def tiles(
    pictures: Sequence[Array | None],
    columns: int,
    *,
    title: str = "",
    names: Sequence[str] = (),
    side: float = 1.6,
    left: Sequence[str] = (),
    top: Sequence[str] = (),
    scale: str | None = None,
    limits: tuple[float, float] | None = None,
    bar: str | None = None,
    caption: str = "",
) -> Figure:
    """Arrange pictures in a grid, row by row.

    Args:
        pictures: [H, W, 3] colours or [H, W] values; None leaves a cell empty.
        columns: pictures per row.
        title: a line above the grid.
        names: a line above each picture.
        side: width of a picture in inches (default: 1.6).
        left: labels of the rows.
        top: labels of the columns.
        scale: colour map for values (default: HEAT).
        limits: values at the ends of the colour map (default: each picture's own minimum and maximum).
        bar: label of the colour bar (default: no colour bar).
        caption: a line below the grid.
    """
    rows = -(-len(pictures) // columns)
    low, high = limits if limits is not None else (None, None)
    cells = [_coloured(p, scale or HEAT, low, high, round(side * 1.4 * DPI)) for p in pictures if p is not None]
    H, W = cells[0].shape[:2] if cells else (1, 1)
    gap = max(round(W * 0.04), 1)
    above = max(round(0.18 * W / side), 1) if len(names) else 0  # room for a line of text, in pixels of the pictures
    down, across = H + gap + above, W + gap
    sheet = np.zeros((rows * down - gap, columns * across - gap, 4), np.uint8)  # one image is faster than many axes
    figure = Figure(
        figsize=(
            columns * side * across / W + (0.6 if left else 0.1) + (0.9 if bar else 0),
            rows * side * down / W
            + (0.15 + 0.2 * len(title.splitlines()))
            + (0.2 if top else 0)
            + (0.2 if caption else 0),
        ),
        layout="constrained",
    )
    axis: Axes = _axes(figure)[0, 0]
    places = [(i // columns, i % columns) for i, picture in enumerate(pictures) if picture is not None]
    for (r, c), cell in zip(places, cells, strict=True):
        x, y = c * across, r * down + above
        sheet[y : y + H, x : x + W, :3], sheet[y : y + H, x : x + W, 3] = cell, 255
        if names:
            axis.text(x + W / 2, y - above * 0.2, names[r * columns + c], fontsize=7, ha="center", va="bottom")
    axis.imshow(sheet, interpolation="nearest", extent=(0, sheet.shape[1], sheet.shape[0], 0))
    axis.set_xticks([c * across + W / 2 for c in range(min(columns, len(top)))], top[:columns], fontsize=8)
    axis.set_yticks([r * down + above + H / 2 for r in range(min(rows, len(left)))], left[:rows], fontsize=8)
    axis.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    axis.set_frame_on(False)
    if title:
        figure.suptitle(title, fontsize=11)
    if caption:
        figure.supxlabel(caption, fontsize=8)
    if bar is not None:
        colours = mpl.cm.ScalarMappable(mpl.colors.Normalize(low, high), scale or HEAT)
        figure.colorbar(colours, ax=axis, shrink=0.6, label=bar)
    return figure


def _coloured(picture: Array, scale: str, low: float | None, high: float | None, most: int) -> NDArray[np.uint8]:
    """Apply a colour map to [H, W] values, or keep [H, W, 3] colours, and shrink to about `most` pixels wide."""
    if picture.ndim == 2:
        least, largest = (np.nanmin(picture) if low is None else low), (np.nanmax(picture) if high is None else high)
        picture = mpl.colormaps[scale]((picture - least) / max(float(largest - least), 1e-12))[..., :3]
    if picture.dtype != np.uint8:
        picture = np.clip(picture * 255, 0, 255).astype(np.uint8)
    return shrunk(picture, most)


def _from_zero(axis: Axes) -> None:
    """Let the vertical axis start at zero, with room for a point there: it stays clear of the frame."""
    most = axis.get_ylim()[1]
    axis.set_ylim(-0.03 * most, 1.02 * most)


def points(values: Array, *, title: str, x: str, y: str, name: str) -> Figure:
    """Draw columns of points: values[i, j] at x = i + 1, one colour per j; NaN is left out.

    Args:
        values: [columns, points].
        title: a line above the plot.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        name: what a point is ("Head"), for the legend.
    """
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axis: Axes = _axes(figure)[0, 0]
    for j in range(values.shape[1]):
        axis.scatter(
            range(1, 1 + len(values)),
            values[:, j],
            s=22,
            color=SERIES[j % len(SERIES)],
            alpha=0.85,
            label=f"{name} {j + 1}",
        )
    axis.set(title=title, xlabel=x, ylabel=y)
    _from_zero(axis)
    axis.set_xticks(range(1, 1 + len(values), -(-len(values) // 12)))
    axis.grid(alpha=0.25)
    if values.shape[1] <= 16:
        axis.legend(fontsize=7, ncols=1 + values.shape[1] // 9, loc="lower right", framealpha=0)
    return figure


def lines(
    series: Mapping[str, tuple[Sequence[float] | Array, Sequence[float] | Array]],
    *,
    title: str,
    x: str,
    y: str,
    from_zero: bool = False,
    log_x: bool = False,
) -> Figure:
    """Draw one line per series.

    Args:
        series: {name: (x values, y values)}; short series get point markers too.
        title: a line above the plot.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        from_zero: whether the vertical axis starts at zero.
        log_x: whether the horizontal axis is logarithmic.
    """
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axis: Axes = _axes(figure)[0, 0]

    for i, (name, (xs, ys)) in enumerate(series.items()):
        marks = "o" if len(xs) <= 40 else ""
        axis.plot(xs, ys, marker=marks, ms=3.5, lw=1.6, color=SERIES[i % len(SERIES)], label=name)
    axis.set(title=title, xlabel=x, ylabel=y)
    if from_zero:
        _from_zero(axis)
    if log_x:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, place: f"{value:g}")  # the usual one writes formulas
        axis.xaxis.set_minor_formatter(lambda value, place: "")
    axis.grid(alpha=0.25)
    if len(series) > 1:
        axis.legend(fontsize=8, framealpha=0)
    return figure


def reliability(
    confidence: Sequence[float], accuracy: Sequence[float], intervals: Sequence[tuple[float, float]], *, title: str
) -> Figure:
    """Draw accuracy over confidence with its intervals, and the line where both are equal.

    Args:
        confidence: mean confidence of each bin, from 0 to 1.
        accuracy: accuracy of each bin, from 0 to 1.
        intervals: (low, high) of each accuracy.
        title: a line above the plot.
    """
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axis: Axes = _axes(figure)[0, 0]
    axis.plot([0, 1], [0, 1], color=INK, lw=1, ls="--", alpha=0.6)
    axis.plot(confidence, accuracy, "o-", color=SERIES[0], ms=5, lw=1.2)
    axis.vlines(confidence, *zip(*intervals, strict=True), color=SERIES[0], lw=1.6, alpha=0.55)
    least = min([*confidence, *(low for low, _ in intervals)], default=0.0)
    low = max(np.floor(10 * least - 0.2) / 10, 0.0)
    axis.set(title=title, xlabel="confidence", ylabel="accuracy", xlim=(low - 0.02, 1.02), ylim=(low - 0.02, 1.03))
    axis.grid(alpha=0.25)
    return figure


def curves(panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]]) -> Figure:
    """Draw several panels of lines side by side.

    Args:
        panels: {title: {name: (steps, values)}}.
    """
    figure = Figure(figsize=(5 * len(panels), 3.4), layout="constrained")
    for axis, (title, series) in zip(_axes(figure, 1, len(panels))[0], panels.items(), strict=True):
        for i, (name, (xs, ys)) in enumerate(series.items()):
            axis.plot(xs, ys, marker="o" if len(xs) <= 40 else "", ms=3.5, lw=1.6, color=SERIES[i], label=name)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.25)
        if series:
            axis.legend(fontsize=8, framealpha=0)
    return _ink(figure)


def photo(image: NDArray[np.uint8], title: str, wide: float = 4.5) -> Figure:
    """Draw one photo under its title.

    Args:
        image: [H, W, 3].
        title: the title.
        wide: width in inches (default: 4.5).
    """
    figure = Figure(figsize=(wide, wide * image.shape[0] / image.shape[1] + 0.4), layout="constrained")
    axis: Axes = _axes(figure)[0, 0]
    axis.imshow(image)
    axis.set_title(title)
    axis.axis("off")
    return _ink(figure)


def stacked(figures: Sequence[Figure]) -> Figure:
    """Draw several figures as one, each below the one before."""
    pictures = []
    for figure in figures:
        with Image.open(io.BytesIO(figure._repr_png_())) as opened:
            pictures.append(np.asarray(opened.convert("RGB")))
    sheet = np.full((sum(map(len, pictures)), max(picture.shape[1] for picture in pictures), 3), 255, np.uint8)
    top = 0
    for picture in pictures:
        left = (sheet.shape[1] - picture.shape[1]) // 2
        sheet[top : top + len(picture), left : left + picture.shape[1]] = picture
        top += len(picture)
    result = Figure(figsize=(sheet.shape[1] / DPI, sheet.shape[0] / DPI), dpi=DPI)
    axis = result.add_axes((0, 0, 1, 1))
    axis.imshow(sheet)
    axis.axis("off")
    return result


def short(names: Sequence[str], most: int = 24) -> list[str]:
    """Truncate long names, marking the cut with an ellipsis."""
    return [name if len(name) <= most else f"{name[: most - 1]}…" for name in names]


def dots(
    names: Sequence[str],
    series: Mapping[str, tuple[Sequence[float], Sequence[float | None]]],
    *,
    title: str,
    x: str,
) -> Figure:
    """Draw a point per name and series, with its spread: for values that differ little, where bars would look the same.

    Args:
        names: labels of the rows, the first on top.
        series: {name: (values, spreads)}; a spread of None draws no line.
        title: a line above the plot.
        x: label of the horizontal axis.
    """
    figure = Figure(figsize=(6, 1.1 + 0.32 * len(names)), layout="constrained")
    axis: Axes = _axes(figure)[0, 0]
    for i, (name, (values, spreads)) in enumerate(series.items()):
        rows = [row + 0.16 * (i - (len(series) - 1) / 2) for row in range(len(names))]
        spans = [spread or 0.0 for spread in spreads]
        axis.errorbar(values, rows, xerr=spans, fmt="o", ms=5, capsize=2, color=SERIES[i % len(SERIES)], label=name)
    axis.set_yticks(range(len(names)), short(names, 40), fontsize=9)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set(title=title, xlabel=x)
    axis.grid(alpha=0.25)
    if len(series) > 1:
        axis.legend(fontsize=8, framealpha=0)
    return figure


def bars(names: Sequence[str], values: Sequence[float] | Array, *, title: str, x: str) -> Figure:
    """Draw horizontal bars labelled with their values, the first on top.

    Args:
        names: labels of the bars.
        values: their lengths.
        title: a line above the plot.
        x: label of the horizontal axis.
    """
    figure = Figure(figsize=(6, 0.8 + 0.3 * len(names)), layout="constrained")
    axis: Axes = _axes(figure)[0, 0]
    drawn = axis.barh(range(len(names)), values, color=SERIES[0])
    axis.bar_label(drawn, fmt="%.3g", padding=3, fontsize=8)
    axis.set_yticks(range(len(names)), short(names), fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set(title=title, xlabel=x)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def matrix(counts: Array, names: Sequence[str], *, title: str, x: str, y: str) -> Figure:
    """Draw a matrix of counts, each coloured by its share of its row; small matrices also show names and counts.

    Args:
        counts: [K, K].
        names: labels of the rows and columns.
        title: a line above the plot.
        x: label of the horizontal axis.
        y: label of the vertical axis.
    """
    K = len(counts)
    side = min(max(2.6, 0.42 * K + 1.6), 9.0)
    figure = Figure(figsize=(side + 0.6, side), layout="constrained")
    axis: Axes = _axes(figure)[0, 0]
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axis.imshow(share, cmap=SHARES, vmin=0, vmax=1)
    if K <= 30:
        named = short(names)
        axis.set_xticks(range(K), named, fontsize=8, rotation=90 if K * max(map(len, named)) > 40 else 0)
        axis.set_yticks(range(K), named, fontsize=8)
        for (r, c), value in np.ndenumerate(counts):
            if value:
                axis.text(
                    c,
                    r,
                    f"{value:g}",
                    ha="center",
                    va="center",
                    fontsize=8 if K <= 12 else 6,
                    color="white" if share[r, c] > 0.55 else INK,
                )
    axis.set(title=title, xlabel=x, ylabel=y)
    return figure


def values(
    table: Array,
    *,
    title: str,
    x: str,
    y: str,
    tall: float = 3.0,
    bar: str = "value",
    marks: Mapping[int, str] | None = None,
) -> Figure:
    """Draw a table of numbers as colours: blue below zero, red above, saturating at the 99th percentile of |value|.

    Args:
        table: [rows, columns].
        title: a line above the plot.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        tall: height in inches (default: 3).
        bar: label of the colour bar.
        marks: {row: label} of labelled rows.
    """
    figure = Figure(figsize=(9, tall), layout="constrained")
    axis: Axes = _axes(figure)[0, 0]
    most = float(np.quantile(np.abs(table), 0.99)) or 1.0
    shown = axis.imshow(table, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
    axis.set(title=title, xlabel=x, ylabel=y)
    if marks is not None:
        axis.set_yticks(list(marks), list(marks.values()), fontsize=8)
    figure.colorbar(shown, ax=axis, label=bar, pad=0.01)
    return figure
