"""The page in a real Chromium, from a plain file server, with the network cut: the same answers as Python's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

import PIL
import torch
from PIL import Image
from playwright import sync_api as playwright

from tests.explore.conftest import NAMES, tiny
from tests.server.test_page import until
from vitkit.data.preprocess import pixels, preprocess
from vitkit.evaluation.predict import predict
from vitkit.explore.graph import OUTPUTS, Explored
from vitkit.jobs.explore import Built
from vitkit.model.config import InputSpec

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
LIVE = "window.vitkit?.result?.live && vitkit.result.key === vitkit.wanted()"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
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


def opened(browser: Any, url: str, **how: Any) -> Iterator[Any]:
    """A page whose model is loaded; afterwards there were no errors and no requests to other hosts."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}} | how)
    page, problems = context.new_page(), []
    page.set_default_timeout(60_000)
    own = url.split("#", maxsplit=1)[0]
    context.route(lambda address: not address.startswith((own, "blob:", "data:")), lambda route: route.abort())
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("requestfailed", lambda request: problems.append(request.url))
    page.goto(url)
    until(page, LIVE)
    yield page
    context.close()
    assert problems == []


@pytest.fixture(scope="module")
def page(browser: Any, url: str) -> Iterator[Any]:
    yield from opened(browser, url)


def go(page: Any, link: str) -> None:
    """Follow a link; it begins with its view."""
    page.evaluate("link => { location.hash = link; }", link)
    until(
        page,
        f"vitkit.state.view === arg && vitkit.state.tour === -1 && {LIVE}",
        link.removeprefix("view=").partition("&")[0],
    )


def give(page: Any, photo: Path) -> None:
    before = page.evaluate("vitkit.turn")
    page.set_input_files("#file", photo)
    until(page, f"vitkit.turn > arg && vitkit.photo && {LIVE}", before)


def answers(page: Any) -> list[str]:
    return page.locator("#answer .name").all_inner_texts()


def result(page: Any, name: str) -> np.ndarray:
    return np.array(page.evaluate("name => Array.from(vitkit.result.out[name])", name), np.float32)


def explored(keep: torch.Tensor, photo: Path, grey: bool = False) -> dict[str, np.ndarray]:
    """What Python computes for a photo with patches masked, or painted in the mean colour."""
    model = tiny()
    x = preprocess(Image.open(photo), model.input_spec)[None]
    if grey:
        x = x * keep.reshape(4, 4).repeat_interleave(8, 0).repeat_interleave(8, 1)
        keep = torch.ones(16)
    with torch.inference_mode():
        return {name: value.numpy() for name, value in zip(OUTPUTS, Explored(model)(x, keep), strict=True)}


def test_every_photo_gets_the_answer_of_predict(page: Any, photos: list[Path]) -> None:
    for photo, expected in zip(photos, predict(tiny(), photos, top=3), strict=True):
        give(page, photo)
        assert answers(page) == [guess.name for guess in expected.guesses]
        found = page.evaluate("vitkit.result.probabilities")
        for guess in expected.guesses:
            assert abs(found[guess.index] - guess.probability) < 1e-3


def test_everything_inside_is_what_the_model_computes(page: Any, photos: list[Path]) -> None:
    give(page, photos[0])
    for name, expected in explored(torch.ones(16), photos[0]).items():
        np.testing.assert_allclose(result(page, name), expected.ravel(), atol=2e-3, err_msg=name)
    row = page.evaluate("Array.from(vitkit.result.attention(1, 2, 5))")
    np.testing.assert_allclose(row, tiny().attention(preprocessed(photos[0]))[1][0, 2, 5].detach(), atol=1e-3)
    mean = page.evaluate("Array.from(vitkit.result.attention(1, -1, -1))")
    np.testing.assert_allclose(mean, tiny().attention(preprocessed(photos[0]))[1][0, :, 0].mean(0).detach(), atol=1e-3)


def preprocessed(photo: Path) -> torch.Tensor:
    return preprocess(Image.open(photo), tiny().input_spec)[None]


