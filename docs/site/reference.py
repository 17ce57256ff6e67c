"""Reference pages made from the code: every command with its options, every public name with its docstring, and source
files whose lines other pages link to."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from typer.core import TyperArgument

import vitkit
from vitkit.cli import COMMANDS, app

SECTION = re.compile(r"^(Args|Returns|Raises|Example|Yields|Attributes):$")


def commands() -> str:
    """Write the page of all commands, under the headings of `vitkit --help`."""
    group: Any = typer.main.get_command(app)
    text = ["# Commands\n", "What `vitkit COMMAND --help` prints, made from the code.\n"]
    for heading, names in COMMANDS.items():
        text.append(f"## {heading}\n")
        for name in names:
            command = group.commands[name]
            arguments = [p for p in command.params if isinstance(p, TyperArgument)]
            usage = " ".join([f"vitkit {name}", *(_argument(p) for p in arguments), "[OPTIONS]"])
            text.append(f"### {name}\n\n```text\n{usage}\n```\n\n{inspect.cleandoc(command.help)}\n")
            text.append(_table(command.params))
    return "\n".join(text)


def _argument(argument: Any) -> str:
    return _name(argument) if argument.required else f"[{_name(argument)}]"


def _name(argument: Any) -> str:
    return (argument.metavar or argument.name).strip("{}").upper().replace("|", " or ")


def _table(params: list[Any]) -> str:
    rows = []
    for option in params:
        if option.name == "help":
            continue
        names = [_name(option)] if isinstance(option, TyperArgument) else [*option.opts, *option.secondary_opts]
        rows.append(f"| {', '.join(f'`{_cell(n)}`' for n in names)} | {_cell(option.help or '')} |")
    return "\n".join(["| option | |", "|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def python() -> str:
    """Write the page of all public names: signature, docstring, example."""
    text = ["# Python\n", "Everything that `import vitkit` offers, made from the docstrings.\n"]
    for name in sorted(n for n in vitkit.__all__ if not n.startswith("__")):
        thing = getattr(vitkit, name)
        text.append(
            f"## vitkit.{name}\n\n```text\n{_signature(name, thing)}\n```\n\n{docstring(inspect.getdoc(thing) or '')}"
        )
        if inspect.isclass(thing):
            for method, member in _methods(thing):
                text.append(f"### {name}.{method}\n\n```text\n{_signature(method, member)}\n```\n")
                text.append(docstring(inspect.getdoc(member) or ""))
    return "\n".join(text)


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(kind).items():
        if not name.startswith("_") and inspect.isfunction(member) and inspect.getdoc(member):
            yield name, member


def _signature(name: str, thing: Any) -> str:
    signature = inspect.signature(thing)
    parameters = [str(p).replace("vitkit.model.", "") for p in signature.parameters.values()]
    one = f"{name}({', '.join(parameters)})"
    return one if len(one) <= 100 else f"{name}(\n" + "".join(f"    {p},\n" for p in parameters) + ")"


def docstring(text: str) -> str:
    """Turn a docstring with Args, Returns, Raises and Example into Markdown."""
    lines: list[str] = []
    section = ""
    for line in text.splitlines():
        if match := SECTION.match(line):
            section = match[1]
            lines += ["", f"**{section}**", ""] + (["```pycon"] if section == "Example" else [])
        elif not section:
            lines.append(line)
        elif section == "Example":
            if line and not line.startswith(" "):  # the section has ended
                lines += ["```", "", line]
                section = ""
            else:
                lines.append(line.removeprefix("    "))
        elif item := re.match(r"^    (\*{0,2}\w[\w, *]*): (.*)$", line):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif line and not line.startswith(" "):
            section = ""
            lines += ["", line]
        else:
            lines.append(
                f"  {line.strip()}" if line.strip() and lines and lines[-1].startswith(("- ", "  ")) else line.strip()
            )
    if section == "Example":
        while not lines[-1].strip():
            lines.pop()
        lines.append("```")
    return "\n".join(lines) + "\n"


def source(path: Path, root: Path) -> str:
    """Write a page with a source file whose lines have anchors."""
    name = path.relative_to(root).as_posix()
    code = path.read_text(encoding="utf-8")
    return f'---\nhide: [navigation, toc]\n---\n\n# {name}\n\n````python linenums="1"\n{code}````\n'


def line_of(path: Path, code: str) -> int:
    """Return the number of the only line of a file that contains `code`, counted from 1.

    Raises:
        ValueError: no line contains it, or several do.
    """
    found = [n for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if code in line]
    if len(found) != 1:
        raise ValueError(f"{path.name} has {len(found)} lines with {code!r}; a page that shows it needs exactly one.")
    return found[0]
