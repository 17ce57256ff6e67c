"""The page in a real browser: no complaint on the console, no request, nothing wider than a phone, printable."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vitkit
from vitkit.jobs.report import compare

playwright = pytest.importorskip("playwright.sync_api")
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(18, 22, 29)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(digits_page: Path, food_page: Path, folder: Path, photos: Path, digits: Path) -> dict[str, Path]:
    vitkit.doctor(photos, weights=digits, page=folder / "doctor.html", cache=folder / "cache", workers=0)
    return {"digits": digits_page, "food": food_page, "runs": compare(folder), "doctor": folder / "doctor.html"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("name", ["digits", "food", "runs", "doctor"])
def test_in_a_browser(browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(pages[name].as_uri())
    page.wait_for_load_state("networkidle")
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [pages[name].as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (DARK if scheme == "dark" else LIGHT)
    broken = page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).length")
    assert broken == 0
    if name == "doctor":  # it has photos, not drawings
        assert page.evaluate("document.images.length")
        context.close()
        return
    drawn = page.evaluate("[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height)")
    assert drawn
    assert min(drawn) > 50
    # Text of drawings is in the page's own colour: it can be read in both schemes.
    colours = page.evaluate("[...document.querySelectorAll('svg text')].map(text => getComputedStyle(text).fill)")
    assert ("rgb(230, 234, 242)" if scheme == "dark" else "rgb(28, 35, 48)") in colours
    context.close()


def test_links_lead_to_their_sections(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page()
    page.goto(pages["digits"].as_uri())
    page.click("nav a[href='#figures']")
    assert page.evaluate("Math.abs(document.getElementById('figures').getBoundingClientRect().top) < innerHeight")
    page.click("summary:has-text('Recipe')")
    assert page.is_visible("text=weight_decay")
    page.close()


def test_it_prints(browser: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(pages["digits"].as_uri())
    content = page.pdf(path=tmp_path / "page.pdf", format="A4", print_background=True)
    assert content.startswith(b"%PDF")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == LIGHT  # ink is not wasted on night
    page.close()
