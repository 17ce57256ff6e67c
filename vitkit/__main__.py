"""`python -m vitkit` is the command line."""

from vitkit.cli import main

main()
