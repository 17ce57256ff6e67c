"""Mutated files of run folders, sweeps and lessons, through the functions that read them; see benchmarks/fuzz.py."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.mutations import mutate, mutate_json, text_of

SETTINGS: dict[str, Any] = {"trackers": (), "device": "cpu", "workers": 0}
WIDTH = 8  # numbers of a feature


class Runs:
    """One mutated file, and one function that reads it.

    What is not written by vitkit may be refused, or read as something else; but no photo of a lesson may get lost.
    """

    count = 5000

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data, self.run, self.other = folder / "data", folder / "runs" / "a", folder / "runs" / "b"
        self.sweep, self.lesson, self.now = folder / "sweep", folder / "lesson", folder / "now"
        rng = np.random.default_rng(0)
        for number in range(16):
            file = self.data / "ab"[number % 2] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(file)
        self._train()
        self._teach()
        self.photos = self._contents(self.lesson)
        of_run: list[Callable[[], object]] = [
            self._list, self._diff, self._report, self._card, self._resume, self._evaluate, self._show, self._compare
        ]  # fmt: skip
        self.doors: dict[Path, list[Callable[[], object]]] = {
            self.run / "run.json": of_run,
            self.run / "metrics.jsonl": of_run,
            self.run / "evaluation.json": of_run,
            self.sweep / "results.json": [self._sweep],
            self.lesson / ".teach" / "journal.jsonl": [self._open],
            self.lesson / ".teach" / "features-1.bin": [self._open],
        }
        self.originals = {file: file.read_bytes() for file in self.doors}

    # The corpus

    def _train(self) -> None:
        from vitkit.checkpoints import load
        from vitkit.jobs.cells import Request, product, sweep_cells
        from vitkit.jobs.evaluate import evaluate, part_of, write
        from vitkit.jobs.train import train
        from vitkit.model.config import ViTConfig
        from vitkit.training.recipe import Recipe
        from vitkit.training.run_folder import RunFolder

        shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        config = ViTConfig(**shape, image_size=16, patch_size=8)
        recipe = Recipe(source="", config=config, small_data=True, steps=2, batch_size=4, lr=1e-3, val=0.25)
        for out in (self.run, self.other):
            train(self.data, out, recipe=recipe, settings=SETTINGS)
        part, words = part_of(self.data, None, RunFolder.open(self.run))
        write(self.run, evaluate(load(self.run), part, weights=str(self.run), data=str(self.data), part=words))
        self.request = Request(data=str(self.data), out=self.sweep, recipe=recipe, settings=SETTINGS)
        self.cells = product({"lr": [1e-3, 1e-2]})
        sweep_cells(self.request, self.cells, say=_nothing)

    def _teach(self) -> None:
        from vitkit.server.teach_state import Photo
        from vitkit.server.teach_store import KEY, Store

        self.start = {
            **{"key": "key", "weights": "w", "backbone": "b", "features": "cls", "width": WIDTH, "input_spec": {}}
        }
        store = Store(self.lesson, self.start)
        for number, name in enumerate("ab", 1):
            store.do({"do": "class", "id": number, "name": name})
        for number, file in enumerate(sorted(self.data.glob("*/*.png"))):
            key = hashlib.sha256(file.read_bytes()).hexdigest()[:KEY]
            photo = Photo(key, file.name, f"{key}.png", row=0, of=number % 2 + 1)
            kept = store.keep([(photo, file.read_bytes())], [np.full(WIDTH, number, np.float32)])
            store.do({"do": "photos", "photos": [asdict(one) for one in kept]})
        store.do({"do": "class", "id": 2, "name": "c"})
        store.close()

    @staticmethod
    def _contents(folder: Path) -> set[str]:
        return {hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*.png")}

    # Cases

    def case(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        file = rng.choice(list(self.doors))
        original, other = self.originals[file], self.originals[rng.choice(list(self.doors))]
        if file.suffix == ".json" and rng.random() < 0.8:
            raw = text_of(mutate_json(json.loads(original), rng), rng)
        elif file.suffix == ".jsonl" and rng.random() < 0.8:
            lines = [json.loads(line) for line in original.splitlines()]
            for number in rng.sample(range(len(lines)), rng.randint(1, 3)):
                lines[number] = mutate_json(lines[number], rng)
            raw = b"".join(text_of(line, rng) + b"\n" for line in lines)
        else:
            raw = mutate(original, rng, other)
        door = rng.choice(self.doors[file])
        name = f"{file.relative_to(self.folder)}, {door.__name__.strip('_')}"  # type: ignore[attr-defined]
        return name, lambda: self.door(file, raw, door)

    def seeds(self) -> Iterator[tuple[str, bytes]]:
        for number, file in enumerate(self.doors):
            for which in range(len(self.doors[file])):
                yield file.name, bytes([number, which]) + self.originals[file]

    def take(self, data: bytes) -> None:
        """The first byte says which file the others replace, the second one which function reads it."""
        file = list(self.doors)[(data[0] if data else 0) % len(self.doors)]
        doors = self.doors[file]
        self.door(file, data[2:], doors[(data[1] if len(data) > 1 else 0) % len(doors)])

    def door(self, file: Path, raw: bytes, door: Callable[[], object]) -> None:
        file.write_bytes(raw)
        try:
            door()
        finally:
            file.write_bytes(self.originals[file])
            shutil.rmtree(self.now, ignore_errors=True)

    # Functions that read

    def _list(self) -> None:
        from vitkit.jobs.listing import list_runs

        list_runs(self.run.parent)

    def _diff(self) -> None:
        from vitkit.jobs.listing import diff

        diff(self.run, self.other)

    def _report(self) -> None:
        from vitkit.jobs.report import report

        report(self.run, out=self.now / "report.html")

    def _compare(self) -> None:
        from vitkit.jobs.report import compare

        compare(self.run.parent, self.now / "runs.html")

    def _card(self) -> None:
        from vitkit.jobs.share import write_card

        write_card(self.run, self.now / "README.md")

    def _resume(self) -> None:
        from vitkit.jobs.train import prepare

        prepare(None, self.run, resume=True)

    def _evaluate(self) -> None:
        from vitkit.jobs.evaluate import part_of
        from vitkit.training.run_folder import RunFolder

        part_of(self.data, None, RunFolder.open(self.run))

    def _show(self) -> None:
        from vitkit.checkpoints import load
        from vitkit.jobs.photos import open_photos

        open_photos(self.run, load(self.run), self.folder / "cache")

    def _sweep(self) -> None:
        from vitkit.jobs.cells import sweep_cells
        from vitkit.jobs.study import summary, table

        rows = sweep_cells(self.request, self.cells, resume=True, say=_nothing)
        assert not isinstance(rows, int)
        table(summary(rows))

    def _open(self) -> None:
        from vitkit.server.teach_store import Store

        shutil.copytree(self.lesson, self.now)
        try:
            Store(self.now, self.start).close()
        finally:
            if lost := self.photos - self._contents(self.now):
                raise AssertionError(f"{len(lost)} photos are lost")


def _nothing(text: str) -> None:
    """Say nothing."""
