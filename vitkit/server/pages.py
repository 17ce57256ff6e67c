"""The web page's files and the sample photos, each under a fixed name: no request ever becomes a path."""

from __future__ import annotations

import functools
import importlib.util
from importlib import resources
from pathlib import Path

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
EXPLORE = "/explore/"  # the explorable page
MODEL = "model/"  # its folder of files that hold the model
WHOLE = {"index.html": "/", "docs.html": "/docs"}  # the files that are pages; all others are parts of them
# path -> (file in page/, content type)
PAGE: dict[str, tuple[str, str]] = {
    WHOLE.get(file.name, f"/page/{file.name}"): (file.name, f"{TYPES[Path(file.name).suffix]}; charset=utf-8")
    for file in sorted(resources.files("vitkit.server").joinpath("page").iterdir(), key=lambda file: file.name)
    if Path(file.name).suffix in TYPES
}
# path -> (file, description): two photos that scikit-learn installs
SAMPLES: dict[str, tuple[str, str]] = {
    "/samples/china.jpg": ("china.jpg", "A temple in China"),
    "/samples/flower.jpg": ("flower.jpg", "A flower"),
}


def kind_of(name: str) -> str:
    """Return the content type of a file of the explorable page."""
    known = {**TYPES, ".json": "application/json", ".png": "image/png", ".txt": "text/plain"}
    kind = known.get(Path(name).suffix, "application/octet-stream")
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind


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
