"""Teach: accuracy against the probe on the same photos, and how long a refit takes while photos are being embedded.

python -m benchmarks.teach accuracy --data pizza_steak_sushi --from vit_tiny_...timm.pth [--shots 10] [--draws 5]
python -m benchmarks.teach refit [--photos 100,500,2000] [--width 768] [--classes 20] [--changes 100]

`accuracy` teaches through the server's own routes and saves a run, then evaluates the run on the test part. `refit`
does what the server does after each change (follow it, judge every photo left out, list what is confused and doubtful),
while another thread runs a ViT of that width on batches without a pause, as uploads do. On a machine that others use,
the processor time of a refit says more than its time by the clock.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import resource
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np


def accuracy(data: str, weights: str, shots: int, draws: int) -> None:
    """Print the accuracy of a taught run and of the probe's method, for several draws of photos."""
    from starlette.testclient import TestClient

    import vitkit
    from vitkit.data.sources import open_splits
    from vitkit.features import FeatureCache, attach, choose, fill, fit
    from vitkit.features.ridge import draw
    from vitkit.jobs.teach import save
    from vitkit.server.app import create_app
    from vitkit.server.service import Service
    from vitkit.server.teach import Lessons

    model = vitkit.load(weights)
    splits = open_splits(data)
    train, test = splits["train"](), splits["test"]()
    names, rows = train.class_names, {"taught": [], "probe": []}
    with tempfile.TemporaryDirectory() as place:
        X, Xt = (fill(model, source, FeatureCache(f"{place}/cache")).read() for source in (train, test))
        for seed in range(draws):
            chosen = draw(X.labels, len(names), shots, seed)
            head = fit("logistic", X.features[chosen], X.labels[chosen], names).head
            probe = attach(model, head, names, choose(None, model.config))
            W, b = (probe.state_dict()[f"head.{name}"].numpy() for name in ("weight", "bias"))
            rows["probe"].append(float(((Xt.features @ W.T + b).argmax(1) == Xt.labels).mean()))

            service = Service(model, source=weights)
            lessons = Lessons(service, f"{place}/taught-{seed}", partial(save, model, weights))
            with TestClient(create_app(service, lessons)) as client:
                headers = {"Lesson": client.post("/v1/teach", json={}).json()["lesson"]}
                for k, name in enumerate(names):
                    change = {"change": {"do": "class", "name": name}}
                    of = client.post("/v1/teach/change", json=change, headers=headers).json()["id"]
                    photos = [i for i in chosen if X.labels[i] == k]
                    for start in range(0, len(photos), 32):
                        files = [("files", (train.names[i], train.raw(int(i)))) for i in photos[start : start + 32]]
                        client.post(f"/v1/teach/photos?of={of}", files=files, headers=headers).raise_for_status()
                client.post("/v1/teach/save", headers=headers).raise_for_status()
            rows["taught"].append(vitkit.evaluate(f"{place}/taught-{seed}", data).measures.top1)
            print(f"draw {seed}: taught {rows['taught'][-1]:.4f}, probe {rows['probe'][-1]:.4f}", flush=True)
    print(f"\n| {shots} photos per class, {draws} draws | mean | standard error |\n|---|---|---|")
    for name, found in rows.items():
        print(f"| {name} | {np.mean(found):.4f} | {np.std(found, ddof=1) / len(found) ** 0.5:.4f} |")


def refit(photos: int, width: int, classes: int, changes: int) -> None:
    """Print a row of the table for one number of photos."""
    import torch

    from vitkit import ViT, ViTConfig
    from vitkit.features.online import use_one_thread
    from vitkit.server.teach_advice import advise, look
    from vitkit.server.teach_fit import Fitting
    from vitkit.server.teach_state import Photo, State

    use_one_thread()
    rng, y = np.random.default_rng(0), np.arange(photos + changes) % classes
    means = rng.normal(size=(classes, width)).astype(np.float32)
    X = rng.normal(size=(len(y), width)).astype(np.float32) + 0.2 * means[y]
    every = {str(i): Photo(str(i), str(i), str(i), i, int(of) + 1) for i, of in enumerate(y)}
    names = {k + 1: f"class {k}" for k in range(classes)}
    states = [State(names, {key: every[key] for key in list(every)[: photos + i]}) for i in range(changes + 1)]

    config = ViTConfig(
        hidden_size=width, num_hidden_layers=12, num_attention_heads=width // 64, intermediate_size=4 * width
    )
    model, batch, stop, embedded = ViT(config).eval(), torch.zeros(1, 3, 224, 224), threading.Event(), 0

    def upload() -> None:
        nonlocal embedded
        while not stop.is_set():
            with torch.inference_mode():
                model.features(batch)
            embedded += len(batch)

    before = memory()
    fitting = Fitting({key: X[i] for i, key in enumerate(every)})
    start = time.perf_counter()
    fitting.follow(states[0])
    first = time.perf_counter() - start
    held = memory() - before
    thread = threading.Thread(target=upload)
    thread.start()
    time.sleep(1.0)
    seconds, worked, began = [], [], time.perf_counter()
    for state in states[1:]:
        start, work = time.perf_counter(), time.thread_time()
        advise(state, look(state, fitting.follow(state)))
        seconds.append(time.perf_counter() - start)
        worked.append(time.thread_time() - work)
    rate = embedded / (time.perf_counter() - began)
    stop.set()
    thread.join()
    (p50, p95), (w50, w95) = (1e3 * np.quantile(found, (0.5, 0.95)) for found in (seconds, worked))
    print(
        f"| {photos:,} | {p50:.0f} ms | {p95:.0f} ms | {1e3 * max(seconds):.0f} ms | {w50:.0f} ms | {w95:.0f} ms | "
        f"{first:.2f} s | {held:.0f} MB | {rate:.1f} photos/s |",
        flush=True,
    )


def memory() -> float:
    """Return the most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["accuracy", "refit", "row"])
    parser.add_argument("--data")
    parser.add_argument("--from", dest="weights")
    parser.add_argument("--shots", type=int, default=10)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--photos", default="100,500,2000")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--changes", type=int, default=100)
    asked = parser.parse_args()
    if asked.what == "accuracy":
        accuracy(asked.data, asked.weights, asked.shots, asked.draws)
        return
    if asked.what == "row":  # in a process of its own, so that its memory is its own
        refit(int(asked.photos), asked.width, asked.classes, asked.changes)
        return
    print(f"{asked.width} numbers per photo, {asked.classes} classes")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| photos | refit p50 | p95 | longest | processor time p50 | p95 | first fit | memory | embedded meanwhile |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for photos in asked.photos.split(","):
        how = ("--photos", photos, "--width", asked.width, "--classes", asked.classes, "--changes", asked.changes)
        subprocess.run([sys.executable, "-m", "benchmarks.teach", "row", *map(str, how)], check=True, cwd=Path.cwd())


if __name__ == "__main__":
    main()
