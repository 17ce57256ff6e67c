"""Share a result: reports, cards, the hub, files for other runtimes, servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from vitkit.api.models import Model, Weights, model_of

if TYPE_CHECKING:
    from vitkit.jobs.export import ExportedFile
    from vitkit.jobs.share import Pushed
    from vitkit.results import Run
    from vitkit.server.server import Running


def report(run: Run | Weights, out: Weights | None = None) -> Path:
    """Write the HTML report of a run, and return its path.

    Args:
        run: a Run, or its folder.
        out: the HTML file (default: `report.html` in the run folder).

    Example:
        >>> import vitkit
        >>> model = vitkit.create(image_size=8, patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=1,
        ...                       num_attention_heads=2, intermediate_size=32, num_classes=10)
        >>> run = vitkit.train("digits", "run", model=model, recipe="digits", steps=2, progress=False, report=False)
        >>> vitkit.report(run).name
        'report.html'
    """
    from vitkit.jobs.report import report as job

    return job(run if isinstance(run, str | Path) else run.path, out=out)


def card(run: Run | Weights, out: Weights | None = None, *, licence: str | None = None) -> Path:
    """Write the model card of a run, and return its path.

    Args:
        run: a Run, or its folder.
        out: the Markdown file (default: `README.md` in the run folder).
        licence: licence of the weights, such as apache-2.0 (default: what the weights state).

    Example:
        >>> import vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=0, num_hidden_layers=1)
        >>> found = vitkit.probe(model, "digits", "run", methods=["ridge"], cache="cache", workers=0)
        >>> vitkit.card(found.run, licence="apache-2.0").name
        'README.md'
    """
    from vitkit.jobs.share import write_card

    return write_card(run if isinstance(run, str | Path) else run.path, out, licence=licence)


def push(
    run: Run | Weights, name: str, *, private: bool = False, licence: str | None = None, dry_run: bool = False
) -> Pushed:
    """Send a run's model with its card to the Hugging Face hub; logs, training states and photos are not sent.

    Args:
        run: a Run, or its folder.
        name: owner/name on the hub.
        private: whether only you can see a new repository (default: False).
        licence: licence of the weights, such as apache-2.0 (default: what the weights state).
        dry_run: whether to only list what would be sent, without a network (default: False).

    Returns:
        `files` with their sizes, and `url`.

    Example:
        >>> import vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=0, num_hidden_layers=1)
        >>> found = vitkit.probe(model, "digits", "run", methods=["ridge"], cache="cache", workers=0)
        >>> "README.md" in vitkit.push(found.run, "you/digits", licence="apache-2.0", dry_run=True).files
        True
    """
    from vitkit.jobs.share import push as job

    folder = run if isinstance(run, str | Path) else run.path
    return job(folder, name, private=private, licence=licence, dry_run=dry_run)


def export(model: Model, to: str, out: Weights, *, data: Weights | None = None, merge: int = 0) -> ExportedFile:
    """Export a model for another runtime, and compare the file with the model.

    Args:
        model: a model of any interface, or anything that `vitkit.load` accepts.
        to: onnx, openvino or openvino-int8.
        out: the file.
        data: images to compare on, and to calibrate int8 with (default: random pixels; int8 needs images).
        merge: tokens to merge in each block (default: none).

    Example:
        >>> import vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=3, num_hidden_layers=1)
        >>> vitkit.export(model, "onnx", "tiny.onnx").path.name
        'tiny.onnx'
    """
    from vitkit.jobs.export import export_file, images_for

    vit = model_of(model)
    weights = model if isinstance(model, str | Path) else ""
    shown = images_for(data, weights, vit, 300 if to == "openvino-int8" else 0, 200)
    return export_file(vit, to, out, shown, merge=merge, source=str(weights))


@overload
def teach(model: Model, out: str | Path, *, host: str = ..., port: int = ..., wait: Literal[True] = ...) -> None: ...


@overload
def teach(model: Model, out: str | Path, *, host: str = ..., port: int = ..., wait: Literal[False]) -> Running: ...


def teach(
    model: Model, out: str | Path, *, host: str = "127.0.0.1", port: int = 8000, wait: bool = True
) -> Running | None:
    """Open a web page on which photos become a classifier, which is saved as a run.

    Args:
        model: the backbone: a model of any interface, or anything that `vitkit.load` accepts.
        out: run folder: a new one, or one that was taught before with the same model.
        host: address to listen on (default: this machine only).
        port: port; 0 for any free one (default: 8000).
        wait: whether to serve until Ctrl-C; otherwise return the running server, with its `url` and `stop()`
            (default: True).

    Example:
        >>> import tempfile, vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=0, num_hidden_layers=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with vitkit.teach(model, f"{folder}/desk", port=0, wait=False) as server:
        ...         server.url.startswith("http://127.0.0.1:")
        True
    """
    from functools import partial

    from vitkit.features.online import use_one_thread
    from vitkit.jobs.teach import save
    from vitkit.server.app import create_app
    from vitkit.server.server import Running, is_local, listen, run
    from vitkit.server.service import Service
    from vitkit.server.settings import LOCAL, Settings
    from vitkit.server.teach import Lessons

    source = str(model) if isinstance(model, str | Path) else type(model).__name__
    with listen(host, port) as bound:
        backbone = model_of(model).eval()
        service = Service(backbone, Settings(hosts=LOCAL if is_local(host) else None), source=source)
        service.warm()
        use_one_thread()
        app = create_app(service, Lessons(service, out, partial(save, backbone, source)))
        if not wait:
            return Running(app, bound.dup())
        print(f"vitkit: teach at http://{host}:{bound.getsockname()[1]}/#teach; Ctrl-C stops it.", flush=True)
        run(app, bound)
    return None


@overload
def serve(
    model: Model, *, host: str = ..., port: int = ..., engine: str | None = ..., wait: Literal[True] = ...
) -> None: ...


@overload
def serve(
    model: Model, *, host: str = ..., port: int = ..., engine: str | None = ..., wait: Literal[False]
) -> Running: ...


def serve(
    model: Model, *, host: str = "127.0.0.1", port: int = 8000, engine: str | None = None, wait: bool = True
) -> Running | None:
    """Serve a model with its web page and API, until Ctrl-C or in the background.

    Args:
        model: a model of any interface, or anything that `vitkit.load` accepts.
        host: address to listen on (default: this machine only).
        port: port; 0 for any free one (default: 8000).
        engine: a row of `vitkit.speed.ENGINES` (default: `cpu-fused` on the CPU, else `torch`).
        wait: whether to serve until Ctrl-C; otherwise return the running server, with its `url` and `stop()`
            (default: True).

    Example:
        >>> import urllib.request, vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=3, num_hidden_layers=1)
        >>> with vitkit.serve(model, port=0, wait=False) as server:
        ...     urllib.request.urlopen(f"{server.url}/healthz").status
        200
    """
    from vitkit.server.app import create_app
    from vitkit.server.server import Running, is_local, listen, run
    from vitkit.server.service import Service
    from vitkit.server.settings import LOCAL, Settings

    settings = Settings(hosts=LOCAL if is_local(host) else None)
    source = str(model) if isinstance(model, str | Path) else type(model).__name__
    bound = listen(host, port)
    try:
        service = Service(model_of(model).eval(), settings, engine=engine, source=source)
        if isinstance(model, str | Path) and is_local(host):
            from vitkit.jobs.photos import open_photos

            service.photos = open_photos(model, service.model)
        service.warm()
        if not wait:
            return Running(create_app(service), bound)
        print(f"vitkit: {source} is served at http://{host}:{bound.getsockname()[1]}; Ctrl-C stops it.", flush=True)
        run(create_app(service), bound)
    except BaseException:
        bound.close()
        raise
    bound.close()
    return None
