"""Weights and photos -> the folder of the explorable page, and a file server for it."""

from __future__ import annotations

import copy
import functools
import http.server
import importlib.util
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import vitkit
from vitkit.checkpoints.atomic import staging
from vitkit.checkpoints.outputs import check_folder
from vitkit.data.preprocess import normalize, pixels
from vitkit.data.samples import sample_photo
from vitkit.errors import InputError, Occupied
from vitkit.evaluation.names import answer_names
from vitkit.evaluation.predict import Images
from vitkit.explore import runtime
from vitkit.explore.examples import compute, packed
from vitkit.explore.graph import OUTPUTS, Explored, check
from vitkit.explore.sixteen import need_exporters, to_onnx
from vitkit.model.backbone import Backbone
from vitkit.model.vit import ViT

MOST_PHOTOS = 12
EXAMPLES = 3  # photos of a run that its served page shows
MODEL = "model/"  # folder of what differs from model to model
PORTRAIT = "mpl-data/sample_data/grace_hopper.jpg"  # comes with matplotlib


def samples() -> list[Example]:
    """Return (photo, title, credit) of the examples: real photos that come with matplotlib and scikit-learn."""
    found = [
        (sample_photo("flower"), "A flower", "Flower: vultilion on Flickr, CC BY 2.0."),
        (sample_photo("china"), "A temple", "Temple: danielbuechele on Flickr, CC BY 2.0."),
    ]
    spec = importlib.util.find_spec("matplotlib")
    portrait = Path(spec.origin).parent / PORTRAIT if spec is not None and spec.origin else Path(PORTRAIT)
    if portrait.is_file():  # some distributions leave it out
        found.insert(0, (Image.open(portrait), "Grace Hopper", "Grace Hopper: US Navy, public domain."))
    return found


@dataclass(frozen=True)
class Built:
    """What `build` wrote.

    Args:
        folder: the folder.
        sizes: bytes of each file.
    """

    folder: Path
    sizes: dict[str, int]

    @property
    def megabytes(self) -> float:
        """Size of all files."""
        return sum(self.sizes.values()) / 1e6


Example = tuple[Image.Image, str, str]  # a photo, its title and its credit
Say = Callable[[str], None]


def build(
    model: Backbone,
    out: str | Path,
    photos: Sequence[str | Path] = (),
    *,
    name: str = "",
    progress: Say | None = None,
) -> Built:
    """Write the explorable page of a model as a static folder.

    Args:
        model: a ViT with a head, of the paper's kind (see `vitkit.explore.graph.check`); it is not changed.
        out: the folder; created if missing.
        photos: example photos: files, folders or patterns (default: three sample photos).
        name: what the page calls the model (default: its shape, such as "ViT").
        progress: called with what is being done.

    Raises:
        CannotExpress: the page cannot show this model.
        InputError: there are too many photos.
        OutputError: the folder holds a page already, or cannot be written to.
    """
    vit, out = check(model), check_free(out)
    source = Images(photos) if photos else ()
    if len(source) > MOST_PHOTOS:
        raise InputError(f"Expected at most {MOST_PHOTOS} example photos; got {len(source)}. Give fewer with --photos.")
    examples = (
        [(source.read(i)[0], Path(source.names[i]).stem, "") for i in range(len(source))] if source else samples()
    )
    files = page() | of_model(vit, examples, name=name, progress=progress)
    with staging(out) as folder:
        for file, content in files.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(content)
    return Built(out, {file: len(content) for file, content in files.items()})


def check_free(out: str | Path) -> Path:
    """Refuse a folder that holds a page or cannot be written to, before any work is done; return it expanded.

    Args:
        out: the folder.
    """
    folder = check_folder(out)
    names = ("index.html", *sorted(page()), MODEL.rstrip("/"))
    if taken := next((name for name in names if os.path.lexists(folder / name)), None):
        raise Occupied(
            f"Expected a new folder for the page; {out} has {taken} already. Choose another one, or delete it first."
        )
    return folder


