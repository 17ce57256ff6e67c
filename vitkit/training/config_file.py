"""config.toml: a run as a file that repeats it, `vitkit train --config RUN/config.toml --out NEW`.

Its keys are the arguments of `vitkit.train`, so Python reads it too: `vitkit.train(out="new", **tomllib.load(file))`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from vitkit.errors import ConfigError, UnreadableFile
from vitkit.training.recipe import Recipe
from vitkit.training.recipes import RECIPES
from vitkit.training.settings import Settings

FILE = "config.toml"  # in the run folder
FIELDS = [f.name for f in fields(Recipe)]
DESCRIPTIVE = ("source", "ours", "expect", "models", "config", "small_data", "lr_choices")  # of a named recipe
EMPTY: dict[str, list[float]] = {"scale": []}  # how TOML says None for fields with another default


def read(file: str | Path) -> dict[str, Any]:
    """Read a config file; the options in its table `loading` stand next to the others.

    Raises:
        UnreadableFile: there is no such file.
        ConfigError: it is not valid TOML.
    """
    try:
        with open(Path(file).expanduser(), "rb") as opened:
            values = tomllib.load(opened)
    except OSError as error:
        raise UnreadableFile(f"Expected a TOML file; {file} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}.") from error
    loading = values.pop("loading", {})
    if not isinstance(loading, Mapping):
        raise ConfigError(f"{file}: loading must be a table, [loading]; got {loading!r}.")
    return {**values, **loading}


def repeat(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `vitkit.train` that repeat a run.

    Args:
        info: the contents of its run.json.
    """
    recipe, name = Recipe.from_dict(info["recipe"]), info["recipe_name"]
    shards = bool(info["settings"].get("shard"))
    plain, usual = {**Settings(shard=shards).to_dict(), "shard": False}, {}
    if name in RECIPES:
        base, now = RECIPES[name].to_dict(), recipe.to_dict()
        usual = {key: value for key, value in now.items() if value != base[key] and key not in DESCRIPTIVE}
        if "batch_size" in usual:
            usual["lr"] = recipe.lr  # which would otherwise follow the batch size
        usual = {key: value for key, value in usual.items() if value is not None}
    # A recipe of one's own, or one that has changed since, is written out.
    named = name in RECIPES and RECIPES[name].change(**usual).to_dict() == {**recipe.to_dict(), **_described(name)}
    weights, data = info["weights"], info["data"]
    values = {
        "data": data["path"] or data["spec"],
        "recipe": name if named else recipe.to_dict(),
        "model": info["same"]["config"] if info["model"] == "custom" else info["model"],
        "weights": absolute_weights(weights) if weights else None,
        "image_size": info.get("image_size"),
        **(usual if named else {}),
        **{key: value for key, value in info["settings"].items() if value != plain.get(key)},
        "fields": info.get("fields"),
        "loading": info.get("loading"),
    }
    return _without_none(values)


def _described(name: str) -> dict[str, Any]:
    values = RECIPES[name].to_dict()
    return {key: values[key] for key in DESCRIPTIVE}


def absolute_weights(weights: str) -> str:
    """Return weights by their absolute path if they are a file or a folder here, and otherwise as they are."""
    place, at, which = weights.partition("@")
    return f"{Path(place).expanduser().absolute()}{at}{which}" if Path(place).expanduser().exists() else weights


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what TOML cannot say: the default of every such field is None, except those of EMPTY."""
    said = {key: EMPTY.get(key) if value is None else value for key, value in values.items()}
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in said.items()
        if value is not None and value != {}
    }


def as_toml(info: Mapping[str, Any]) -> str:
    """Return the text of config.toml.

    Args:
        info: the contents of run.json.
    """
    command = "pretrain" if info["recipe"]["objective"] == "masked-patch" else "train"
    lines = [f"# Repeats this run: vitkit {command} --config {FILE} --out NEW_FOLDER"]
    if info.get("own_weights"):
        lines.append("# The model was passed in Python; pass it again, as it was: vitkit.train(model=..., ...)")
    return "\n".join([*lines, *toml_lines(repeat(info))]) + "\n"


def _literal(value: Any) -> str:
    """Return a value as TOML writes it: as JSON does, except for the character 127 and letters beyond 16 bits."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_lines(values: Mapping[str, Any], table: str = "") -> list[str]:
    """Return the lines of a TOML document: values first, then tables.

    Args:
        values: text, numbers, truth values, lists of these, and mappings.
        table: name of the table that they belong to (default: none).
    """
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    lines = [f"{key} = {_literal(value)}" for key, value in plain.items()]
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{table}{key}]", *toml_lines(value, f"{table}{key}.")]
    return lines
