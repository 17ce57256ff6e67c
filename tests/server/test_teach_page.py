"""The Teach tab in a real Chromium: from empty to a saved run, by mouse, keyboard, touch and camera."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

import uvicorn

import vitkit
from benchmarks.fuzz_serve import wait_for
from tests.server.conftest import tiny
from tests.server.test_page import CHROMIUM, browser, opened, until
from tests.server.test_teach import COLOURS, colour
from vitkit.jobs.teach import save
from vitkit.server import server as module
from vitkit.server.app import create_app
from vitkit.server.service import Service
from vitkit.server.settings import Settings
from vitkit.server.teach import Lessons

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
assert browser  # a fixture
DATA = os.environ.get("VITKIT_TEST_DATA")
DROP_ON = """([selector, files]) => {
  const data = new DataTransfer();
  for (const [name, type, bytes] of files) data.items.add(new File([Uint8Array.from(bytes)], name, {type}));
  const place = document.querySelector(selector);
  for (const kind of ["dragenter", "dragover", "drop"])
    place.dispatchEvent(new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true}));
}"""


def serve(model: vitkit.ViT, out: Path) -> Iterator[tuple[Lessons, str]]:
    service = Service(model, Settings(max_megabytes=4), source="tiny.safetensors", sha256="0" * 64)
    lessons = Lessons(service, out, partial(save, model, "tiny.safetensors"))
    bound = module.listen("127.0.0.1", 0)
    port = bound.getsockname()[1]
    app = create_app(service, lessons)
    server = uvicorn.Server(uvicorn.Config(app, http=module.Protocol, ws="none", log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    wait_for(port)
    yield lessons, f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(60)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[tuple[Lessons, str]]:
    yield from serve(tiny(), tmp_path / "lesson")


@pytest.fixture
def page(browser, app) -> Iterator[object]:
    yield from entered(browser, app[1])


def entered(browser, url: str, **how: object) -> Iterator[object]:
    """A page that shows the Teach tab."""
    for page in opened(browser, url, **how):
        page.locator("#tab-teach").click()
        page.locator("#teach-name:enabled").wait_for()  # from then on it takes names
        yield page


def write(folder: Path, name: str, count: int, seed: int = 0) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{name}{seed + i}.png").write_bytes(colour(name, seed + i))
    return [folder / f"{name}{seed + i}.png" for i in range(count)]


def name_class(page, name: str) -> None:
    page.locator("#teach-name").fill(name)
    page.locator("#teach-name").press("Enter")
    said(page, f"Class {name} added")


def said(page, words: str) -> None:
    page.locator("#teach-status").filter(has_text=words).wait_for()


def add(page, name: str, files: list[Path]) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name=f"Add photos of {name}").first.click()
    chooser.value.set_files(files)
    said(page, f"photos of {name} added")


def test_from_empty_to_a_saved_run(page, app, tmp_path: Path) -> None:
    assert page.locator("#teach-save").is_disabled()
    for number, name in enumerate(COLOURS):
        name_class(page, name)
        add(page, name, write(tmp_path / "photos", name, 6, 100 * number))
    page.locator("#teach-score").filter(has_text="18 of 18 photos recognised.").wait_for()
    assert page.locator("#teach-table td.right").all_inner_texts() == ["6", "6", "6"]
    assert page.locator(".teach-thumbs img").count() >= 18
    page.locator(".teach-class img[src^=blob]").first.wait_for()

    page.locator("#teach-try-file").set_input_files(write(tmp_path / "try", "green", 1, 900)[0])
    said(page, "It says green")
    assert page.locator("#teach-bars li").first.locator(".name").inner_text() == "green"

    page.locator("#teach-save").click()
    page.locator("#teach-saved").wait_for()
    assert page.locator("#teach-saved-title").evaluate("one => one === document.activeElement")
    folder = page.locator("#teach-folder").inner_text()
    assert folder == str(tmp_path / "lesson")
    (found,) = vitkit.predict(folder, tmp_path / "try" / "green900.png")
    assert found.guesses[0].name == "green"
    assert page.locator("#teach-save").is_disabled()

    page.reload()  # the lesson is on the server
    page.locator("#teach-score").filter(has_text="18 of 18").wait_for()


def test_a_hostile_upload_in_the_middle_of_teaching(page, app, tmp_path: Path) -> None:
    name_class(page, "red")
    good = [("a.png", "image/png", list(colour("red", 1))), ("b.png", "image/png", list(colour("red", 2)))]
    bad = [("evil.png", "image/png", list(b"<script>alert(1)</script>")), ("bomb.png", "image/png", list(bomb()))]
    page.evaluate(DROP_ON, [".teach-class", [good[0], *bad, good[1]]])
    said(page, "2 photos of red added. 2 files could not be used.")
    errors = page.locator(".teach-errors li").all_inner_texts()
    assert [text.partition(":")[0] for text in errors] == ["evil.png", "bomb.png"]
    assert page.locator(".teach-count").inner_text() == "2 photos"
    assert len(app[0].first.state.photos) == 2


def bomb() -> bytes:
    """A PNG that declares 60,000 x 60,000 pixels."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"0" * 100)) + chunk(b"IEND", b"")