@pytest.mark.parametrize("how", ["mask", "grey"])
def test_erasing_changes_the_answer_as_in_python(page: Any, photos: list[Path], how: str) -> None:
    go(page, "view=erase" + ("&how=grey" if how == "grey" else ""))
    give(page, photos[1])
    before, keep = page.evaluate("vitkit.result.probabilities"), torch.ones(16)
    box = page.locator("#canvas").bounding_box()
    for patch in (0, 6, 9, 15):
        keep[patch] = 0
        page.mouse.click(
            box["x"] + (patch % 4 + 0.5) * box["width"] / 4, box["y"] + (patch // 4 + 0.5) * box["height"] / 4
        )
    until(page, f"vitkit.state.erased.join() === '0,6,9,15' && {LIVE}")
    expected = explored(keep, photos[1], grey=how == "grey")
    np.testing.assert_allclose(result(page, "logits"), expected["logits"], atol=2e-3)
    assert np.abs(np.array(before) - page.evaluate("vitkit.result.probabilities")).max() > 1e-3
    assert "→" in page.locator("#answer .share").first.inner_text()
    page.click("#restore")
    until(page, f"!vitkit.state.erased.length && {LIVE}")
    np.testing.assert_allclose(page.evaluate("vitkit.result.probabilities"), before, atol=1e-6)


def test_stored_examples_are_close_to_live_ones(page: Any, built: Built) -> None:
    go(page, "view=attention")
    found = page.evaluate(
        """async () => {
            const { Stored } = await import("./result.js"), { download, inflate } = await import("./files.js");
            const stored = new Stored(vitkit.card, await inflate(await download("model/example-1.gz")));
            vitkit.choose(0);
            while (!vitkit.result?.live) await new Promise((done) => setTimeout(done, 20));
            const live = vitkit.result, far = (a, b) => Math.max(...a.map((v, i) => Math.abs(v - b[i])));
            let attention = 0, norms = 0;
            for (let t = 0; t < 17; t += 1) {
                for (let l = 0; l < 2; l += 1) for (let k = 0; k < 4; k += 1)
                    attention = Math.max(attention, far([...stored.attention(l, k, t)], live.attention(l, k, t)));
                norms = Math.max(norms, Math.abs(stored.norm(1, t) - live.norm(1, t)));
            }
            return [attention, norms, far(stored.probabilities, live.probabilities), far(stored.lens(1), live.lens(1))];
        }"""
    )
    assert found[0] < 0.006
    assert max(found[1:]) < 2e-3


def test_pixels_are_those_of_pillow(page: Any) -> None:
    rng = np.random.default_rng(0)
    cases: list[tuple[int, int, dict[str, Any]]] = [
        (50, 37, {}),
        (37, 50, {}),
        (20, 16, {}),
        (64, 22, {"size": (32, 24)}),
        (20, 66, {}),  # Pillow resizes the height of such a photo first
        (40, 70, {}),
        (40, 100, {"interpolation": "bilinear"}),
        (24, 60, {"mean": (0.5,), "std": (0.5,), "channels": "gray"}),
        (34, 90, {"size": (48, 64), "resize": "squash", "crop": 1.0}),
        (50, 33, {"interpolation": "bilinear", "resize": "squash", "crop": 1.0}),
        (33, 50, {"interpolation": "bilinear", "resize": "squash", "crop": 1.0}),
        (40, 23, {"interpolation": "lanczos"}),
        (23, 40, {"interpolation": "nearest"}),
        (40, 23, {"mean": (0.5,), "std": (0.5,), "channels": "gray"}),
    ]
    for width, height, changes in cases:
        spec = InputSpec(**{"size": (32, 32), "resize": "crop", "crop": 0.9, "interpolation": "bicubic", **changes})
        photo = rng.integers(0, 256, (height, width, 4), dtype=np.uint8)
        found = page.evaluate(
            """async ([data, width, height, spec]) => {
                const { pixels } = await import("./resize.js");
                return Array.from(pixels({ data, width, height }, spec).data);
            }""",
            [photo.ravel().tolist(), width, height, spec.to_dict()],
        )
        expected = pixels(Image.fromarray(photo[..., :3].copy()), spec).permute(1, 2, 0).numpy()
        difference = np.abs(np.array(found, int) - expected.ravel())
        other_order = height > width and int(PIL.__version__.partition(".")[0]) < 13  # see resize.js
        assert difference.max() <= int(other_order), (width, height, changes)


def test_normalised_pixels_are_exact(page: Any) -> None:
    spec = InputSpec(size=(4, 64), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    values = np.arange(4 * 64 * 3, dtype=np.uint8)
    found = page.evaluate(
        """async ([data, spec]) => {
            const { normalise } = await import("./resize.js");
            return Array.from(normalise({ data, width: 64, height: 4, depth: 3 }, spec));
        }""",
        [values.tolist(), spec.to_dict()],
    )
    from vitkit.data.preprocess import normalize

    expected = normalize(torch.from_numpy(values.reshape(1, 4, 64, 3)).permute(0, 3, 1, 2), spec)
    assert np.array_equal(np.array(found, np.float32), expected.numpy().ravel())


def test_keyboard(page: Any) -> None:
    go(page, "view=attention&layer=2")
    page.click("body", position={"x": 2, "y": 2})
    page.keyboard.press("[")
    assert page.evaluate("vitkit.state.layer") == 0
    page.keyboard.press("h")
    assert page.evaluate("vitkit.state.head") == 0
    page.focus("#canvas")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):  # the first press only shows the cursor
        page.keyboard.press(key)
    assert page.evaluate("vitkit.state.held") == 15
    assert "row 4, column 4" in page.locator("#words").inner_text()
    page.keyboard.press("e")
    until(page, f"vitkit.state.erased.join() === '15' && {LIVE}")
    page.keyboard.press("e")
    page.keyboard.press("Escape")
    assert page.evaluate("vitkit.state.held") is None
    for i, view in enumerate(["photo", "patches", "projection", "positions", "attention", "stream", "layers", "erase"]):
        page.keyboard.press(str(i + 1))
        assert page.evaluate("vitkit.state.view") == view
        assert page.locator("#equations .equation").count() >= 1


def test_a_link_restores_what_was_looked_at(browser: Any, page: Any, url: str) -> None:
    page.evaluate("vitkit.choose(1)")
    until(page, LIVE)
    change = {"view": "erase", "layer": 1, "head": 3, "held": 7, "dimension": 4, "erased": [0, 5, 15], "how": "grey"}
    page.evaluate("change => vitkit.set(change)", change | {"tour": -1})
    until(page, LIVE)
    link, state, logits = page.url, page.evaluate("vitkit.state"), result(page, "logits")
    for other in opened(browser, link):
        assert other.evaluate("vitkit.state") == state
        assert np.array_equal(result(other, "logits"), logits)
    for wrong in ("layer=99&held=-3&photo=7&erased=zz", "view=nothing&head=x&tour=1e9"):
        for other in opened(browser, f"{url}#{wrong}"):
            default = other.evaluate("import('./state.js').then(({ DEFAULT }) => DEFAULT)")
            assert other.evaluate("vitkit.state") == default


def test_the_tour_visits_every_view_and_ends(page: Any) -> None:
    go(page, "view=photo")
    page.click("#guide")
    seen = []
    while page.locator("#tour").is_visible():
        seen.append(page.evaluate("vitkit.state.view"))
        text = page.locator("#tour").inner_text()
        assert "{" not in text
        assert "undefined" not in text
        page.click("#next")
    until(page, LIVE)
    assert set(seen) == {"photo", "patches", "projection", "positions", "attention", "stream", "layers", "erase"}
    assert page.evaluate("vitkit.state.tour") == -1


def test_names_are_text(page: Any, photos: list[Path]) -> None:
    give(page, photos[0])
    assert set(answers(page)) == set(NAMES)
    for view in ("layers", "attention", "erase"):
        page.evaluate("view => vitkit.set({ view })", view)
        assert page.locator("main b b, main .name b").count() == 0


def test_a_file_that_is_no_image_is_refused(page: Any, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("words", encoding="utf-8")
    page.set_input_files("#file", tmp_path / "words.txt")
    page.locator("#message").filter(has_text="not an image that your browser can open").wait_for()
    page.evaluate("vitkit.complain('')")


def test_camera(page: Any) -> None:
    before = page.evaluate("vitkit.turn")
    page.click("#take")
    page.locator("#shoot:enabled").click()
    until(page, f"vitkit.turn > arg && vitkit.state.photo === -1 && {LIVE}", before)
    assert page.evaluate("vitkit.turn") > before
    assert page.evaluate("vitkit.state.photo") == -1  # not one of the examples


@pytest.mark.parametrize("view", ["photo", "projection", "attention", "stream", "layers", "erase"])
def test_a_phone_scrolls_only_down(browser: Any, url: str, view: str) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "color_scheme": "dark"}
    for page in opened(browser, f"{url}#view={view}&held=3", **phone):
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.evaluate("scrollTo(0, 0)")
        page.locator("#canvas").tap(position={"x": 30, "y": 30})
        state = page.evaluate("vitkit.state")
        assert (state["erased"], state["held"]) == (([0], 2) if view == "erase" else ([], 0))


def test_from_a_file_it_says_why_it_cannot_run(browser: Any, built: Built) -> None:
    page = browser.new_page()
    page.goto((built.folder / "index.html").as_uri())
    page.locator("#message").filter(has_text="python -m http.server").wait_for()
    page.close()


def test_threads_where_the_server_allows_them(browser: Any, built: Built) -> None:
    """`vitkit explore` without --build sends the two headers; the answers stay the same."""
    import threading

    from vitkit.jobs.explore import server

    with server(built.folder, 0) as own:
        threading.Thread(target=own.serve_forever).start()
        for page in opened(browser, f"http://127.0.0.1:{own.server_address[1]}/#view=attention"):
            assert page.evaluate("crossOriginIsolated")
            assert page.evaluate("vitkit.threads === Math.min(4, navigator.hardwareConcurrency)")
            found = result(page, "attention").reshape(2, 4, 17, 17)
            np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)
        own.shutdown()
