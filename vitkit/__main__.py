"""Run the command line with `python -m vitkit`."""

from vitkit.cli import program

program()
