"""Values -> HTML: the templates, with all images embedded in the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from vitkit.explanations import draw

if TYPE_CHECKING:
    from PIL.Image import Image

SMALL = 64  # pixels; smaller images are embedded unchanged and enlarged with visible pixels


def render(template: str, **values: Any) -> str:
    """Fill in a template; every value except Markup is escaped.

    Args:
        template: `page.html` or `runs.html`.
        values: its variables.

    Raises:
        LookupError: a value that the template needs is missing.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vitkit.reports", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"share": share, "number": number, "whole": whole, "time": duration, "date": date}
    try:
        return environment.get_template(template).render(**values)
    except jinja2.UndefinedError as error:
        raise LookupError(str(error)) from error


def share(value: float | None) -> str:
    """Format a share as a percentage; None becomes a dash."""
    return "–" if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    """Format a number with four significant digits; None becomes a dash."""
    return "–" if value is None else f"{value:.4g}"


def whole(value: float | None) -> str:
    """Format a number without decimals and with thousands separators; None becomes a dash."""
    return "–" if value is None else f"{value:,.0f}"


def data_name(spec: object) -> str:
    """Return the short name of a data set: the last part of its path, or its source; empty if it has none."""
    kind, _, place = str(spec).rpartition(":")
    name = Path(place).name
    return (name or kind) if name != ".." else ""


def images_of(found: Mapping[str, Any]) -> str:
    """Say which images were evaluated: the part, and the data, which need not be the data of the run."""
    part, data = str(found["part"]), data_name(found.get("data", ""))
    if not data:
        return part
    return data + part.removeprefix("all images") if part.startswith("all images") else f"{part} of {data}"


def millions(count: int) -> str:
    """Format a number of parameters as people say it: 5.5 million; below a million, all digits."""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}" if count < 100 * size else f"{count / size:.0f} {word}"
    return f"{count:,}"


def duration(seconds: float | None) -> str:
    """Format a duration in seconds, minutes or hours; None becomes a dash."""
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def date(created: str | None) -> str:
    """Format the ISO date of run.json in minutes; None becomes a dash."""
    return "–" if not created else f"{datetime.fromisoformat(created).astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _data(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def thumbnail(image: Image, side: int = 128) -> str:
    """Encode an image as a data URI of at most `side` pixels; tiny images stay lossless."""
    small, out = image.convert("RGB"), io.BytesIO()
    if max(small.size) < SMALL:
        small.save(out, "PNG")
        return _data("png", out.getvalue())
    small.thumbnail((side, side))
    small.save(out, "JPEG", quality=82)
    return _data("jpeg", out.getvalue())


def picture(pixels: NDArray[np.uint8]) -> str:
    """Encode pixels [H, W, 3] as a data URI."""
    return _data("jpeg", draw.jpeg(pixels))


def prose(text: str) -> Markup:
    """Render text for a page, with `words` in backticks as code."""
    parts = text.split("`")
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


def headed(drawn: draw.Figure, label: str, caption: str) -> tuple[str, Markup, str]:
    """Return a figure's title, which the page shows as text in its own size, the figure without it, and its caption."""
    return draw.without_title(drawn), figure(drawn, label), caption


def figure(drawn: draw.Figure, label: str) -> Markup:
    """Render a figure as an <svg> element in the colours of the page; `label` is for screen readers."""
    return Markup(draw.inline(drawn, label))
