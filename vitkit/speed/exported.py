"""Models exported for other runtimes: EXPORTS says how each kind of file is written and opened.

A file carries a card (configuration, InputSpec with class names, how it was made), so that whoever opens it can
preprocess images as for the plain model. An opened file is a Classifier.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import ConfigError, InputError, UnreadableFile, pick
from vitkit.model.backbone import Backbone, Config
from vitkit.model.checks import pair
from vitkit.model.config import InputSpec, config_from_dict
from vitkit.model.inputs import checked, validate_and_pad
from vitkit.model.resnet_config import ResNetConfig
from vitkit.speed import onnx, openvino
from vitkit.speed.graph import Graph
from vitkit.types import Array

Pixels = Iterable[Tensor]  # batches [B, C, H, W], normalized


@dataclass(frozen=True)
class Card:
    """Metadata inside an exported file.

    Args:
        form: the row of EXPORTS that wrote it.
        config: configuration of the model.
        input_spec: preprocessing and class names.
        merge: tokens that each block merges.
        any_size: whether the file accepts other image sizes.
        words: strings from whoever exported it, such as the source.
    """

    form: str
    config: Config
    input_spec: InputSpec
    merge: int = 0
    any_size: bool = False
    words: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """Return the card as the JSON that a file holds."""
        return json.dumps(
            {
                "form": self.form,
                "config": self.config.to_dict(),
                "input_spec": self.input_spec.to_dict(),
                "merge": self.merge,
                "any_size": self.any_size,
                "words": self.words,
            }
        )

    @classmethod
    def from_json(cls, text: str | None, path: Path) -> Card:
        """Read a card.

        Args:
            text: the JSON in the file; None if there is none.
            path: the file, for the error message.

        Raises:
            UnreadableFile: there is no card, or one of another version.
        """
        try:
            values = json.loads(text or "")
            return cls(
                str(values["form"]),
                config_from_dict(values["config"]),
                InputSpec.from_dict(values["input_spec"]),
                int(values["merge"]),
                bool(values["any_size"]),
                dict(values["words"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UnreadableFile(
                f"Expected a file written by this version of `vitkit export`; {path} has no card that says how to "
                f"preprocess images. Export the weights again."
            ) from None


class Exported:
    """A Classifier that another runtime runs on the CPU.

    Args:
        card: metadata from the file.
        run: maps pixels [B, C, H, W] in float32 to logits [B, K].
    """

    def __init__(self, card: Card, run: Callable[[Array], Array]) -> None:
        self.card, self.config, self.input_spec, self.run = card, card.config, card.input_spec, run
        self.lock = threading.Lock()  # a runtime's session handles one batch at a time

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits [B, K] in fp32, on the device of the pixels.

        Args:
            x: pixels [B, C, H, W], normalized as `input_spec` says.

        Raises:
            InputError: the pixels do not fit the model.
            UnreadableFile: the file is damaged, which shows only when it runs.
        """
        device, c = x.device, self.config
        if isinstance(c, ResNetConfig):
            x, own = checked(x, c), c.image_hw
        else:
            x, own = validate_and_pad(x, c), (c.grid[0] * c.patch_size, c.grid[1] * c.patch_size)
        if not len(x):
            raise InputError("Expected at least one image; got a batch of 0.")
        if not self.card.any_size and tuple(x.shape[2:]) != own:
            raise InputError(
                f"This file was exported for images of {own[0]} x {own[1]}; got {x.shape[2]} x {x.shape[3]}. "
                f"Export it with that --image-size, or as ONNX without --merge, which accepts any size."
            )
        with self.lock:
            found = self.run(x.detach().float().cpu().contiguous().numpy())
        if found.shape != (len(x), c.num_classes):
            raise UnreadableFile(
                f"Expected logits of shape {[len(x), c.num_classes]}; the exported file returned "
                f"{list(found.shape)}. It may be damaged: export the weights again."
            )
        return torch.from_numpy(found).to(device)

    def feed(self, size: int | tuple[int, int] | None = None, **changes: Any) -> Exported:
        """Change the preprocessing in place, or the image size if the file accepts any.

        Args:
            size: pixels, or (height, width).
            changes: fields of InputSpec.

        Raises:
            ConfigError: the file does not accept this image size, or such a change.
        """
        if odd := set(changes) - {field.name for field in dataclasses.fields(InputSpec)}:
            raise ConfigError(
                f"An exported file cannot change {', '.join(sorted(odd))}. Export the weights again with it."
            )
        if changes.get("resize") == "squash":
            changes.setdefault("crop", 1.0)
        if size is not None and pair(size) != self.input_spec.size:
            if not self.card.any_size:
                raise ConfigError(
                    f"This file accepts only images of {self.input_spec.size[0]} x {self.input_spec.size[1]}; got "
                    f"--image-size {size}. Export the weights again with that size."
                )
            dataclasses.replace(self.config, image_size=size)  # raises unless it is a multiple of the patch size
            changes["size"] = pair(size)
        for name in {"mean", "std"} & set(changes):
            if len(changes[name]) == 1:  # one number for all channels
                changes[name] = changes[name] * self.config.num_channels
        self.input_spec = dataclasses.replace(self.input_spec, **changes).check(self.config)
        return self


