"""Connections are started for each client in turn, and nothing stops the whole process for long."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import uvicorn
from PIL import Image
from uvicorn.server import ServerState

from benchmarks.fuzz_serve import parse, request
from tests.server.conftest import tiny
from vitkit.errors import ConfigError
from vitkit.server import accepting, server
from vitkit.server.accepting import Listener, Turns
from vitkit.server.app import create_app
from vitkit.server.middleware import Middleware
from vitkit.server.server import Running, listen
from vitkit.server.service import Service

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the event loop of Windows accepts in its own way")
several_addresses = pytest.mark.skipif(sys.platform != "linux", reason="needs several local addresses")


def connect(port: int, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(source, 0))


@several_addresses
@pytest.mark.parametrize("queued", ["connections", "requests"])
def test_a_client_with_many_connections_does_not_keep_others_waiting(
    queued: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, loops = list[str](), list[asyncio.AbstractEventLoop]()
    waiting, go, answer = threading.Event(), threading.Event(), Middleware.__call__

    def wait() -> None:
        waiting.set()
        go.wait(60)

    def hold() -> None:
        """Keep the event loop from doing anything until the test says so."""
        loops[0].call_soon_threadsafe(wait)
        assert waiting.wait(60)

    async def record(self, scope, receive, send) -> None:
        loops.append(asyncio.get_running_loop())
        if scope["type"] == "http":
            order.append(scope["client"][0])
        await answer(self, scope, receive, send)

    monkeypatch.setattr(Middleware, "__call__", record)
    bound = listen("127.0.0.1", 0)
    port = bound.getsockname()[1]
    with Running(create_app(Service(tiny())), bound) as running:
        if queued == "connections":
            hold()  # meanwhile they arrive
        lines = [connect(port, source) for source in ["127.0.0.2"] * 60 + ["127.0.0.3"]]
        if queued == "requests":
            while len(running._server.server_state.connections) < 61:
                time.sleep(0.01)
            hold()
        for line in lines:
            line.sendall(request("GET", "/healthz"))
        go.set()
        for line in lines:
            assert parse(line.recv(65536)).status == 200
            line.close()
    assert len(order) == 61
    assert order.index("127.0.0.3") < 20  # the others of its turn, and those that arrived in the turn before


def test_large_bodies_of_one_client_all_arrive() -> None:
    """Connections that wait for their turn are not read, and then read again."""
    bound = listen("127.0.0.1", 0)
    body = b"x" * 3 * 2**20

    def send(_: int) -> int:
        with connect(bound.getsockname()[1]) as line:
            line.sendall(request("POST", "/v1/predict", body, {"Content-Type": "image/png"}))
            return parse(line.recv(65536)).status

    with Running(create_app(Service(tiny())), bound), ThreadPoolExecutor(8) as pool:
        assert list(pool.map(send, range(8))) == [422] * 8


def test_a_connection_that_waits_for_its_turn_is_neither_read_nor_if_lost_written_to() -> None:
    """Writing to it raised an error, whose traceback filled the log."""
    received: list[str] = []

    async def app(scope, receive, send) -> None:
        received.extend([(await receive())["type"] for _ in range(2)])

    async def main() -> None:
        config = uvicorn.Config(app, http=server.Protocol, ws="none", lifespan="off", proxy_headers=False)
        config.load()
        protocol, transport = server.Protocol(config, ServerState(), {}), MagicMock()
        transport.is_closing.return_value = False
        protocol.connection_made(transport)
        protocol.data_received(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        assert not transport.pause_reading.called
        transport.resume_reading.reset_mock()
        protocol.data_received(b"a")
        assert transport.pause_reading.called
        assert not transport.resume_reading.called
        for _ in range(9):
            await asyncio.sleep(0)
        assert transport.resume_reading.called
        protocol.data_received(b"b")  # in its turn
        transport.resume_reading.reset_mock()
        transport.is_closing.return_value = True
        protocol.connection_lost(None)
        assert protocol.cycle.disconnected
        for _ in range(9):
            await asyncio.sleep(0)
        assert not transport.resume_reading.called
        assert not protocol.connections

    asyncio.run(main())
    assert received == ["http.request", "http.disconnect"]


def test_turns(caplog: pytest.LogCaptureFixture) -> None:
    turns, order = Turns(), list[str]()

    async def main() -> list[bool]:
        loop = asyncio.get_running_loop()
        now = [turns(name[0], partial(order.append, name)) for name in ("a1", "a2", "a3", "b1")]
        now.append(turns("b", partial(order.index, "nothing")))  # fails
        loop.call_soon(order.append, "-")
        for _ in range(2):
            await asyncio.sleep(0)
            order.append("|")
        now.append(turns("c", partial(order.append, "c1")))
        for _ in range(3):
            await asyncio.sleep(0)
        now.append(turns("a", partial(order.append, "a4")))
        return now

    assert asyncio.run(main()) == [True, False, False, True, False, True, True]
    assert order == ["a1", "b1", "a2", "-", "|", "a3", "|", "c1", "a4"]
    assert "a connection failed" in caplog.text
    assert "ValueError" in caplog.text


def serve(bound: socket.socket, count: int, close_first: bool = False) -> list[bool]:
    """Open `count` connections to a Listener; return whether each was greeted."""

    class Greeter(asyncio.Protocol):
        def connection_made(self, transport) -> None:
            transport.write(b"hello")
            transport.close()

    async def main() -> list[bool]:
        bound.listen()
        listener = Listener(bound, Greeter)
        lines = [connect(bound.getsockname()[1]) for _ in range(count)]
        if close_first:
            await asyncio.sleep(0)
            listener._accept()
            listener.close()
            await listener.wait_closed()
        found = [await asyncio.to_thread(line.recv, 10) == b"hello" for line in lines]
        for line in lines:
            line.close()
        if not close_first:
            listener.close()
            await listener.wait_closed()
        return found

    return asyncio.run(main())


def test_what_was_accepted_is_still_served_after_closing() -> None:
    with listen("127.0.0.1", 0) as bound:
        assert serve(bound, 20, close_first=True) == [True] * 20


def test_no_room_for_connections_is_waited_out(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(accepting, "PAUSE", 0.05)
    failures = [OSError(errno.EMFILE, "Too many open files"), ConnectionAbortedError()]

    class Full(socket.socket):
        def accept(self):
            if failures:
                raise failures.pop()
            return super().accept()

    with Full() as bound:
        bound.bind(("127.0.0.1", 0))
        assert serve(bound, 3) == [True] * 3
    assert "cannot accept more connections for now (Too many open files)" in caplog.text


def test_the_process_is_prepared_before_it_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A full collection of all objects of the libraries took up to a second, in which no client was answered."""
    called: dict[str, object] = {}
    monkeypatch.setattr(gc, "freeze", lambda: called.update(frozen=True))
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: called.update(seconds=seconds))
    monkeypatch.setattr(Image.core, "set_block_size", lambda size: called.update(block=size))  # type: ignore[attr-defined]
    monkeypatch.setattr(server, "keep_memory_together", lambda: called.update(memory=True))
    monkeypatch.setattr(
        server, "_server", lambda *a: SimpleNamespace(run=lambda sockets: called.update(ran=len(called)))
    )
    server.run(None, None)  # type: ignore[arg-type]
    assert called.pop("ran") == 4
    assert called["frozen"]
    assert called["seconds"] < sys.getswitchinterval()
    # glibc keeps freed blocks of up to 32 MiB
    assert called["block"] > 32 * 2**20


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_does_not_exist_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=f"Expected a port from 0 to 65535; got {port}"):
        listen("127.0.0.1", port)