FOLDER = """(tree) => {
  const file = ([name, bytes]) => ({isFile: true, isDirectory: false, name,
    file: (give) => give(new File([Uint8Array.from(bytes)], name, {type: name.endsWith("txt") ? "text/plain" : ""}))});
  const folder = ([name, inside]) => ({isFile: false, isDirectory: true, name, createReader: () => {
    const left = inside.map((one) => Array.isArray(one[1][0]) ? folder(one) : file(one));
    return {readEntries: (give) => give(left.splice(0, 2))};      // a browser gives some at a time
  }});
  const event = new DragEvent("drop", {bubbles: true, cancelable: true});
  const items = tree.map((one) => ({webkitGetAsEntry: () => folder(one)}));
  Object.defineProperty(event, "dataTransfer", {value: {items, files: [], types: ["Files"]}});
  document.querySelector("#teach-new").dispatchEvent(event);
}"""


def test_folders_become_classes(page, app) -> None:
    def inside(name: str, count: int) -> list[list[object]]:
        return [[f"{name}{i}.png", list(colour(name, i))] for i in range(count)] + [["notes.txt", [1, 2]]]

    page.evaluate(
        FOLDER, [["all", [["red", inside("red", 5)], ["blue", inside("blue", 3)], ["green", inside("green", 2)]]]]
    )
    page.locator("#teach-score").filter(has_text="of 10 photos").wait_for()
    found = {one["name"]: one["photos"] for one in shown(app)}
    assert found == {"red": 5, "blue": 3, "green": 2}
    page.evaluate(FOLDER, [["Red", [["new.png", list(colour("red", 99))]]]])  # a name that is there already
    said(page, "1 photo of red added")


def shown(app) -> list[dict[str, object]]:
    state = app[0].first.state
    counts = state.counts()
    return [{"name": name, "photos": counts[of]} for of, name in state.classes.items()]


def test_fifty_photos_at_once_and_one_undo(page, app, tmp_path: Path) -> None:
    name_class(page, "red")
    name_class(page, "blue")
    add(page, "red", write(tmp_path / "photos", "red", 50))
    assert page.locator(".teach-count").first.inner_text() == "50 photos"
    assert page.locator(".teach-class").first.locator(".teach-thumbs li").count() == 24
    page.get_by_role("button", name="Show all 50").click()
    assert page.locator(".teach-class").first.locator(".teach-thumbs li").count() == 50
    page.locator("#teach-undo").click()
    said(page, "Undone: 50 photos added to red.")
    assert page.locator(".teach-count").first.inner_text() == "0 photos"


