"""The page in a real Chromium: a photo in, an answer out, sliders, a clicked patch, keyboard, phone, camera, token."""

from __future__ import annotations

import re
import shutil
import threading
import time
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
    thread.join(60)


@pytest.fixture
def page(browser, app) -> Iterator[object]:
    yield from opened(browser, app[1])


def opened(browser, url: str, **how: object) -> Iterator[object]:
    """A page that is ready; afterwards there were no errors and no outside requests."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}} | how)
    page, problems = context.new_page(), []
    page.set_default_timeout(60_000)
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


def until(page, condition: str, arg: object = None) -> None:
    """Wait for a condition. Playwright's own waiting evaluates strings inside the page, which its policy forbids."""
    end = time.monotonic() + 240
    while not page.evaluate(f"arg => Boolean({condition})", arg):
        assert time.monotonic() < end, f"never came true: {condition}"
        page.wait_for_timeout(20)


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
    until(page, "document.getElementById('canvas').toDataURL() !== arg", before)
    until(page, "document.getElementById('readout').innerText !== arg", said)

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
    page.locator("#samples button").first.click()
    answered(page)
    page.evaluate(PASTE, ["pasted.png", list(photo(5))])
    page.locator("#photo[alt='Your photo: pasted.png']").wait_for()
    (tmp_path / "picked.png").write_bytes(photo(6))
    page.locator("#file").set_input_files(tmp_path / "picked.png")
    page.locator("#photo[alt='Your photo: picked.png']").wait_for()
    answered(page)
    assert page.locator("#tray button").count() == 2
    assert page.locator("#samples button").count() == 2
    page.locator("#clear").click()
    assert page.locator("#tray button").count() == 0
    assert page.locator("#photo").is_hidden()
    assert page.locator("#bars li").count() == 0


def test_by_keyboard_alone(page) -> None:
    page.locator("#samples button").first.focus()
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
    page.locator("#samples button").first.click()
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
    assert page.locator("#tray .name").inner_text() == "scan.tiff"
    page.locator("#samples button").last.click()
    page.locator("#photo[alt^='Your photo: ']:visible").wait_for()


def test_bad_files_are_explained(page) -> None:
    page.evaluate(DROP, ["notes.png", list(b"not a picture at all")])
    page.locator("#message").filter(has_text="This file could not be read as an image.").wait_for()
    assert "notes.png" in page.locator("#message").inner_text()
    assert "doctor" not in page.locator("#message").inner_text()
    assert page.locator("#photo").is_hidden()
    assert page.locator("#tray img").count() == 0  # no icon of a broken image
    assert page.locator("#tray .bad").inner_text().split("\n") == ["notes.png", "no answer"]
    assert page.locator("#invite").inner_text() == "Drop, paste or choose photos"
    page.evaluate(DROP.replace("Uint8Array.from(bytes)", "new Uint8Array(1_200_000)"), ["huge.png", []])
    page.locator("#message").filter(has_text="That is more than this server accepts.").wait_for()
    page.locator("#samples button").last.click()
    answered(page)
    assert page.locator("#message").is_hidden()
    assert len(page.problems) == 1  # the 422 in Chromium's own words; what is too large is not even sent
    assert "422" in page.problems.pop()


TAKE = """files => {
  const data = new DataTransfer();
  for (const [name, bytes, type] of files) data.items.add(new File([Uint8Array.from(bytes)], name, {type}));
  document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
}"""


def test_several_photos_each_with_its_answer(page, app) -> None:
    """Twelve photos, a text among them and a damaged one: eleven requests' worth of answers in two requests."""
    from vitkit import predict

    asked = []
    page.on("request", lambda request: asked.append(request.url) if "v1/predict" in request.url else None)
    raws = [photo(seed) for seed in range(10)]
    given = [[f"{i}.png", list(raw), "image/png"] for i, raw in enumerate(raws)]
    given[4:4] = [["damaged.png", list(photo()[:200]), "image/png"], ["notes.txt", list(b"hello"), "text/plain"]]
    page.evaluate(TAKE, given)
    answered(page)
    page.locator("#tray .share").last.filter(has_text="%").wait_for()
    names = page.locator("#tray .caption").all_inner_texts()
    expected = [one.name for one in predict(app[0].service.model, raws, top=1)]
    assert names[:4] + names[6:] == expected
    assert names[4:6] == ["damaged.png", "notes.txt"]
    assert page.locator("#tray .bad").count() == 2
    assert len(asked) == 2
    assert page.locator("#message").is_hidden()  # the first photo is fine
    page.locator("#tray button", has_text="damaged.png").click()
    page.locator("#message").filter(has_text="damaged.png: truncated: the file is incomplete; copy it").wait_for()
    assert "Try a JPEG" not in page.locator("#message").inner_text()  # it is a PNG
    assert page.locator("#photo").is_hidden()
    page.locator("#tray button", has_text="notes.txt").click()
    page.locator("#message").filter(has_text="notes.txt is not an image.").wait_for()
    page.locator("#tray button").nth(7).click()
    page.locator("#photo[alt='Your photo: 5.png']:visible").wait_for()
    assert page.locator("#bars li:first-child .name").inner_text() == expected[5]
    assert len(asked) == 2  # it was known already


