"""The page in a real Chromium: a photo in, an answer out, sliders, a clicked patch, keyboard, phone, camera, token."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

import torch
import uvicorn
from playwright import sync_api as playwright

from benchmarks.fuzz_serve import wait_for
from tests.server.conftest import NAMES, photo, tiny
from vitkit.server import server as module
from vitkit.server.app import create_app
from vitkit.server.middleware import Middleware
from vitkit.server.service import Service
from vitkit.server.settings import Settings

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
DROP = """([name, bytes]) => {
  const data = new DataTransfer();
  data.items.add(new File([Uint8Array.from(bytes)], name, {type: "image/png"}));
  for (const kind of ["dragenter", "drop"])
    document.body.dispatchEvent(new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true}));
}"""
PASTE = """([name, bytes]) => {
  const data = new DataTransfer();
  data.items.add(new File([Uint8Array.from(bytes)], name, {type: "image/png"}));
  window.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data}));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--use-fake-device-for-media-stream",
                "--use-fake-ui-for-media-stream",
            ],
        )
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def app() -> Iterator[tuple[Middleware, str]]:
    """A server in a thread; its settings may be changed between tests."""
    middleware = create_app(Service(tiny(), Settings(max_megabytes=1), source="tiny.safetensors"))
    bound = module.listen("127.0.0.1", 0)
    port = bound.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(middleware, http=module.Protocol, ws="none", log_level="error", lifespan="on")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    wait_for(port)
    yield middleware, f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def page(browser, app) -> Iterator[object]:
    yield from opened(browser, app[1])


def opened(browser, url: str, **how: object) -> Iterator[object]:
    """A page that is ready; afterwards there were no errors and no outside requests."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}} | how)
    page, problems = context.new_page(), []
    page.set_default_timeout(20_000)
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((url, "blob:", "data:"))
            else problems.append(f"outside request: {request.url}")
        ),
    )
    page.problems = problems
    page.goto(url)
    page.wait_for_selector("html[data-ready]")
    yield page
    context.close()
    assert problems == []


def answered(page) -> str:
    """Wait for the bars and for the view inside; the likeliest class."""
    page.locator("#readout").filter(has_text="Looks most at").wait_for()
    return str(page.locator("#bars li:first-child .name").inner_text())


def test_none_of_these_comes_before_the_classes(page) -> None:
    """With an answer as the server gives it for a model that was made with `vitkit probe --accept`."""

    def far(route) -> None:
        answer = route.fetch()
        values = answer.json()
        assert values["results"][0]["none_of_these"] is False  # this model accepts everything
        values["results"][0]["none_of_these"] = True
        route.fulfill(response=answer, json=values)

    page.route("**/v1/predict*", far)
    page.evaluate(DROP, ["mine.png", list(photo(4))])
    assert answered(page) == "None of these"
    assert page.locator("#bars li").count() == 6
    assert page.locator("#status").inner_text().startswith("None of these (nearest: ")


def test_drop_a_photo_read_the_answer_look_inside(page, app) -> None:
    raw = photo(4)
    page.evaluate(DROP, ["mine.png", list(raw)])
    first = answered(page)
    assert first in NAMES
    assert page.locator("#bars li").count() == 5
    assert page.locator("#status").inner_text().startswith(f"{first}, ")
    widths = page.locator("#bars .fill").evaluate_all("all => all.map(one => parseFloat(one.style.width))")
    assert widths == sorted(widths, reverse=True)
    assert page.locator("#photo").get_attribute("alt") == "Your photo: mine.png"

    before = page.locator("#canvas").evaluate("one => one.toDataURL()")
    said = page.locator("#readout").inner_text()
    page.locator("#layer").fill("0")
    page.locator("#head").fill("3")
    assert page.locator("#layer-out").inner_text() == "1 of 2"
    assert page.locator("#head-out").inner_text() == "3 of 4"
    page.wait_for_timeout(400)
    assert page.locator("#canvas").evaluate("one => one.toDataURL()") != before
    assert page.locator("#readout").inner_text() != said

    page.locator("#canvas").click(position={"x": 10, "y": 10})
    page.locator("#who").filter(has_text="the patch in row 1, column 1").wait_for()
    page.locator("#reset").click()
    page.locator("#who").filter(has_text="the class token").wait_for()

    for mode, words in {
        "patches": "16 patches of 8 × 8",
        "rollout": "The largest contribution comes from",
        "gradient": "The largest contribution comes from",
    }.items():
        page.locator(f"input[name=mode][value={mode}]").check()
        page.locator("#readout").filter(has_text=words).wait_for()
    page.locator("#bars button").nth(2).click()  # where does it see the third?
    assert (
        page.locator("#target").evaluate("one => one.selectedOptions[0].text")
        == page.locator("#bars .name").nth(2).inner_text()
    )


def test_the_patch_that_is_shown_is_the_one_that_was_computed(page, app) -> None:
    """The page's sentence against Eq. 6 of the model itself."""
    from vitkit.data import decode, preprocess

    model, raw = app[0].service.model, photo(8)
    page.evaluate(DROP, ["mine.png", list(raw)])
    answered(page)
    page.locator("#layer").fill("1")
    page.locator("#head").fill("2")
    box = page.locator("#canvas").bounding_box()
    page.locator("#canvas").click(position={"x": box["width"] * 0.6, "y": box["height"] * 0.4})  # row 2, column 3
    page.locator("#who").filter(has_text="row 2, column 3").wait_for()
    page.mouse.move(2, 2)
    query = 1 + 1 * 4 + 2
    with torch.no_grad():
        A = model.attention(preprocess(decode(raw), model.input_spec)[None], layers=1, heads=1, query=query)[1][0, 0, 0]
    best, share = int(A[1:].argmax()), 100 * float(A[1:].max())
    page.locator("#readout").filter(
        has_text=f"Looks most at the patch in row {best // 4 + 1}, column {best % 4 + 1} ({share:.1f}%)"
    ).wait_for()