def of_model(
    vit: ViT, examples: Sequence[Example], *, name: str = "", home: bool = False, progress: Say | None = None
) -> dict[str, bytes]:
    """Return the files that hold a model and its examples, by name; all are in the folder MODEL.

    Args:
        vit: a model that `check` accepts; it is not changed.
        examples: photos, their titles and credits.
        name: what the page calls the model (default: its shape, such as "ViT").
        home: whether there is a page above this one to go back to.
        progress: called with what is being done.
    """
    say = progress or (lambda what: None)
    names = answer_names(vit)
    graph = Explored(copy.deepcopy(vit).float().cpu().eval().requires_grad_(False))
    files, shown = {}, []
    for i, (image, title, credit) in enumerate(examples, 1):
        say(f"looking at {title}")
        seen = pixels(image, vit.input_spec, title)[None]
        picture, data = f"{MODEL}example-{i}.png", f"{MODEL}example-{i}.gz"
        files[picture] = png(seen[0])
        files[data] = packed(compute(graph, normalize(seen, vit.input_spec)))
        shown.append({"title": title, "credit": credit, "picture": picture, "data": data})
    say("exporting the model")
    c = vit.config
    inputs = {"pixels": torch.zeros(1, c.num_channels, *c.image_hw), "keep": torch.ones(c.num_patches)}
    weights = f"{MODEL}model.onnx"
    files[weights] = to_onnx(graph, inputs, OUTPUTS)
    card = card_of(vit, names, name) | {
        "home": home,
        "examples": shown,
        "files": {
            "model": {"name": weights, "bytes": len(files[weights])},
            "runtime": {"name": runtime.WASM, "bytes": len(runtime.files()[runtime.WASM])},
        },
    }
    files[f"{MODEL}card.json"] = json.dumps(card, ensure_ascii=False).encode()
    return files


def png(seen: torch.Tensor) -> bytes:
    """Encode pixels [C, H, W] in 8 bits without loss."""
    image, out = seen.permute(1, 2, 0).numpy(), io.BytesIO()
    Image.fromarray(image if image.shape[2] == 3 else image[:, :, 0]).save(out, "PNG", optimize=True)
    return out.getvalue()


def page() -> dict[str, bytes]:
    """Return the files of the page itself, by name: the same for every model."""
    folder = resources.files("vitkit.explore").joinpath("page")
    own = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith((".html", ".css", ".js"))}
    camera = resources.files("vitkit.server").joinpath("page", "camera.js")  # one file for both pages
    return own | {camera.name: camera.read_bytes()} | runtime.files()


def card_of(vit: ViT, names: Sequence[str], name: str) -> dict[str, Any]:
    """Return what the page must know about a model: shapes, preprocessing and class names."""
    c, spec = vit.config, vit.input_spec
    note = (
        "For this model, `vitkit predict` can also answer “none of these”, which this page does not."
        if vit.known is not None
        else ""
    )
    return {
        "vitkit": vitkit.__version__,
        "note": note,
        "classes": list(names),
        "model": {
            "name": name or "ViT",
            "parameters": sum(p.numel() for p in vit.parameters()),
            "size": list(c.image_hw),
            "channels": c.num_channels,
            "patch": c.patch_size,
            "rows": c.grid[0],
            "columns": c.grid[1],
            "patches": c.num_patches,
            "prefix": c.num_prefix_tokens,
            "tokens": c.num_prefix_tokens + c.num_patches,
            "layers": c.num_hidden_layers,
            "heads": c.num_attention_heads,
            "width": c.hidden_size,
            "head_size": c.head_size,
            "pool": c.pool,
            "positions": c.positions != "none",
            "grey": [round(255 * v) for v in (spec.mean if len(spec.mean) == 3 else spec.mean * 3)],
            "input": {
                "size": list(spec.size),
                "resize": spec.resize,
                "crop": spec.crop,
                "interpolation": spec.interpolation,
                "mean": list(spec.mean),
                "std": list(spec.std),
            },
        },
    }


def explorable(
    model: Backbone, *, name: str = "", photos: Callable[[], Sequence[Example]] = samples
) -> tuple[dict[str, bytes], Callable[[Say], dict[str, bytes]]]:
    """Return the files of the page itself, and a function that makes those that hold the model, for `vitkit serve`.

    Args:
        model: a ViT with a head, of the paper's kind.
        name: what the page calls the model (default: its shape, such as "ViT").
        photos: returns the examples (default: three sample photos).

    Raises:
        CannotExpress: the page cannot show this model.
        MissingDependency: what exports the model is not installed.
    """
    vit = check(model)
    need_exporters()
    return page(), lambda say: of_model(vit, photos(), name=name, home=True, progress=say)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the folder with the two headers that let the page use several threads."""

    def end_headers(self) -> None:
        """Add the headers to every answer."""
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for each request."""


def server(folder: Path, port: int) -> http.server.ThreadingHTTPServer:
    """Return a file server for a folder, on this machine only; call its `serve_forever`.

    Args:
        folder: the folder that `build` wrote.
        port: port to listen on; 0 for any free one.
    """
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Handler, directory=str(folder)))
