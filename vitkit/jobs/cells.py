"""Many runs that differ in a few fields: train each cell, measure it, and keep the results as they come.

A cell is a mapping of field to value: a field of Recipe or of ViTConfig, `seed`, `model` (a variant), `image_size`, or
`size` (a row of SIZES). Every cell is a run folder of its own; results.json has a line for each that is finished. A
sweep that was killed continues where it stopped, in the middle of a cell.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.checkpoints import load
from vitkit.checkpoints.atomic import staging
from vitkit.data.base import Source, Subset, need_one_class
from vitkit.errors import ConfigError, LostWorker, OutputError, nearest, pick
from vitkit.evaluation.logits import logits_of
from vitkit.features.ridge import SEEDS, draw, ridge
from vitkit.jobs.train import Prepared, prepare, start
from vitkit.model.backbone import Backbone
from vitkit.model.config import InputSpec, ViTConfig
from vitkit.model.count import flops
from vitkit.runtime import Runtime, stop_requests
from vitkit.training.loop import Watch
from vitkit.training.recipe import Recipe
from vitkit.training.run_folder import read_object
from vitkit.types import Array

RESULTS = "results.json"
START = "spawn"  # processes: forked ones could not use CUDA
TICK = 0.5  # seconds between two looks at whether to stop
Cell = Mapping[str, Any]

# Models of three sizes, for the field `size`: the paper's Figures 3 to 5 compare several.
SIZES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256},
    "medium": {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512},
    "large": {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1024},
}
OF_RECIPE = tuple(field.name for field in dataclasses.fields(Recipe) if field.name not in ("image_size", "config"))
OF_MODEL = tuple(field.name for field in dataclasses.fields(ViTConfig) if field.name not in ("image_size", *OF_RECIPE))
OTHERS = ("seed", "model", "image_size", "size")


def product(over: Mapping[str, Sequence[Any]], seeds: Sequence[int] = (0,)) -> list[dict[str, Any]]:
    """Return every combination of values, with every seed.

    Args:
        over: field -> its values.
        seeds: random seeds (default: 0 only).
    """
    return [
        {**dict(zip(over, values, strict=True)), "seed": seed}
        for values in itertools.product(*over.values())
        for seed in seeds
    ]


def name_of(cell: Cell) -> str:
    """Return the name of a cell's folder: `positions-2d,seed-0`."""
    return ",".join(f"{field}-{_word(value)}" for field, value in cell.items())


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).replace("/", "_")


