"""Send ten thousand malformed requests: `python -m benchmarks.fuzz_serve [COUNT] [--seed N]`.

Truncated and damaged images, wrong types, huge headers, slow clients, broken HTTP, decompression bombs and nonsense in
every field, mixed with valid requests. No answer may be a 5xx other than 503 with Retry-After, memory must stay flat,
and the server must still answer at the end.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import io
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class Answer:
    """An answer; its status is 0 if the connection was closed without one."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


# `vitkit serve` where the packages of the command line are not installed.
PLAIN = """
import sys
from vitkit.server.app import create_app
from vitkit.server.server import listen, run
from vitkit.server.service import load_service
from vitkit.server.settings import LOCAL, Settings
with listen("127.0.0.1", 0) as bound:
    service = load_service(sys.argv[1], Settings(hosts=LOCAL))
    service.warm()
    print(f"serving at http://127.0.0.1:{bound.getsockname()[1]}", flush=True)
    run(create_app(service), bound, log_requests=False)
"""


@contextmanager
def serving(weights: str | Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a server in its own process on a free port; yield the process and the port."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = ["-m", "vitkit", "serve", str(weights), "--port", "0", *options]
    if importlib.util.find_spec("typer") is None and not options:
        command = ["-c", PLAIN, str(weights)]
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if found is None:
            raise RuntimeError(f"the server did not start: {line}{process.communicate(timeout=20)[1]}")
        wait_for(int(found[1]))
        yield process, int(found[1])
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()


def wait_for(port: int, seconds: float = 120) -> None:
    """Wait until the server is ready."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if send(port, request("GET", "/readyz")).status == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise RuntimeError("the server did not become ready")


def request(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    """The bytes of a request that closes its connection."""
    lines = {"Host": "localhost", "Connection": "close", "Content-Length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1", "replace") + body


def multipart(*images: bytes, name: str = "files", filename: str = "a.jpg") -> tuple[bytes, dict[str, str]]:
    """A multipart body and its headers."""
    parts = b"".join(
        b'--edge\r\nContent-Disposition: form-data; name="%s"; filename="%s"\r\n\r\n%s\r\n'
        % (name.encode(), filename.encode("utf-8", "replace"), image)
        for image in images
    )
    return parts + b"--edge--\r\n", {"Content-Type": "multipart/form-data; boundary=edge"}


def send(port: int, *chunks: bytes, pause: float = 0.0, seconds: float = 60.0) -> Answer:
    """Send chunks with pauses between them, then read until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as line:
        try:
            for chunk in chunks:
                line.sendall(chunk)
                if pause:
                    time.sleep(pause)
        except OSError:  # the server closed the connection; it may have sent an answer
            pass
        received = b""
        try:
            while data := line.recv(65536):
                received += data
        except OSError:
            pass
    return parse(received)


def parse(received: bytes) -> Answer:
    """Parse what a server sent."""
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    if not lines[0].startswith("HTTP/1.1 "):
        return Answer(0)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    return Answer(int(lines[0].split()[1]), headers, body)


def picture(rng: random.Random, format: str | None = None) -> bytes:
    """A small image of noise in a common format."""
    width, height = rng.randint(1, 90), rng.randint(1, 90)
    pixels = np.frombuffer(rng.randbytes(width * height * 3), np.uint8).reshape(height, width, 3)
    image, out = Image.fromarray(pixels), io.BytesIO()
    kind = format or rng.choice(["JPEG", "PNG", "WEBP", "BMP", "GIF"])
    image.convert(rng.choice(["RGB", "L", "RGB"])).save(out, kind)
    return out.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that declares many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


def word(rng: random.Random) -> str:
    """A value that makes no sense."""
    return rng.choice(
        [
            "",
            "-1",
            "0",
            "1e9",
            "nan",
            "99999999999999999999",
            "../../etc/passwd",
            "%00",
            "%ff%fe",
            "a b",
            "'; DROP TABLE",
            "\u00e9",
            "true",
            "[]",
            "{}",
            "<script>",
            "x" * 5000,
        ]
    )


def post(port: int, path: str, body: bytes, headers: dict[str, str]) -> Answer:
    return send(port, request("POST", path, body, headers))


def good(port: int, rng: random.Random) -> Answer:
    path = rng.choice(["predict", "predict?top=1", "embed", "explain", "explain?kind=attention&format=npy"])
    answer = post(port, f"/v1/{path}", *multipart(picture(rng)))
    if answer.status not in (200, 503):
        raise AssertionError(f"a good request was answered with {answer}")
    return answer


def truncated_image(port: int, rng: random.Random) -> Answer:
    raw = picture(rng)
    return post(port, "/v1/predict", *multipart(raw[: rng.randrange(len(raw))]))


def damaged_image(port: int, rng: random.Random) -> Answer:
    raw = bytearray(picture(rng))
    for _ in range(rng.randint(1, 12)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return post(port, rng.choice(["/v1/predict", "/v1/embed", "/v1/explain"]), *multipart(bytes(raw)))


def noise(port: int, rng: random.Random) -> Answer:
    return post(port, "/v1/predict", *multipart(rng.randbytes(rng.randint(0, 3000))))


def bombs(port: int, rng: random.Random) -> Answer:
    side = rng.choice([(60_000, 60_000), (8000, 8000), (1, 2_000_000), (3_000_000, 1), (2**31 - 1, 2**31 - 1), (0, 5)])
    return post(port, "/v1/predict", *multipart(bomb(*side)))


def other_formats(port: int, rng: random.Random) -> Answer:
    out = io.BytesIO()
    Image.new("RGB", (9, 9)).save(out, rng.choice(["ICO", "TGA", "EPS", "PDF", "PCX", "SGI", "DDS", "TIFF", "PPM"]))
    return post(port, "/v1/predict", *multipart(out.getvalue(), filename=word(rng).replace('"', "")))


def wrong_type(port: int, rng: random.Random) -> Answer:
    body, _ = multipart(picture(rng))
    kind = rng.choice(
        [
            "text/plain",
            "application/json",
            "multipart/form-data",
            "multipart/form-data; boundary=other",
            "application/x-www-form-urlencoded",
            "image/jpeg",
            "",
            "multipart/form-data; boundary=",
            f"multipart/form-data; boundary={'x' * 300}",
            "application/json; charset=utf-7",
        ]
    )
    return post(port, "/v1/predict", body, {"Content-Type": kind})


def wrong_parts(port: int, rng: random.Random) -> Answer:
    body, headers = multipart(*[picture(rng)] * rng.choice([1, 2, 40]), name=rng.choice(["file", "files", "", "image"]))
    cut = rng.choice([len(body), rng.randrange(len(body))])
    return post(port, "/v1/explain", body[:cut], headers)


def wrong_json(port: int, rng: random.Random) -> Answer:
    data = base64.b64encode(picture(rng)).decode()
    body = rng.choice(
        [
            {"images": [{"data": data[: rng.randrange(len(data))]}]},
            {"images": [{"data": word(rng), "name": word(rng)}]},
            {"images": {}},
            {"images": [[]]},
            {"images": [None] * 50},
            [],
            7,
            None,
            {"images": [{"data": 5}]},
            {"image": data},
            {"images": [{"data": data, "path": "/etc/passwd"}]},
            {"images": [{"data": data}] * 40},
            {"images": [{"data": data, "name": "\ud800"}]},
        ]
    )
    raw = json.dumps(body).encode()
    if rng.random() < 0.3:
        raw = raw[: rng.randrange(len(raw) + 1)] + rng.randbytes(rng.randint(0, 4))
    if rng.random() < 0.05:
        raw = b"[" * 20_000
    return post(port, "/v1/predict", raw, {"Content-Type": "application/json"})


def wrong_choices(port: int, rng: random.Random) -> Answer:
    name = rng.choice(["top", "kind", "layer", "head", "query", "target", "format", "name", "unknown"])
    value = word(rng).replace(" ", "+").replace("\u00e9", "%C3%A9")[:2000]
    path = f"/v1/{rng.choice(['predict', 'explain', 'picture', 'embed'])}?{name}={value}"
    return post(port, path, *multipart(picture(rng)))


def wrong_places(port: int, rng: random.Random) -> Answer:
    path = rng.choice(
        [
            "/",
            "/v1",
            "/v1/predict/",
            "/page/../../app.py",
            "/samples/%2e%2e/x",
            "//",
            "/%00",
            "/docs?x=1",
            "/openapi.json",
            "/metrics",
            "/v1/model",
            "/nothing",
            "*",
            "http://elsewhere/v1/model",
        ]
    )
    return send(port, request(rng.choice(["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"]), path))


def huge_headers(port: int, rng: random.Random) -> Answer:
    size = rng.choice([20_000, 70_000, 300_000])
    return send(port, request("GET", "/v1/model", headers={"X-Long": "y" * size}))


def many_headers(port: int, rng: random.Random) -> Answer:
    return send(port, request("GET", "/v1/model", headers={f"X-{i}": "z" for i in range(rng.choice([50, 3000]))}))


def too_large(port: int, rng: random.Random) -> Answer:
    claimed = rng.choice([10**9, 10**12, 10**30])
    return send(
        port,
        request("POST", "/v1/predict", b"", {"Content-Length": str(claimed), "Content-Type": "application/json"}),
        b"x" * 70_000,
    )


def gone_early(port: int, rng: random.Random) -> Answer:
    whole = request("POST", "/v1/predict", *multipart(picture(rng)))
    with socket.create_connection(("127.0.0.1", port), timeout=30) as line:
        line.sendall(whole[: rng.randrange(1, len(whole))])
        if rng.random() < 0.5:  # reset the connection instead of closing it
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return Answer(0)


def half_closed(port: int, rng: random.Random) -> Answer:
    whole = request("POST", "/v1/predict", *multipart(picture(rng)))
    with socket.create_connection(("127.0.0.1", port), timeout=30) as line:
        line.sendall(whole[: -rng.randint(1, 40)])
        line.shutdown(socket.SHUT_WR)
        received = b""
        try:
            while data := line.recv(65536):
                received += data
        except OSError:
            pass
    return parse(received)


def slow_sender(port: int, rng: random.Random) -> Answer:
    whole = request("POST", "/v1/predict", *multipart(picture(rng)))
    cuts = sorted(rng.randrange(len(whole)) for _ in range(6))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)])]
    return send(port, *chunks, pause=rng.choice([0.01, 0.1]))


