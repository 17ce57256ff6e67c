"""`vitkit models`: the variants of Table 1 and of the authors' later papers, hybrids and ResNets."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of a table.")] = False,
) -> None:
    """List the model variants with their sizes, parameters and FLOPs per image."""
    from vitkit.cli.text import print_table
    from vitkit.model.config import VARIANTS
    from vitkit.model.count import flops, parameters
    from vitkit.model.resnet_config import RESNETS

    rows: dict[str, dict[str, Any]] = {
        name: {
            "layers": c.num_hidden_layers,
            "width": c.hidden_size,
            "mlp": c.intermediate_size,
            "heads": c.num_attention_heads,
            "patch": c.patch_size,
            "parameters": parameters(c),
            "flops": flops(c),
        }
        for name, c in VARIANTS.items()
    }
    for name, resnet in RESNETS.items():
        units, width = sum(resnet.depths), resnet.width
        rows[name] = {"units": units, "width": width, "parameters": parameters(resnet), "flops": flops(resnet)}
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print_table(
        ["variant", "layers#", "width#", "MLP#", "heads#", "patch#", "parameters#", "GFLOPs#"],
        [
            [
                name,
                row.get("layers", "-"),
                row["width"],
                row.get("mlp", "-"),
                row.get("heads", "-"),
                row.get("patch", "-"),
                f"{row['parameters']:,}",
                f"{row['flops'] / 1e9:,.1f}",
            ]
            for name, row in rows.items()
        ],
    )
    print("For images of 224 x 224 pixels and 1000 classes. A multiply-add counts as two operations (FLOPs).")
    print("r50+vit-b/16 is a hybrid: a ResNet before the Transformer. r50x1 is a ResNet without one.")
