"""`vitkit serve`: a web page and an API for one model."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Annotated

import typer

from vitkit.cli.options import ENGINES, Device, ImageSize, Mean, Std, Weights, parse_numbers, parse_size


def serve(
    weights: Weights,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; this machine alone by default.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port; 0 for any free one.")] = 8000,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help=f"What runs the model: {ENGINES} (int8 and merged "
            f"tokens: serve the exported file). cpu-fused on the CPU, else torch, "
            f"when not given.",
        ),
    ] = None,
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16; the file's own by default.")] = None,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
    max_batch: Annotated[int, typer.Option("--max-batch", help="Images through the model at once.")] = 16,
    max_delay: Annotated[float, typer.Option("--max-delay", help="Milliseconds a batch waits for late images.")] = 10.0,
    max_queue: Annotated[int, typer.Option("--max-queue", help="Images waiting; beyond it, 503.")] = 256,
    max_files: Annotated[int, typer.Option("--max-files", help="Images in one request.")] = 32,
    max_megabytes: Annotated[float, typer.Option("--max-megabytes", help="Size of one request.")] = 32.0,
    max_megapixels: Annotated[float, typer.Option("--max-megapixels", help="Size of one image.")] = 50.0,
    token: Annotated[
        str | None, typer.Option("--token", envvar="VITKIT_TOKEN", help="Clients must send it as a bearer token.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="A name the server may be called by; may be given several times."),
    ] = None,
    embed_in: Annotated[str | None, typer.Option("--embed-in", help="Site that may show the page in a frame.")] = None,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Print every request.")] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Serve by Ray Serve, on as many machines as its cluster has.")
    ] = False,
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="With --ray: copies of the model.")] = 1,
) -> None:
    """Serve a model: a page to drop photos on, and an HTTP API that batches, holds under load, and explains."""
    if ray:
        from vitkit.optional import need

        need("scale", "ray")
    from vitkit.serve.server import LOCAL, is_local, listen
    from vitkit.serve.settings import Settings

    local = is_local(host)
    hosts = (*LOCAL, *(allow_host or ())) if local else tuple(allow_host) if allow_host else None
    settings = Settings(
        max_batch=max_batch,
        max_delay=max_delay / 1000,
        max_queue=max_queue,
        max_files=max_files,
        max_megabytes=max_megabytes,
        max_megapixels=max_megapixels,
        token=token,
        hosts=hosts,
        embed_in=embed_in,
    )
    how = {
        "engine": engine,
        "device": device,
        "dtype": dtype,
        "image_size": parse_size(image_size),
        "mean": parse_numbers(mean, "--mean"),
        "std": parse_numbers(std, "--std"),
    }
    with listen(host, port) if not ray else nullcontext() as bound:
        if not local:
            print(
                f"vitkit: warning: everybody who can reach {host} can use this server"
                + ("." if token else "; ask for a token with --token."),
                file=sys.stderr,
            )
        if bound is None:
            from vitkit.serve.rayserve import run as run_on_ray

            run_on_ray(
                weights,
                settings,
                host=host,
                port=port,
                replicas=replicas,
                **how | {"device": "cpu" if device == "auto" else device},
            )
            return
        from vitkit.serve.app import create_app
        from vitkit.serve.server import run
        from vitkit.serve.service import load_service

        service = load_service(weights, settings, **how)  # type: ignore[arg-type]
        service.warm()
        name, number = bound.getsockname()[:2]
        print(
            f"vitkit: {weights} is served at http://{f'[{name}]' if ':' in name else name}:{number} "
            f"({service.device}, engine {service.engine}); Ctrl-C stops it.",
            flush=True,
        )
        run(create_app(service), bound, log_requests=log_requests)