def test_header_and_classes(page) -> None:
    assert (
        page.locator("header strong").inner_text() == "tiny.safetensors"
    )  # a file that does not exist has no short name
    assert page.locator("#model-name").inner_text().endswith("ant, bee, cat, dog, elk")
    assert page.title() == "tiny.safetensors · vitkit"
    assert page.locator("#classes li").all_inner_texts() == list(NAMES)


class TwoPhotos:
    """Stands for the photos of a run."""

    samples, searchable = (1,), True

    def __len__(self) -> int:
        return 2

    def label(self, number: int) -> str:
        return NAMES[number]

    def file(self, number: int) -> tuple[bytes, str]:
        return photo(number), "image/png"

    def thumbnail(self, number: int) -> bytes:
        return photo(number, size=(24, 20), format="JPEG")

    def nearest(self, features, count: int) -> list[list[tuple[int, float]]]:
        return [[(0, 0.91), (1, 0.5)] for _ in features]


def test_samples_and_similar_photos_of_the_run(browser, app, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a token too, without which a photo's address gives nothing."""
    middleware, url = app
    monkeypatch.setattr(middleware.service, "photos", TwoPhotos())
    monkeypatch.setattr(middleware, "settings", Settings(token="open-sesame"))
    context = browser.new_context()
    page = context.new_page()
    page.goto(url)
    page.locator("#token").fill("open-sesame")
    page.keyboard.press("Enter")
    page.wait_for_selector("html[data-ready]")
    assert page.locator("#samples .caption").all_inner_texts() == ["bee"]
    page.locator("#samples button").click()
    answered(page)
    page.locator("#similar-photos button").first.wait_for()
    assert page.locator("#similar-photos .caption").all_inner_texts() == ["ant", "bee"]
    assert page.locator("#similar-photos .share").all_inner_texts() == ["0.91", "0.50"]
    images = page.locator("#samples img, #similar-photos img")
    wide = images.evaluate_all("all => Promise.all(all.map(one => one.decode().then(() => one.naturalWidth)))")
    assert wide == [24, 24, 24]
    page.locator("#similar-photos button").first.click()  # more like this
    page.locator("#tray .share").filter(has_text="%").wait_for()
    page.locator("#photo[alt='Your photo: ant, from the training photos']").wait_for()
    context.close()


def test_the_distance_to_what_is_known(page) -> None:
    def far(route) -> None:
        answer = route.fetch()
        values = answer.json()
        values["results"][0]["distance"] = 0.5
        route.fulfill(response=answer, json=values)

    page.route("**/v1/predict*", far)
    page.evaluate(DROP, ["mine.png", list(photo(4))])
    answered(page)
    assert page.locator("#meter-out").inner_text() == "50% of the limit"
    until(page, "document.getElementById('meter-fill').style.width === '25%'")  # the mark is at 50%


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_gallery_has_a_sentence_each_and_suits_the_page(browser, app, mode: str) -> None:
    themes: list[str] = []
    for page in opened(browser, app[1], color_scheme=mode):
        page.on(
            "request", lambda one: themes.append(one.url.partition("theme=")[2]) if "/v1/picture" in one.url else None
        )
        page.locator("#samples button").first.click()
        answered(page)
        figures = page.locator("#pictures figure")
        card = page.evaluate("fetch('v1/model').then(one => one.json())")
        assert figures.count() == len(card["pictures"]) > 3
        assert figures.locator("p").all_inner_texts() == [one["caption"] for one in card["pictures"].values()]
        figures.first.scroll_into_view_if_needed()
        figures.first.locator("button:enabled").click()
        page.locator("dialog#large[open] img[alt]:not([alt=''])").wait_for()
        page.keyboard.press("Escape")
        assert set(themes) == {mode}


CONTRAST = """() => {
  const rgb = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = (top, under) => top.slice(0, 3).map((v, i) => v * top[3] + under[i] * (1 - top[3]));
  const behind = (one) => {
    const chain = [];
    for (let at = one; at; at = at.parentElement) chain.push(rgb(getComputedStyle(at).backgroundColor));
    return chain.reduceRight((under, colour) => over(colour, under), [255, 255, 255]);
  };
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (colour) => colour.map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const found = [];
  for (const one of document.querySelectorAll("body *")) {
    const text = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const box = one.getBoundingClientRect();
    if (!text || !one.checkVisibility() || box.width < 2 || box.right < 0) continue;
    if (one.closest("option, noscript, svg, .old")) continue;
    const style = getComputedStyle(one), back = behind(one);
    let opacity = 1;
    for (let at = one; at; at = at.parentElement) opacity *= getComputedStyle(at).opacity;
    const ink = rgb(style.color), value = ratio(over([...ink.slice(0, 3), ink[3] * opacity], back), back);
    found.push([value, one.tagName + "#" + one.id + "." + one.className + ": " + one.textContent.trim().slice(0, 40)]);
  }
  const bars = [...document.querySelectorAll(".track")].filter((one) => one.checkVisibility())
    .map((one) => ratio(behind(one.firstChild), behind(one)));
  return { text: found, bars };
}"""


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("path", ["", "docs"])
def test_contrast(browser, app, mode: str, path: str) -> None:
    """WCAG 2.2 AA: 4.5 for text, whatever its size, and 3 for the bars; with an answer, an error and open details."""
    for page in opened(browser, app[1], color_scheme=mode, reduced_motion="reduce"):
        if path:
            page.goto(app[1] + path)
            page.locator("article").first.wait_for()
        else:
            page.route("**/v1/predict*", _far)
            page.evaluate(TAKE, [["a.png", list(photo(4)), "image/png"], ["b.txt", [1], "text/plain"]])
            answered(page)
            page.evaluate("document.getElementById('message').hidden = false")
            page.locator("#message").evaluate("one => { one.textContent = 'An error'; }")
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        found = page.evaluate(CONTRAST)
        assert len(found["text"]) > 40
        assert [words for ratio, words in found["text"] if ratio < 4.5] == []
        assert path or (len(found["bars"]) == 6 and min(found["bars"]) >= 3)


def _far(route) -> None:
    answer = route.fetch()
    values = answer.json()
    values["results"][0] |= {"distance": 1.2, "none_of_these": True}
    route.fulfill(response=answer, json=values)


@pytest.mark.parametrize("path", ["", "docs"])
def test_everything_to_touch_is_44_pixels_high_and_wide(browser, app, path: str) -> None:
    for page in opened(browser, app[1], viewport={"width": 390, "height": 844}, has_touch=True):
        if path:
            page.goto(app[1] + path)
            page.locator("article").first.wait_for()
        else:
            page.evaluate(TAKE, [["a.png", list(photo(4)), "image/png"], ["b.txt", [1], "text/plain"]])
            answered(page)
            page.locator("#canvas").tap(position={"x": 20, "y": 20})
            page.locator("#reset:visible").wait_for()
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        small = page.locator("button, a, input, select, summary").evaluate_all("""all => all
            .filter(one => one.checkVisibility() && !one.closest('.skip'))
            .map(one => [one.outerHTML.slice(0, 80), one.getBoundingClientRect()])
            .filter(([, box]) => box.right > 0 && (box.width < 44 || box.height < 44)).map(([text]) => text)""")
        assert small == []


def test_phone(browser, app) -> None:
    for page in opened(browser, app[1], viewport={"width": 360, "height": 740}, has_touch=True, color_scheme="dark"):
        page.locator("#samples button").first.tap()
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
    monkeypatch.setattr(middleware.service.logits, "retry_after", lambda: 2)  # however slow this machine is
    with middleware.service.logits.reserve(middleware.service.settings.max_queue):
        page.locator("#samples button").first.click()
        page.locator("#status").filter(has_text=re.compile(r"trying again in \d+ s")).wait_for()
    answered(page)  # it did try again
    page.goto(f"{url}docs")
    page.locator("article code", has_text="/v1/predict").first.wait_for()
    context.close()


def test_docs_page_asks_for_the_token(browser, app, monkeypatch: pytest.MonkeyPatch) -> None:
    middleware, url = app
    monkeypatch.setattr(middleware, "settings", Settings(token="open-sesame"))
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{url}docs")
    page.locator("#token").fill("open-sesame")
    page.keyboard.press("Enter")
    article = page.locator("article", has=page.locator("h2", has_text="/v1/predict"))
    assert '-H "Authorization: Bearer $VITKIT_TOKEN"' in article.locator("pre").first.inner_text()
    article.locator("summary", has_text="Try it").click()
    article.locator("input[type=file]").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": photo(4)})
    article.locator("button").click()
    article.locator(".said", has_text='"index"').wait_for()
    context.close()


def test_docs_page(browser, app) -> None:
    for page in opened(browser, app[1]):
        page.locator("nav .api").click()
        page.locator("article h2", has_text="/v1/explain").wait_for()
        assert page.locator("article").count() == 10
        text = page.locator("article pre").first.inner_text()
        assert "curl -F files=@photo.jpg" in text
        assert "--data-binary @photo.jpg" in text
        article = page.locator("article", has=page.locator("h2", has_text="/v1/picture"))
        article.locator("summary", has_text="Try it").click()
        article.locator("input[type=file]").set_input_files(
            {"name": "a.png", "mimeType": "image/png", "buffer": photo(4)}
        )
        article.locator("button").click()
        article.locator(".said img").wait_for()
        article.locator("input[type=file]").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": b"no"})
        article.locator("button").click()
        article.locator(".said", has_text="a.png: not an image").wait_for()
        assert "422" in page.problems.pop()
