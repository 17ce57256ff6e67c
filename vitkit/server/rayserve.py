"""The same app on many machines: a Ray Serve deployment with replicas of the model and batches gathered by Ray."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ray import serve

from vitkit.server.app import create_app
from vitkit.server.batching import Batcher
from vitkit.server.middleware import Middleware
from vitkit.server.service import load_service
from vitkit.server.settings import Settings

T = TypeVar("T")
R = TypeVar("R")


class RayBatcher(Batcher[T, R]):
    """Limits its queue as Batcher does, and gathers batches with `ray.serve.batch`."""

    def _start(self) -> None:
        async def batched(items: list[T]) -> list[R]:
            start = time.perf_counter()
            results = await asyncio.to_thread(self.run, items)
            self.observe(len(items), time.perf_counter() - start)
            return list(results)

        self._batched: Callable[[T], Any] = serve.batch(
            max_batch_size=self.max_batch, batch_wait_timeout_s=self.max_delay
        )(batched)

    def enqueue(self, item: T) -> Any:
        """Add an item to the next batch."""
        return asyncio.ensure_future(self._batched(item))

    def close(self) -> None:
        """Refuse new items; Ray waits for the others."""
        with self._changed:
            self._closed = True


def application(
    source: str,
    settings: Settings,
    *,
    replicas: int = 1,
    engine: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    **overrides: Any,
) -> Any:
    """Create a Ray Serve application: pass it to `ray.serve.run`, or name it in a Serve config file.

    Args:
        source: anything `vitkit.load` accepts; every machine of the cluster must be able to read it.
        settings: the limits of each replica.
        replicas: number of copies of the model.
        engine: a row of `speed.ENGINES` (default: `speed.usual` chooses).
        device: `cuda` gives every replica its own GPU.
        dtype: type of the weights (default: as in the file).
        overrides: any other arguments of `vitkit.load`.
    """

    def build() -> Middleware:
        return create_app(
            load_service(source, settings, engine=engine, device=device, dtype=dtype, batcher=RayBatcher, **overrides)
        )

    @serve.deployment(
        name="vitkit",
        num_replicas=replicas,
        max_ongoing_requests=settings.max_requests,
        max_queued_requests=settings.max_queue,
        graceful_shutdown_timeout_s=settings.answer_seconds,
        ray_actor_options={"num_cpus": 1, "num_gpus": int(device.startswith("cuda"))},
    )
    @serve.ingress(build)
    class Replica:
        """One copy of the model behind the app."""

    return Replica.bind()  # type: ignore[attr-defined]


def run(source: str, settings: Settings, *, host: str, port: int, replicas: int, **how: Any) -> None:
    """Serve on the Ray cluster that RAY_ADDRESS names, or on a local one, until SIGTERM or Ctrl-C.

    Args:
        source: see `application`.
        settings: see `application`.
        host: address that Ray's proxies listen on.
        port: port that they listen on.
        replicas: see `application`.
        how: see `application`.
    """
    serve.start(http_options={"host": host, "port": port, "request_timeout_s": settings.answer_seconds + 5})
    serve.run(application(source, settings, replicas=replicas, **how), name="vitkit")
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):  # after Ray has installed its own handlers
        signal.signal(name, lambda *_: stop.set())
    print(
        f"vitkit: serving {source} with {replicas} replica{'s' if replicas > 1 else ''} at http://{host}:{port}; "
        f"press Ctrl-C to stop.",
        flush=True,
    )
    while not stop.wait(1.0):  # an endless wait would not notice Ctrl-C on Windows
        pass
    serve.delete("vitkit")  # Ray lets the replicas finish the requests they have accepted
    print("vitkit: stopped.", flush=True)
