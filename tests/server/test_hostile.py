"""Malformed requests: 500 of our own over a real socket, and those that schemathesis derives from the OpenAPI file."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import fuzz_serve
from benchmarks.fuzz_serve import KINDS, good, memory, multipart, picture, request, save_tiny, send, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    weights = save_tiny(tmp_path_factory.mktemp("weights"))
    with serving(weights) as (process, port):
        yield process.pid, port
        process.terminate()
        said = process.communicate(timeout=120)[1]
        assert "Traceback" not in said, said[-3000:]


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def test_five_hundred_hostile_requests(server: tuple[int, int]) -> None:
    pid, port = server
    fuzz_serve.fuzz(port, 100, seed=11)
    proc = Path(f"/proc/{pid}/status").exists()
    before = memory(pid) if proc else 0.0
    found = fuzz_serve.fuzz(port, 400, seed=12)
    assert {kind for kind, _ in found} == set(KINDS)
    assert found["good", 200] > 5
    assert good(port, random.Random(1)).status == 200
    if proc:
        assert memory(pid) - before < 60


def test_a_client_that_never_finishes_its_head_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    import uvicorn

    from tests.server.conftest import tiny
    from vitkit.server import server as module
    from vitkit.server.app import create_app
    from vitkit.server.service import Service
    from vitkit.server.settings import Settings

    app = create_app(Service(tiny()))
    bound = module.listen("127.0.0.1", 0)
    port = bound.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, http=module.Protocol, ws="none", log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        fuzz_serve.wait_for(port)
        with connect(port) as second:
            second.sendall(request("GET", "/healthz", headers={"Connection": "keep-alive"}))
            received = second.recv(4096)
            while not received.endswith(b'"alive"}'):  # head and body may come apart
                received += second.recv(4096) or pytest.fail(f"it was closed after {received!r}")
            assert b"200 OK" in received
            monkeypatch.setattr(module, "HEAD_SECONDS", 0.3)
            second.sendall(b"GET /hea")  # the second request of a connection
            assert second.recv(10) == b""  # closed, not kept
        with connect(port) as silent:
            assert silent.recv(10) == b""
        with connect(port) as half, contextlib.suppress(ConnectionError):  # closed before the server had read this
            half.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
            assert half.recv(10) == b""
        monkeypatch.undo()  # what follows may take longer to arrive
        whole = request("POST", "/v1/predict", *multipart(picture(random.Random(0))))
        with monkeypatch.context() as impatient:
            impatient.setattr(app, "settings", Settings(body_seconds=0.4))
            slow = send(port, whole[:-30])
        assert slow.status == 408
        assert "within 0.4 s" in slow.body.decode()
        assert good(port, random.Random(2)).status == 200
    finally:
        server.should_exit = True
        thread.join(60)


def test_too_large_is_heard_by_one_who_is_still_sending(server: tuple[int, int]) -> None:
    body, headers = multipart(b"x" * 40 * 2**20)
    answer = send(server[1], request("POST", "/v1/predict", body, headers))
    assert answer.status == 413
    assert b"larger than the 32 MB" in answer.body


def test_schemathesis() -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis import checks

    from tests.server.conftest import tiny
    from vitkit.server.app import create_app
    from vitkit.server.service import Service

    # Not the service that tests share: schemathesis stops the app after the test, and the app closes its service.
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(Service(tiny())))
    wanted = [
        checks.not_a_server_error,
        schemathesis.checks.CHECKS.get_one("status_code_conformance"),
        schemathesis.checks.CHECKS.get_one("content_type_conformance"),
        schemathesis.checks.CHECKS.get_one("response_schema_conformance"),
    ]
    seen: dict[str, int] = {}
    for operation in schema.get_all_operations():
        for mode in schemathesis.GenerationMode:
            strategy = operation.ok().as_strategy(generation_mode=mode)

            @given(case=strategy)
            @settings(
                max_examples=8,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
                phases=[Phase.generate],
                derandomize=True,
            )
            def check(case) -> None:
                case.call_and_validate(checks=wanted)
                seen[case.path] = seen.get(case.path, 0) + 1

            with contextlib.suppress(Unsatisfiable):  # nothing that could be wrong about it
                check()
    assert set(seen) == set(schema.raw_schema["paths"])
