"""Attack a server while honest clients use it: `python -m benchmarks.fuzz http [--seconds 600] [--seed 0] [--state F]`.

A tenth of the time is quiet: only the honest clients, which send small photos. Then attackers of several kinds join, in
a process of their own that uses at most half a core. Every client has an address of its own, where the system has more
than one local address (Linux). Printed are the honest clients' latencies, how many of their requests were lost
(anything but 200), the attackers' requests by kind and answer, and the server's memory. A second server, which does
nothing and is not attacked, is asked at the same time: its latencies are the machine's own. Memory counts as its least
value within a minute, because requests in progress hold some. With --state, the results are added to those of earlier
runs.

The exit code is 1 if an honest request was lost, an attack was answered with a 5xx other than 503, the server's log has
a traceback, or, in a run of more than 20 minutes, memory grew by more than 5% after the tenth.
"""

from __future__ import annotations

import io
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks import fuzz_serve
from benchmarks.fuzz_serve import memory, multipart, parse, request, save_tiny, serving

HONEST = 3  # clients
PAUSE = 0.15  # seconds between the requests of one
SHARE = 0.5  # of a core, for all attackers together
GROWTH = 0.05  # of memory after minute STEADY
STEADY = 10
NOTHING = """
import asyncio
async def answer(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write(b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\nContent-Length: 0\\r\\n\\r\\n")
    await writer.drain()
    writer.close()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


def ask(port: int, *chunks: bytes, source: str = "127.0.0.1", seconds: float = 90.0) -> int:
    """Send a request from an address and return the status of the answer; 0 if there was none."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=seconds, source_address=(source, 0)) as line:
            for chunk in chunks:
                line.sendall(chunk)
            received = b""
            while data := line.recv(65536):
                received += data
    except OSError:
        return 0
    return parse(received).status