@dataclass(frozen=True)
class Export:
    """One kind of file.

    Args:
        ending: file name extension.
        write: (graph, path, card, batches for calibration) -> None.
        open: path -> (the card's JSON, a function that runs the file).
        tolerance: largest difference of a logit from the plain model's, relative to the largest logit; None if it is
            not promised but measured on the user's images.
        calibrates: whether it needs images.
        any_size: whether it accepts other image sizes; never with merged tokens.
        words: description for help texts.
    """

    ending: str
    write: Callable[[Graph, Path, str, Pixels], None]
    open: Callable[[Path], tuple[str | None, Callable[[Array], Array]]]
    tolerance: float | None
    calibrates: bool
    any_size: bool
    words: str


EXPORTS: dict[str, Export] = {
    "onnx": Export(".onnx", onnx.write, onnx.open_file, 1e-5, False, True, "ONNX, fp32, any batch and image size"),
    "openvino": Export(
        ".xml", openvino.write, openvino.open_file, 1e-5, False, True, "OpenVINO, fp32, any batch and image size"
    ),
    "openvino-int8": Export(
        ".xml",
        openvino.write_int8,
        openvino.open_file,
        None,
        True,
        False,
        "OpenVINO, int8, calibrated on your images: the fastest on a CPU",
    ),
}


def export(
    model: Backbone,
    to: str,
    path: str | Path,
    *,
    merge: int = 0,
    pixels: Pixels = (),
    words: dict[str, str] | None = None,
) -> Card:
    """Export a model to a file for another runtime.

    Args:
        model: a ViT or a ResNet; it is not changed.
        to: a row of EXPORTS.
        path: the file, with the row's extension.
        merge: tokens to merge per block (default: 0, none); see merge.py for what that costs.
        pixels: batches [B, C, H, W] of normalized images, for rows that calibrate.
        words: strings to keep in the file.

    Raises:
        ConfigError: the extension is not the row's, or the model has no head.
        MissingDependency: the row's library is not installed.
    """
    row, path = pick(EXPORTS, to, "export"), Path(path)
    if path.suffix != row.ending:
        raise ConfigError(
            f"The name of an {to} file must end in {row.ending}; got {path.name!r}. Use {path.stem}{row.ending}."
        )
    graph = Graph(copy.deepcopy(model).float().cpu().eval().requires_grad_(False), merge, row.any_size)
    card = Card(to, model.config, model.input_spec, merge, graph.any_size, dict(words or {}))
    row.write(graph, path, card.to_json(), pixels)
    return card


def is_exported(source: str | Path) -> bool:
    """Return whether a source is an exported file, judging by its extension."""
    return Path(source).suffix in {row.ending for row in EXPORTS.values()}


def open_exported(path: str | Path) -> Exported:
    """Open a file that `export` wrote.

    Args:
        path: the .onnx or .xml file.

    Raises:
        UnreadableFile: the file does not exist, or was not written by `export`.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UnreadableFile(f"Expected an exported file; {str(path)!r} does not exist.")
    opener = next((row.open for row in EXPORTS.values() if row.ending == path.suffix), None)
    if opener is None:
        endings = " or ".join(sorted({row.ending for row in EXPORTS.values()}))
        raise UnreadableFile(f"The name of an exported file must end in {endings}; got {str(path)!r}.")
    text, run = opener(path)
    return Exported(Card.from_json(text, path), run)


def through(to: str, model: Backbone) -> Exported:
    """Export a model to a temporary file and open it.

    Args:
        to: a row of EXPORTS that needs no calibration.
        model: a ViT or a ResNet.

    Raises:
        ConfigError: the row needs images to calibrate on.
    """
    row = pick(EXPORTS, to, "export")
    if row.calibrates:
        raise ConfigError(
            f"{to} must be calibrated on your images first: run `vitkit export WEIGHTS --to {to} --images DATA`, then "
            f"pass the exported file instead of the weights."
        )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        export(model, to, path := Path(folder) / f"model{row.ending}")
        return open_exported(path)
