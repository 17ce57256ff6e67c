"""Weights and photos -> the folder of the explorable page, and a file server for it."""

from __future__ import annotations

import copy
import functools
import http.server
import importlib.util
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import vitkit
from vitkit.checkpoints.atomic import staging
from vitkit.data.preprocess import normalize, pixels
from vitkit.data.samples import sample_photo
from vitkit.errors import InputError
from vitkit.evaluation.names import answer_names
from vitkit.evaluation.predict import Images
from vitkit.explore import runtime
from vitkit.explore.examples import compute, packed
from vitkit.explore.graph import OUTPUTS, Explored, check
from vitkit.explore.sixteen import to_onnx
from vitkit.model.backbone import Backbone
from vitkit.model.vit import ViT

MOST_PHOTOS = 12
PORTRAIT = "mpl-data/sample_data/grace_hopper.jpg"  # comes with matplotlib


def samples() -> list[tuple[Image.Image, str, str]]:
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


def build(
    model: Backbone,
    out: str | Path,
    photos: Sequence[str | Path] = (),
    *,
    name: str = "",
    progress: Callable[[str], None] | None = None,
) -> Built:
    """Write the explorable page of a model as a static folder.

    Args:
        model: a ViT with a head, of the paper's kind (see `vitkit.explore.graph.check`); it is not changed.
        out: the folder; created if missing, and files of the same names in it are replaced.
        photos: example photos: files, folders or patterns (default: three sample photos).
        name: what the page calls the model (default: its shape, such as "ViT").
        progress: called with what is being done.

    Raises:
        CannotExpress: the page cannot show this model.
        InputError: there are too many photos.
    """
    say = progress or (lambda what: None)
    vit = check(model)
    names = answer_names(vit)
    graph = Explored(copy.deepcopy(vit).float().cpu().eval().requires_grad_(False))
    given = samples() if not photos else []
    source = Images([image for image, _, _ in given] if given else photos)
    if len(source) > MOST_PHOTOS:
        raise InputError(f"Expected at most {MOST_PHOTOS} example photos; got {len(source)}. Give fewer with --photos.")
    files, examples = {}, []
    for i in range(len(source)):
        title, credit = given[i][1:] if given else (Path(source.names[i]).stem, "")
        say(f"looking at {title}")
        seen = pixels(source.read(i)[0], vit.input_spec, source.names[i])[None]
        picture, data = f"example-{i + 1}.png", f"example-{i + 1}.gz"
        files[picture] = png(seen[0])
        files[data] = packed(compute(graph, normalize(seen, vit.input_spec)))
        examples.append({"title": title, "credit": credit, "picture": picture, "data": data})
    say("exporting the model")
    c = vit.config
    inputs = {"pixels": torch.zeros(1, c.num_channels, *c.image_hw), "keep": torch.ones(c.num_patches)}
    files["model.onnx"] = to_onnx(graph, inputs, OUTPUTS)
    files |= page() | runtime.files()
    card = card_of(vit, names, name) | {
        "examples": examples,
        "files": {
            "model": {"name": "model.onnx", "bytes": len(files["model.onnx"])},
            "runtime": {"name": runtime.WASM, "bytes": len(files[runtime.WASM])},
        },
    }
    files["card.json"] = json.dumps(card, ensure_ascii=False).encode()
    out = Path(out).expanduser()
    with staging(out) as folder:
        for file, content in files.items():
            (folder / file).write_bytes(content)
    return Built(out, {file: len(content) for file, content in files.items()})


def png(seen: torch.Tensor) -> bytes:
    """Encode pixels [C, H, W] in 8 bits without loss."""
    image, out = seen.permute(1, 2, 0).numpy(), io.BytesIO()
    Image.fromarray(image if image.shape[2] == 3 else image[:, :, 0]).save(out, "PNG", optimize=True)
    return out.getvalue()


def page() -> dict[str, bytes]:
    """Return the files of the page itself, by name."""
    folder = resources.files("vitkit.explore").joinpath("page")
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith((".html", ".css", ".js"))}


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