def test_samples_paste_and_pick(page, tmp_path: Path) -> None:
    page.locator("#tray button").first.click()
    answered(page)
    page.evaluate(PASTE, ["pasted.png", list(photo(5))])
    page.locator("#photo[alt='Your photo: pasted.png']").wait_for()
    (tmp_path / "picked.png").write_bytes(photo(6))
    page.locator("#file").set_input_files(tmp_path / "picked.png")
    page.locator("#photo[alt='Your photo: picked.png']").wait_for()
    answered(page)
    assert page.locator("#tray button").count() == 4
    page.locator("#pictures button").first.click()
    page.locator("#picture img[alt]:not([alt=''])").wait_for()


def test_by_keyboard_alone(page) -> None:
    page.locator("#tray button").first.focus()
    page.keyboard.press("Enter")
    answered(page)
    page.locator("#canvas").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowUp")
    page.locator("#readout").filter(has_text="Under the pointer, the patch in row 2, column 2").wait_for()
    page.keyboard.press("Enter")
    page.locator("#who").filter(has_text="row 2, column 2").wait_for()
    page.keyboard.press("Escape")
    page.locator("#who").filter(has_text="the class token").wait_for()
    page.locator("#layer").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#layer").get_attribute("aria-valuetext") == "1 of 2"


def test_everything_has_a_name_for_a_screen_reader(page) -> None:
    page.locator("#tray button").first.click()
    answered(page)
    assert page.locator("img:not([alt])").count() == 0
    unnamed = page.locator("button, input:not([hidden]), select, canvas").evaluate_all("""all => all.filter(one =>
        !(one.labels?.length || one.ariaLabel || one.textContent.trim() || one.title)).map(one => one.outerHTML)""")
    assert unnamed == []
    assert page.locator("[role=alert], [role=status], [aria-live]").count() >= 3
    levels = page.locator("h1, h2").evaluate_all("all => all.map(one => one.tagName)")
    assert levels.count("H1") == 1


def test_a_tab_is_a_row_and_its_files(browser, app) -> None:
    """With a second tab: it is reached by mouse, keyboard and address, and photos go to the tab that is shown."""
    made = {
        "second.html": "<p id='got'>nothing yet</p>",
        "second.js": """export const start = (panel, { model }) => ({
            take: (files) => { document.getElementById("got").textContent = `${files[0].name} of ${model.source}`; },
            show: () => { document.body.dataset.second = "shown"; },
            hide: () => { document.body.dataset.second = "hidden"; },
        });""",
    }
    context = browser.new_context()
    page = context.new_page()

    def answer(route) -> None:
        name = route.request.url.rsplit("/", 1)[1]
        if name in made:
            route.fulfill(body=made[name], content_type=f"text/{'html' if name.endswith('html') else 'javascript'}")
        else:
            row = '{ name: "second", title: "Second", shown: always, load: () => import("./second.js") },'
            text = route.fetch().text()
            assert text.count("\n];") == 1
            route.fulfill(body=text.replace("\n];", f"\n  {row}\n];"), content_type="text/javascript")

    page.route(re.compile(r"/page/(tabs\.js|second\.\w+)$"), answer)
    page.goto(app[1])
    page.wait_for_selector("html[data-ready]")
    tabs = page.get_by_role("tab")
    assert tabs.evaluate_all("all => all.map(one => one.ariaSelected ?? one.getAttribute('aria-selected'))") == [
        "true",
        "false",
    ]
    tabs.nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("body[data-second=shown]")
    assert page.evaluate("document.activeElement.id") == "tab-second"
    assert page.locator("#panel-photos").is_hidden()
    page.evaluate(DROP, ["mine.png", list(photo(4))])
    page.locator("#got").filter(has_text="mine.png of tiny.safetensors").wait_for()
    tabs.nth(0).click()
    page.wait_for_selector("body[data-second=hidden]")
    page.locator("#panel-photos #title").wait_for()
    page.goto(f"{app[1]}#second")
    page.reload()
    page.locator("#got").wait_for()
    context.close()


