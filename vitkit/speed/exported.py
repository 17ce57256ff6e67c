"""Models in other runtimes' files, each a Classifier: EXPORTS says how such a file is written and opened.

A file carries its own card (configuration, InputSpec with class names, how it was made), so that whoever opens it
feeds it as the plain model was fed.
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
from vitkit.model.checks import pair
from vitkit.model.config import InputSpec, ViTConfig
from vitkit.model.inputs import validate_and_pad
from vitkit.model.vit import ViT
from vitkit.speed import onnx, openvino
from vitkit.speed.graph import Graph
from vitkit.types import Array

Pixels = Iterable[Tensor]  # batches [B, C, H, W], normalised


@dataclass(frozen=True)
class Card:
    """What an exported file says of itself.

    Args:
        form: the row of EXPORTS that wrote it.
        config: of the model.
        input_spec: what it is fed, and its class names.
        merge: tokens that each block merges.
        any_size: whether it takes images of other sizes.
        words: strings of whoever exported it (source, date, numbers).
    """

    form: str
    config: ViTConfig
    input_spec: InputSpec
    merge: int = 0
    any_size: bool = False
    words: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """The card as a file holds it."""
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
            text: what stands in the file; None where nothing does.
            path: the file, for the message.
        """
        try:
            values = json.loads(text or "")
            return cls(
                str(values["form"]),
                ViTConfig.from_dict(values["config"]),
                InputSpec.from_dict(values["input_spec"]),
                int(values["merge"]),
                bool(values["any_size"]),
                dict(values["words"]),
            )
        except (ValueError, KeyError, TypeError, ConfigError):
            raise UnreadableFile(
                f"{path} was not written by this version of `vitkit export`: it does not say what it "
                f"is to be fed. Export the weights again."
            ) from None


class Exported:
    """A Classifier that another runtime computes, on the CPU.

    Args:
        card: what the file says of itself.
        run: pixels [B, C, H, W] float32 to logits [B, K].
    """

    def __init__(self, card: Card, run: Callable[[Array], Array]) -> None:
        self.card, self.config, self.input_spec, self.run = card, card.config, card.input_spec, run
        self.lock = threading.Lock()  # a runtime's session takes one batch at a time

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [B, K] in fp32, where the pixels were.

        Args:
            x: pixels [B, C, H, W], normalised as `input_spec` says.
        """
        device, x = x.device, validate_and_pad(x, self.config)
        own = tuple(side * self.config.patch_size for side in self.config.grid)
        if not len(x):
            raise InputError("Expected at least one image; got a batch of 0.")
        if not self.card.any_size and tuple(x.shape[2:]) != own:
            raise InputError(
                f"This file was exported for images of {own[0]} x {own[1]}; got {x.shape[2]} x "
                f"{x.shape[3]}. Export it with that --image-size, or as ONNX without --merge, which takes "
                f"any size."
            )
        with self.lock:
            found = self.run(x.detach().float().cpu().contiguous().numpy())
        return torch.from_numpy(found).to(device)

    def feed(self, size: int | tuple[int, int] | None = None, **changes: Any) -> Exported:
        """Change what it is fed, in place: another image size where the file takes any, mean, std.

        Args:
            size: pixels, or (height, width).
            changes: fields of InputSpec.
        """
        if size is not None and pair(size) != self.input_spec.size:
            if not self.card.any_size:
                raise ConfigError(
                    f"This file takes images of {self.input_spec.size[0]} x {self.input_spec.size[1]} "
                    f"only; got --image-size {size}. Export the weights again with that size."
                )
            dataclasses.replace(self.config, image_size=size)  # a multiple of the patch, or refused
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
        ending: of its name.
        write: (graph, path, card, batches for calibration) -> None.
        open: path -> (the card's text, a function that runs the file).
        tolerance: largest difference of a logit from the plain model's, relative to the largest; None for a trade
            whose cost is measured on the user's images.
        calibrates: whether it needs images.
        any_size: whether images of other sizes are taken, unless tokens are merged.
        words: what it is, for help.
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
    model: ViT, to: str, path: str | Path, *, merge: int = 0, pixels: Pixels = (), words: dict[str, str] | None = None
) -> Card:
    """Write a model as another runtime's file.

    Args:
        model: any ViT; it is not changed.
        to: a row of EXPORTS.
        path: the file; its ending is the row's.
        merge: tokens to merge in each block, 0 for none: a trade, see merge.py.
        pixels: batches [B, C, H, W] of images to calibrate on, normalised, where the row calibrates.
        words: strings to keep in the file.

    Raises:
        ConfigError: an ending that is not the row's, or a model without a head.
        MissingDependency: the row's library is not installed.
    """
    row, path = pick(EXPORTS, to, "export"), Path(path)
    if path.suffix != row.ending:
        raise ConfigError(f"{to} files end in {row.ending}; got {path.name!r}. Name it {path.stem}{row.ending}.")
    graph = Graph(copy.deepcopy(model).float().cpu().eval().requires_grad_(False), merge, row.any_size)
    card = Card(to, model.config, model.input_spec, merge, graph.any_size, dict(words or {}))
    row.write(graph, path, card.to_json(), pixels)
    return card


def is_exported(source: str | Path) -> bool:
    """Whether a source is a file that `open_exported` opens, by its ending."""
    return Path(source).suffix in {row.ending for row in EXPORTS.values()}


def open_exported(path: str | Path) -> Exported:
    """Open what `export` wrote.

    Args:
        path: the .onnx or .xml file.

    Raises:
        UnreadableFile: there is no such file, or it is something else.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UnreadableFile(f"There is no file {str(path)!r}.")
    opener = next((row.open for row in EXPORTS.values() if row.ending == path.suffix), None)
    if opener is None:
        raise UnreadableFile(f"{path} ends in none of {', '.join(sorted({r.ending for r in EXPORTS.values()}))}.")
    text, run = opener(path)
    return Exported(Card.from_json(text, path), run)


def through(to: str, model: ViT) -> Exported:
    """A model as a row of EXPORTS runs it, without a file that stays.

    Args:
        to: a row of EXPORTS that calibrates nothing.
        model: any ViT.
    """
    row = pick(EXPORTS, to, "export")
    if row.calibrates:
        raise ConfigError(
            f"{to} is calibrated on your images: export it first (vitkit export WEIGHTS --to {to} "
            f"--images DATA), and give the file instead of the weights."
        )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        export(model, to, path := Path(folder) / f"model{row.ending}")
        return open_exported(path)
