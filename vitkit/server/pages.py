"""The web page's files and the sample photos, each under a fixed name: no request ever becomes a path."""

from __future__ import annotations

import functools
import importlib.util
from importlib import resources
from pathlib import Path

# path -> (file in page/, content type)
PAGE: dict[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/page/api.js": ("api.js", "text/javascript; charset=utf-8"),
    "/page/look.js": ("look.js", "text/javascript; charset=utf-8"),
    "/page/camera.js": ("camera.js", "text/javascript; charset=utf-8"),
    "/page/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
}
# path -> (file, description): two photos that scikit-learn installs
SAMPLES: dict[str, tuple[str, str]] = {
    "/samples/china.jpg": ("china.jpg", "A temple in China"),
    "/samples/flower.jpg": ("flower.jpg", "A flower"),
}


@functools.cache
def page(path: str) -> bytes:
    """Read the file of a row of PAGE."""
    return resources.files("vitkit.server").joinpath("page", PAGE[path][0]).read_bytes()


def samples() -> dict[str, Path]:
    """{path: file} of the sample photos that are installed. Finds scikit-learn without importing it."""
    found = importlib.util.find_spec("sklearn")
    places = (found.submodule_search_locations or ()) if found else ()
    folders = [Path(place) / "datasets" / "images" for place in places]
    return {
        path: folder / name for folder in folders for path, (name, _) in SAMPLES.items() if (folder / name).is_file()
    }
