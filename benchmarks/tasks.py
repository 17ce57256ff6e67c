"""Ten small tasks: `vitkit tune` next to `probe`, `train --recipe finetune` and scikit-learn on timm's features.

python -m benchmarks.tasks pack FILE --cifar10 FOLDER --fashion FOLDER     training subsets of three seeds, fixed tests
python -m benchmarks.tasks run FILE --weights WEIGHTS --out RESULTS.json [--processes 8] [--minutes 5]
python -m benchmarks.tasks show RESULTS.json [MORE.json ...]               the table and the verdicts

`run` can be repeated: what RESULTS.json has is not computed again. The settings of `tune` and of the recipes were fixed
before any of these test images was looked at.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: several processes share the cores

import numpy as np

from vitkit.types import Array

SEEDS = (0, 1, 2)
TEST = 2_000  # test images per source; of the digits, whatever is not in the pool
POOL = {"cifar10": 200, "fashion": 200, "digits": 55}  # training images per class and seed
NOISE = 0.2  # share of the labels that are wrong in a noisy task
METHODS = ("tune", "probe", "finetune", "sklearn")


def counts(name: str) -> tuple[str, list[int], bool]:
    """Return a task's source, its training images per class, and whether some labels are wrong."""
    source, _, kind = name.partition("-")
    if kind == "imbalanced":  # from 100 down to 10 images
        return source, [round(100 * 10 ** (-k / 9)) for k in range(10)], False
    number = int(kind.removesuffix("-noisy"))
    return source, [number] * 10, kind.endswith("noisy")


TASKS = (
    *(f"{source}-{number}" for source in ("cifar10", "fashion") for number in (10, 50, 200)),
    *("digits-10", "digits-50", "cifar10-imbalanced", "fashion-50-noisy"),
)


# ---------------------------------------------------------------------------------------------------------- the pack


def pack(out: Path, cifar10: str, fashion: str) -> None:
    """Write the training pools of all seeds, and the test images of each source, to one .npz file."""
    arrays: dict[str, Array] = {}
    for name, spec in {"cifar10": f"cifar10:{cifar10}", "fashion": f"idx:{fashion}", "digits": "digits"}.items():
        (X, y), (Xt, yt) = _pool_and_test(name, spec)
        for seed in SEEDS:
            rng = np.random.default_rng([seed, len(name)])
            chosen = [rng.permutation(np.flatnonzero(y == k))[: POOL[name]] for k in range(10)]
            index = np.stack(chosen).T.reshape(-1)  # image 0 of every class, then image 1 of every class, ...
            arrays |= {f"{name}/{seed}/images": X[index], f"{name}/{seed}/labels": y[index]}
        arrays |= {f"{name}/test/images": Xt, f"{name}/test/labels": yt}
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]
    print(f"wrote {out}: {out.stat().st_size / 1e6:.1f} MB")


def _pool_and_test(name: str, spec: str) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    from vitkit.data.sources import open_splits

    splits = open_splits(spec)
    whole = splits["train" if "train" in splits else "all"]()
    order = np.random.default_rng(0).permutation(len(whole))

    def taken(source: Any, index: Iterable[int]) -> tuple[Array, Array]:
        index = np.asarray(index)
        return np.stack([source.raw(int(i)) for i in index]), source.labels[index].astype(np.int64)

    if "test" in splits:
        test = splits["test"]()
        return taken(whole, range(len(whole))), taken(test, np.random.default_rng(0).permutation(len(test))[:TEST])
    y = whole.labels  # digits: every seed draws its training images from a fixed third
    pool = np.concatenate([order[y[order] == k][: POOL[name] + 5] for k in range(10)])
    return taken(whole, pool), taken(whole, np.setdiff1d(np.arange(len(whole)), pool))


def training_part(arrays: Any, task: str, seed: int) -> tuple[Array, Array]:
    """Return the training images and labels of a task."""
    source, numbers, noisy = counts(task)
    X, y = arrays[f"{source}/{seed}/images"], arrays[f"{source}/{seed}/labels"]
    place = np.arange(len(y)) // 10  # the pool has one image of every class after the other
    kept = np.flatnonzero(place < np.array(numbers)[y])
    X, y = X[kept], y[kept].copy()
    if noisy:
        rng = np.random.default_rng([seed, 99])
        wrong = rng.permutation(len(y))[: round(NOISE * len(y))]
        y[wrong] = (y[wrong] + rng.integers(1, 10, len(wrong))) % 10
    return X, y


# ----------------------------------------------------------------------------------------------------------- a cell


