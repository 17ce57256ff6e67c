"""The same app on many machines: a Ray Serve deployment, replicas of the model, batches gathered by Ray."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ray import serve

from vitkit.serve.app import create_app
from vitkit.serve.batching import Batcher
from vitkit.serve.middleware import Middleware
from vitkit.serve.service import load_service
from vitkit.serve.settings import Settings

T = TypeVar("T")
R = TypeVar("R")


class RayBatcher(Batcher[T, R]):
    """Room is counted as in Batcher; batches are gathered by `ray.serve.batch`."""

    def _start(self) -> None:
        async def batched(items: list[T]) -> list[R]:
            start = time.perf_counter()
            results = await asyncio.to_thread(self.run, items)
            self.observe(len(items), time.perf_counter() - start)
            return list(results)

        self._batched: Callable[[T], Any] = serve.batch(
            max_batch_size=self.max_batch, batch_wait_timeout_s=self.max_delay
        )(batched)

    def _submit(self, item: T) -> Any:
        with self._changed:
            self.coming -= 1
        return asyncio.ensure_future(self._batched(item))

    def close(self) -> None:
        """Refuse what is new; Ray waits for the rest."""
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
    """A Ray Serve application: give it to `ray.serve.run`, or name it in a Serve config file.

    Args:
        source: whatever `vitkit.load` takes; every machine of the cluster must find it there.
        settings: the limits of each replica.
        replicas: copies of the model.
        engine: a row of `speed.ENGINES`; the usual one when not given.
        device: `cuda` gives every replica a GPU of its own.
        dtype: type of the weights; the file's own when not given.
        overrides: whatever else `vitkit.load` takes.
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
    """Serve on the cluster that Ray finds (or a local one) until SIGTERM or Ctrl-C.

    Args:
        source: see `application`.
        settings: see `application`.
        host: address that the proxies listen on.
        port: their port.
        replicas: see `application`.
        how: see `application`.
    """
    serve.start(http_options={"host": host, "port": port, "request_timeout_s": settings.answer_seconds + 5})
    serve.run(application(source, settings, replicas=replicas, **how), name="vitkit")
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):  # after Ray has set its own
        signal.signal(name, lambda *_: stop.set())
    print(
        f"vitkit: {source} is served by {replicas} replica{'s' if replicas > 1 else ''} at http://{host}:{port}; "
        f"Ctrl-C stops it.",
        flush=True,
    )
    stop.wait()
    serve.delete("vitkit")  # Ray lets the replicas answer what they have taken
    print("vitkit: stopped.", flush=True)