def arguments(cell: Cell) -> dict[str, Any]:
    """Return the arguments of `jobs.train.prepare` that a cell stands for.

    Args:
        cell: field -> value.

    Raises:
        ConfigError: a field that does not exist.
    """
    found: dict[str, Any] = {"changes": {}, "fields": {}, "settings": {}}
    for field, value in cell.items():
        if field == "seed":
            found["settings"]["seed"] = value
        elif field in ("model", "image_size"):
            found[field] = value
        elif field == "size":
            found["fields"] |= pick(SIZES, value, "size")
        elif field in OF_RECIPE:
            found["changes"][field] = value
        elif field in OF_MODEL:
            found["fields"][field] = value
        else:
            known = (*OTHERS, *OF_RECIPE, *OF_MODEL)
            raise ConfigError(
                f"A sweep goes over fields of a recipe or a model, and over {', '.join(OTHERS)}; got "
                f"{field!r}{nearest(field, list(known)) or '.'}"
            )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What all cells of a sweep have in common.

    Args:
        data: anything that `vitkit.data.open_splits` accepts.
        out: folder for the runs and results.json.
        recipe: a key of RECIPES, or a Recipe.
        changes: fields of Recipe to change in every cell.
        settings: fields of Settings to set in every cell.
        how: other arguments of `jobs.train.prepare`, such as `weights`.
        shots: images per class for the few-shot accuracy; 0 leaves it out.
    """

    data: str
    out: Path
    recipe: str | Recipe
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    how: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shots: int = 0

    def same(self) -> dict[str, Any]:
        """Return what a resumed sweep must agree in, as JSON values."""
        recipe = self.recipe if isinstance(self.recipe, str) else self.recipe.to_dict()
        changes = {name: value for name, value in self.changes.items() if value is not None}
        return json.loads(json.dumps({"recipe": recipe, "changes": changes, "shots": self.shots}, default=str))

    def prepare(self, cell: Cell, *, resume: bool) -> Prepared:
        """Check a cell and build what it needs, without writing anything."""
        own = arguments(cell)
        changes, settings = {**self.changes, **own.pop("changes")}, {**self.settings, **own.pop("settings")}
        fields = {**self.how.get("fields", {}), **own.pop("fields")}
        how = {**self.how, **own, "changes": changes, "settings": settings, "fields": fields}
        ready = prepare(self.data, self.out / name_of(cell), recipe=self.recipe, resume=resume, **how)
        need_one_class(ready.train, "A study")
        return ready


def sweep_cells(
    request: Request,
    cells: Sequence[Cell],
    *,
    resume: bool = False,
    jobs: int = 1,
    watch: Watch | None = None,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]] | int:
    """Train and measure every cell; return a row of results for each, in order, or the signal that interrupted it.

    Args:
        request: what all cells have in common.
        cells: the cells; those that are finished are not trained again.
        resume: whether to continue the sweep at `request.out`.
        jobs: cells to train at the same time, each in a process of its own (default: 1).
        watch: called with the events of every run, if one cell is trained at a time.
        say: called with a line of text before and after every cell.

    Raises:
        ConfigError: a cell cannot work; nothing has been written.
        OutputError: `request.out` already holds something.
    """
    out = request.out
    if not cells:
        raise ConfigError("Expected at least one cell to train; got none.")
    if twice := [name for name, count in Counter(map(name_of, cells)).items() if count > 1]:
        raise ConfigError(f"Expected every combination once; {twice[0]} comes several times. Leave out equal values.")
    check_place(out, resume)
    done = _finished(request)
    left = [cell for cell in cells if name_of(cell) not in done]
    for cell in _without_seeds(left):
        request.prepare(cell, resume=resume)  # refuses what cannot work before the first cell is trained
    if len(left) < len(cells):
        say(f"{len(cells) - len(left)} of {len(cells)} cells are finished")
    for number, row in enumerate(_trained(request, left, resume, jobs, watch, say), len(cells) - len(left) + 1):
        if isinstance(row, int):
            return row
        done[row["name"]] = row
        _write(request, done)
        say(f"{number} of {len(cells)}  {row['name']}: {shown(row)}")
    return [done[name_of(cell)] for cell in cells]


def check_place(out: Path, resume: bool) -> None:
    """Refuse a folder for a sweep that holds something else."""
    if out.exists() and not out.is_dir():
        raise OutputError(f"--out must be a folder; {out} is a file. Choose another.")
    if out.exists() and any(out.iterdir()) and not resume:
        raise OutputError(f"--out must be a new folder; {out} is not empty. Choose another, or add --resume.")


def _without_seeds(cells: Sequence[Cell]) -> list[Cell]:
    """Return the first of each group of cells that differ only in their seeds."""
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(name_of({field: value for field, value in cell.items() if field != "seed"}), cell)
    return list(first.values())


def shown(row: Mapping[str, Any]) -> str:
    """Return a cell's results as text."""
    few = f", {row['shots']}-shot {row['few_shot']:.2%}" if row.get("few_shot") is not None else ""
    return f"{row['top1']:.2%} of {row['val']:,} held-out images{few}, {row['seconds']:.0f} s"


def _finished(request: Request) -> dict[str, dict[str, Any]]:
    """Return the rows of results.json by name; those that are damaged or lost are measured again."""
    found = read_object(request.out / RESULTS)
    if found is None:
        return {}
    if found.get("same") != request.same():
        raise ConfigError(
            f"{request.out} was started with another recipe or other settings. Continue with the original ones, or "
            f"start another sweep with a new --out."
        )
    rows = found.get("rows")
    return {row["name"]: row for row in rows if _is_row(row)} if isinstance(rows, list) else {}


