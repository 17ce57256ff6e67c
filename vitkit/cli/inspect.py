"""`vitkit inspect SOURCE`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from vitkit.cli.options import loads_weights


@loads_weights
def inspect(
    source: Annotated[
        str, typer.Argument(help="A file, a folder, a run, or a hub id such as google/vit-base-patch16-224.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    dialect: Annotated[
        str | None, typer.Option(help="Dialect of SOURCE (default: recognised from the names of its tensors).")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit on the hub (default: the main branch).")
    ] = None,
    *,
    overrides: dict[str, Any],
) -> None:
    """Show what a checkpoint holds: dialect, variant, tensors, numerics, preprocessing, classes, sha256."""
    from vitkit import checkpoints

    found = checkpoints.inspect(source, dialect=dialect, revision=revision, **overrides)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    config, spec, numerics = found["config"], found["input_spec"], found["numerics"]
    unused = f", {len(found['unused'])} of them not used ({', '.join(found['unused'][:3])})" if found["unused"] else ""
    shown = f" ({', '.join(found['class_names'][:5])}{', ...' if found['classes'] > 5 else ''})"
    if "depths" in config:
        shape = f"{config['depths']} units, width {config['hidden_sizes'][-1]}, image {config['image_size']}"
    else:
        shape = (
            f"{config['num_hidden_layers']} layers, width {config['hidden_size']}, MLP {config['intermediate_size']}, "
            f"{config['num_attention_heads']} heads, patch {config['patch_size']}, image {config['image_size']}"
        )
    rows = {
        "file": found["file"],
        "dialect": found["dialect"],
        "variant": found["variant"] or "not a published one",
        "shape": shape,
        "tensors": f"{found['tensors']}, {found['parameters']:,} parameters, {found['dtype']}{unused}",
        "numerics": ", ".join(f"{name} {value}" for name, value in numerics.items()),
        "input": ", ".join(f"{name} {value}" for name, value in spec.items() if name != "thresholds"),
        "classes": f"{found['classes']}{shown if found['class_names'] else ' (unnamed)'}",
        "licence": found["licence"] or "not stated",
        "sha256": found["sha256"],
    }
    if limits := spec.get("thresholds"):
        listed = ", ".join(f"{limit:.3g}" for limit in limits[:5]) + ", ..." * (len(limits) > 5)
        rows["classes"] += "; any number of them per image, thresholds " + listed
    for name, value in rows.items():
        print(f"{name:<9} {value}")
    for note in found["notes"]:
        print(f"note      {note}")
