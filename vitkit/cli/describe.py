"""`vitkit describe`: the modules of a model with their shapes and parameters, and drawings of it."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitkit.cli.options import loads_weights

if TYPE_CHECKING:
    from vitkit.model.backbone import Config
    from vitkit.model.config import ViTConfig


@loads_weights
def describe(
    model: Annotated[
        str,
        typer.Argument(
            help="Variant, such as vit-b/16 or its timm name (see `vitkit models`), a run folder, a file or a hub id."
        ),
    ],
    num_classes: Annotated[
        int | None, typer.Option("--classes", help="Number of classes of a variant; 0 for no head (default: 1000).")
    ] = None,
    channels: Annotated[
        int | None, typer.Option("--channels", help="Channels per image of a variant (default: 3).")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Batch size of the shapes.")] = 1,
    depth: Annotated[
        int | None, typer.Option("--depth", min=0, help="Show modules down to this depth (default: all).")
    ] = None,
    draw: Annotated[
        Path | None,
        typer.Option("--draw", help="Folder for SVG drawings of the model and its classes (default: no drawings)."),
    ] = None,
    photo: Annotated[
        str | None,
        typer.Option("--photo", help="Photo whose patches the overview drawing shows (default: empty patches)."),
    ] = None,
    *,
    overrides: dict[str, Any],
) -> None:
    """Show every module of a model with the shapes of its input and output and its parameters."""
    from vitkit.cli.text import print_table
    from vitkit.model.count import flops, parameters

    if photo is not None and draw is None:
        from vitkit.errors import InputError

        raise InputError("--photo is for the drawings; give a folder for them with --draw.")
    config = _config(model, num_classes, channels, overrides)

    from vitkit.explanations.describe import describe as rows_of
    from vitkit.explanations.describe import differences

    label = Path(model).name if Path(model).exists() else model
    rows = [row for row in rows_of(config, batch) if depth is None or row.depth <= depth]
    print_table(
        ["module", "class", "input", "output", "parameters#", "trainable"],
        [
            [
                "  " * row.depth
                + (row.name.rpartition(".")[2] if not row.name.startswith("blocks.") or row.depth > 2 else row.name)
                if row.name
                else label,
                row.kind,
                "-" if row.input is None else list(row.input),
                "-" if row.output is None else list(row.output),
                f"{row.parameters:,}" if row.parameters else "-",
                {True: "yes", False: "no", None: "-"}[row.trainable],
            ]
            for row in rows
        ],
    )
    print(
        f"{parameters(config):,} parameters ({parameters(config) * 4 / 2**20:,.0f} MiB in fp32), "
        f"{flops(config) / 1e9:,.1f} GFLOPs per image of {config.image_hw[0]} x {config.image_hw[1]} pixels."
    )
    if odd := differences(config):
        print(odd)
    if draw is not None:
        from vitkit.errors import ConfigError, OutputError
        from vitkit.explanations.diagram import DIAGRAMS
        from vitkit.explanations.overview import overview
        from vitkit.model.resnet_config import ResNetConfig

        if isinstance(config, ResNetConfig):
            raise ConfigError("--draw draws Vision Transformers; this model is a ResNet. Leave --draw out.")
        diagrams = DIAGRAMS | ({"overview": partial(overview, photo=_photo(photo, config))} if photo else {})
        try:
            draw.mkdir(parents=True, exist_ok=True)
            for name, diagram in diagrams.items():
                path = draw / f"{name}.svg"
                try:
                    path.write_text(diagram(config), encoding="utf-8")
                    print(f"wrote {path}")
                except ConfigError as reason:  # the five and the twelve classes do not have every option
                    print(f"left out {path.name}: {reason}")
        except OSError as error:
            raise OutputError(
                f"Expected a writable folder; cannot write to {draw} ({error.strerror}). Choose another with --draw."
            ) from error


def _photo(path: str, config: ViTConfig) -> Any:
    """Return a photo as the model sees it, [H, W, 3]."""
    from vitkit.data import preprocess
    from vitkit.evaluation.predict import Images
    from vitkit.explanations.common import shown
    from vitkit.model.config import InputSpec

    source, spec = Images(path), InputSpec.of(config)
    return shown(preprocess(source.read(0)[0], spec, source.names[0])[None], spec)[0]


def _config(model: str, num_classes: int | None, channels: int | None, overrides: dict[str, Any]) -> Config:
    """Return the configuration of a variant with these changes, or of trained weights loaded with these options."""
    from vitkit.api.models import names_weights
    from vitkit.checkpoints import load
    from vitkit.errors import ConfigError, InputError
    from vitkit.model.create import configuration

    given = {"num_classes": num_classes, "num_channels": channels}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        variant = None if Path(model).expanduser().exists() else configuration(model)
    except ConfigError:
        if not names_weights(model):
            raise
        variant = None
    if variant is not None:
        if odd := overrides.keys() - {field.name for field in dataclasses.fields(variant)}:
            raise InputError(
                f"Expected trained weights with --{min(odd)}; {model} is a variant. Leave --{min(odd)} out."
            )
        return configuration(model, **changes, **overrides)
    for option, value in (("--classes", num_classes), ("--channels", channels)):
        if value is not None:
            raise InputError(f"Expected a variant with {option}; {model} is trained weights. Leave {option} out.")
    return load(model, **overrides).config
