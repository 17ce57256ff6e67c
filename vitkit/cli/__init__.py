"""The command line: argv -> rooms -> text and an exit code. One file per command, listed in COMMANDS.

What does not belong here: any work. A command parses, calls a room or a job, and prints; nobody imports this room.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

import vitkit
from vitkit.cli import (
    bench,
    card,
    convert,
    demo,
    describe,
    doctor,
    embed,
    eval,
    explain,
    explore,
    export,
    figures,
    inspect,
    learn,
    models,
    patches,
    predict,
    pretrain,
    probe,
    push,
    recipes,
    report,
    runs,
    search,
    serve,
    study,
    suggest,
    sweep,
    teach,
    train,
    tune,
    walk,
)
from vitkit.cli.text import one_line, only_printable, prepare
from vitkit.devices import import_torch, start_device
from vitkit.errors import BadImage, VitkitError

COMMANDS: dict[str, dict[str, Callable[..., Any]]] = {  # heading in `vitkit --help` -> its commands
    "Learn": {
        "demo": demo.demo,
        "learn": learn.learn,
        "walk": walk.walk,
        "explore": explore.explore,
        "models": models.models,
        "describe": describe.describe,
        "patches": patches.patches,
        "figures": figures.figures,
    },
    "Data": {"doctor": doctor.doctor, "search": search.search, "suggest": suggest.suggest},
    "Train": {
        "train": train.train,
        "pretrain": pretrain.pretrain,
        "probe": probe.probe,
        "teach": teach.teach,
        "tune": tune.tune,
        "recipes": recipes.recipes,
        "sweep": sweep.sweep,
        "study": study.study,
        "runs": runs.runs,
        "diff": runs.diff,
        "report": report.report,
    },
    "Use": {
        "predict": predict.predict,
        "eval": eval.evaluate,
        "explain": explain.explain,
        "embed": embed.embed,
    },
    "Ship": {
        "convert": convert.convert,
        "inspect": inspect.inspect,
        "export": export.export,
        "bench": bench.bench,
        "serve": serve.serve,
        "card": card.card,
        "push": push.push,
    },
}


class Command(TyperCommand):
    """A command whose help ends every option with `(default: ...)`, where the text does not say so itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for option in self.params:
            if not isinstance(option, TyperOption):
                continue
            option.show_default = False  # typer would add its own `[default: ...]`
            if option.help and "(default:" not in option.help and option.default is not None:
                default = ("on" if option.default else "off") if option.is_flag else option.default
                default = f"{default:g}" if isinstance(default, float) else default
                option.help = f"{option.help.removesuffix('.')} (default: {default})."

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command; what it prints cannot contain codes that a terminal obeys."""
        device = ctx.params.get("device")
        if device and not ctx.params.get("on"):  # another machine computes with --on
            start_device(device)
            import_torch()
        try:
            with only_printable():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            print("vitkit: stopped.", file=sys.stderr, flush=True)  # typer would say nothing
            raise
        except BadImage as error:
            if "--bad-images" not in str(error) and any(option.name == "bad_images" for option in self.params):
                text = str(error)
                joined = f"{text} Or" if text.endswith(".") else f"{text}, or"  # a command stays as it is typed
                error.args = (f"{joined} leave out all such images with --bad-images skip.",)
            raise


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
for _heading, _commands in COMMANDS.items():
    for _name, _command in _commands.items():
        app.command(_name, cls=Command, rich_help_panel=_heading)(_command)

# What may happen wherever a file is opened or something is printed: the sentence and the exit code.
UNTOLD = {
    errno.ENAMETOOLONG: ("A name is too long for this file system. Use a shorter one.", 2),
    errno.ENOSPC: ("No space is left where the output goes. Free some, or redirect the output to another disk.", 3),
}

_format = warnings.formatwarning


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"vitkit {vitkit.__version__}")
        raise typer.Exit


@app.callback(context_settings={"help_option_names": ["-h", "--help"]})
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The Vision Transformer as real software: train, probe, evaluate, look inside, convert, serve."""


def main() -> None:
    """Run the command line. An error of `vitkit.errors` prints one sentence to stderr; its exit code is 2 for most."""
    warnings.formatwarning = _sentence
    sys.stdout, sys.stderr = prepare(sys.stdout), prepare(sys.stderr)
    try:
        app()
    except VitkitError as error:
        print(f"vitkit: {one_line(str(error))}", file=sys.stderr, flush=True)
        if not error.transient:
            _end_launcher()
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == 2:  # an option or argument that does not exist
            _end_launcher()
        raise
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output is gone: there is nobody left to tell
        sys.exit(141)
    except (MemoryError, RuntimeError, OSError) as error:
        from vitkit.runtime import out_of_memory

        if isinstance(error, OSError) and error.errno in UNTOLD:
            said, code = UNTOLD[error.errno]
            print(f"vitkit: {said}", file=sys.stderr)
            sys.exit(code)
        if not out_of_memory(error):
            raise
        what = (str(error).splitlines() or ["MemoryError"])[0]
        print(f"vitkit: No memory was left ({what[:200]}). Use smaller batches or fewer --workers.", file=sys.stderr)
        sys.exit(5)


def program() -> None:
    """Run the command line in a process of its own, and end that as soon as the command has ended."""
    code: object = None
    try:
        main()
    except SystemExit as end:
        code = end.code
    # Here the error is gone, and with it what the variables of a command hold, such as a database.
    # Several processes end in the usual way: one may still need what another one has.
    if "torch" in sys.modules and "RANK" not in os.environ and isinstance(code, int | None):
        from vitkit.process_group import leave

        leave(code or 0)
    sys.exit(code)  # type: ignore[arg-type]


def _end_launcher() -> None:
    from vitkit.process_group import end_launcher

    end_launcher()


def _sentence(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format one of our warnings without the line of code that raised it, and all others as Python does."""
    ours = Path(filename).is_relative_to(Path(__file__).parent.parent)
    return f"vitkit: {message}\n" if ours else _format(message, category, filename, lineno, line)
