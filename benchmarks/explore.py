"""The explorable page in Chromium, compared with Python: `python -m benchmarks.explore --from WEIGHTS --images DATA`.

Builds the page, serves the folder with Python's plain file server, cuts every other connection, and gives the photos to
the page as a visitor would. Reports the size, the time to the first picture, to the first stored answer and to the live
model, photos per second (decoding, resizing and all outputs included), how often the five best classes are the same in
the same order as those of `vitkit predict`, and the largest difference of attention from `model.attention`.
"""

from __future__ import annotations

import argparse
import base64
import functools
import http.server
import json
import shutil
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np
import torch
from playwright.sync_api import sync_playwright

import vitkit
from vitkit.data.preprocess import preprocess
from vitkit.evaluation.predict import Images, predict
from vitkit.jobs.explore import build

LIVE = "vitkit.result?.live && vitkit.result.key === vitkit.wanted()"


BYTES = """(() => {
  const { buffer, byteOffset, byteLength } = vitkit.result.out.attention, parts = [];
  for (let i = 0; i < byteLength; i += 30000) {
    parts.push(String.fromCharCode(...new Uint8Array(buffer, byteOffset + i, Math.min(30000, byteLength - i))));
  }
  return btoa(parts.join(""));
})()"""  # a list of a million numbers would take a minute


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def until(page: Any, condition: str, arg: object = None) -> None:
    while not page.evaluate(f"arg => Boolean({condition})", arg):
        page.wait_for_timeout(20)


def measure(page: Any, model: Any, photos: list[str], looks: int) -> dict[str, float]:
    expected = predict(model, photos, top=5)
    source, same, first, far, seconds, inside = Images(photos), 0, 0, 0.0, 0.0, []
    for i, photo in enumerate(photos):
        before, start = page.evaluate("vitkit.turn"), time.perf_counter()
        page.set_input_files("#file", photo)
        until(page, f"vitkit.turn > arg && vitkit.photo && {LIVE}", before)
        seconds += time.perf_counter() - start
        inside.append(page.evaluate("vitkit.result.milliseconds"))
        names = page.locator("#answer .name").all_inner_texts()
        wanted = [guess.name for guess in expected[i].guesses]
        same += names == wanted
        print(
            f"\r{i + 1} of {len(photos)} photos, {same} with the same five classes", end="", file=sys.stderr, flush=True
        )
        first += names[0] == wanted[0]
        if i < looks:
            x = preprocess(source.read(i)[0], model.input_spec)[None]
            with torch.inference_mode():
                A = torch.cat(list(model.attention(x).values())).numpy()
            found = np.frombuffer(base64.b64decode(page.evaluate(BYTES)), np.float32)
            far = max(far, float(np.abs(found.reshape(A.shape) - A).max()))
    return {
        "photos": len(photos),
        "same_top5_order": same,
        "same_top1": first,
        "attention_photos": min(looks, len(photos)),
        "attention_largest_difference": far,
        "photos_per_second": len(photos) / seconds,
        "model_ms_median": float(np.median(inside)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="weights", required=True)
    parser.add_argument("--images", required=True, help="folder of photos")
    parser.add_argument("--count", type=int, default=100, help="photos to compare (default: 100)")
    parser.add_argument(
        "--looks", type=int, default=20, help="of these, photos whose attention is compared (default: 20)"
    )
    args = parser.parse_args()
    model = vitkit.load(args.weights).eval()
    found = Images(args.images).names
    photos = found[:: max(1, len(found) // args.count)][: args.count]
    with tempfile.TemporaryDirectory() as folder:
        built = build(model, folder, name="benchmark")
        handler = functools.partial(Quiet, directory=folder)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as started:
            threading.Thread(target=server.serve_forever).start()
            url = f"http://127.0.0.1:{server.server_address[1]}/"
            browser = started.chromium.launch(
                executable_path=shutil.which("chromium") or shutil.which("google-chrome"), args=["--no-sandbox"]
            )
            context = browser.new_context()
            context.route(lambda address: not address.startswith((url, "blob:", "data:")), lambda route: route.abort())
            page = context.new_page()
            start = time.perf_counter()
            page.goto(url)
            until(page, f"window.vitkit && {LIVE}")
            live = time.perf_counter() - start
            times = page.evaluate("({ ...document.documentElement.dataset })")
            results = {
                "megabytes": round(built.megabytes, 2),
                "files": len(built.sizes),
                "model_megabytes": round(built.sizes["model/model.onnx"] / 1e6, 2),
                "first_picture_s": int(times["picture"]) / 1000,
                "stored_answer_s": int(times.get("stored", 0)) / 1000,
                "live_s": round(live, 2),
                "threads": page.evaluate("vitkit.threads"),
            } | measure(page, model, photos, args.looks)
            browser.close()
            server.shutdown()
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
