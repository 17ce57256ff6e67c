"""What commands share: options, their parsers, loading a model, and progress."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from vitkit.model.backbone import Backbone
    from vitkit.runtime import Runtime
    from vitkit.types import Progress, Tick

# The rows of speed.ENGINES. Reading them for a help text would import torch; a test keeps the two equal.
ENGINES = "torch, compile, cpu-fused, cuda-fused, fp8, onnx, openvino, openvino-int8"

of_loading = partial(typer.Option, rich_help_panel="How the weights are loaded")
Weights = Annotated[str, typer.Argument(help="Weights: a run folder, a file, or a hub id.", metavar="RUN|WEIGHTS")]
From = Annotated[str, typer.Option("--from", help="Pre-trained weights: a run folder, a file, or a hub id.")]
BatchOf = Annotated[int, typer.Option("--batch-size", min=1, help="Images per batch.")]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        min=1,
        help="Images per batch (default: 256 on CUDA for images of up to 256 pixels, 64 otherwise).",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=0, help="Worker processes for decoding images (default: one per core)."),
]
Device = Annotated[str, typer.Option("--device", help="Device: auto, cpu, cuda, cuda:1 or mps.")]
Precision = Annotated[
    str,
    typer.Option(
        "--precision",
        help="Precision: fp32, bf16 or fp16 (default: auto, bf16 on CUDA and fp32 elsewhere).",
    ),
]
Decode = Annotated[
    str,
    typer.Option(
        "--decode",
        help="Where JPEGs are decoded: cpu, or gpu (faster, with slightly other pixels; needs torchvision) "
        "(default: cpu).",
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        help="Cluster to run on: ray. --out is then a folder of Parquet shards that all machines share, or an s3:// "
        "address; unreadable images become rows with an error (default: this machine).",
    ),
]
Host = Annotated[str, typer.Option("--host", help="Address to listen on (default: 127.0.0.1, this machine only).")]
Port = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 for any free one (default: 8000).")
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token", envvar="VITKIT_TOKEN", help="Token that clients must send as a bearer token (default: none)."
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        help="Host name under which clients may reach the server; repeat for several "
        "(default: localhost if only this machine can reach it, otherwise any).",
    ),
]
LogRequests = Annotated[bool, typer.Option("--log-requests", help="Print every request.")]
ImageSize = Annotated[
    str | None,
    of_loading("--image-size", help="Image size in pixels: 384, or HEIGHTxWIDTH (default: the checkpoint's)."),
]
# Options of every command that loads weights, by the argument of `vitkit.load` that each one sets.
LOADING: dict[str, Any] = {
    "image_size": ImageSize,
    "num_attention_heads": Annotated[
        int | None,
        of_loading("--heads", min=1, help="Number of attention heads (default: what the checkpoint states)."),
    ],
    "hidden_act": Annotated[
        str | None,
        of_loading(
            "--activation",
            help="Activation of the MLP: gelu, gelu_tanh, quick_gelu, relu, selu, silu or swiglu (default: what the "
            "checkpoint states).",
        ),
    ],
    "mean": Annotated[
        str | None,
        of_loading(
            "--mean",
            help="Mean to subtract from pixels in 0..1, for all channels or for each: 0.5, or 0.485,0.456,0.406 "
            "(default: the checkpoint's).",
        ),
    ],
    "std": Annotated[
        str | None,
        of_loading("--std", help="Standard deviation to divide by after that (default: the checkpoint's)."),
    ],
    "resize": Annotated[
        str | None,
        of_loading(
            "--resize",
            help="How to resize images: squash (to the input size), or crop (keep the aspect ratio, take the centre) "
            "(default: the checkpoint's).",
        ),
    ],
    "crop": Annotated[
        float | None,
        of_loading(
            "--crop", help="With --resize crop, share of the side to keep, such as 0.9 (default: the checkpoint's)."
        ),
    ],
    "interpolation": Annotated[
        str | None,
        of_loading(
            "--interpolation",
            help="Filter for resizing: nearest, bilinear, bicubic or lanczos (default: the checkpoint's).",
        ),
    ],
    "key": Annotated[
        str | None,
        of_loading(
            "--key",
            help="Where a PyTorch file that holds more than weights keeps them, such as student (default: a teacher or "
            "an average before the rest).",
        ),
    ],
    "backbone": Annotated[
        str | None,
        of_loading("--backbone", help="Where the backbone of a LoRA file is (default: where the file says)."),
    ],
}
Licence = Annotated[
    str | None,
    typer.Option("--licence", help="Licence of the weights, such as apache-2.0 (default: what the weights state)."),
]
BadImages = Annotated[
    str,
    typer.Option(
        "--bad-images", help="What to do with unreadable images: fail, or skip and list them and exit with code 1."
    ),
]
BadImagesOrRows = Annotated[
    str | None,
    typer.Option(
        "--bad-images",
        help="What to do with unreadable images: fail, or skip and list them and exit with code 1 (default: fail; with "
        "--on ray, skip, which gives them a row with their error).",
    ),
]
Features = Annotated[
    str | None,
    typer.Option(
        "--features",
        help="Feature vector: cls (the class token after the final norm), mean (of the patch tokens), pre-logits, "
        "projected (by CLIP), patches (all of them), or layers:-2,-1 (default: the model's own pooling).",
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


def collect(
    tables: Mapping[str, Mapping[str, Any]], parse: Mapping[str, Callable[[Any], Any]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of some tables; it receives those of a table as one dict.

    An option that the command has itself is left to the command, and one that the user did not give is left out.

    Args:
        tables: argument of the command that receives the dict -> name -> annotation of an option.
        parse: name -> what turns the given value into the one in the dict.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = {p.name: p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()}
        shared = {
            name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
            for table in tables.values()
            for name, option in table.items()
            if name not in own
        }

        @functools.wraps(command)
        def collected(**given: Any) -> None:
            values = {name: value for name in shared if (value := given.pop(name)) is not None}
            values |= {name: parse[name](values[name]) for name in values if name in parse}
            command(**given, **{to: {n: values[n] for n in table if n in values} for to, table in tables.items()})

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (own | shared).values()]
        parameters = [p for p in parameters if p.name not in tables]
        collected.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        collected.__annotations__ = {p.name: p.annotation for p in parameters}
        return collected

    return decorate


def loads_weights(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options in LOADING; it receives them parsed, as one dict called `overrides`."""
    parse: dict[str, Callable[[Any], Any]] = {
        "image_size": parse_size,
        "mean": partial(parse_numbers, option="--mean"),
        "std": partial(parse_numbers, option="--std"),
    }
    return collect({"overrides": LOADING}, parse)(command)