class Worker:
    """Computes cells of the table, one after the other, in a process of its own.

    Args:
        file: the pack.
        weights: the pre-trained weights.
        minutes: time limit of `tune`.
        workers: worker processes for images.
    """

    def __init__(self, file: Path, weights: str, minutes: float, workers: int) -> None:
        from benchmarks import stand_ins

        self.stand_ins = stand_ins.install()
        import torch

        from vitkit.runtime import Runtime

        self.arrays, self.weights, self.minutes, self.workers = np.load(file), weights, minutes, workers
        torch.set_num_threads(1)
        cuda = torch.cuda.is_available()
        self.runtime = Runtime("cuda" if cuda else "cpu", "bf16" if cuda else "fp32")

    def cell(self, task: str, seed: int, method: str) -> dict[str, Any]:
        """Return the test accuracy, the answers and the time of one method on one task."""
        from vitkit.data.base import Pixels

        X, y = training_part(self.arrays, task, seed)
        source = counts(task)[0]
        names = tuple(str(k) for k in range(10))
        train = Pixels(X, y, names)
        test = Pixels(self.arrays[f"{source}/test/images"], self.arrays[f"{source}/test/labels"], names)
        began = time.perf_counter()
        answer, more = getattr(self, method)(train, test, seed)
        right = answer() == test.labels
        return {
            "task": task,
            "seed": seed,
            "method": method,
            "accuracy": float(right.mean()),
            "right": np.packbits(right).tobytes().hex(),
            "n": len(right),
            "images": len(y),
            "seconds": round(more.pop("until", time.perf_counter()) - began, 2),
            "device": str(self.runtime.device),
            "precision": self.runtime.precision,
            "stand_ins": self.stand_ins,
            **more,
        }

    def _load(self) -> Any:
        import vitkit

        return vitkit.load(self.weights).to(self.runtime.device)

    def _embedded(self, model: Any, source: Any) -> Any:
        from vitkit.features.cache import FeatureCache
        from vitkit.features.embed import embed

        with tempfile.TemporaryDirectory() as folder:
            how = {"runtime": self.runtime, "workers": self.workers, "batch_size": 256}
            return embed(model, source, FeatureCache(Path(folder)), **how)

    def _answers(self, model: Any, test: Any) -> Array:
        from vitkit.evaluation.logits import logits_of

        found = logits_of(model, test, runtime=self.runtime, workers=self.workers, batch_size=256)
        return found.logits.argmax(1)

    def probe(self, train: Any, test: Any, seed: int) -> tuple[Any, dict[str, Any]]:
        """`vitkit probe`."""
        from vitkit.features.probe import Options, fit

        model = self._load()
        found = self._embedded(model, train)
        fitted = fit("logistic", found.features, found.labels, train.class_names, Options(seed=seed))
        until = time.perf_counter()
        return lambda: fitted.head.logits(self._embedded(model, test).features).argmax(1), {"until": until}

    def tune(self, train: Any, test: Any, seed: int) -> tuple[Any, dict[str, Any]]:
        """`vitkit tune`."""
        from vitkit.jobs.tuning import Mirrored, Search
        from vitkit.training.settings import Settings

        began, model = time.perf_counter(), self._load()
        found = self._embedded(model, train)
        mirrored = self._embedded(model, Mirrored(train)).features
        settings = Settings(
            seed=seed,
            device=str(self.runtime.device),
            precision=self.runtime.precision,
            workers=self.workers,
            trackers=(),
            log_every=1000,
        )
        deadline = began + 60 * self.minutes
        say = lambda sentence: print(sentence, file=sys.stderr, flush=True)  # noqa: E731
        chosen = Search(model, train, found, mirrored, deadline, self.runtime, settings, say=say)()
        until = time.perf_counter()
        rows = [
            {"name": t.name, "gain": t.gain, "error": t.error, "seconds": round(t.seconds, 1)} for t in chosen.tried
        ]
        more = {"until": until, "chosen": chosen.name, "flip": chosen.flip, "tried": rows}
        return lambda: self._answers(chosen.model, test), more

    def finetune(self, train: Any, test: Any, seed: int) -> tuple[Any, dict[str, Any]]:
        """`vitkit train --recipe finetune`: a tenth is held out to choose the best epoch."""
        import vitkit
        from vitkit.data.base import Subset, stratified
        from vitkit.jobs.train import Prepared, train_into
        from vitkit.training.build import pretrained
        from vitkit.training.objectives import OBJECTIVES
        from vitkit.training.recipes import RECIPES
        from vitkit.training.run_folder import RunFolder
        from vitkit.training.settings import Settings

        recipe = RECIPES["finetune"]
        settings = Settings(
            seed=seed,
            device=str(self.runtime.device),
            precision=self.runtime.precision,
            workers=self.workers,
            trackers=(),
            log_every=1000,
        )
        kept, held = stratified(train.labels, recipe.val, seed)
        model = pretrained(self.weights, recipe, train.class_names)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            info = {"kind": "train", "same": {}}
            parts = (Subset(train, kept), Subset(train, held))
            objective = OBJECTIVES[recipe.objective](recipe, seed, parts[0])
            ready = Prepared(model, *parts, recipe, objective, settings, self.runtime, info, (), out, False)
            run = RunFolder.create(out, info)
            train_into(ready, run)
            best = vitkit.load(run.weights("best")).to(self.runtime.device)
            for parameter in best.parameters():  # not mapped from a file that is about to go
                parameter.data = parameter.data.clone()
        until = time.perf_counter()
        return lambda: self._answers(best, test), {"until": until}

    def sklearn(self, train: Any, test: Any, seed: int) -> tuple[Any, dict[str, Any]]:
        """scikit-learn's logistic regression on timm's features, standardised, its C chosen by cross-validation."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import StratifiedKFold

        embed, whose = self._timm()
        X = embed(train)
        mean, std = X.mean(0), X.std(0) + 1e-5

        def fit(X: Array, y: Array, C: float) -> Any:
            return LogisticRegression(C=C, max_iter=1000).fit((X - mean) / std, y)

        y, losses = train.labels, {}
        for C in 10.0 ** np.arange(-4, 3):
            total = 0.0
            for inside, outside in StratifiedKFold(5, shuffle=True, random_state=seed).split(X, y):
                model = fit(X[inside], y[inside], C)
                p = model.predict_proba((X[outside] - mean) / std)
                total -= np.log(np.maximum(p[np.arange(len(outside)), y[outside]], 1e-12)).sum()
            losses[C] = total
        best = fit(X, y, min(losses, key=lambda C: losses[C]))
        until = time.perf_counter()
        return lambda: best.predict((embed(test) - mean) / std), {"until": until, "features": whose}

    def _timm(self) -> tuple[Any, str]:
        """Return a function that computes timm's features; without timm, vitkit's, which are equal up to rounding."""
        import torch
        from PIL import Image

        try:
            import timm
            import timm.data
        except ImportError:
            timm = None
        if timm is None or ".timm" not in Path(self.weights).name:
            model = self._load()
            return lambda source: self._embedded(model, source).features, "vitkit"
        name = Path(self.weights).name.split(".timm")[0]
        theirs = timm.create_model(name, pretrained=False)
        theirs.load_state_dict(torch.load(self.weights, weights_only=True))
        theirs = theirs.eval().to(self.runtime.device)
        transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=theirs))

        def embed(source: Any) -> Array:
            rows = []
            for start in range(0, len(source), 256):
                images = [_rgb(source.raw(i)) for i in range(start, min(start + 256, len(source)))]
                x = torch.stack([transform(Image.fromarray(image)) for image in images]).to(self.runtime.device)
                with torch.inference_mode():
                    rows.append(theirs.forward_head(theirs.forward_features(x), pre_logits=True).float().cpu().numpy())
            return np.concatenate(rows).astype(np.float64)

        return embed, f"timm {timm.__version__}"


def _rgb(image: Array) -> Array:
    return np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image


# ------------------------------------------------------------------------------------------------------- the runner


def run(file: Path, weights: str, out: Path, processes: int, minutes: float, limit: float, only: list[str]) -> None:
    """Compute the cells that are missing from the results, in several processes."""
    results = json.loads(out.read_text()) if out.is_file() else []
    have = {(row["task"], row["seed"], row["method"]) for row in results if "accuracy" in row}
    cells = [
        (task, seed, method)
        for seed in SEEDS  # so that whole seeds are finished if the time runs out
        for method in METHODS
        for task in sorted(TASKS, key=lambda task: -sum(counts(task)[1]))  # the longest first
        if (task, seed, method) not in have and all(word in (task, method, f"seed{seed}") for word in only)
    ]
    deadline, todo = time.monotonic() + 60 * minutes, queue.SimpleQueue[tuple[str, int, str]]()
    for cell in cells:
        todo.put(cell)
    lock, started = threading.Lock(), []
    each = max((os.cpu_count() or 1) // processes, 1)

    def serve() -> None:
        command = [sys.executable, "-m", "benchmarks.tasks", "worker", str(file), "--weights", weights]
        command += ["--limit", str(limit), "--workers", str(0 if processes == 1 and each < 4 else each)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stdin is not None
        assert child.stdout is not None
        while time.monotonic() < deadline:
            try:
                cell = todo.get_nowait()
            except queue.Empty:
                break
            child.stdin.write(json.dumps(cell) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
            if not line:
                break  # killed at the deadline, or crashed: its stderr says why
            row = json.loads(line)
            with lock:
                results.append(row)
                private = out.with_suffix(".partial")
                private.write_text(json.dumps(results, indent=0))
                private.replace(out)
                said = row.get("error") or f"{row['accuracy']:.4f} in {row['seconds']:.0f} s {row.get('chosen', '')}"
                print(f"{len(results)} of {len(have) + len(cells)}: {' '.join(map(str, cell))}: {said}", flush=True)
        child.stdin.close()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(min(processes, len(cells)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.1))
    for child in started:
        child.kill()
    show([out])


def work(file: Path, weights: str, limit: float, workers: int) -> None:
    """Answer cells from stdin with results on stdout, one JSON line each."""
    answers, sys.stdout = sys.stdout, sys.stderr
    worker = Worker(file, weights, limit, workers)
    for line in sys.stdin:
        task, seed, method = json.loads(line)
        try:
            row = worker.cell(task, seed, method)
        except Exception as error:  # one cell must not end the others
            import traceback

            traceback.print_exc()
            row = {"task": task, "seed": seed, "method": method, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(row), file=answers, flush=True)


# -------------------------------------------------------------------------------------------------------- the table


def show(files: list[Path]) -> None:
    """Print the table of all results, and whether tune does what it promises."""
    rows = {
        (row["task"], row["seed"], row["method"]): row
        for file in files
        for row in json.loads(file.read_text())
        if "accuracy" in row
    }
    if not rows:
        print("no results")
        return
    print(f"| task | {' | '.join(METHODS)} | tune - probe, its standard error | chosen |")
    print("|---" * (len(METHODS) + 3) + "|")
    below, above = [], {"finetune": [], "sklearn": []}  # type: ignore[var-annotated]
    for task in TASKS:
        means, cells = {}, []
        for method in METHODS:
            found = [rows[task, seed, method] for seed in SEEDS if (task, seed, method) in rows]
            if len(found) == len(SEEDS):
                means[method] = float(np.mean([row["accuracy"] for row in found]))
            if not found:
                cells.append("-")
                continue
            mean, seconds = np.mean([row["accuracy"] for row in found]), np.mean([row["seconds"] for row in found])
            cells.append(
                f"{100 * mean:.1f}, {seconds:.0f} s" + ("" if len(found) == len(SEEDS) else f" ({len(found)})")
            )
        pairs = [
            (rows[task, s, "tune"], rows[task, s, "probe"]) for s in SEEDS if {"tune", "probe"} <= _have(rows, task, s)
        ]
        gain, error = _paired(pairs)
        if gain is not None:
            below.append((task, gain, error))
        for method, wins in above.items():
            if {"tune", method} <= set(means):
                wins.append(means["tune"] > means[method])
        chosen = ", ".join(rows[task, s, "tune"]["chosen"] for s in SEEDS if (task, s, "tune") in rows)
        said = "-" if gain is None else f"{100 * gain:+.1f}, {100 * error:.1f}"
        print(f"| {task} | {' | '.join(cells)} | {said} | {chosen} |")
    bad = [task for task, gain, error in below if gain < -error]
    print(f"\ntune is below the probe by more than one standard error on {len(bad)} of {len(below)} tasks {bad or ''}")
    for method, wins in above.items():
        print(f"the mean of tune is above that of {method} on {sum(wins)} of {len(wins)} tasks")


def _have(rows: Any, task: str, seed: int) -> set[str]:
    return {method for method in METHODS if (task, seed, method) in rows}


def _paired(pairs: list[Any]) -> tuple[float | None, float]:
    """Return the mean difference over all seeds' test answers, and its standard error.

    The same test images are answered for every seed, so an image's differences are averaged over the seeds first.
    """
    if not pairs:
        return None, 0.0
    bits = [
        [np.unpackbits(np.frombuffer(bytes.fromhex(r["right"]), np.uint8))[: r["n"]] for r in pair] for pair in pairs
    ]
    difference = np.mean([a.astype(float) - b for a, b in bits], axis=0)
    return float(difference.mean()), float(difference.std(ddof=1) / len(difference) ** 0.5)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("file", type=Path)
    packing.add_argument("--cifar10", required=True)
    packing.add_argument("--fashion", required=True)
    for name in ("run", "worker"):
        running = commands.add_parser(name)
        running.add_argument("file", type=Path)
        running.add_argument("--weights", required=True)
        running.add_argument("--limit", type=float, default=3.0, help="minutes that each tune may take")
        if name == "worker":
            running.add_argument("--workers", type=int, default=0)
            continue
        running.add_argument("--out", type=Path, required=True)
        running.add_argument("--processes", type=int, default=1)
        running.add_argument("--minutes", type=float, default=60.0, help="time limit of the whole table")
        running.add_argument("--only", action="append", default=[], help="a task, a method, or seed0; repeatable")
    commands.add_parser("show").add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "pack":
        pack(given.file, given.cifar10, given.fashion)
    elif given.command == "worker":
        work(given.file, given.weights, given.limit, given.workers)
    elif given.command == "run":
        run(given.file, given.weights, given.out, given.processes, given.minutes, given.limit, given.only)
    else:
        show(given.files)


if __name__ == "__main__":
    main()
