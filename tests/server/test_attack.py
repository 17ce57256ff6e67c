"""Attacks that once kept honest clients out, or were answered when they should not have been."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.fuzz_serve import bomb, good, multipart, parse, picture, request, save_tiny, send, serving
from tests.server.conftest import files, photo
from vitkit.errors import Busy, ConfigError
from vitkit.server import service as service_module
from vitkit.server import uploads
from vitkit.server.fair import (
    FADING,
    LARGE,
    LEAST,
    LONGEST,
    MALLOC,
    NICE,
    Budget,
    FairPool,
    Pace,
    keep_memory_together,
    trim,
)
from vitkit.server.middleware import BYTE_SECONDS, REQUEST_SECONDS, RequestContext
from vitkit.server.uploads import Upload

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with serving(save_tiny(tmp_path_factory.mktemp("weights")), "--max-requests", "6") as (_, found):
        yield found


def test_the_number_of_images_in_json_is_checked_first(client_with) -> None:
    client = client_with(max_files=3)
    image = {"data": base64.b64encode(photo()).decode()}
    assert client.post("/v1/predict", json={"images": [image] * 3}).status_code == 200
    for images in ([image] * 4, [{"data": "AA=="}] * 200_000, [None] * 200_000, [{}] * 4):
        answer = client.post("/v1/predict", json={"images": images})
        assert answer.status_code == 413, answer.text
        assert f"at most 3 images per request; got {len(images)}." in answer.json()["error"]
        assert len(answer.text) < 300


def test_too_many_files_are_413_with_the_limit(client_with) -> None:
    client = client_with(max_files=3)
    for count in (4, 5, 40):
        answer = client.post("/v1/predict", files=files(*[photo()] * count))
        assert answer.status_code == 413, answer.text
        assert "at most 3 images per request" in answer.json()["error"]


def test_the_pixels_of_a_request_are_bounded(client_with) -> None:
    client = client_with(max_megapixels=1.0, max_request_megapixels=2.0)
    million = bomb(1000, 1000)
    answer = client.post("/v1/predict", files=files(*[million] * 3))
    assert answer.status_code == 413
    assert "3 megapixels in all are more than the 2 that this server accepts per request" in answer.json()["error"]
    answer = client.post("/v1/predict", files=files(bomb(1001, 1000)))
    assert answer.status_code == 413
    assert "1 megapixels that this server accepts" in answer.json()["error"]


def test_the_budget_of_a_client() -> None:
    budget = Budget(100, 10)
    with budget.reserve("a", 80):
        with pytest.raises(Busy, match="your requests in progress"), budget.reserve("a", 21):
            pass
        with budget.reserve("a", 10), budget.reserve("b", 100):  # small ones pass, and so do other clients
            pass
    with budget.reserve("a", 100):
        pass
    assert not budget.held


@pytest.mark.parametrize("least", [0, LARGE + 1])
def test_clients_take_turns_and_small_images_come_first(least: int) -> None:
    pool, order, hold = FairPool(1, Pace(1)), list[str](), threading.Event()
    pool.submit("x", least, hold.wait)
    done = [
        pool.submit(client, least + size, lambda client=client, size=size: order.append(f"{client}{size}"))
        for client, size in (("a", 9), ("a", 8), ("a", 1), ("b", 5), ("c", 7), ("b", 6))
    ]
    hold.set()
    for one in done:
        one.result(60)
    assert order == ["a1", "b5", "c7", "a8", "b6", "a9"]
    failed = pool.submit("a", least, lambda: 1 // 0)
    assert isinstance(failed.exception(60), ZeroDivisionError)
    last = pool.submit("a", least, lambda: "answered")
    pool.shutdown()
    assert last.done()


def test_large_images_leave_a_thread_for_others() -> None:
    pool, started, hold = FairPool(1, Pace(1)), threading.Event(), threading.Event()

    def wait() -> bool:
        started.set()
        return hold.wait(60)

    large = [pool.submit("a", LARGE + 1, wait) for _ in range(4)]
    other = pool.submit("b", LARGE + 1, wait)
    assert started.wait(60)
    assert pool.submit("b", 1, lambda: "small").result(60) == "small"
    assert pool.submit("a", 1, lambda: "small").result(60) == "small"
    assert sum(one.running() for one in (*large, other)) == 1
    large[2].cancel()
    hold.set()
    assert all(one.cancelled() or one.result(60) for one in (*large, other))
    pool.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_large_images_have_a_lower_priority() -> None:
    """So that on a busy machine the event loop, the model and small images go first."""

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    pool, mine = FairPool(2, Pace(1)), priority()
    found = [pool.submit("a", size, priority).result(60) for size in (0, LARGE, LARGE + 1)]
    assert found == [mine, mine, min(mine + NICE, 19)]
    assert priority() == mine  # not the whole process
    pool.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_explanations_have_a_lower_priority_than_predictions(client_with) -> None:
    service = client_with().app.service
    mine = os.getpriority(os.PRIO_PROCESS, os.getpid())

    def priority(*_: object) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert asyncio.run(service.explain(Upload("a.png", photo()), priority)) == min(mine + NICE, 19)
    seen: list[int] = []
    service.logits.observe = lambda size, seconds: seen.append(priority())
    asyncio.run(service.predict([Upload("a.png", photo())], 1))
    assert seen == [mine]


def test_the_app_sees_a_request_only_when_all_of_it_has_arrived(client_with) -> None:
    """Hundreds of requests that send a byte now and then would each wake the app for every byte."""
    import asyncio

    middleware, seen, sent = client_with().app, [], []
    inner = middleware.app

    async def app(scope, receive, send) -> None:
        seen.append(scope["path"])
        await inner(scope, receive, send)

    middleware.app = app
    body, headers = multipart(photo())
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/predict",
        "raw_path": b"/v1/predict",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), *((k.lower().encode(), v.encode()) for k, v in headers.items())],
        "client": ("10.0.0.1", 1),
        "app": None,
    }

    async def send(message) -> None:
        sent.append(message)

    async def answer(*parts: dict) -> None:
        left = iter(parts)

        async def receive() -> dict:
            assert seen == []  # until the last part
            return next(left)

        await middleware(scope, receive, send)

    pieces = [{"type": "http.request", "body": body[i : i + 1], "more_body": True} for i in range(len(body))]
    asyncio.run(answer(*pieces, {"type": "http.disconnect"}))
    assert seen == []
    assert sent[0]["status"] == 400
    sent.clear()
    asyncio.run(answer(*pieces[:-1], pieces[-1] | {"more_body": False}))
    assert seen == ["/v1/predict"]
    assert sent[0]["status"] == 200
    assert middleware.held == 0


def test_the_client_with_the_most_slow_requests_makes_room(client_with) -> None:
    from vitkit.server.middleware import RequestContext

    middleware = client_with(max_requests=4).app
    made = [RequestContext(middleware, None, None, {}, 1e9, client) for client in ("honest", "a", "a", "b", "honest")]
    for one in made:
        one.arrive()
    assert [one.client for one in middleware.arriving] == ["honest", "a", "b", "honest"]
    assert made[1].why


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc gives memory back on request")
def test_memory_is_given_back_soon_after_large_requests(client_with, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    from vitkit.server import middleware as module

    trimmed = []
    monkeypatch.setattr(module, "trim", lambda: trimmed.append(1))
    monkeypatch.setattr(module, "TRIM_SECONDS", 0.01)
    app = client_with().app

    async def serve(*sizes: int) -> None:
        for size in sizes:
            app.tidy(size)
        await asyncio.sleep(0.3)

    asyncio.run(serve(10, module.LARGE_BODY))
    assert trimmed == []
    asyncio.run(serve(module.LARGE_BODY + 1, module.LARGE_BODY + 1, 10))
    assert trimmed == [1]  # once for many
    app.service.untidy = True  # as after a large image
    asyncio.run(serve(10))
    assert trimmed == [1, 1]


def test_memory_is_given_back_where_the_c_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    trim()  # does no harm, whatever the C library
    asked: list[int] = []
    monkeypatch.setattr("vitkit.server.fair._glibc", {"malloc_trim": asked.append}.get)
    trim()
    assert asked == [0]
    monkeypatch.setattr("vitkit.server.fair._glibc", {}.get)
    trim()
    keep_memory_together()
    assert asked == [0]


def test_the_heaps_of_the_c_library_are_few_and_hold_no_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, int] = {}
    monkeypatch.setattr("vitkit.server.fair._glibc", {"mallopt": asked.__setitem__}.get)
    keep_memory_together()
    assert asked == MALLOC == {-3: 2**20, -8: 2}  # M_MMAP_THRESHOLD and M_ARENA_MAX of malloc.h


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_client_alone_never_waits() -> None:
    pace = Pace(0.5, Clock())
    pace.charge("a", 1000)
    assert pace.wait("a") == 0


def test_nobody_waits_while_the_processors_are_free() -> None:
    pace = Pace(0.5, Clock())
    pace.charge("a", 0.3 * FADING)
    pace.charge("b", 0.19 * FADING)
    assert pace.wait("a") == pace.wait("b") == 0


def test_those_who_use_most_wait_for_those_who_use_little() -> None:
    pace, clock = Pace(0.5, clock := Clock()), clock
    for client, cores in {"light": 0.1, "a": 0.5, "b": 0.9}.items():
        pace.charge(client, cores * FADING)
    # The light one leaves 0.4 cores, 0.2 for each of the others.
    assert pace.wait("light") == pace.wait("another") == 0
    assert 0 < pace.wait("a") < pace.wait("b") <= LONGEST
    clock.now = 0.99 * pace.wait("a")
    pace.charge("light", 0.1 * FADING - pace._fading("light", clock.now))
    assert 0 < pace.wait("a") < 0.1
    pace.charge("b", 1e9)
    assert pace.wait("b") == LONGEST
    pace.stop()
    assert pace.wait("b") == 0


def test_a_client_that_uses_very_little_never_waits() -> None:
    pace = Pace(0.5, Clock())
    for number in range(100):
        pace.charge(f"{number}", 0.99 * LEAST * FADING)
    assert pace.wait("7") == 0
    pace.charge("7", 0.02 * LEAST * FADING)
    assert pace.wait("7") > 0


def test_clients_are_forgotten() -> None:
    pace, clock = Pace(0.5, clock := Clock()), clock
    for number in range(100):
        pace.charge(f"{number}", 1)
    assert pace.wait("7") > 0
    clock.now = 100 * FADING
    assert pace.wait("7") == 0
    assert not pace._used


def test_work_of_greedy_clients_waits_and_lets_others_pass() -> None:
    pace = Pace(0.5)
    pace.charge("greedy", 1e9)
    pace.charge("light", 0.01)
    pool, order = FairPool(1, pace), list[str]()
    greedy = pool.submit("greedy", LARGE + 1, lambda: order.append("greedy"))
    pool.submit("light", LARGE + 1, lambda: order.append("light")).result(60)
    assert order == ["light"]
    pace.stop()
    pool.submit("light", LARGE + 1, lambda: None).result(60)
    greedy.result(60)
    pool.shutdown()


@pytest.mark.parametrize("fails", [False, True])
def test_work_is_charged_before_its_result_is_known(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pace, order, hold = Pace(0.5), list[str](), threading.Event()
    monkeypatch.setattr(pace, "charge", lambda client, seconds: order.append("charged"))
    pool = FairPool(1, pace)

    def work() -> None:
        hold.wait()
        if fails:
            raise Busy("damaged")

    pool.submit("10.0.0.1", 100, work).add_done_callback(lambda future: order.append("answered"))
    hold.set()
    pool.shutdown()
    assert order == ["charged", "answered"]


def test_clients_are_charged_for_decoding_and_explanations(client_with, monkeypatch: pytest.MonkeyPatch) -> None:
    client, charged, used = client_with(), list[tuple[str, float]](), threading.local()
    service = client.app.service
    monkeypatch.setattr(service.pace, "charge", lambda client, seconds: charged.append((client, seconds)))
    monkeypatch.setattr(time, "thread_time", lambda: getattr(used, "seconds", 0.0))  # of each thread
    upload = Upload("a.png", photo(), "10.0.0.1")
    decode = service_module.to_pixels

    def use(seconds: float) -> None:
        used.seconds = time.thread_time() + seconds

    monkeypatch.setattr(service_module, "to_pixels", lambda *given: (use(2.0), decode(*given))[1])
    asyncio.run(service.predict([upload], 1))
    assert charged == [("10.0.0.1", 2.0)]
    asyncio.run(service.explain(upload, lambda model, x: use(7.0)))
    assert charged == [("10.0.0.1", 2.0), ("10.0.0.1", 2.0), ("10.0.0.1", 7.0)]


def test_requests_and_their_bytes_are_charged_and_wait(client_with, monkeypatch: pytest.MonkeyPatch) -> None:
    client, charged, slept = client_with(), list[float](), list[float]()
    pace, sleep = client.app.service.pace, asyncio.sleep

    async def record(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(pace, "charge", lambda client, seconds: charged.append(seconds))
    monkeypatch.setattr(pace, "wait", lambda client: 0.125)
    monkeypatch.setattr("vitkit.server.middleware.asyncio.sleep", record)
    assert client.get("/healthz").status_code == 200  # health checks are not another client
    assert charged == slept == []
    assert client.get("/nothing").status_code == 404
    assert charged == [REQUEST_SECONDS]
    assert slept == [0.125]
    assert client.post("/v1/predict", content=b"x" * 1000, headers=JSON).status_code == 400
    assert charged[1:] == [REQUEST_SECONDS, 1000 * BYTE_SECONDS]
    assert slept == [0.125] * 3


def slow(port: int, source: str = "127.0.0.1") -> socket.socket:
    """A request that sends its head and the beginning of its body, and then nothing."""
    line = socket.create_connection(("127.0.0.1", port), timeout=30, source_address=(source, 0))
    body, headers = multipart(picture(random.Random(0)))
    line.sendall(request("POST", "/v1/predict", body, headers)[: -len(body) // 2])
    return line


def test_slow_bodies_cannot_take_all_places(port: int) -> None:
    """There are six places; twenty slow clients of the same address leave room for an honest one."""
    lines = [slow(port) for _ in range(20)]
    try:
        for line in lines[:14]:  # those that have been arriving for longest make room
            answer = parse(line.recv(65536))
            assert answer.status == 408
            assert b"slowest to arrive" in answer.body or not answer.body
        for seed in range(3):
            assert good(port, random.Random(seed)).status == 200
    finally:
        for line in lines:
            line.close()


def test_two_lengths_are_refused(port: int) -> None:
    """A proxy might believe one and this server the other, and so see a second request inside the body."""
    hidden = b"GET /v1/model HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for path in ("/v1/predict", "/healthz"):
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {5 + len(hidden)}\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
            line.sendall(head.encode() + b"0\r\n\r\n" + hidden)
            received = b""
            while data := line.recv(65536):
                received += data
        assert received.count(b"HTTP/1.1 ") == 1, received
        assert received.startswith(b"HTTP/1.1 400 ")
        assert b"both Content-Length and Transfer-Encoding" in received
    chunked = request("POST", "/v1/predict", b"", {**JSON, "Transfer-Encoding": "chunked"})
    chunked = chunked.replace(b"Content-Length: 0\r\n", b"") + b"2\r\n{}\r\n0\r\n\r\n"
    assert b"Expected JSON" in send(port, chunked).body  # one of them alone is fine


def test_posts_of_other_sites_are_refused(client, port: int) -> None:
    for origin in ("http://evil.example", "null", "http://localhost.evil.example", "http://localhost:1"):
        answer = client.post("/v1/predict", files=files(photo()), headers={"Origin": origin, "Host": "localhost:8000"})
        assert answer.status_code == 403, origin
        assert "the proxy must pass the Host header on" in answer.json()["error"]
    for origin in ("http://localhost:8000", "https://LOCALHOST:8000"):
        answer = client.post("/v1/predict", files=files(photo()), headers={"Origin": origin, "Host": "localhost:8000"})
        assert answer.status_code == 200, answer.text
    assert client.get("/v1/model", headers={"Origin": "http://evil.example"}).status_code == 200  # nobody can read it


def test_origins_behind_a_proxy(client_with) -> None:
    """A proxy may change Host; the names that the operator allowed are origins of this server."""
    client = client_with(hosts=("127.0.0.1", "example.com", "*.example.org"))
    for origin, status in (
        ("https://example.com", 200),
        ("https://a.example.org", 200),
        ("https://example.org.evil.example", 403),
        ("https://evil.example", 403),
    ):
        headers = {"Origin": origin, "Host": "127.0.0.1:8000"}
        assert client.post("/v1/predict", files=files(photo()), headers=headers).status_code == status, origin


def test_the_limits_of_a_head(port: int) -> None:
    for headers, what in (
        ({"X-Long": "y" * 33_000}, "32 KiB"),
        ({f"X-{n}": "z" for n in range(120)}, "100 header"),
    ):
        answer = send(port, request("GET", "/v1/model", headers=headers))
        assert answer.status in (400, 431)
        if answer.status == 431:
            assert what in answer.body.decode()
    assert send(port, request("GET", "/v1/model", headers={"X-Long": "y" * 30_000})).status == 200
    assert send(port, request("GET", "/v1/model", headers={f"X-{n}": "z" for n in range(90)})).status == 200


def test_a_head_over_the_limit_in_one_piece(client) -> None:
    """An HTTP library limits only heads that arrive in pieces."""
    answer = client.get("/v1/model", headers={"X-Long": "y" * 33_000})
    assert answer.status_code == 431
    assert "32 KiB" in answer.json()["error"]
    answer = client.get("/v1/model", headers={f"X-{n}": "z" for n in range(120)})
    assert answer.status_code == 431
    assert "100 header lines" in answer.json()["error"]


def test_an_empty_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer takes an empty environment variable for none, and the server would be open to everybody."""
    from vitkit.cli import app

    weights = save_tiny(tmp_path)
    for variable, options in (("", ()), ("   ", ()), ("long-enough-token", ("--token", ""))):
        monkeypatch.setenv("VITKIT_TOKEN", variable)
        found = CliRunner().invoke(app, ["serve", str(weights), "--port", "0", *options])
        assert isinstance(found.exception, ConfigError)
        assert "token must have at least 8" in str(found.exception)