def broken_http(port: int, rng: random.Random) -> Answer:
    return send(
        port,
        rng.choice(
            [
                b"\x00" * 100,
                b"GET\r\n\r\n",
                b"GET / HTTP/9.9\r\n\r\n",
                b"\x16\x03\x01\x02\x00" + rng.randbytes(200),
                b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
                b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
                b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
                b"ZZ\r\nhello\r\n0\r\n\r\n",
                b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
                b"GET / HTTP/1.1\r\n Host: a\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\n",
                b"GET /healthz HTTP/1.0\r\n\r\n",
                b"GET / HTTP/1.1\r\n\r\n",
                rng.randbytes(300) + b"\r\n\r\n",
            ]
        ),
    )


KINDS: dict[str, Callable[[int, random.Random], Answer]] = {
    kind.__name__: kind
    for kind in (
        good,
        truncated_image,
        damaged_image,
        noise,
        bombs,
        other_formats,
        wrong_type,
        wrong_parts,
        wrong_json,
        wrong_choices,
        wrong_places,
        huge_headers,
        many_headers,
        too_large,
        gone_early,
        half_closed,
        slow_sender,
        broken_http,
    )
}


def fuzz(port: int, count: int, seed: int, clients: int = 8) -> Counter[tuple[str, int]]:
    """Send `count` requests and return {(kind, status): count}. A forbidden answer raises AssertionError."""

    def one(number: int) -> tuple[str, int]:
        rng = random.Random(seed * 1_000_003 + number)
        name = rng.choice(list(KINDS))
        answer = KINDS[name](port, rng)
        if answer.status >= 500 and not (answer.status == 503 and "retry-after" in answer.headers):
            raise AssertionError(f"request {number} of seed {seed} ({name}) was answered with {answer}")
        if b"Traceback" in answer.body:
            raise AssertionError(f"request {number} of seed {seed} ({name}) shows the server's internals")
        return name, answer.status

    with ThreadPoolExecutor(clients) as pool:
        return Counter(pool.map(one, range(count)))


