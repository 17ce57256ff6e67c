"""FoodVision Mini with the real ViT-Ti/16: the page of a real run in a real browser."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vitkit.cli import app


@pytest.mark.slow
def test_foodvision_mini(shared_data: Path, tmp_path: Path) -> None:
    weights = shared_data / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.timm.pth"
    app(
        [
            "probe",
            str(shared_data / "pizza_steak_sushi"),
            "--from",
            str(weights),
            "--out",
            str(tmp_path / "run"),
            "--cache",
            str(tmp_path / "cache"),
            "--workers",
            "0",
        ],
        standalone_mode=False,
    )
    page = tmp_path / "run" / "report.html"
    assert page.stat().st_size < 4_000_000
    chromium = shutil.which("chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for width, scheme in ((1200, "light"), (1200, "dark"), (390, "light")):
            context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
            opened, said, asked = context.new_page(), [], []
            opened.on("console", lambda message, said=said: said.append(message.text))
            opened.on("pageerror", lambda error, said=said: said.append(str(error)))
            opened.on("request", lambda request, asked=asked: asked.append(request.url))
            opened.goto(page.as_uri())
            opened.wait_for_load_state("networkidle")
            assert said == []
            assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
            assert opened.evaluate("document.documentElement.scrollWidth") <= width
            for words in ("pizza", "steak", "sushi", "the test part", "Worst errors"):
                assert words in opened.inner_text("main")
            context.close()
        browser.close()
