"""`--config run.toml`: the options of a command from a file. The command line wins over the file."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="TOML file with any of these options; the command line wins. Every run writes one, config.toml, that "
        "repeats it (default: none).",
    ),
]
# Options of which a command takes one: given on the command line, it also replaces the other one in the file.
RIVALS = {
    "epochs": ("steps",),
    "steps": ("epochs",),
    "micro_batch": ("accumulate",),
    "accumulate": ("micro_batch",),
    "model": ("weights",),
    "weights": ("model", "fields"),
}


def takes_config(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the option --config; it receives fields of the recipe that have no option as the dict `more`."""
    hints = get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()]

    @functools.wraps(command)
    def configured(ctx: typer.Context, config: Path | None, **given: Any) -> None:
        command(**given, more={}) if config is None else command(**given | _values(ctx, config))

    extra = {"ctx": typer.Context, "config": Config}
    parameters = [p for p in own if p.name != "more"]
    parameters += [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=a) for n, a in extra.items()]
    parameters[-1] = parameters[-1].replace(default=None)
    configured.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    configured.__annotations__ = {p.name: p.annotation for p in parameters}
    return configured


def _values(ctx: typer.Context, file: Path) -> dict[str, Any]:
    """Return the arguments of the command that a file sets and the command line does not."""
    from vitkit.errors import ConfigError, nearest
    from vitkit.training.config_file import FIELDS, read

    options = {option.name: option for option in ctx.command.params if option.name not in ("config", "help")}
    names = {spelt.lstrip("-").replace("-", "_"): name for name, o in options.items() for spelt in (*o.opts, name)}
    on_command_line = {name for name in options if ctx.get_parameter_source(str(name)).name == "COMMANDLINE"}  # type: ignore[union-attr]
    replaced = on_command_line | {other for name in on_command_line for other in RIVALS.get(str(name), ())}
    found: dict[str, Any] = {"more": {}}
    for key, value in read(file).items():
        name = names.get(key.replace("-", "_"), key)
        if name in replaced or ((name, value) == ("batch_size", "auto") and "micro_batch" in on_command_line):
            continue
        if name in options:
            found[str(name)] = _value(ctx, options[name], value, f"{file}: {key}")
        elif name in FIELDS:
            found["more"][name] = value
        else:
            known = sorted({*map(str, names), *FIELDS})
            raise ConfigError(f"{file}: `vitkit {ctx.info_name}` has no option {key!r}{nearest(key, known) or '.'}")
    return found


def _value(ctx: typer.Context, option: Any, value: Any, where: str) -> Any:
    """Return a value of the file as the command line would have given it."""
    from vitkit.errors import ConfigError

    if isinstance(value, Mapping) and option.name in ("recipe", "model"):
        return value
    if isinstance(value, Mapping) and option.name == "fields":
        value = [f"{name}={json.dumps(field)}" for name, field in value.items()]
    elif isinstance(value, list) and not getattr(option, "multiple", False):  # --mean 0.5,0.5 and --image-size 64,96
        value = ",".join(str(item) for item in value)
    if not isinstance(value, bool):
        value = [str(item) for item in value] if isinstance(value, list) else str(value)
    try:
        return option.process_value(ctx, value)
    except Exception as error:
        if not hasattr(error, "format_message"):  # a mistake in typing that the command line would refuse
            raise
        raise ConfigError(f"{where}: {error.format_message().rstrip('.')}; got {value!r}.") from error