def load(weights: str, runtime: Runtime, overrides: Mapping[str, Any]) -> Backbone:
    """Load a model onto the runtime's device.

    Args:
        weights: anything `vitkit.load` accepts.
        runtime: its device is used.
        overrides: what `loads_weights` gives a command.

    Raises:
        ConfigError: `weights` is an exported file.
    """
    from vitkit import checkpoints
    from vitkit.errors import ConfigError
    from vitkit.speed.exported import is_exported

    if is_exported(weights):
        raise ConfigError(
            f"Expected weights; {weights} is an exported file, which works with predict, eval and serve only. "
            f"Pass the weights it was exported from."
        )
    return checkpoints.load(weights, **overrides).to(runtime.device)


def free_place(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3, ... that does not exist."""
    number, place = 2, path
    while place.exists():
        place, number = path.with_name(f"{path.name}-{number}"), number + 1
    return place


def one_photo(image: str | None) -> str | None:
    """Return the photo that a command shows, which can be read; of several, say which one it is.

    Args:
        image: what the user gave: a file, a folder or a pattern; None for a sample photo.
    """
    if image is None:
        return None
    from vitkit.evaluation.predict import Images

    found = Images(image)
    found.read(0)
    if len(found) > 1:
        print(f"Showing {found.names[0]}, the first of {len(found)} photos in {image}.")
    return found.names[0]


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
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from vitkit.cli.text import console

    with Bar(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)
