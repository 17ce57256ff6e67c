"""The explorable page behind the server: its files, its headers, and that they are made once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import photo, tiny
from vitkit.errors import CannotExpress
from vitkit.jobs.explore import explorable
from vitkit.server.app import create_app
from vitkit.server.exploring import ExplorablePage
from vitkit.server.service import Service
from vitkit.server.settings import Settings

# Word by word: the policy of every page except the explorable one.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE = {"index.html": b"<!doctype html>", "app.js": b"1"}
Say = Callable[[str], None]


def served(make: Callable[[Say], Mapping[str, bytes]], **settings: object) -> TestClient:
    service = Service(tiny(), Settings(**settings))  # type: ignore[arg-type]
    service.warm()
    service.explorable = ExplorablePage(PAGE, make)
    return TestClient(create_app(service))


def test_without_the_page_nothing_is_there(client: TestClient) -> None:
    assert client.get("/v1/model").json()["explores"] is False
    for path in ("/explore/", "/explore/index.html", "/explore/model/card.json"):
        assert client.get(path).status_code == 404


def test_only_the_explorable_page_may_run_wasm() -> None:
    client = served(lambda say: {"model/card.json": b"{}"})
    for path in ("/", "/docs", "/page/app.js", "/v1/model", "/healthz", "/nothing", "/explore"):
        headers = client.get(path).headers
        assert headers["content-security-policy"] == POLICY, path
        assert not {name for name in headers if name.startswith("cross-origin-opener")}, path
    for path in ("/explore/", "/explore/app.js", "/explore/model/card.json"):
        headers = client.get(path).headers
        rest = headers["content-security-policy"].replace(" 'wasm-unsafe-eval'; worker-src 'self'", "")
        assert rest == POLICY, path
        assert "script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'" in headers["content-security-policy"]
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cross-origin-embedder-policy"] == "require-corp"
    assert client.get("/v1/model").json()["explores"] is True


def test_it_is_made_once_and_only_when_asked_for() -> None:
    go, calls = threading.Event(), []

    def make(say: Say) -> dict[str, bytes]:
        calls.append(1)
        say("looking at a cat")
        go.wait(60)
        return {"model/card.json": b"{}"}

    client = served(make)
    assert client.get("/explore/").content == PAGE["index.html"]
    assert client.get("/explore/app.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert calls == []
    first = client.get("/explore/model/card.json")
    assert (first.status_code, first.headers["retry-after"]) == (202, "1")
    assert client.post("/v1/predict", files={"files": ("a.png", photo())}).status_code == 200  # nobody waits for it
    found = client.get("/explore/model/card.json")
    while found.json()["status"].startswith("Preparing the model: starting"):
        found = client.get("/explore/model/card.json")
    assert found.json() == {"status": "Preparing the model: looking at a cat …"}
    go.set()
    while found.status_code == 202:
        found = client.get("/explore/model/card.json")
    assert (found.status_code, found.content, found.headers["content-type"]) == (200, b"{}", "application/json")
    assert calls == [1]
    for name in ("model/nothing", "nothing.js", "model/%2e%2e/app.js", "%2e%2e%2fpage%2fapp.js", "/model/card.json"):
        assert client.get(f"/explore/{name}").status_code == 404, name


@pytest.mark.parametrize("error", [CannotExpress("This model has a stem."), RuntimeError("secret inside")])
def test_a_model_that_cannot_be_exported_says_why(error: Exception) -> None:
    def make(say: Say) -> dict[str, bytes]:
        raise error

    client = served(make)
    found = client.get("/explore/model/card.json")
    while found.status_code == 202:
        found = client.get("/explore/model/card.json")
    assert found.status_code == 422
    assert "secret" not in found.text
    assert "has a stem" in found.text or "see the server log" in found.text


def test_the_model_needs_the_token() -> None:
    client = served(lambda say: {"model/card.json": b"{}"}, token="open-sesame")
    assert client.get("/explore/").status_code == 200  # the page itself holds no secret
    assert client.get("/explore/model/card.json").status_code == 401
    assert client.get("/explore/model/card.json", headers={"Authorization": "Bearer open-sesame"}).status_code in (
        200,
        202,
    )


def test_a_model_that_the_page_cannot_show_is_refused_before_the_server_starts() -> None:
    with pytest.raises(CannotExpress, match="num_register_tokens=2"):
        explorable(tiny(num_register_tokens=2))


def test_the_api_describes_the_model_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "secret place").mkdir()
    client = TestClient(create_app(Service(tiny(), source=str(tmp_path / "secret place"))))
    assert client.get("/openapi.json").json()["info"]["description"].endswith("from secret place.")
    assert str(tmp_path) not in client.get("/openapi.json").text