def test_a_client_cannot_hold_more_than_its_pixels(client_with) -> None:
    client = client_with(max_megapixels=50, max_request_megapixels=60)
    service = client.app.service
    with service.budget.reserve("testclient", 55_000_000):
        answer = client.post("/v1/predict", files=files(bomb(4000, 4000)))
        assert answer.status_code == 503
        assert "your requests in progress" in answer.json()["error"]
        assert client.post("/v1/predict", files=files(photo())).status_code == 200
    assert client.post("/v1/predict", files=files(bomb(4000, 4000))).status_code == 422  # it is truncated
    assert not service.budget.held


def test_deep_json_is_a_sentence(client) -> None:
    for body in (b"[" * 200_000, json.dumps({"images": "x" * 10**6}).encode()):
        answer = client.post("/v1/predict", content=body, headers=JSON)
        assert answer.status_code == 400
        assert len(answer.text) < 500


def test_json_with_too_many_images_is_not_parsed(client_with, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing a million images takes seconds, in which nothing else is answered."""

    def parsed(max_files: int) -> None:
        raise AssertionError("parsed")

    client = client_with(max_files=3)
    monkeypatch.setattr("vitkit.server.uploads._model", parsed)
    for image in (b'{"data":"AA=="}', b'{"dat\\u0061":"AA=="}', b"null"):
        body = b'{"images":[' + b",".join([image] * 1000) + b"]}"
        answer = client.post("/v1/predict", content=body, headers=JSON)
        assert answer.status_code == 413
        assert "at most 3 images per request; got 1000." in answer.json()["error"]


@pytest.mark.parametrize("piece", [1, 5, 7, 2**20])
def test_counting_piece_by_piece_misses_nothing(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PIECE", piece)
    body = b'{"images": [{"data": "AA=="}, {"data": "data"}, {"name": "data"}]}' * 3
    assert uploads._count(body, b'"data"') == body.count(b'"data"') == 12
    assert uploads._count(body, b",") == body.count(b",")


def test_predictions_do_not_wait_for_explanations(client_with) -> None:
    service = client_with().app.service
    hold, started = threading.Event(), threading.Event()
    upload = Upload("a.png", photo())

    def explain(model, x) -> str:
        started.set()
        assert hold.wait(60)
        return "done"

    async def both() -> str:
        explaining = asyncio.ensure_future(service.explain(upload, explain))
        await asyncio.to_thread(started.wait, 60)
        await asyncio.wait_for(service.predict([upload], 1), 60)
        await asyncio.wait_for(service.embed([upload]), 60)
        hold.set()
        return await explaining

    assert asyncio.run(both()) == "done"


def test_a_single_small_image_takes_one_turn(client_with, monkeypatch: pytest.MonkeyPatch) -> None:
    client, turns = client_with(max_request_megapixels=50), list[int]()
    service = client.app.service
    submit = service.pool.submit
    monkeypatch.setattr(service.pool, "submit", lambda who, size, work: turns.append(size) or submit(who, size, work))
    assert client.post("/v1/predict", files=files(photo())).status_code == 200
    assert turns == [0]
    turns.clear()
    assert client.post("/v1/predict", files=files(photo(), photo(1))).status_code == 200
    assert turns == [0, 48 * 40, 48 * 40]
    turns.clear()
    assert client.post("/v1/predict", files=files(photo(size=(600, 600)))).status_code == 200  # over a 200th of 50
    assert turns == [0, 600 * 600]


def test_nobody_waits_for_large_images(client_with, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is decoded, batches of others start without the delay in which they would wait for it."""
    monkeypatch.setattr("vitkit.server.service.LARGE", 100 * 100)
    client = client_with(max_delay=10.0)
    service, hold = client.app.service, threading.Event()
    decode = service_module.to_pixels
    monkeypatch.setattr(service_module, "to_pixels", lambda one, spec: hold.wait(60) and decode(one, spec))

    async def both() -> tuple[int, int]:
        large = asyncio.ensure_future(service.predict([Upload("large.png", photo(size=(101, 100)))] * 2, 1))
        while service.logits.coming or not service.budget.held:  # reserved, measured, and being decoded
            await asyncio.sleep(0.01)
        waiting = service.logits.held
        hold.set()
        await large
        return waiting, service.logits.coming

    assert asyncio.run(asyncio.wait_for(both(), 60)) == (2, 0)


def test_a_body_has_one_timer(client_with, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer for each part made slow bodies expensive, of which a client can send many."""
    middleware, timers = client_with().app, list[float]()
    timeout = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda seconds: timers.append(seconds) or timeout(seconds))
    parts = [{"type": "http.request", "body": b"x", "more_body": i < 49} for i in range(50)]

    async def receive() -> dict:
        return parts.pop(0)

    context = RequestContext(middleware, receive, receive, {}, time.monotonic() + 30)
    context.arrive()
    asyncio.run(context.gather())
    assert len(timers) == 1
    assert (context.size, len(context.parts), context.working) == (50, 50, True)
    context.leave()


def test_a_request_that_is_too_late_anyway_can_be_evicted(client_with) -> None:
    """Two timeouts in one turn of the event loop must not fail the request that needs the room."""

    async def late() -> RequestContext:
        context = RequestContext(client_with().app, None, None, {}, time.monotonic() + 30)  # type: ignore[arg-type]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0) as context.timer:
                await asyncio.sleep(60)
        context.evict("others arrive")
        return context

    assert asyncio.run(late()).why == "others arrive"
