"""`vitkit teach`: a web page on which photos become a classifier."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import AllowHost, Device, Host, LogRequests, Port, Token, loads_weights
from vitkit.errors import ConfigError


@loads_weights
def teach(
    run: Annotated[
        Path | None, typer.Argument(help="Folder of an earlier lesson, to continue it.", metavar="[RUN]")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Pre-trained weights: a run folder, a file, or a hub id (default: those that RUN was begun with).",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the run, new or of an earlier lesson (default: runs/teach)."),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    device: Device = "auto",
    token: Token = None,
    allow_host: AllowHost = None,
    log_requests: LogRequests = False,
    *,
    overrides: dict[str, Any],
) -> None:
    """Teach a classifier on a web page: name classes, drop or take photos, see it learn, and save it as a run."""
    if run is not None and out is not None:
        raise ConfigError(f"Expected a lesson to continue or a new --out; got both ({run} and {out}).")
    folder = run or out or Path("runs/teach")
    from vitkit.server.teach_store import is_lesson, start_of

    if weights is None:
        if run is None and not is_lesson(folder):
            raise ConfigError(
                "Expected weights to begin with; got none. Give --from, or the folder of an earlier lesson."
            )
        weights = str(start_of(folder)["weights"])
    from vitkit.features.online import use_one_thread
    from vitkit.jobs.teach import save
    from vitkit.server.app import create_app
    from vitkit.server.server import is_local, listen
    from vitkit.server.server import run as serve
    from vitkit.server.service import load_service
    from vitkit.server.settings import LOCAL, Settings
    from vitkit.server.teach import Lessons

    local = is_local(host)
    hosts = (*LOCAL, *(allow_host or ())) if local else tuple(allow_host) if allow_host else None
    settings = Settings(token=token if token is not None else os.environ.get("VITKIT_TOKEN"), hosts=hosts)
    with listen(host, port) as bound:
        if not local:
            print(
                f"vitkit: warning: everyone who can reach {host} can "
                + ("load the page." if token else "teach on this machine; require a token with --token."),
                file=sys.stderr,
            )
        service = load_service(weights, settings, device=device, **overrides)
        service.warm()
        use_one_thread()
        source = str(Path(weights).absolute()) if Path(weights).exists() else weights
        lessons = Lessons(service, folder, partial(save, service.model, source), source)
        state = lessons.first.state
        if state.photos:
            print(f"vitkit: continuing {folder}: {len(state.classes)} classes, {len(state.photos)} photos.")
        name, number = bound.getsockname()[:2]
        print(
            f"vitkit: teach at http://{f'[{name}]' if ':' in name else name}:{number}/#teach; photos are kept in "
            f"{folder}; press Ctrl-C to stop.",
            flush=True,
        )
        serve(create_app(service, lessons), bound, log_requests=log_requests)
