"""uvicorn around the app: slow clients are disconnected, and a signal loses no request that was accepted."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from PIL import Image
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitkit.errors import ConfigError
from vitkit.server.accepting import BACKLOG, Listener, Turns
from vitkit.server.fair import keep_memory_together
from vitkit.server.logs import written_apart
from vitkit.server.middleware import HEAD_BYTES, Middleware

log = logging.getLogger("vitkit")
HEAD_SECONDS = 10.0  # time in which a request's head must arrive
SWITCH_SECONDS = 0.0005  # how long a thread runs Python while others wait for their turn; Python's default is 0.005
# The memory of a large image comes in blocks of this size. The C library takes such large blocks from the system and
# gives them back at once; smaller ones are kept, and filled with zeros for the next image while all threads wait.
BLOCK_BYTES = 64 * 2**20
FAREWELL = 0.5  # seconds after SIGTERM in which open connections may send one more request


class Protocol(H11Protocol):
    """HTTP/1.1 that gives each client its turn, and disconnects those that do not finish a request's head in time."""

    turns: Turns  # shared by all connections of a server
    head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request."""
        super().connection_made(transport)
        self.turns = vars(self.server_state).setdefault("turns", Turns())
        self._update_timer()

    def data_received(self, data: bytes) -> None:
        """Handle data in the client's turn, and read no more until then."""
        if not self._in_turn(partial(self._handle, data)):
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection in the client's turn, and stop the timer."""
        self._cancel_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # at once: nothing more can be sent
        self._in_turn(partial(super().connection_lost, exc))

    def _in_turn(self, function: Callable[[], None]) -> bool:
        return self.turns(self.client[0] if self.client else "", function)

    def _handle(self, data: bytes) -> None:
        """Stop the timer when a head is complete, and start it for the next request."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._update_timer()
        if not self.flow.read_paused:
            self.transport.resume_reading()

    def _update_timer(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_timer()  # the head is complete; the middleware times the body
        elif self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _cancel_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long."""
        self._cancel_timer()
        super().timeout_keep_alive_handler()


class Server(uvicorn.Server):
    """A uvicorn server that tells its clients to close their connections before it stops listening.

    Args:
        config: uvicorn's configuration.
        middleware: the app.
    """

    def __init__(self, config: uvicorn.Config, middleware: Middleware) -> None:
        super().__init__(config)
        self.middleware = middleware

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle SIGHUP like SIGTERM and Ctrl-C, unless it is ignored, as under `nohup`."""
        with super().capture_signals():
            hangup = getattr(signal, "SIGHUP", None)  # Windows has none
            here = threading.current_thread() is threading.main_thread()  # others cannot handle signals
            if hangup is None or not here or signal.getsignal(hangup) == signal.SIG_IGN:
                yield
                return
            before = signal.signal(hangup, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(hangup, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """At the first signal, answer with `Connection: close` for a moment, then stop; at the second, stop at once.

        A second SIGHUP has no effect: a closing terminal sends it twice, by the shell and by the system.
        """
        if self.middleware.service.stopping:
            if sig != getattr(signal, "SIGHUP", None):
                self.should_exit = self.force_exit = True
            return
        self.middleware.service.stopping = True
        # Not here: a signal may interrupt this thread while it holds the lock that `Pace.stop` needs.
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(self.middleware.service.pace.stop)
        loop.call_soon_threadsafe(loop.call_later, FAREWELL, setattr, self, "should_exit", True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets, so that every client gets its turn. The event loop of Windows has its own way."""
        if sockets is None or sys.platform == "win32":
            await super().startup(sockets)
            return
        for bound in sockets:
            bound.listen(BACKLOG)  # before the server says that it has started
        await super().startup([])
        protocol = partial(Protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        self.servers = [Listener(bound, protocol) for bound in sockets]  # type: ignore[misc]

    async def shutdown(self, sockets: Any = None) -> None:
        """Answer the requests that were accepted, then log how many there were."""
        await super().shutdown(sockets)
        log.warning("stopped: %d requests accepted, %d answered", self.middleware.accepted, self.middleware.answered)


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket, so that a port in use is reported before a model is loaded.

    Args:
        host: name or address of this machine.
        port: port; 0 for any free one.
    """
    if not 0 <= port < 2**16:  # the system would take a larger one modulo that
        raise ConfigError(f"Expected a port from 0 to 65535; got {port}.")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        try:
            if os.name == "posix":  # on Windows this option would let two servers share a port
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"Cannot listen on {host}, port {port} ({getattr(error, 'strerror', None) or error}). "
            f"Choose another one with --port or --host."
        ) from None
    return bound


def is_local(host: str) -> bool:
    """Whether a server that listens on `host` can be reached from this machine only."""
    return host == "localhost" or host.startswith("127.") or host in ("::1", "[::1]")


def prepare_process() -> None:
    """Keep memory small, and the pauses short in which one thread stops all others, such as the event loop."""
    sys.setswitchinterval(SWITCH_SECONDS)
    Image.core.set_block_size(BLOCK_BYTES)  # type: ignore[attr-defined]
    keep_memory_together()
    gc.collect()
    gc.freeze()  # from now on collections skip the libraries and the model, which takes up to a second


def run(middleware: Middleware, bound: socket.socket, *, log_requests: bool = False) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        middleware: the app.
        bound: the socket from `listen`.
        log_requests: whether to print every request.
    """
    prepare_process()
    server = _server(middleware, log_requests)
    with written_apart():
        server.run(sockets=[bound])


class Running:
    """A server in a thread of this process; a context manager that stops it.

    Args:
        middleware: the app.
        bound: the socket from `listen`; it is closed when the server stops.
    """

    def __init__(self, middleware: Middleware, bound: socket.socket) -> None:
        host, port = bound.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._server, self._bound = _server(middleware), bound
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [bound]}, daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def stop(self) -> None:
        """Answer the requests that were accepted, then stop."""
        self._server.should_exit = True
        self._thread.join()
        self._bound.close()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Running({self.url!r}{'' if self._thread.is_alive() else ', stopped'})"


def _server(middleware: Middleware, log_requests: bool = False) -> Server:
    s = middleware.settings
    config = uvicorn.Config(
        middleware,
        http=Protocol,
        ws="none",
        log_level="info" if log_requests else "warning",
        access_log=log_requests,
        use_colors=False,
        server_header=False,
        lifespan="on",
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=round(s.body_seconds + s.answer_seconds) + 5,
    )
    return Server(config, middleware)
