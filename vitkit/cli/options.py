"""What commands share: options, their parsers, loading a model, and progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vitkit.model.classifier import Classifier
    from vitkit.model.vit import ViT
    from vitkit.runtime import Runtime
    from vitkit.types import Progress, Tick

# The rows of speed.ENGINES. Reading them for a help text would import torch; a test keeps the two equal.
ENGINES = "torch, compile, cpu-fused, cuda-fused, fp8, onnx, openvino, openvino-int8"

Weights = Annotated[str, typer.Argument(help="Weights: a run folder, a file, or a hub id.", metavar="RUN|WEIGHTS")]
From = Annotated[str, typer.Option("--from", help="Pre-trained weights: a run folder, a file, or a hub id.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Images per batch.")]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=0, help="Worker processes for decoding images (default: one per core)."),
]
Device = Annotated[str, typer.Option("--device", help="Device: auto, cpu, cuda or mps.")]
Precision = Annotated[str, typer.Option("--precision", help="Precision of the computation: fp32, bf16 or fp16.")]
Mean = Annotated[
    str | None,
    typer.Option(
        "--mean",
        help="Mean to subtract from pixels in 0..1, for all channels or for each: 0.5, or 0.485,0.456,0.406 "
        "(default: the checkpoint's).",
    ),
]
Std = Annotated[
    str | None,
    typer.Option("--std", help="Standard deviation to divide by after that (default: the checkpoint's)."),
]
ImageSize = Annotated[
    str | None,
    typer.Option("--image-size", help="Image size in pixels: 384, or HEIGHTxWIDTH (default: the checkpoint's)."),
]
BadImages = Annotated[
    str,
    typer.Option(
        "--bad-images", help="What to do with unreadable images: fail, or skip and list them and exit with code 1."
    ),
]
Features = Annotated[
    str | None,
    typer.Option(
        "--features",
        help="Feature vector: cls (the class token after the final norm), mean (of the patch tokens), pre-logits, or "
        "layers:-2,-1 (default: the model's own pooling).",
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option("--cache", help="Feature cache folder (default: $VITKIT_CACHE, or the user's cache folder)."),
]


def parse_size(text: str | None) -> int | tuple[int, int] | None:
    """Parse `384` or `384x512` (height x width)."""
    from vitkit.errors import ConfigError

    if text is None:
        return None
    sides = text.lower().replace(",", "x").split("x")
    if not 1 <= len(sides) <= 2 or not all(side.strip().isdigit() for side in sides):
        raise ConfigError(f"--image-size must be pixels or HEIGHTxWIDTH, such as 384 or 384x512; got {text!r}.")
    pixels = [int(side) for side in sides]
    return pixels[0] if len(pixels) == 1 else (pixels[0], pixels[1])


def parse_fields(given: list[str] | None) -> dict[str, Any]:
    """Parse `hidden_size=256`, `class_token=false`, `image_size=[64,32]`: names and JSON values, or plain words."""
    from vitkit.errors import ConfigError

    found: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set takes FIELD=VALUE, such as hidden_size=256; got {text!r}.")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value.strip()
    return found


def parse_numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """Parse `0.5` or `0.485,0.456,0.406`."""
    from vitkit.errors import ConfigError

    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{option} must be numbers separated by commas, such as 0.485,0.456,0.406; got {text!r}."
        ) from None


def load(weights: str, runtime: Runtime, mean: str | None, std: str | None, size: str | None) -> ViT:
    """Load a model onto the runtime's device.

    Args:
        weights: anything `vitkit.load` accepts.
        runtime: its device is used.
        mean: value of --mean.
        std: value of --std.
        size: value of --image-size.

    Raises:
        ConfigError: `weights` is an exported file, or an option cannot be parsed.
    """
    from vitkit import checkpoints
    from vitkit.errors import ConfigError
    from vitkit.speed.exported import is_exported

    if is_exported(weights):
        raise ConfigError(
            f"Expected weights; {weights} is an exported file, which works with predict, eval and serve only. "
            f"Pass the weights it was exported from."
        )
    given: dict[str, Any] = {
        "mean": parse_numbers(mean, "--mean"),
        "std": parse_numbers(std, "--std"),
        "image_size": parse_size(size),
    }
    model = checkpoints.load(weights, **{name: value for name, value in given.items() if value is not None})
    return model.to(runtime.device)


def load_classifier(weights: str, runtime: Runtime, mean: str | None, std: str | None, size: str | None) -> Classifier:
    """Load a model as `load` does, or a file that `vitkit export` wrote.

    Args:
        weights: anything `vitkit.load` accepts, or an exported file.
        runtime: its device is used.
        mean: value of --mean.
        std: value of --std.
        size: value of --image-size.
    """
    from vitkit.jobs.open_model import open_model

    return open_model(
        weights,
        runtime.device,
        image_size=parse_size(size),
        mean=parse_numbers(mean, "--mean"),
        std=parse_numbers(std, "--std"),
    )


@contextmanager
def counting(what: str, total: int, *, show: bool = True) -> Iterator[Tick]:
    """Show progress over a known number of images; yields a function to call with each number finished.

    Args:
        what: label of the progress bar.
        total: number of images.
        show: False on processes that stay silent.
    """
    if not show:
        yield lambda count: None
        return
    done = 0
    with progress_bar(what) as show_progress:

        def tick(count: int) -> None:
            nonlocal done
            done = min(done + count, total)
            if total:
                show_progress(done, total)

        yield tick


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """Show progress on stderr: a bar on a terminal, otherwise a line per tenth.

    Args:
        what: label of the bar or of each line.
    """
    if not sys.stderr.isatty():
        shown = 0

        def line(done: int, total: int) -> None:
            nonlocal shown
            if done * 10 // total > shown:
                shown = done * 10 // total
                print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)