def _is_row(row: Any) -> bool:
    """Return whether a value is a row of results, with everything that tables and pictures use."""
    if not isinstance(row, dict) or not isinstance(row.get("cell"), dict) or row.get("name") != name_of(row["cell"]):
        return False
    numbers = [row.get(name, "") for name in ("train", "val", "parameters", "flops", "seconds")]
    scores = [row.get("top1", ""), row.get("few_shot")]
    numbers += [row.get("shots")] if row.get("few_shot") is not None else []
    return all(_is_number(value) for value in numbers) and all(value is None or _is_number(value) for value in scores)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300  # not NaN, and no number of 400 digits


def _write(request: Request, done: Mapping[str, Mapping[str, Any]]) -> None:
    request.out.mkdir(parents=True, exist_ok=True)
    with staging(request.out) as private:
        text = json.dumps({"data": request.data, "same": request.same(), "rows": list(done.values())}, indent=1)
        (private / RESULTS).write_text(text + "\n", encoding="utf-8")


def _trained(
    request: Request, cells: Sequence[Cell], resume: bool, jobs: int, watch: Watch | None, say: Callable[[str], None]
) -> Iterator[dict[str, Any] | int]:
    """Train cells, one after the other or in processes of their own; yield each row, or a signal, as it comes."""
    if jobs <= 1 or len(cells) <= 1:
        for cell in cells:
            say(name_of(cell))
            yield train_cell(request, cell, resume, watch)
        return
    context = multiprocessing.get_context(START)
    stop, ask = context.Pipe(duplex=False)  # an Event would wait for a process that was killed
    given = (stop, os.getpid())
    with stop, ask, stop_requests() as requests, ProcessPoolExecutor(jobs, context, _Apart.begin, given) as pool:
        with deaf_children():
            waiting = {pool.submit(_Apart.train, request, cell, resume) for cell in cells}
        try:
            while waiting and not requests:
                ready, waiting = wait(waiting, TICK, FIRST_COMPLETED)
                for one in ready:
                    yield one.result()
        except BrokenProcessPool:
            raise LostWorker(
                "A process that trained a cell was killed, perhaps because memory ran out. Use fewer --jobs. The other "
                "cells are saved; to continue, repeat the command with --resume."
            ) from None
        finally:
            ask.send_bytes(b"stop")  # the cells in training are saved, and the processes end
            for one in waiting:
                one.cancel()
    if requests:
        yield requests[0]


@contextmanager
def deaf_children() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach, not even while Python starts in them: their parent stops them.

    A Ctrl-C meanwhile reaches the parent afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Asked(BaseException):
    """The process of a cell was asked to stop while it did not train yet."""


class _Apart:
    """What a process of `_trained` does: cells, until it is asked to stop or its parent dies; then it saves and ends.

    It has a session of its own, so that a signal from the terminal reaches the parent only. Whoever asks it to stop,
    and however often, a run in training is saved.
    """

    stop: Connection
    parent: int
    busy = training = False

    @classmethod
    def begin(cls, stop: Connection, parent: int) -> None:
        """Prepare a process.

        Args:
            stop: has something to read when the process is to stop; it is never read, so that all processes see it.
            parent: the parent's process id.
        """
        cls.stop, cls.parent = stop, parent
        if hasattr(os, "setsid"):
            os.setsid()
        signal.signal(signal.SIGTERM, cls._receive)
        threading.Thread(target=cls._watch, daemon=True).start()

    @classmethod
    def train(cls, request: Request, cell: Cell, resume: bool) -> dict[str, Any] | int:
        """Train one cell; the number of a signal if it was asked to stop."""

        def tell(event: dict[str, Any]) -> None:
            cls.training = True
            if event["event"] == "val":
                score = f"{event['top1']:.2%}" if "top1" in event else f"loss {event['loss']:.4f}"
                print(f"  {name_of(cell)}  step {event['step']:,}  {event['weights']} {score}", flush=True)

        cls.busy = True
        try:
            stopping = cls.stop.poll() or os.getppid() != cls.parent
            return int(signal.SIGTERM) if stopping else train_cell(request, cell, resume, tell)
        except _Asked:
            return int(signal.SIGTERM)
        finally:
            cls.busy = cls.training = False

    @classmethod
    def _receive(cls, number: int, frame: Any) -> None:
        """Receive SIGTERM. In training this is the second one: the first stopped the run, which is being saved."""
        if cls.busy and not cls.training:
            raise _Asked
        if not cls.busy:
            os._exit(1)

    @classmethod
    def _watch(cls) -> None:
        """Wait until the process is to stop, and see that it does."""
        while not cls.stop.poll(TICK) and os.getppid() == cls.parent:
            pass
        while cls.busy:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(TICK)
        time.sleep(TICK)  # the result is on its way
        os._exit(1)


