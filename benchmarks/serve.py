"""Load test: `python -m benchmarks.serve` (HTTP, this machine) or `--batcher-only --device cuda` (no web framework).

Sixteen clients in one process send requests without pause, with images that were encoded beforehand. The server is
compared with a plain batched forward pass that receives the same requests but neither parses nor decodes them, and with
typical FastAPI servers of the same model that run one image per call. All take turns in one run.
"""

from __future__ import annotations

from benchmarks import timing  # sets OMP_WAIT_POLICY before torch is imported  # isort: skip

import argparse
import asyncio
import io
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

try:
    from fastapi import UploadFile  # at module level, where FastAPI looks up annotations
except ImportError:  # --batcher-only needs no web framework
    UploadFile = None  # type: ignore[assignment, misc]

assert timing


# --- one process per server -------------------------------------------------------------------------------------------


def serve_vitkit(weights: str, port: int) -> None:
    """vitkit, as the command starts it."""
    sys.argv = ["vitkit", "serve", weights, "--port", str(port), "--device", "cpu"]
    from vitkit.cli import main

    main()


def serve_plain(weights: str, port: int) -> None:
    """A plain batched forward pass: reads the same bytes, decodes nothing, and runs sixteen images at a time."""
    import vitkit

    model = vitkit.load(weights)
    batch = torch.randn(16, 3, *model.input_spec.size)
    waiting: list[asyncio.StreamWriter] = []

    def forward() -> None:
        with torch.inference_mode():
            model(batch).softmax(-1)

    async def run() -> None:
        while True:
            if len(waiting) < 16:
                await asyncio.sleep(0.0005)
                continue
            now, waiting[:] = waiting[:16], waiting[16:]
            await asyncio.to_thread(forward)
            for writer in now:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            else:
                waiting.append(writer)

    async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await client(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        async with await asyncio.start_server(quiet, "127.0.0.1", port, limit=2**22):
            await run()

    asyncio.run(main())


def serve_usual(weights: str, port: int, asynchronous: bool = False) -> None:
    """A typical server, with one image per call: FastAPI, an UploadFile, model(x)."""
    import uvicorn
    from fastapi import FastAPI
    from PIL import Image

    import vitkit
    from vitkit.data import preprocess

    model = vitkit.load(weights)
    app = FastAPI()

    def answer(raw: bytes) -> dict[str, Any]:
        x = preprocess(Image.open(io.BytesIO(raw)).convert("RGB"), model.input_spec)
        with torch.inference_mode():
            p = model(x[None]).softmax(-1)[0]
        top = p.topk(5)
        return {"top": [{"index": int(i), "p": float(v)} for v, i in zip(top.values, top.indices)]}

    if asynchronous:

        @app.post("/v1/predict")
        async def predict(files: UploadFile) -> dict[str, Any]:
            return answer(await files.read())
    else:

        @app.post("/v1/predict")
        def predict_in_a_thread(files: UploadFile) -> dict[str, Any]:
            return answer(files.file.read())

    @app.get("/readyz")
    def ready() -> str:
        return "ready"

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def serve_usual_async(weights: str, port: int) -> None:
    """The same in the event loop, one image after another."""
    serve_usual(weights, port, asynchronous=True)


SERVERS: dict[str, Callable[[str, int], None]] = {
    "vitkit serve": serve_vitkit,
    "plain batched forward": serve_plain,
    "FastAPI, one image per call": serve_usual,
    "FastAPI, one image per call, async": serve_usual_async,
}


# --- the clients -----------------------------------------------------------------------------------------------------


def photos(count: int = 16) -> list[bytes]:
    """Crops of scikit-learn's two photos as JPEG files of 500 x 375 pixels."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_sample_images

    found, rng = [], np.random.default_rng(0)
    for i in range(count):
        image = load_sample_images().images[i % 2]
        top, left = rng.integers(0, image.shape[0] - 375), rng.integers(0, image.shape[1] - 500)
        out = io.BytesIO()
        Image.fromarray(image[top : top + 375, left : left + 500]).save(out, "JPEG", quality=90)
        found.append(out.getvalue())
    return found


async def load(port: int, requests: list[bytes], each: int) -> tuple[float, list[float]]:
    """(seconds, latencies) of `each` requests from every client, sent without pause; one client per request."""
    found: list[float] = []

    async def client(raw: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(each):
            asked = time.perf_counter()
            writer.write(raw)
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head.split(b"\r\n")[0]:
                raise RuntimeError(head.decode("latin-1"))
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
            found.append(time.perf_counter() - asked)
        writer.close()

    start = time.perf_counter()
    await asyncio.gather(*map(client, requests))
    return time.perf_counter() - start, found


@contextmanager
def started(name: str, weights: Path, threads: int) -> Iterator[tuple[int, int]]:
    from benchmarks.fuzz_serve import wait_for
    from vitkit.server.server import listen

    with listen("127.0.0.1", 0) as bound:
        port = int(bound.getsockname()[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serve", "--role", name, "--weights", str(weights), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"},
    )
    try:
        wait_for(port, 180)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(60)


def cpu_seconds(pid: int) -> float:
    """CPU time of a server so far; unlike elapsed time, it does not depend on what else the machine does."""
    import psutil

    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def over_http(model: str, clients: int, each: int, rounds: int, threads: int) -> None:
    from contextlib import ExitStack

    import vitkit
    from benchmarks.fuzz_serve import multipart, request

    raw = []
    for image in photos(clients):
        body, headers = multipart(image)
        raw.append(request("POST", "/v1/predict", body, headers | {"Connection": "keep-alive"}))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        weights = Path(folder) / "weights.safetensors"
        vitkit.save(vitkit.create(model), weights)
        ports = {name: stack.enter_context(started(name, weights, threads)) for name in SERVERS}
        rates: dict[str, list[float]] = {name: [] for name in SERVERS}
        work: dict[str, list[float]] = {name: [] for name in SERVERS}
        times: dict[str, list[float]] = {name: [] for name in SERVERS}
        for port, _ in ports.values():
            asyncio.run(load(port, raw, 1))  # warm
        for turn in range(rounds):
            names = list(SERVERS)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                port, pid = ports[name]
                before = cpu_seconds(pid)
                seconds, latencies = asyncio.run(load(port, raw, each))
                work[name].append((cpu_seconds(pid) - before) / len(latencies))
                rates[name].append(len(latencies) / seconds)
                times[name] += latencies
                print(f"  round {turn + 1}: {name}: {rates[name][-1]:.2f} images/s", flush=True)
    print(f"\n{model}, {clients} clients, {threads} threads, {rounds} rounds of {clients * each} images, CPU\n")
    print("| | images/s | p50 | p99 | CPU time per image | vitkit serve relative to it |\n|---|---|---|---|---|---|")
    for name, values in rates.items():
        ratios = sorted(ours / theirs for ours, theirs in zip(rates["vitkit serve"], values))
        ordered = sorted(times[name])
        p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        against = f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(
            f"| {name} | {statistics.median(values):.2f} | {p50:.2f} s | {p99:.2f} s | "
            f"{1000 * statistics.median(work[name]):.0f} ms | {'' if name == 'vitkit serve' else against} |"
        )


# --- the batcher alone -----------------------------------------------------------------------------------------------


def batcher_only(model: str, device: str, dtype: str, engine: str, clients: int, seconds: float, rounds: int) -> None:
    """Sixteen threads use the batcher, or take turns to run the model with one image each. Needs only torch."""
    from vitkit import create
    from vitkit.server.batching import Batcher
    from vitkit.speed.engines import ENGINES

    vit = create(model).eval().to(device, getattr(torch, dtype))
    forward = ENGINES[engine].build(vit)
    size = vit.input_spec.size
    image = torch.randint(0, 256, (3, *size), dtype=torch.uint8)

    def run(images: Any) -> list[Any]:
        with torch.inference_mode():
            x = torch.stack(list(images)).to(device, getattr(torch, dtype)).div_(255).sub_(0.5).div_(0.5)
            return list(forward(x).float().cpu())

    for count in (1, 2, clients):
        run([image] * count)
    turns, batcher = threading.Lock(), Batcher(run, max_batch=clients, max_delay=0.005, max_queue=8 * clients)

    def batched() -> None:
        with batcher.reserve() as submit:
            submit(image).result()

    def alone() -> None:
        with turns:
            run([image])

    def plain() -> None:  # the most that the model can do: full batches, no waiting
        run([image] * clients)

    def rate(ask: Callable[[], None], threads: int, each: int = 1) -> float:
        done, end = [0] * threads, time.perf_counter() + seconds

        def client(number: int) -> None:
            while time.perf_counter() < end:
                ask()
                done[number] += each

        workers = [threading.Thread(target=client, args=(number,)) for number in range(threads)]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sum(done) / (time.perf_counter() - start)

    ways: dict[str, Callable[[], float]] = {
        "batcher": lambda: rate(batched, clients),
        "one image per call": lambda: rate(alone, clients),
        "full batches, no clients": lambda: rate(plain, 1, clients),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            rates[name].append(way())
    batcher.close()
    place = torch.cuda.get_device_name() if device.startswith("cuda") else device
    print(f"{model}, {place}, {dtype}, engine {engine}, {clients} clients, {rounds} rounds of {seconds:g} s\n")
    print("| | images/s | the batcher relative to it |\n|---|---|---|")
    for name, values in rates.items():
        ratios = sorted(ours / theirs for ours, theirs in zip(rates["batcher"], values))
        against = f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {name} | {statistics.median(values):.1f} | {'' if name == 'batcher' else against} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit-b/16")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--each", type=int, default=8, help="over HTTP: requests per client and round")
    parser.add_argument("--seconds", type=float, default=10.0, help="with --batcher-only: seconds per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batcher-only", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--engine", default="torch")
    for hidden in ("--role", "--weights"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        SERVERS[given.role](given.weights, given.port)
    elif given.batcher_only:
        batcher_only(given.model, given.device, given.dtype, given.engine, given.clients, given.seconds, given.rounds)
    else:
        over_http(given.model, given.clients, given.each, given.rounds, given.threads)


if __name__ == "__main__":
    main()
