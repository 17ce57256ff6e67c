"""Values -> HTML: the templates, and pictures as parts of the page itself."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from vitkit.explain import draw

if TYPE_CHECKING:
    from PIL.Image import Image

SMALL = 64  # images narrower than this are enlarged, with their pixels visible


def render(template: str, **values: Any) -> str:
    """Fill one of the templates of this folder; everything that is no Markup is escaped.

    Args:
        template: `page.html` or `runs.html`.
        values: what it shows.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vitkit.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"share": share, "number": number, "whole": whole, "time": duration}
    return environment.get_template(template).render(**values)


def share(value: float | None) -> str:
    """A share in percent, or a dash."""
    return "–" if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    """A number with four digits, or a dash."""
    return "–" if value is None else f"{value:.4g}"


def whole(value: float | None) -> str:
    """A whole number with separators, or a dash."""
    return "–" if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Seconds as people say them."""
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _data(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def thumbnail(image: Image, side: int = 128) -> str:
    """A decoded image as a data URI, at most `side` pixels on its longer side; tiny ones are kept to the pixel."""
    small, out = image.convert("RGB"), io.BytesIO()
    if max(small.size) < SMALL:
        small.save(out, "PNG")
        return _data("png", out.getvalue())
    small.thumbnail((side, side))
    small.save(out, "JPEG", quality=82)
    return _data("jpeg", out.getvalue())


def picture(pixels: NDArray[np.uint8]) -> str:
    """Pixels [H, W, 3] as a data URI."""
    return _data("jpeg", draw.jpeg(pixels))


def figure(drawn: draw.Figure, label: str) -> Markup:
    """A drawing as an <svg> element in the page's own colours."""
    return Markup(draw.inline(drawn, label))
