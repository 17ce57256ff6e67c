"""What every command that takes weights has in common: its options, how it loads, how it tells of progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vitkit.model.classifier import Classifier
    from vitkit.model.vit import ViT
    from vitkit.runtime import Runtime

# The rows of speed.ENGINES, which a help text cannot read without importing torch; a test compares them.
ENGINES = "torch, compile, cpu-fused, cuda-fused, fp8, onnx, openvino, openvino-int8"

Weights = Annotated[str, typer.Argument(help="Weights: a run folder, a file, or a hub id.", metavar="RUN|WEIGHTS")]
From = Annotated[str, typer.Option("--from", help="Pre-trained weights: a file, a run folder, or a hub id.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Images at once.")]
Workers = Annotated[
    int | None, typer.Option("--workers", min=0, help="Processes that decode; one a core when not given.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
Precision = Annotated[str, typer.Option("--precision", help="fp32, bf16 or fp16.")]
Mean = Annotated[
    str | None,
    typer.Option(
        "--mean", help="Subtracted from pixels in 0..1, instead of what the checkpoint says: 0.5 or 0.485,0.456,0.406."
    ),
]
Std = Annotated[str | None, typer.Option("--std", help="Divides after that.")]
ImageSize = Annotated[str | None, typer.Option("--image-size", help="Another size: pixels, or HEIGHTxWIDTH.")]
BadImages = Annotated[str, typer.Option("--bad-images", help="fail, or skip and name them (then the exit code is 1).")]
Features = Annotated[
    str | None,
    typer.Option(
        "--features",
        help="Which vector: cls (the class token after the final "
        "norm), mean (of the patches), pre-logits, layers:-2,-1; the model's "
        "own pooling when not given.",
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache", help="Folder of the feature cache; $VITKIT_CACHE or the user's cache folder when not given."
    ),
]


def parse_size(text: str | None) -> int | tuple[int, int] | None:
    """Parse `384` or `384x512` (height x width)."""
    from vitkit.errors import ConfigError

    if text is None:
        return None
    sides = text.lower().replace(",", "x").split("x")
    if not 1 <= len(sides) <= 2 or not all(side.strip().isdigit() for side in sides):
        raise ConfigError(f"--image-size takes pixels or HEIGHTxWIDTH, such as 384 or 384x512; got {text!r}.")
    pixels = [int(side) for side in sides]
    return pixels[0] if len(pixels) == 1 else (pixels[0], pixels[1])


def parse_numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """Parse `0.5` or `0.485,0.456,0.406`."""
    from vitkit.errors import ConfigError

    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} must be numbers with commas between them; got {text!r}.") from None


def load(weights: str, runtime: Runtime, mean: str | None, std: str | None, size: str | None) -> ViT:
    """The model that the options mean, on its device.

    Args:
        weights: what `vitkit.load` takes.
        runtime: says the device.
        mean: --mean.
        std: --std.
        size: --image-size.
    """
    from vitkit import checkpoints
    from vitkit.errors import ConfigError
    from vitkit.speed.exported import is_exported

    if is_exported(weights):
        raise ConfigError(
            f"{weights} is an exported file, which only predicts (predict, eval, serve); give the "
            f"weights that it was made of."
        )
    given: dict[str, Any] = {
        "mean": parse_numbers(mean, "--mean"),
        "std": parse_numbers(std, "--std"),
        "image_size": parse_size(size),
    }
    model = checkpoints.load(weights, **{name: value for name, value in given.items() if value is not None})
    return model.to(runtime.device)


def predictor(weights: str, runtime: Runtime, mean: str | None, std: str | None, size: str | None) -> Classifier:
    """`load`, that also takes what `vitkit export` wrote.

    Args:
        weights: what `vitkit.load` takes, or an exported file.
        runtime: says the device.
        mean: --mean.
        std: --std.
        size: --image-size.
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
def counting(what: str, total: int, *, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes numbers of images as they are done.

    Args:
        what: the word before the bar.
        total: images in all.
        show: False where another process does.
    """
    if not show:
        yield lambda count: None
        return
    done = 0
    with progress_bar(what) as tell:

        def tick(count: int) -> None:
            nonlocal done
            done = min(done + count, total)
            if total:
                tell(done, total)

        yield tick


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Tell how far a count has come: a bar on a terminal, else a line every tenth; on standard error.

    Args:
        what: the word before it.
    """
    if not sys.stderr.isatty():
        told = 0

        def line(done: int, total: int) -> None:
            nonlocal told
            if done * 10 // total > told:
                told = done * 10 // total
                print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)
