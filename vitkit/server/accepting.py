"""Accept connections, and handle what they receive, from each client in turn."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import deque
from collections.abc import Callable

log = logging.getLogger("vitkit")
BACKLOG = 2048  # connections that the system holds until they are accepted, and the most accepted at a time
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PAUSE = 1.0  # seconds without accepting after the system had no room for another connection


class Turns:
    """Calls functions of each client in order, at most one per client in each turn of the event loop.

    Event loops handle everything that has arrived before anything else. A client that sends something on hundreds of
    connections at once would therefore keep every other client waiting until the server had dealt with all of it.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # of every client that had its call in this turn

    def __call__(self, client: str, function: Callable[[], None]) -> bool:
        """Call a function in the client's next turn, which may be now; return whether it was called."""
        if client in self._waiting:
            self._waiting[client].append(function)
            return False
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        self._waiting[client] = deque()
        function()
        return True

    def _next(self) -> None:
        self._waiting = {client: calls for client, calls in self._waiting.items() if calls}
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        for function in [calls.popleft() for calls in self._waiting.values()]:
            try:
                function()
            except Exception as error:  # as the event loop itself does: the other clients still get their turn
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a connection failed", "exception": error}
                )


class Listener:
    """Accepts the connections of a socket, and starts one of every waiting client in each turn of the event loop.

    Event loops start connections in the order in which they arrived, uvloop one per turn. A client that opens hundreds
    at once would therefore keep every other client waiting until the server had dealt with all of them.

    Args:
        bound: the socket, which listens.
        protocol: makes the protocol of one connection.
    """

    def __init__(self, bound: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._bound, self._protocol, self._loop = bound, protocol, asyncio.get_running_loop()
        self._waiting: dict[str, deque[socket.socket]] = {}  # accepted and not yet started, by client
        self._starting: asyncio.Task[None] | None = None
        self._pause: asyncio.TimerHandle | None = None
        bound.setblocking(False)
        self._loop.add_reader(bound, self._accept)

    def close(self) -> None:
        """Stop accepting; connections that were accepted are still started."""
        self._loop.remove_reader(self._bound)
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """Wait until every accepted connection has been started."""
        if self._starting is not None:
            await self._starting

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                connection, address = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                log.warning("cannot accept more connections for now (%s).", error.strerror)
                self._loop.remove_reader(self._bound)
                self._pause = self._loop.call_later(PAUSE, self._loop.add_reader, self._bound, self._accept)
                break
            connection.setblocking(False)
            self._waiting.setdefault(address[0], deque()).append(connection)
        if self._waiting and (self._starting is None or self._starting.done()):
            self._starting = self._loop.create_task(self._start())

    async def _start(self) -> None:
        while self._waiting:
            turn = [connections.popleft() for connections in self._waiting.values()]
            self._waiting = {client: left for client, left in self._waiting.items() if left}
            started = (self._loop.connect_accepted_socket(self._protocol, one) for one in turn)
            await asyncio.gather(*started, return_exceptions=True)  # a connection may have been lost meanwhile
