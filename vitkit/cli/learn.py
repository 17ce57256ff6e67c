"""`vitkit learn`: list the exercises and what you solved, or show one."""

from __future__ import annotations

from typing import Annotated

import typer


def learn(
    name: Annotated[str | None, typer.Argument(help="Exercise to show (default: list all).")] = None,
    answer: Annotated[str | None, typer.Option(help="Python file that defines your function (default: none).")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Forget which exercises you solved (default: keep).")] = False,
) -> None:
    """List the exercises with your progress, show one, or check your answer to it."""
    from vitkit.cli.text import print_table
    from vitkit.errors import InputError, pick
    from vitkit.learn import EXERCISES, check, passed
    from vitkit.learn.progress import write

    if reset:
        write([])
    if name is None:
        if answer is not None:
            raise InputError("--answer needs the name of an exercise, for example: vitkit learn eq1 --answer eq1.py")
        done = passed()
        print_table(
            ["", "exercise", "what it is"],
            [("✓" if key in done else "", key, one.title) for key, one in EXERCISES.items()],
        )
        print(f"{sum(key in done for key in EXERCISES)} of {len(EXERCISES)} solved. Show one: vitkit learn eq1")
        return
    one = pick(EXERCISES, name, "exercise")
    if answer is not None:
        from vitkit.learn.files import function_of

        raise typer.Exit(0 if check(name, function_of(answer, one)) else 1)
    print(f"{one.title}\n\n{one.task}\n\n    {one.start}\n")
    print(f"Check it in Python with vitkit.learn.check({name!r}, your_function),")
    print(f"or write it to a file and run: vitkit learn {name} --answer FILE.py")