def photo(seed: int, side: int = 160) -> bytes:
    """A small JPEG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((side, side)).save(out, "JPEG")
    return out.getvalue()


def large(megapixels: float) -> bytes:
    """A PNG of one colour: few bytes, many pixels."""
    side, out = int((megapixels * 1e6) ** 0.5), io.BytesIO()
    Image.new("RGB", (side, side), (9, 9, 9)).save(out, "PNG", compress_level=9)
    return out.getvalue()


# Attackers: each is called again and again with (port, rng, address), and returns a status.

Attacker = Callable[[int, random.Random, str], int]
_large: dict[float, bytes] = {}


def malformed(port: int, rng: random.Random, source: str) -> int:
    """Send one of the malformed requests of fuzz_serve."""
    name = rng.choice([name for name in fuzz_serve.KINDS if name not in ("good", "slow_sender")])
    return fuzz_serve.KINDS[name](port, rng).status


def many_images(port: int, rng: random.Random, source: str) -> int:
    """Send a million tiny images in one JSON request."""
    body = b'{"images":[' + b",".join([b'{"data":"AA=="}'] * rng.choice((1000, 100_000, 1_000_000))) + b"]}"
    return ask(port, request("POST", "/v1/predict", body, {"Content-Type": "application/json"}), source=source)


def many_pixels(port: int, rng: random.Random, source: str) -> int:
    """Send as many pixels as a request may hold, or more."""
    size = rng.choice((10.0, 45.0))
    if size not in _large:
        _large[size] = large(size)
    body, headers = multipart(*[_large[size]] * rng.choice((1, 4, 8, 32)))
    return ask(port, request("POST", rng.choice(["/v1/predict", "/v1/embed"]), body, headers), source=source)


def slow_bodies(port: int, rng: random.Random, source: str) -> int:
    """Open 140 requests whose bodies never end, and hold them for a while."""
    body, headers = multipart(photo(0))
    head = request("POST", "/v1/predict", body, headers)
    lines = []
    try:
        for _ in range(140):
            line = socket.create_connection(("127.0.0.1", port), timeout=10, source_address=(source, 0))
            line.sendall(head[: -rng.randrange(1, len(body))])
            lines.append(line)
        for _ in range(10):
            time.sleep(0.5)
            for line in lines:
                line.sendall(b"x")
    except OSError:
        pass
    finally:
        for line in lines:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            line.close()
    return 0


def two_lengths(port: int, rng: random.Random, source: str) -> int:
    """Hide a second request in a body whose length is stated twice."""
    hidden = b"GET /v1/model HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = request("POST", "/v1/predict", b"", {"Content-Length": str(len(hidden) + 5), "Transfer-Encoding": "chunked"})
    return ask(port, head, b"0\r\n\r\n", hidden, source=source)


def other_site(port: int, rng: random.Random, source: str) -> int:
    """Send what a page of another site would."""
    body, headers = multipart(photo(1))
    return ask(port, request("POST", "/v1/predict", body, {**headers, "Origin": "http://evil.example"}), source=source)


def long_heads(port: int, rng: random.Random, source: str) -> int:
    """Send heads over the limits, and heads that never end."""
    if rng.random() < 0.5:
        return ask(port, request("GET", "/v1/model", headers={"X": "y" * 60_000}), source=source)
    return ask(port, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * rng.randrange(2000), source=source, seconds=15)


def explanations(port: int, rng: random.Random, source: str) -> int:
    """Ask for the most expensive answers."""
    body, headers = multipart(photo(rng.randrange(9)))
    path = f"/v1/explain?kind={rng.choice(['rollout', 'gradient', 'attention'])}"
    return ask(port, request("POST", path, body, headers), source=source)


ATTACKERS: dict[str, Attacker] = {
    kind.__name__: kind
    for kind in (
        malformed,
        many_images,
        many_pixels,
        slow_bodies,
        two_lengths,
        other_site,
        long_heads,
        explanations,
    )
}


def address(number: int) -> str:
    """A local address of its own for each attacker, where the system has several (Linux)."""
    return f"127.0.0.{2 + number}" if sys.platform == "linux" else "127.0.0.1"


def attackers(port: int, seconds: float, seed: int) -> Counter[str]:
    """Run all attackers at once, slowed down so that together they use at most SHARE of a core."""
    end, began, counts = time.monotonic() + seconds, time.monotonic(), Counter[str]()

    def run(number: int, name: str) -> None:
        rng = random.Random(f"{seed} {name}")
        while time.monotonic() < end:
            try:
                status = ATTACKERS[name](port, rng, address(number))
            except OSError:  # the server let it wait too long
                status = 0
            counts[f"{name} {status or 'closed'}"] += 1
            while time.process_time() > SHARE * (time.monotonic() - began) + 1 and time.monotonic() < end:
                time.sleep(0.05)

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in enumerate(ATTACKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()) + 100)
    return counts


def honest(port: int, control: int, seconds: float) -> tuple[list[float], list[int], list[float]]:
    """Ask both servers for a while.

    Args:
        port: of the server, which is sent small photos.
        control: port of the server that does nothing.
        seconds: how long.

    Returns:
        The seconds of each answer, the statuses that are not 200, and the seconds of the other server's answers.
    """
    end, times, lost, idle = time.monotonic() + seconds, list[float](), list[int](), list[float]()

    def run(number: int) -> None:
        wanted = request("POST", "/v1/predict", *multipart(photo(number)))
        while time.monotonic() < end:
            start = time.perf_counter()
            status = ask(port, wanted, source=address(100 + number)) if number else ask(control, request("GET", "/"))
            (times if number else idle).append(time.perf_counter() - start)
            if status != 200:
                lost.append(status)
            time.sleep(PAUSE)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1 + HONEST)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times, lost, idle


@contextmanager
def doing_nothing() -> Iterator[int]:
    """Run a server that answers everything with 200 in a process of its own; yield its port."""
    with subprocess.Popen([sys.executable, "-c", NOTHING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


class Memory:
    """Watches the memory of a process: MB, once per second.

    Args:
        pid: the process.
    """

    def __init__(self, pid: int) -> None:
        self.seen: list[float] = []
        self.end = threading.Event()
        threading.Thread(target=self._watch, args=(pid,), daemon=True).start()

    def _watch(self, pid: int) -> None:
        while sys.platform == "linux" and not self.end.wait(1):
            with suppress(OSError):
                self.seen.append(memory(pid))

    def floors(self) -> list[float]:
        """Return the least value of each minute; a last one of a few seconds says little and is left out."""
        minutes = [self.seen[i : i + 60] for i in range(0, len(self.seen), 60)]
        return [min(one) for one in minutes if len(one) >= 30 or len(minutes) == 1]


def percentiles(times: list[float]) -> str:
    """The median and the 99th percentile, in milliseconds."""
    return f"p50 {np.percentile(times, 50) * 1000:.0f} ms, p99 {np.percentile(times, 99) * 1000:.0f} ms"


def attack(seconds: float, seed: int, state: Path | None = None) -> int:
    """Run quiet and attacked phases and print the result; return the exit code.

    Args:
        seconds: how long, in all.
        seed: chooses the attackers' requests.
        state: file with the results of earlier runs, to which these are added (default: none).
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(save_tiny(Path(folder))) as (process, port),
        doing_nothing() as control,
    ):
        quiet, lost, idle = honest(port, control, max(seconds / 10, 2))
        print(f"quiet: {len(quiet):,} requests, {len(lost)} lost, {percentiles(quiet)}", flush=True)
        print(f"  an idle server at the same time: {percentiles(idle)}", flush=True)
        rest, watched = seconds * 0.9, Memory(process.pid)
        hostile = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fuzz_http", str(port), str(rest), str(seed)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        times, others = list[float](), list[float]()
        for part in range(3):
            found = honest(port, control, rest / 3)
            times += found[0]
            lost += found[1]
            others += found[2]
            now = watched.seen[-1] if watched.seen else 0.0
            print(f"attacked, part {part + 1} of 3: {percentiles(found[0])}; {now:.0f} MB", flush=True)
        print(f"  an idle server at the same time: {percentiles(others)}", flush=True)
        sent, used = json.loads(hostile.communicate(timeout=200)[0].strip().splitlines()[-1])
        counts = Counter[str](sent)
        watched.end.set()
        alive = ask(port, request("POST", "/v1/predict", *multipart(photo(0)))) == 200
        process.terminate()
        said = process.communicate(timeout=120)[1]
    bad = {what: often for what, often in counts.items() if what.split()[1].startswith("5") and "503" not in what}
    floors = watched.floors()
    growth = floors[-1] / floors[STEADY] - 1 if len(floors) > 2 * STEADY else 0.0
    print(
        f"http: {sum(counts.values()):,} hostile requests in {rest:.0f} s, which took the attackers {used / rest:.2f} "
        f"cores, seed {seed}; honest under attack: "
        f"{len(times):,} requests, {len(lost)} lost {sorted(Counter(lost).items()) or ''}, {percentiles(times)} "
        f"({np.percentile(times, 99) / np.percentile(quiet, 99):.1f} times the quiet p99); "
        f"memory by minute: {', '.join(f'{one:.0f}' for one in floors)} MB; "
        + ("still answering" if alive else "NO LONGER ANSWERING")
    )
    for what, often in sorted(counts.items()):
        print(f"  {what:28} {often:,}")
    if "Traceback" in said:
        print("the server's log contains a traceback:\n" + said[-3000:])
    if state is not None:
        runs = json.loads(state.read_text(encoding="utf-8")) if state.is_file() else []
        runs.append({"seconds": rest, "honest": len(times), "lost": len(lost), "hostile": sum(counts.values())})
        state.write_text(json.dumps(runs), encoding="utf-8")
        total = {key: sum(run[key] for run in runs) for key in runs[0]}
        print(
            f"in all {len(runs)} runs: {total['hostile']:,} hostile requests in {total['seconds']:.0f} s; honest "
            f"{total['honest']:,}, lost {total['lost']}"
        )
    return int(bool(lost or bad or not alive or "Traceback" in said or growth > GROWTH))


if __name__ == "__main__":
    print(json.dumps([attackers(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])), time.process_time()]))
