"""`vitkit serve`: a web page and an API for one model."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitkit.cli.options import ENGINES, AllowHost, Device, Host, LogRequests, Port, Token, Weights, loads_weights

if TYPE_CHECKING:
    from vitkit.server.service import Service


@loads_weights
def serve(
    weights: Weights,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help=f"Engine that runs the model: {ENGINES}. To serve int8 or merged tokens, serve an exported file "
            f"(default: cpu-fused in float32 on the CPU, otherwise torch).",
        ),
    ] = None,
    device: Device = "auto",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Type of the weights: float32 or bfloat16 (default: as in the file).")
    ] = None,
    max_batch: Annotated[int, typer.Option("--max-batch", help="Maximum images per forward pass (default: 16).")] = 16,
    max_delay: Annotated[
        float, typer.Option("--max-delay", help="Maximum milliseconds a batch waits for more images (default: 10).")
    ] = 10.0,
    max_queue: Annotated[
        int, typer.Option("--max-queue", help="Maximum images accepted and not yet answered (default: 256).")
    ] = 256,
    max_requests: Annotated[
        int, typer.Option("--max-requests", help="Maximum concurrent requests (default: 128).")
    ] = 128,
    max_files: Annotated[int, typer.Option("--max-files", help="Maximum images per request (default: 32).")] = 32,
    max_megabytes: Annotated[
        float, typer.Option("--max-megabytes", help="Maximum size of one request (default: 32).")
    ] = 32.0,
    max_megapixels: Annotated[
        float, typer.Option("--max-megapixels", help="Maximum size of one image (default: 50).")
    ] = 50.0,
    max_request_megapixels: Annotated[
        float,
        typer.Option(
            "--max-request-megapixels",
            help="Maximum size of all images of one request, and of all requests of one client in progress "
            "(default: 400).",
        ),
    ] = 400.0,
    token: Token = None,
    allow_host: AllowHost = None,
    embed_in: Annotated[
        str | None, typer.Option("--embed-in", help="Site that may show the page in a frame (default: none).")
    ] = None,
    photos: Annotated[
        bool | None,
        typer.Option(
            "--photos/--no-photos",
            help="Show photos of the run's own data on the page: some to try, and training photos that are similar to "
            "yours (default: on if only this machine can reach the server).",
        ),
    ] = None,
    explore: Annotated[
        bool | None,
        typer.Option(
            "--explore/--no-explore",
            help="Offer the explorable page, which runs the model in the visitor's browser and so gives the weights to "
            "visitors (default: on if only this machine can reach the server and the page can show the model).",
        ),
    ] = None,
    log_requests: LogRequests = False,
    ray: Annotated[bool, typer.Option("--ray", help="Serve with Ray Serve, on all machines of its cluster.")] = False,
    replicas: Annotated[
        int, typer.Option("--replicas", min=1, help="With --ray, number of copies of the model (default: 1).")
    ] = 1,
    *,
    overrides: dict[str, Any],
) -> None:
    """Serve a model: a web page for photos, and an HTTP API for predictions, features and explanations."""
    if ray:
        from vitkit.optional import need

        need("scale", "ray")
    from vitkit.server.server import is_local, listen
    from vitkit.server.settings import LOCAL, Settings

    local = is_local(host)
    hosts = (*LOCAL, *(allow_host or ())) if local else tuple(allow_host) if allow_host else None
    settings = Settings(
        max_batch=max_batch,
        max_delay=max_delay / 1000,
        max_queue=max_queue,
        max_requests=max_requests,
        max_files=max_files,
        max_megabytes=max_megabytes,
        max_megapixels=max_megapixels,
        max_request_megapixels=max_request_megapixels,
        token=token if token is not None else os.environ.get("VITKIT_TOKEN"),  # typer takes an empty one for none
        hosts=hosts,
        embed_in=embed_in,
    )
    how: dict[str, Any] = {
        "engine": engine,
        "device": device,
        "dtype": dtype,
        **overrides,
    }
    with listen(host, port) if not ray else nullcontext() as bound:
        if not local:
            print(
                f"vitkit: warning: everyone who can reach {host} can "
                + ("load the page." if token else "use this server; require a token with --token."),
                file=sys.stderr,
            )
        if bound is None:
            from vitkit.server.rayserve import run as run_on_ray

            run_on_ray(
                weights,
                settings,
                host=host,
                port=port,
                replicas=replicas,
                **how | {"device": "cpu" if device == "auto" else device},
            )
            return
        from vitkit.server.app import create_app
        from vitkit.server.server import run
        from vitkit.server.service import load_service

        service = load_service(weights, settings, **how)
        if service.embeds and (local if photos is None else photos):
            from vitkit.jobs.photos import open_photos

            service.photos = open_photos(weights, service.model)
        if local if explore is None else explore:
            _offer_explore(service, needed=bool(explore))
        service.warm()
        name, number = bound.getsockname()[:2]
        print(
            f"vitkit: serving {weights} at http://{f'[{name}]' if ':' in name else name}:{number} "
            f"({service.device}, engine {service.engine}); press Ctrl-C to stop.",
            flush=True,
        )
        run(create_app(service), bound, log_requests=log_requests)


def _offer_explore(service: Service, needed: bool) -> None:
    """Let a service offer the explorable page; unless it is needed, a model that does not fit it goes without."""
    from vitkit.errors import CannotExpress, MissingDependency
    from vitkit.jobs.explore import EXAMPLES, Example, explorable, samples
    from vitkit.server.exploring import ExplorablePage
    from vitkit.server.service import name_of

    def examples() -> list[Example]:
        photos = service.photos
        return [(photos.image(i), photos.label(i), "") for i in photos.samples[:EXAMPLES]] if photos else samples()

    try:
        if not service.embeds:
            raise CannotExpress("The explorable page needs a model with weights; this is an exported file.")
        page, make = explorable(service.model, name=name_of(service.source), photos=examples)
    except (CannotExpress, MissingDependency):
        if needed:
            raise
        return
    service.explorable = ExplorablePage(page, make)
