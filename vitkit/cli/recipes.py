"""`vitkit recipes`: list the recipes, or show one."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def recipes(
    name: Annotated[str | None, typer.Argument(help="Recipe to show in full (default: list all).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the recipes: the paper's Tables 3 and 4, later publications, and our own."""
    from vitkit.cli.text import print_table
    from vitkit.errors import pick
    from vitkit.training.recipes import RECIPES

    if name is not None:
        recipe = pick(RECIPES, name, "recipe")
        values = recipe.to_dict() | {"lr(t)": recipe.formula}
        if as_json:
            print(json.dumps(values, indent=1))
        else:
            print_table(["field", "value"], [item for item in values.items() if item[1] not in (None, [], "")])
        return
    if as_json:
        print(json.dumps({key: recipe.to_dict() for key, recipe in RECIPES.items()}, indent=1))
        return
    print_table(
        ["recipe", "for", "length", "batch#", "lr#", "decay", "weight decay#", "source", "what to expect"],
        [
            (
                key,
                ", ".join(r.models) or ("its own" if r.config else "any"),
                f"{r.epochs:g} epochs" if r.epochs is not None else f"{r.steps:,} steps",
                r.batch_size,
                "/".join(f"{lr:g}" for lr in r.lr_choices) or f"{r.lr:g}",
                r.decay,
                f"{r.weight_decay:g}",
                r.source,
                r.expect,
            )
            for key, r in RECIPES.items()
        ],
    )