def train_cell(request: Request, cell: Cell, resume: bool, watch: Watch | None = None) -> dict[str, Any] | int:
    """Train one cell and measure it on its validation part; the number of a signal if one interrupted it.

    Args:
        request: what all cells have in common.
        cell: this cell.
        resume: whether to continue its run, if there is one.
        watch: called with the events of the run.
    """
    began = time.perf_counter()
    ready = request.prepare(cell, resume=resume)
    run, outcome = start(ready, watch)
    if outcome.interrupted:  # even if this cell was finished: the sweep is not
        return outcome.signal
    which = "ema" if ready.recipe.ema is not None else "last"
    train, val, config = ready.train, ready.val, ready.model.config
    row: dict[str, Any] = {
        "name": name_of(cell),
        "cell": dict(cell),
        "weights": which,
        "top1": run.final_score(which) if val is not None else None,
        "train": len(train),
        "val": len(val) if val is not None else 0,
        "parameters": sum(p.numel() for p in ready.model.parameters()),
        "flops": 3.0 * flops(config) * outcome.step * ready.recipe.batch_size,  # a backward pass costs two forwards
        "seconds": time.perf_counter() - began,
    }
    if request.shots and val is not None:
        model = load(run.weights(which), device=ready.runtime.device)
        scores = few_shot(model, train, val, request.shots, ready.runtime)
        row |= {"shots": request.shots, "few_shot": float(np.mean(scores))}
    return row


class _Features:
    """A model's features in place of its logits, to compute them for a data set."""

    def __init__(self, model: Backbone) -> None:
        self.model, self.input_spec = model, model.input_spec

    input_spec: InputSpec

    def __call__(self, x: Any, /) -> Any:
        return self.model.features(x)


def few_shot(
    model: Backbone,
    train: Source,
    held: Source,
    shots: int,
    runtime: Runtime | None = None,
    seeds: Sequence[int] = SEEDS,
) -> list[float]:
    """Return the few-shot accuracy of a model's frozen features (section 4.1), one for each seed.

    Only the images that a seed chooses are embedded, and the held-out ones.

    Args:
        model: a ViT or a ResNet.
        train: images to choose from.
        held: images to measure on.
        shots: images per class.
        runtime: device and precision (default: the CPU, in fp32).
        seeds: each selects different images.

    Raises:
        ConfigError: a class has fewer training images.
    """
    least = int(np.bincount(train.labels, minlength=len(train.class_names)).min())
    if least < shots:
        raise ConfigError(f"{shots} images per class are too many: a class has {least} training images. Use fewer.")
    K = len(train.class_names)
    chosen = [draw(train.labels, K, shots, seed) for seed in seeds]
    some = np.unique(np.concatenate(chosen))
    X, Xt = (
        logits_of(_Features(model), part, batch_size=256, runtime=runtime).logits.astype(np.float64)
        for part in (Subset(train, some), held)
    )
    accuracies = []
    for places in chosen:
        rows: Array = np.searchsorted(some, places)
        head = ridge(X[rows], train.labels[places], K)
        accuracies.append(float((head.logits(Xt).argmax(1) == held.labels).mean()))
    return accuracies
