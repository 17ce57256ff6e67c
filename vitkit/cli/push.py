"""`vitkit push`: send a run's model to the Hugging Face hub."""

from __future__ import annotations

from typing import Annotated

import typer

from vitkit.cli.options import Licence


def push(
    run: Annotated[str, typer.Argument(help="Run folder.", metavar="RUN")],
    name: Annotated[str, typer.Argument(help="Name on the hub.", metavar="OWNER/NAME")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    licence: Licence = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be sent; needs no network.")] = False,
) -> None:
    """Send a run's model with its card to the Hugging Face hub, in a format that vitkit and transformers load by name.

    Log in first with `hf auth login`. Logs, training states and photos are not sent.
    """
    from vitkit.jobs.share import push as job

    sent = job(run, name, private=private, licence=licence, dry_run=dry_run)
    print(f"{'would send' if dry_run else 'sent'} to {name}:")
    for file, size in sent.files.items():
        print(f"  {file}  {size:,} bytes")
    if sent.url:
        print(sent.url)
