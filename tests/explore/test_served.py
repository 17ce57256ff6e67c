"""The explorable page as a part of `vitkit serve`, in a real Chromium: the same answer, with a token, and back."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

import uvicorn
from PIL import Image

from benchmarks.fuzz_serve import wait_for
from tests.explore.conftest import tiny
from tests.explore.test_browser import LIVE, answers, browser, give  # noqa: F401  (a fixture)
from tests.server.test_page import until
from vitkit.evaluation.predict import predict
from vitkit.jobs.explore import explorable
from vitkit.server import server as module
from vitkit.server.app import create_app
from vitkit.server.exploring import ExplorablePage
from vitkit.server.service import Service
from vitkit.server.settings import Settings

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")


@pytest.fixture(scope="module")
def address(photos: list[Path]) -> Iterator[str]:
    """A server with a token whose examples are photos of noise."""
    service = Service(tiny(), Settings(token="open-sesame"), source="tiny.safetensors")
    page, make = explorable(
        service.model,
        name="tiny",
        photos=lambda: [(Image.open(photos[0]), "noise", ""), (Image.open(photos[1]), "n", "")],
    )
    service.explorable = ExplorablePage(page, make)
    bound = module.listen("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(create_app(service), http=module.Protocol, ws="none", log_level="error", lifespan="on")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    port = bound.getsockname()[1]
    wait_for(port)
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(60)


def test_from_the_first_page_to_the_explorable_one_and_back(browser: Any, address: str, photos: list[Path]) -> None:  # noqa: F811
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page, problems = context.new_page(), []
    page.set_default_timeout(60_000)
    context.route(lambda url: not url.startswith((address, "blob:", "data:")), lambda route: route.abort())
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if "401" not in message.text else None)

    page.goto(f"{address}explore/")  # a link that somebody sent: the token is not known yet
    page.locator("#message").filter(has_text="requires a token").wait_for()
    page.goto(address)
    page.locator("#token").fill("open-sesame")
    page.keyboard.press("Enter")
    page.locator("#explore").click()
    page.wait_for_url(f"{address}explore/**")
    until(page, LIVE)
    assert page.evaluate("crossOriginIsolated")
    examples = page.locator("#examples img")
    wide = examples.evaluate_all("all => Promise.all(all.map(one => one.decode().then(() => one.naturalWidth)))")
    assert wide == [32, 32]
    give(page, photos[2])
    assert answers(page) == [guess.name for guess in predict(tiny(), [photos[2]], top=3)[0].guesses]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("#home a", has_text="Photos").click()
    page.locator("#tab-photos").wait_for()
    context.close()
    assert problems == []
