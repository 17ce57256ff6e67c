"""Fetching, against a server of our own that cuts connections."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import threading
import zipfile

import pytest

from tests.data.images import encoded, picture
from vitkit.data import food
from vitkit.data.fetch import fetch, unzip
from vitkit.errors import DataError

MANIFEST = {"train": {"pizza": 2, "steak": 1}, "test": {"pizza": 1, "steak": 1}}


def archive(manifest=MANIFEST) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zip_:
        for split, counts in manifest.items():
            for name, count in counts.items():
                for n in range(count):
                    zip_.writestr(f"{split}/{name}/{n}.jpg", encoded(picture(n)))
    return buffer.getvalue()


class Server(http.server.ThreadingHTTPServer):
    """Serves `data`; cuts the next `cuts` answers off in the middle; remembers the ranges that were asked for."""

    def __init__(self, data: bytes, cuts: int = 0, ranges: bool = True, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.data, self.cuts, self.ranges, self.status, self.asked = data, cuts, ranges, status, []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/x.zip"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        wanted = self.headers.get("Range")
        server.asked.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and server.ranges else 0
        if start >= len(server.data) or server.status != 200:
            self.send_error(server.status if server.status != 200 else 416)
            return
        body = server.data[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if server.cuts:
            server.cuts -= 1
            self.wfile.write(body[: len(body) // 2])
            return
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def serve(monkeypatch, tmp_path):
    servers = []

    def start(*args, **options):
        servers.append(Server(*args, **options))
        return servers[-1]

    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_cut_connection_is_taken_up_where_it_ended(serve, tmp_path):
    data = archive()
    server = serve(data, cuts=2)
    sha256 = fetch(server.url, tmp_path / "x.zip", advice="-")
    assert (tmp_path / "x.zip").read_bytes() == data
    assert sha256 == hashlib.sha256(data).hexdigest()
    half = len(data) // 2
    assert server.asked == [None, f"bytes={half}-", f"bytes={half + (len(data) - half) // 2}-"]
    assert not (tmp_path / "x.zip.part").exists()
    fetch(server.url, tmp_path / "x.zip", advice="-")
    assert len(server.asked) == 3  # what is there is not asked for


def test_the_next_run_resumes_what_the_last_one_left(serve, tmp_path):
    data = archive()
    server = serve(data, cuts=1)
    with pytest.raises(DataError, match=r"lost after \d+ of \d+ bytes\)\. Do this by hand\."):
        fetch(server.url, tmp_path / "x.zip", advice="Do this by hand.", attempts=1)
    assert (tmp_path / "x.zip.part").stat().st_size == len(data) // 2
    fetch(server.url, tmp_path / "x.zip", advice="-", attempts=1)
    assert (tmp_path / "x.zip").read_bytes() == data


def test_a_server_without_ranges_and_a_part_of_something_else(serve, tmp_path):
    data = archive()
    (tmp_path / "x.zip.part").write_bytes(b"zz")
    fetch(serve(data, ranges=False).url, tmp_path / "x.zip", advice="-")
    assert (tmp_path / "x.zip").read_bytes() == data
    (tmp_path / "y.zip.part").write_bytes(data + data)
    fetch(serve(data).url, tmp_path / "y.zip", advice="-")
    assert (tmp_path / "y.zip").read_bytes() == data


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (403, 1), (408, 3), (429, 3), (500, 3), (503, 3)])
def test_only_what_may_pass_is_tried_again(serve, tmp_path, status, tries):
    server = serve(b"x", status=status)
    with pytest.raises(DataError, match=rf"could not be downloaded \(HTTP Error {status}.*\)\. Do this\."):
        fetch(server.url, tmp_path / "x.zip", advice="Do this.")
    assert len(server.asked) == tries


def test_food_is_fetched_checked_and_recorded(serve, tmp_path):
    data = archive()
    server = serve(data, cuts=1)
    root = food.fetched(server.url, MANIFEST)
    assert root == tmp_path / "cache/pizza_steak_sushi"
    assert sorted(p.name for p in root.iterdir()) == ["test", "train"]
    assert json.loads((tmp_path / "cache/pizza_steak_sushi.source.json").read_text()) == {
        "url": server.url,
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
    }
    asked = len(server.asked)
    assert food.fetched(server.url, MANIFEST) == root
    assert len(server.asked) == asked


def test_food_with_other_counts_is_refused_and_kept_aside(serve, tmp_path):
    server = serve(archive({"train": {"pizza": 2, "steak": 2}, "test": {"pizza": 1, "steak": 1}}))
    with pytest.raises(DataError, match=r"expected train to contain .*'steak': 1\}; got .*'steak': 2\}"):
        food.fetched(server.url, MANIFEST)
    assert not (tmp_path / "cache/pizza_steak_sushi").exists()
    assert (tmp_path / "cache/pizza_steak_sushi.refused").is_dir()


def test_without_network_it_says_what_to_do(serve, tmp_path):
    server = serve(b"x")
    server.shutdown()
    server.server_close()
    with pytest.raises(
        DataError, match=r"could not be downloaded.*save it as .*pizza_steak_sushi\.zip, or .*food:FOLDER"
    ):
        food.fetched(server.url, MANIFEST)


def test_a_file_saved_by_hand_is_taken(serve, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/pizza_steak_sushi.zip").write_bytes(archive())
    assert food.fetched("http://127.0.0.1:9/never-asked", MANIFEST).is_dir()


@pytest.mark.parametrize("name", ["../evil.txt", "/abs/evil.txt", "a/../../evil.txt"])
def test_a_zip_cannot_write_outside_its_folder(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as zip_:
        zip_.writestr("fine.txt", "x")
        zip_.writestr(name, "evil")
    with pytest.raises(DataError, match="outside its folder; nothing was unpacked"):
        unzip(tmp_path / "x.zip", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.zip"]


def test_a_damaged_zip_is_named(tmp_path):
    (tmp_path / "x.zip").write_bytes(archive()[:500])
    with pytest.raises(DataError, match=r"x\.zip could not be unpacked"):
        unzip(tmp_path / "x.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists()