def test_by_keyboard_alone(page, app, tmp_path: Path) -> None:
    page.locator("#teach-name").focus()
    for name in ("red", "blue"):
        page.locator("#teach-name").focus()
        page.keyboard.type(name)
        page.keyboard.press("Enter")
        said(page, f"Class {name} added")
    for name in ("red", "blue"):
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name=f"Add photos of {name}").first.focus()
            page.keyboard.press("Enter")
        chooser.value.set_files(write(tmp_path / "photos", name, 3))
        said(page, f"3 photos of {name} added")
    page.locator(".teach-class input").first.focus()  # rename
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("crimson")
    page.keyboard.press("Enter")
    said(page, "Renamed to crimson.")
    page.locator(".teach-thumbs button").first.focus()  # move a photo, then think better of it
    page.keyboard.press("Enter")
    page.locator("#teach-view-class").focus()
    page.keyboard.press("ArrowDown")
    said(page, "Moved to blue.")
    page.locator("#teach-undo").focus()
    page.keyboard.press("ControlOrMeta+z")
    said(page, "Undone: 1 photo moved to blue.")
    page.locator(".teach-class-head button").last.focus()
    page.keyboard.press("Space")
    said(page, "blue removed.")
    assert page.locator("#teach-name").evaluate("one => one === document.activeElement")


def test_everything_has_a_name_and_room_for_a_thumb(page, app, tmp_path: Path) -> None:
    for name in ("red", "blue"):
        name_class(page, name)
        add(page, name, write(tmp_path / "photos", name, 3))
    unnamed = (
        page.locator("#panel-teach")
        .locator("button, input, select, video, table, ol")
        .evaluate_all(
            """all => all.filter(one => !(one.labels?.length || one.ariaLabel || one.getAttribute("aria-labelledby") ||
        one.textContent.trim() || one.title)).map(one => one.outerHTML)"""
        )
    )
    assert unnamed == []
    small = (
        page.locator("#panel-teach")
        .locator("button:visible, select:visible, input[type=text]:visible")
        .evaluate_all(
            "all => all.map(one => one.getBoundingClientRect()).filter(box => box.height < 44 || box.width < 44).length"
        )
    )
    assert small == 0
    assert page.locator("#panel-teach [role=status], #panel-teach [role=alert]").count() >= 2
    assert page.locator("#panel-teach h1").count() == 1


def test_phone(browser, app, tmp_path: Path) -> None:
    how = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "color_scheme": "dark"}
    for page in entered(browser, app[1], **how):
        for name in ("red", "a class with quite a long name"):
            name_class(page, name)
        add(page, "red", write(tmp_path / "photos", "red", 3))
        add(page, "a class with quite a long name", write(tmp_path / "photos", "blue", 3))
        page.locator("#teach-table").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_camera_bursts_and_watching(browser, app, tmp_path: Path) -> None:
    for page in entered(browser, app[1], permissions=["camera"]):
        assert page.locator("#teach-http").is_hidden()
        for name in ("red", "camera"):
            name_class(page, name)
        add(page, "red", write(tmp_path / "photos", "red", 3))
        page.get_by_role("button", name="Take photos of camera").click()
        page.locator("#teach-shoot:enabled").wait_for()
        box = page.locator("#teach-shoot").bounding_box()
        page.mouse.move(box["x"] + 20, box["y"] + 20)
        page.mouse.down()
        # It may be more by the time that somebody looks.
        until(page, "parseInt(document.getElementById('teach-camera-words').textContent) >= 4")
        page.mouse.up()
        page.locator("#teach-camera-close").click()
        page.locator(".teach-class").nth(1).locator(".teach-thumbs li").nth(3).wait_for()
        bursts = [photo.burst for photo in app[0].first.state.photos.values() if photo.name.startswith("camera-")]
        assert len(set(bursts)) == 1
        assert bursts[0] > 0
        page.locator("#teach-advice").filter(has_text="all its photos are from one burst").wait_for()
        page.locator("#teach-watch").click()
        page.locator("#teach-bars li").first.wait_for()
        page.locator("#teach-watch").click()
        assert page.locator("#teach-live").is_hidden()


