"""argv -> rooms -> text and exit code: one file a command, listed in COMMANDS.

What does not belong here: any work. A command parses, calls a room or a job, and prints; nobody imports this room.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from vitkit.cli import (
    bench,
    convert,
    demo,
    describe,
    doctor,
    embed,
    eval,
    explain,
    export,
    figures,
    inspect,
    models,
    patches,
    predict,
    probe,
    recipes,
    report,
    runs,
    serve,
    sweep,
    train,
    walk,
)
from vitkit.errors import VitkitError

COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": demo.demo,
    "train": train.train,
    "recipes": recipes.recipes,
    "sweep": sweep.sweep,
    "runs": runs.runs,
    "diff": runs.diff,
    "walk": walk.walk,
    "models": models.models,
    "describe": describe.describe,
    "explain": explain.explain,
    "figures": figures.figures,
    "patches": patches.patches,
    "report": report.report,
    "doctor": doctor.doctor,
    "convert": convert.convert,
    "inspect": inspect.inspect,
    "export": export.export,
    "bench": bench.bench,
    "predict": predict.predict,
    "eval": eval.evaluate,
    "embed": embed.embed,
    "probe": probe.probe,
    "serve": serve.serve,
}

_format = warnings.formatwarning

app = typer.Typer(
    help="The Vision Transformer as real software: train, probe, evaluate, look inside, convert, serve.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command in COMMANDS.items():
    app.command(_name, no_args_is_help=False)(_command)


def main() -> None:
    """Run the command line. A mistake of the user's is one sentence on stderr and exit code 2."""
    warnings.formatwarning = _sentence
    try:
        app()
    except VitkitError as error:
        print(f"vitkit: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("vitkit: stopped.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; nothing is left to say
        sys.exit(141)


def _sentence(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of ours without the line of code that gave it; others' as ever."""
    ours = Path(filename).is_relative_to(Path(__file__).parent.parent)
    return f"vitkit: {message}\n" if ours else _format(message, category, filename, lineno, line)
