"""How much of vitkit runs for three everyday jobs: functions and files, traced by their calls.

    python -m benchmarks.calls

A reader who wants to understand a job has to read what it runs; this counts that. Only functions of vitkit are
counted, each once, wherever they are called from. Dataclass constructors and comprehensions are not functions to read.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from PIL import Image

import vitkit

ROOT = str(Path(vitkit.__file__).parent)


class Calls:
    """Functions of vitkit that any thread calls while `on` is True; made before the threads that it shall see."""

    def __init__(self) -> None:
        self.on, self.seen = False, set[tuple[str, str, int]]()
        threading.setprofile(self.watch)
        sys.setprofile(self.watch)

    def watch(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call."""
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(ROOT) and not code.co_name.startswith("<"):
            self.seen.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    def of(self, work: Callable[[], object]) -> tuple[int, int]:
        """Functions and files that a piece of work runs; called once before, for its imports."""
        work()
        self.seen.clear()
        self.on = True
        work()
        self.on = False
        return len(self.seen), len({file for file, _, _ in self.seen})


def jobs(folder: Path) -> dict[str, Callable[[], object]]:
    """Load and predict, one training step, one HTTP request."""
    torch.manual_seed(0)
    model = vitkit.create("vit-ti/16", num_classes=3, num_hidden_layers=2)
    vitkit.save(model, folder / "model.safetensors")
    photo = folder / "photo.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8)).save(photo)
    return {
        "load and predict one image": lambda: vitkit.predict(vitkit.load(folder / "model.safetensors"), photo),
        "one training step": training_step(folder),
        "one request to the server": request(folder / "model.safetensors", photo.read_bytes()),
    }


def training_step(folder: Path) -> Callable[[], object]:
    """One update of a prepared run on digits; starting and saving are left out."""
    from vitkit.data.train_loader import TrainLoader
    from vitkit.jobs.train import prepare
    from vitkit.speed.training import TrainingForward
    from vitkit.training.loop import Loop
    from vitkit.training.metrics import Clock
    from vitkit.training.run_folder import RunFolder

    ready = prepare("digits", folder / "run", recipe="digits", settings={"workers": 0})
    run = RunFolder.create(ready.out, ready.info, resume=False)
    parts = (ready.model, ready.train, ready.val, ready.recipe, ready.objective, ready.settings, run, ready.runtime)
    loop, clock = Loop(*parts, None, TrainingForward), Clock(ready.recipe.batch_size)
    loader = TrainLoader(
        ready.train,
        ready.model.input_spec,
        ready.recipe.augment,
        batch_size=ready.recipe.batch_size,
        seed=0,
        mix=ready.recipe.mix,
        workers=0,
        device="cpu",
    )
    batches = iter(loader.batches(0, 10))
    step = iter(range(10))

    def update() -> None:
        loop._launch(next(step), next(batches), False)
        loop._finish(clock)

    return update


def request(weights: Path, photo: bytes) -> Callable[[], object]:
    """POST /predict to the app, in process."""
    from starlette.testclient import TestClient

    from vitkit.server.app import create_app
    from vitkit.server.service import load_service

    client = TestClient(create_app(load_service(weights)), base_url="http://127.0.0.1")
    client.__enter__()

    def post() -> None:
        answer = client.post("/v1/predict", files={"files": ("photo.jpg", photo, "image/jpeg")})
        assert answer.status_code == 200, answer.text

    return post


def main() -> None:
    """Print a row for each job."""
    calls = Calls()
    with tempfile.TemporaryDirectory() as folder:
        for name, work in jobs(Path(folder)).items():
            functions, files = calls.of(work)
            print(f"| {name} | {functions} functions | {files} files |")


if __name__ == "__main__":
    main()
