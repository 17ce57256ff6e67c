"""uvicorn around the app: patience with slow senders has an end, and SIGTERM loses nothing that was accepted."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitkit.errors import ConfigError
from vitkit.serve.middleware import Middleware

log = logging.getLogger("vitkit")
LOCAL = ("localhost", "127.0.0.1", "[::1]")  # the Host header of a request to this machine
HEAD_SECONDS = 10.0  # time in which a request's head must have arrived
HEAD_BYTES = 32 * 1024
FAREWELL = 0.5  # seconds after SIGTERM in which idle connections may still speak


class Protocol(H11Protocol):
    """HTTP/1.1 whose clients must finish a request's head in time; uvicorn itself would wait for ever."""

    impatience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Some bytes are there."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        super().connection_lost(exc)
        self._calm()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._calm()  # the head is there; the body is the middleware's business
        elif self.impatience is None:
            self.impatience = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _calm(self) -> None:
        if self.impatience is not None:
            self.impatience.cancel()
            self.impatience = None

    def timeout_keep_alive_handler(self) -> None:
        """The connection was idle for too long."""
        self._calm()
        super().timeout_keep_alive_handler()


class Server(uvicorn.Server):
    """Tells every client to come on another connection before it stops to listen.

    Args:
        config: uvicorn's.
        middleware: the app.
    """

    def __init__(self, config: uvicorn.Config, middleware: Middleware) -> None:
        super().__init__(config)
        self.middleware = middleware

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: answer with `Connection: close` for a moment, then stop to listen; a second one hurries."""
        if self.middleware.service.stopping:
            self.should_exit = self.force_exit = True
            return
        self.middleware.service.stopping = True
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(loop.call_later, FAREWELL, self._leave)

    def _leave(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        """Answer what was accepted, then say how much that was."""
        await super().shutdown(sockets)
        log.warning("stopped: %d requests accepted, %d answered", self.middleware.accepted, self.middleware.answered)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, so that a port in use is told before a model is loaded.

    Args:
        host: name or address of this machine.
        port: port; 0 for any free one.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"Cannot listen on {host}, port {port} ({getattr(error, 'strerror', None) or error}). "
            f"Choose another with --port or --host."
        ) from None
    return bound


def is_local(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    return host == "localhost" or host.startswith("127.") or host in ("::1", "[::1]")


def run(middleware: Middleware, bound: socket.socket, *, log_requests: bool = False) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        middleware: the app.
        bound: what `listen` gave.
        log_requests: whether every request is printed.
    """
    s = middleware.settings
    config = uvicorn.Config(
        middleware,
        http=Protocol,
        ws="none",
        log_level="info" if log_requests else "warning",
        access_log=log_requests,
        server_header=False,
        lifespan="on",
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=round(s.body_seconds + s.answer_seconds) + 5,
    )
    Server(config, middleware).run(sockets=[bound])