def memory(pid: int) -> float:
    """Resident memory of a process in MB."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    return int(found[1]) / 1024 if found else 0.0


def save_tiny(folder: Path) -> Path:
    """Save a tiny model with five classes."""
    from vitkit import InputSpec, ViT, ViTConfig, save

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_classes=5,
    )
    path = folder / "tiny.safetensors"
    save(ViT(config, InputSpec(size=(32, 32), resize="crop", crop=0.9, class_names=tuple("abcde"))), path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    total: Counter[tuple[str, int]] = Counter()
    with tempfile.TemporaryDirectory() as folder, serving(save_tiny(Path(folder))) as (process, port):
        start, done, first = time.perf_counter(), 0, 0.0
        while done < given.count:
            part = min(1000, given.count - done)
            total += fuzz(port, part, given.seed + done)
            done += part
            now = memory(process.pid)
            first = first or now
            print(f"{done} requests, {time.perf_counter() - start:.0f} s, {now:.0f} MB", flush=True)
        assert good(port, random.Random(0)).status == 200
        print(
            f"still answering; seed {given.seed}; memory {first:.0f} MB after the first thousand, {now:.0f} MB "
            f"at the end"
        )
        statuses: Counter[int] = Counter()
        for (_, status), often in total.items():
            statuses[status] += often
        print("answers:", ", ".join(f"{status or 'closed'}: {often}" for status, often in sorted(statuses.items())))
        process.terminate()
        _, said = process.communicate(timeout=60)
        print(said.strip().splitlines()[-1])
        if "Traceback" in said:
            sys.exit("the server's log contains a traceback:\n" + said[-3000:])


if __name__ == "__main__":
    main()
