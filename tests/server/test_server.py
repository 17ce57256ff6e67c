"""The command, as a process: starting, refusing, and stopping under load."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import random
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvicorn
from starlette.testclient import TestClient

import vitkit
from benchmarks.fuzz_serve import multipart, picture, request, save_tiny, send, serving
from tests.server.conftest import tiny
from vitkit.cli import main
from vitkit.server.app import create_app
from vitkit.server.server import Server
from vitkit.server.service import Service, load_service

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows ends a process without SIGTERM")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line, in this process: (exit code, standard output, standard error)."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vitkit", *args])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return run


def check_same(weights: str, images: list[Path], command: Callable[..., tuple[int, str, str]]) -> None:
    """The same probabilities, to 1e-5, and the same five classes, by command line, Python and HTTP."""
    code, out, error = command("predict", weights, *map(str, images), "--json")
    assert code == 0, error
    cli = [
        [(guess["name"], guess["probability"]) for guess in one["guesses"]] for one in json.loads(out)["predictions"]
    ]
    python = [
        [(guess.name, guess.probability) for guess in one.guesses]
        for one in vitkit.predict(vitkit.load(weights), images)
    ]
    with TestClient(create_app(load_service(weights, device="cpu"))) as client:
        answer = client.post("/v1/predict", files=[("files", (image.name, image.read_bytes())) for image in images])
    http = [[(guess["class"], guess["p"]) for guess in one["top"]] for one in answer.json()["results"]]
    for other in (python, http):
        for one, two in zip(cli, other, strict=True):
            assert [name for name, _ in one] == [name for name, _ in two]
            assert [p for _, p in one] == pytest.approx([p for _, p in two], abs=1e-5)


def test_the_same_answer_by_three_doors(tmp_path: Path, command) -> None:
    vitkit.save(tiny(), tmp_path / "tiny.safetensors")
    images = [tmp_path / f"{i}.png" for i in range(3)]
    for i, image in enumerate(images):
        image.write_bytes(picture(random.Random(i), "PNG"))
    check_same(str(tmp_path / "tiny.safetensors"), images, command)


def test_the_same_answer_by_three_doors_on_real_weights(shared_data: Path, command) -> None:
    photos = sorted((shared_data / "pizza_steak_sushi/test/sushi").glob("*.jpg"))[:6]
    check_same(str(shared_data / "weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.timm.pth"), photos, command)


@posix
def test_sigterm_under_load_loses_nothing_that_was_accepted(tmp_path: Path) -> None:
    """Sixteen clients ask without pause; every request that the server took is answered in full."""
    found: list[int] = []
    stop = threading.Event()
    raw = request("POST", "/v1/predict", *multipart(picture(random.Random(5), "JPEG")))

    def client() -> None:
        while not stop.is_set():
            try:
                answer = send(port, raw, seconds=30)
            except OSError:  # the server no longer listens
                return
            if answer.status:
                json.loads(answer.body)  # whole, not cut
                found.append(answer.status)

    with serving(save_tiny(tmp_path), "--max-batch", "2") as (process, port):
        clients = [threading.Thread(target=client) for _ in range(16)]
        for one in clients:
            one.start()
        while found.count(200) < 60 and any(one.is_alive() for one in clients):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=120)[1]
        stop.set()
        for one in clients:
            one.join()
    accepted, answered = map(int, re.search(r"(\d+) requests accepted, (\d+) answered", said).groups())  # type: ignore[union-attr]
    assert accepted == answered == len(found) + 1  # one asked whether it was ready
    assert set(found) <= {200, 503}
    assert found.count(200) >= 60
    assert process.returncode == 0


def test_a_signal_does_not_wait_for_a_lock_that_it_interrupts() -> None:
    """The thread of the event loop handles it, perhaps while it holds the lock itself; then the server hung."""
    service = Service(tiny())
    app, pace = create_app(service), service.pace
    server = Server(uvicorn.Config(app), app)

    class Held:
        held = False

        def __enter__(self) -> None:
            assert not self.held, "it would wait for itself"
            self.held = True

        def __exit__(self, *_: object) -> None:
            self.held = False

    async def interrupted() -> None:
        with pace._lock:
            server.handle_exit(signal.SIGTERM, None)
        assert service.stopping
        await asyncio.sleep(0)
        assert pace.most == math.inf

    pace._lock = Held()  # type: ignore[assignment]
    asyncio.run(interrupted())


@posix
@pytest.mark.parametrize("names", [["SIGTERM"], ["SIGHUP", "SIGHUP"]])  # a closing terminal sends two
def test_a_stopping_server_waits_for_a_body_that_is_on_its_way(tmp_path: Path, names: list[str]) -> None:
    whole = request("POST", "/v1/predict", *multipart(picture(random.Random(6), "PNG")))
    with (
        serving(save_tiny(tmp_path)) as (process, port),
        socket.create_connection(("127.0.0.1", port), timeout=30) as line,
    ):
        line.sendall(whole[:-50])
        while b"vitkit_requests_in_progress 2.0" not in send(port, request("GET", "/metrics")).body:
            pass  # one of the two asks
        for name in names:
            process.send_signal(getattr(signal, name))
            with contextlib.suppress(OSError):
                while True:  # until it no longer listens
                    send(port, request("GET", "/healthz"))
        line.sendall(whole[-50:])
        assert b"HTTP/1.1 200 OK" in line.recv(65536)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "warp"], "Unknown engine 'warp'"),
        (["--max-queue", "2"], "max_queue must hold one full request"),
        (["--token", "short"], "token must have at least 8"),
        (["--device", "cuda:77"], "Cannot run on device 'cuda:77'"),
        (["--host", "no.such.host.invalid"], "Cannot listen on no.such.host.invalid"),
        (["--dtype", "int8"], "dtype must be"),
        (["--image-size", "big"], "--image-size must be pixels"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, command, options: list[str], words: str) -> None:
    code, _, error = command("serve", str(save_tiny(tmp_path)), "--port", "0", *options)
    assert code == 2
    assert words in error
    assert len(error.strip().splitlines()) == 1


def test_a_port_in_use_and_missing_weights(tmp_path: Path, command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, error = command("serve", str(tmp_path / "none.pth"), "--port", str(taken.getsockname()[1]))
        assert (code, "Cannot listen on 127.0.0.1" in error) == (2, True)
    code, _, error = command("serve", str(tmp_path / "none.pth"), "--port", "0")
    assert (code, "none.pth" in error) == (2, True)


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ([], ("localhost", "127.0.0.1", "[::1]")),
        (["--host", "::1", "--allow-host", "Me.local:8000"], ("localhost", "127.0.0.1", "[::1]", "me.local")),
        (["--host", "[::1]"], ("localhost", "127.0.0.1", "[::1]")),
        (["--host", "0.0.0.0"], None),
        (["--host", "0.0.0.0", "--allow-host", "a.example", "--allow-host", "b.example"], ("a.example", "b.example")),
    ],
)
def test_a_local_server_answers_to_local_names_only(command, monkeypatch, options, hosts) -> None:
    """Protection against DNS rebinding is on unless the server is open to the network."""
    given = []
    monkeypatch.setattr("vitkit.server.service.load_service", lambda weights, settings, **how: given.append(settings))
    monkeypatch.setattr(socket.socket, "bind", lambda *args: None)  # this machine may have no IPv6
    with pytest.raises(AttributeError):  # there is no service
        command("serve", "x", "--port", "0", *options)
    assert given[0].hosts == hosts


def test_a_server_open_to_the_network_warns(tmp_path: Path, command, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, error = command("serve", str(tmp_path / "none.pth"), "--host", "0.0.0.0", "--port", "0")
    assert "warning: everyone who can reach 0.0.0.0 can use this server" in error
    assert "--token" in error
    monkeypatch.setenv("VITKIT_TOKEN", "long-enough")
    assert "--token" not in command("serve", str(tmp_path / "none.pth"), "--host", "0.0.0.0", "--port", "0")[2]


def test_a_missing_library_is_named_with_its_install_command(command, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ray" else real(name, *a))
    code, _, error = command("serve", "x", "--ray")
    assert (code, error.strip()) == (2, "vitkit: This needs ray: pip install 'vitkit[scale]'.")
