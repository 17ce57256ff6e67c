"""`vitkit explore`: a page in which a model runs in the browser."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import From, loads_weights


@loads_weights
def explore(
    weights: From,
    out: Annotated[
        Path | None,
        typer.Option("--build", help="Folder to write; any file server can serve it (default: serve the page here)."),
    ] = None,
    photos: Annotated[
        list[str] | None,
        typer.Option(
            "--photos",
            help="Example photos: a file, a folder or a pattern; may be given several times (default: three samples).",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What the page calls the model (default: the name of the weights).")
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen on without --build; 0 for any free one.")
    ] = 8000,
    *,
    overrides: dict[str, Any],
) -> None:
    """Make a page that shows how a Vision Transformer sees: patches, attention, layers, answer, on any photo.

    The model runs in the browser, so the folder needs no Python: put it on any web server, or send it to a friend.
    """
    from vitkit.cli import options as common
    from vitkit.cli.text import console
    from vitkit.errors import ConfigError
    from vitkit.jobs import explore as job
    from vitkit.runtime import Runtime

    with ExitStack() as stack:
        server = None
        if out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vitkit-explore-")))
            try:
                server = stack.enter_context(job.server(folder, port))
            except OSError as error:
                raise ConfigError(
                    f"Cannot listen on port {port} ({error.strerror}). Choose another one with --port, or 0 for any."
                ) from None
        else:
            folder = job.check_free(out)
        model = common.load(weights, Runtime("cpu"), overrides)
        with console().status("building the page") as status:
            built = job.build(
                model,
                folder,
                photos or (),
                name=name or Path(str(weights).partition("@")[0].rstrip("/")).name,
                progress=status.update,
            )
        if server is None:
            print(f"wrote {built.folder}: {len(built.sizes)} files, {built.megabytes:.1f} MB")
            print(f"next: python -m http.server --directory {built.folder}    then open http://localhost:8000")
        else:
            print(f"The page is at http://127.0.0.1:{server.server_address[1]}. Stop with Ctrl+C.")
            server.serve_forever()