def test_without_a_camera_the_page_says_why(browser, app) -> None:
    """Over plain http a browser has no `mediaDevices`."""
    context = browser.new_context()
    context.add_init_script("Object.defineProperty(navigator, 'mediaDevices', {value: undefined})")
    page = context.new_page()
    page.goto(f"{app[1]}#teach")
    page.locator("#teach-name").wait_for()
    assert "plain http" in page.locator("#teach-http").inner_text()
    name_class(page, "red")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Take photos of red").click()
    assert chooser.value.element.get_attribute("capture") == "environment"
    assert page.locator("#teach-watch").is_hidden()
    context.close()


def test_nothing_can_be_named_before_there_is_a_lesson(browser, app) -> None:
    """A form without its script would be sent by the browser, and the class would be lost."""
    held: list[object] = []

    def hold(route: object) -> None:
        held.append(route)

    for page in opened(browser, app[1]):
        page.route("**/page/teach.js", hold)
        with page.expect_request("**/page/teach.js"):
            page.locator("#tab-teach").click()
        page.locator("#teach-name").wait_for()
        assert page.locator("#teach-name").is_disabled()
        assert page.locator("#teach-add").is_disabled()
        while not held:
            page.wait_for_timeout(20)
        held.pop().continue_()  # type: ignore[attr-defined]
        name_class(page, "mine")


def test_two_browsers_keep_apart(browser, app) -> None:
    for first in entered(browser, app[1]):
        name_class(first, "mine")
        for second in entered(browser, app[1]):
            assert second.locator(".teach-class").count() == 0
            name_class(second, "yours")
        first.reload()
        first.locator(".teach-class").wait_for()
        assert first.locator(".teach-class input").input_value() == "mine"


def test_serve_has_no_teach_tab(browser) -> None:
    app = create_app(Service(tiny(), Settings(), source="tiny"))
    with module.Running(app, module.listen("127.0.0.1", 0)) as running:
        for page in opened(browser, f"{running.url}/"):
            assert page.locator("#tab-teach").count() == 0


CLASSES = ("pizza", "steak", "sushi")


@pytest.mark.slow
@pytest.mark.skipif(DATA is None, reason="needs FoodVision photos and weights: set VITKIT_TEST_DATA")
def test_food_from_empty_to_a_saved_run(browser, tmp_path: Path) -> None:
    data = Path(str(DATA))
    weights = data / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.timm.pth"
    unseen = [
        photo for name in CLASSES for photo in sorted((data / "pizza_steak_sushi" / "test" / name).glob("*.jpg"))[:3]
    ]
    answers = []
    for _, url in serve(vitkit.load(weights, num_attention_heads=3), tmp_path / "food"):
        for page in entered(browser, url):
            for name in CLASSES:
                name_class(page, name)
                add(page, name, sorted((data / "pizza_steak_sushi" / "train" / name).glob("*.jpg"))[:10])
            page.locator("#teach-score").filter(has_text="of 30 photos recognised.").wait_for()
            page.locator("#teach-save:enabled").click()  # which chooses the settings once more, from all photos
            page.locator("#teach-saved").wait_for(timeout=60_000)
            for photo in unseen:
                page.locator("#teach-status").evaluate("one => { one.textContent = ''; }")
                page.locator("#teach-try-file").set_input_files(photo)
                said(page, "It says")
                first = page.locator("#teach-bars li").first
                answers.append((first.locator(".name").inner_text(), first.locator(".share").inner_text()))
    saved = [one.guesses[0] for one in vitkit.predict(tmp_path / "food", unseen)]
    assert [name for name, _ in answers] == [guess.name for guess in saved]  # the run answers as the page did
    for (_, share), guess in zip(answers, saved, strict=True):
        if share[0] not in "<>":
            assert abs(float(share.rstrip("%")) / 100 - guess.probability) < 0.0006  # the page shows three digits
    shutil.copytree(data / "pizza_steak_sushi" / "test", tmp_path / "test")
    assert vitkit.evaluate(tmp_path / "food", tmp_path / "test").measures.top1 > 0.9