def test_a_format_that_only_the_server_reads(page) -> None:
    """Chromium shows no TIFF files: no broken picture, and the answer all the same."""
    page.evaluate(DROP.replace("image/png", "image/tiff"), ["scan.tiff", list(photo(4, format="TIFF"))])
    assert answered(page) in NAMES
    assert page.locator("#photo").is_hidden()
    assert page.locator("#invite").inner_text() == "Your browser cannot show scan.tiff"
    assert page.locator("#tray button").first.inner_text() == "scan.tiff"
    page.locator("#tray button").last.click()
    page.locator("#photo[alt^='Your photo: ']:visible").wait_for()


def test_bad_files_are_explained(page) -> None:
    page.evaluate(DROP, ["notes.png", list(b"not a picture at all")])
    page.locator("#message").filter(has_text="This file could not be read as an image.").wait_for()
    assert "notes.png" in page.locator("#message").inner_text()
    assert "doctor" not in page.locator("#message").inner_text()
    assert page.locator("#photo").is_hidden()
    assert page.locator("#tray", has_text="notes.png").count() == 0  # it cannot be tried again
    assert page.locator("#invite").inner_text() == "Drop, paste or choose a photo"
    page.evaluate(DROP.replace("Uint8Array.from(bytes)", "new Uint8Array(1_200_000)"), ["huge.png", []])
    page.locator("#message").filter(has_text="That is more than this server accepts.").wait_for()
    page.locator("#tray button").last.click()
    answered(page)
    assert page.locator("#message").is_hidden()
    expected = [text for text in page.problems if "422" in text or "413" in text]  # Chromium's own words
    assert len(expected) == len(page.problems) == 2
    page.problems.clear()


def test_phone(browser, app) -> None:
    for page in opened(browser, app[1], viewport={"width": 360, "height": 740}, has_touch=True, color_scheme="dark"):
        page.locator("#tray button").first.tap()
        answered(page)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 360
        page.locator("#canvas").tap(position={"x": 20, "y": 20})
        page.locator("#who").filter(has_text="row 1, column 1").wait_for()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 17, 23)"


def test_camera(browser, app) -> None:
    for page in opened(browser, app[1], permissions=["camera"]):
        page.locator("#take").click()
        page.locator("#shoot:enabled").wait_for()
        page.locator("#shoot").click()
        page.locator("#photo[alt='Your photo: photo.jpg']").wait_for()
        answered(page)


def test_token_and_a_busy_server(browser, app, monkeypatch: pytest.MonkeyPatch) -> None:
    middleware, url = app
    monkeypatch.setattr(middleware, "settings", Settings(token="open-sesame"))
    context = browser.new_context()
    page = context.new_page()
    page.goto(url)
    page.locator("#token").fill("open-sesame")
    page.keyboard.press("Enter")
    page.wait_for_selector("html[data-ready]")
    with middleware.service.logits.reserve(middleware.service.settings.max_queue):
        page.locator("#tray button").first.click()
        page.locator("#status").filter(has_text=re.compile(r"trying again in \d+ s")).wait_for()
    answered(page)  # it did try again
    page.goto(f"{url}docs")
    page.locator("article code", has_text="/v1/predict").first.wait_for()
    context.close()


def test_docs_page(browser, app) -> None:
    for page in opened(browser, app[1]):
        page.locator("nav a").click()
        page.locator("article h2", has_text="/v1/explain").wait_for()
        assert page.locator("article").count() == 10
        assert "curl -F files=@photo.jpg" in page.locator("article pre").first.inner_text()
