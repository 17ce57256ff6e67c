"""Teach by its API: from nothing to a run that every command takes; undo, limits, two people, and a killed server."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

import vitkit
from benchmarks.fuzz_serve import wait_for
from tests.server.conftest import files, photo, tiny
from vitkit.cli import main
from vitkit.errors import InputError, OutputError, UnreadableFile
from vitkit.jobs.teach import save
from vitkit.server import teach, teach_state
from vitkit.server.app import create_app
from vitkit.server.service import Service
from vitkit.server.settings import Settings
from vitkit.server.teach import Lesson, Lessons
from vitkit.server.teach_fit import Fitting, groups_of
from vitkit.server.teach_store import Store, start_of

COLOURS = {"red": (200, 30, 30), "green": (30, 180, 40), "blue": (30, 60, 210)}


def colour(name: str, seed: int, format: str = "PNG") -> bytes:
    """A noisy photo of one colour."""
    rng = np.random.default_rng(seed)
    pixels = np.clip(np.array(COLOURS[name]) + rng.normal(scale=25, size=(40, 48, 3)), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format)
    return out.getvalue()


class Teacher:
    """One browser."""

    def __init__(self, client: TestClient, key: str = "") -> None:
        self.client = client
        self.key = client.post("/v1/teach", json={"lesson": key}).json()["lesson"]

    def get(self) -> dict[str, Any]:
        return dict(self.client.get("/v1/teach", headers={"Lesson": self.key}).json())

    def post(self, path: str, **how: Any) -> Any:
        return self.client.post(f"/v1/teach{path}", headers={"Lesson": self.key}, **how)

    def change(self, **change: Any) -> Any:
        return self.post("/change", json={"change": change})

    def name(self, name: str) -> int:
        return int(self.change(do="class", name=name).json()["id"])

    def add(self, of: int, *images: bytes, burst: int = 0, batch: int = 0) -> list[dict[str, Any]]:
        answer = self.post(f"/photos?of={of}&burst={burst}&batch={batch}", files=files(*images))
        assert answer.status_code == 200, answer.text
        return list(answer.json()["results"])

    def predict(self, *images: bytes) -> list[str]:
        return [one["top"][0]["class"] for one in self.post("/predict", files=files(*images)).json()["results"]]

    def colours(self, each: int = 6, seed: int = 0) -> dict[str, int]:
        """Teach the three colours."""
        found = {}
        for number, name in enumerate(COLOURS):
            found[name] = self.name(name)
            self.add(found[name], *(colour(name, seed + 100 * number + i) for i in range(each)))
        return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """Make servers that teach in a folder; each is closed at the end."""
    opened: list[Any] = []

    def make(out: str = "lesson", **settings: Any) -> TestClient:
        model = tiny()
        service = Service(model, Settings(**settings), source="tiny", sha256="0" * 64)
        lessons = Lessons(service, tmp_path / out, partial(save, model, "tiny"))
        client = TestClient(create_app(service, lessons))
        opened.append(client)
        client.lessons = lessons  # type: ignore[attr-defined]
        return client.__enter__()

    make.close = lambda: opened.pop().__exit__()  # type: ignore[attr-defined]
    yield make
    while opened:
        opened.pop().__exit__()


def on_disk(folder: Path) -> dict[str, int]:
    return {path.name: len(list(path.iterdir())) for path in sorted((folder / "photos").iterdir())}


def test_from_nothing_to_a_run(server, tmp_path: Path) -> None:
    client = server()
    assert client.get("/v1/model").json()["teaches"] is True
    me = Teacher(client)
    assert me.get()["advice"][0]["text"] == "Name two things that you want to tell apart."
    red, green = me.name("red"), me.name("green")
    me.add(red, *(colour("red", i) for i in range(2)))
    refused = me.post("/predict", files=files(colour("red", 50)))
    assert refused.status_code == 422
    assert "two classes with 2 photos each" in refused.json()["error"]
    me.add(green, *(colour("green", i) for i in range(2)))
    assert me.predict(colour("red", 50), colour("green", 51)) == ["red", "green"]  # after two photos of each

    blue = me.name("blue")
    for of, name in ((red, "red"), (green, "green"), (blue, "blue")):
        me.add(of, *(colour(name, 10 + i) for i in range(6)))
    shown = me.get()
    assert shown["seen"]["ready"] is True
    assert shown["seen"]["judged"] == 22
    assert np.trace(np.array(shown["seen"]["confusion"])) == shown["seen"]["right"]
    assert shown["saved"] is False
    live = me.post("/predict", files=files(colour("blue", 77))).json()["results"][0]["top"]

    assert me.post("/save").json()["folder"] == str(tmp_path / "lesson")
    assert me.get()["saved"] is True
    assert on_disk(tmp_path / "lesson") == {"blue": 6, "green": 8, "red": 8}
    after = me.post("/predict", files=files(colour("blue", 77))).json()["results"][0]["top"]
    assert [one["class"] for one in after] == [one["class"] for one in live]
    (tmp_path / "new.png").write_bytes(colour("blue", 77))
    (found,) = vitkit.predict(tmp_path / "lesson", tmp_path / "new.png", top=3)
    assert [(g.name, pytest.approx(g.probability, abs=1e-5)) for g in found.guesses] == [
        (one["class"], one["p"]) for one in after
    ]  # the same by both doors


def test_the_saved_run_goes_through_the_commands(
    server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    me = Teacher(server())
    me.colours()
    me.post("/save")
    server.close()
    run, held = tmp_path / "lesson", tmp_path / "test"
    for name in COLOURS:
        (held / name).mkdir(parents=True)
        for i in range(3):
            (held / name / f"{i}.png").write_bytes(colour(name, 900 + i))
    found = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    assert found["n"] == 18
    info = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert info["data"]["counts"] == {"blue": 6, "green": 6, "red": 6}

    def command(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["vitkit", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        said = capsys.readouterr()
        assert not done.value.code, said.err
        return str(said.out)

    assert json.loads(command("eval", run, held, "--json"))["top1"] == 1.0
    command("report", run)
    assert "classifier that was not fitted to it" in (run / "report.html").read_text(encoding="utf-8")
    command("train", run / "photos", "--from", run, "--epochs", "1", "--out", tmp_path / "tuned", "--workers", "0")
    assert (tmp_path / "tuned" / "run.json").is_file()
    if find_spec("openvino"):
        command("export", run, "--to", "openvino")
    assert "lesson" in command("runs", tmp_path)


def test_every_change_and_undo(server, tmp_path: Path) -> None:
    me = Teacher(server())
    of = me.colours()
    start = me.get()
    (moved,) = [one["key"] for one in start["photos"] if one["of"] == of["red"]][:1]

    me.change(do="class", id=of["red"], name="  crimson ")
    assert on_disk(tmp_path / "lesson") == {"blue": 6, "crimson": 6, "green": 6}
    me.change(do="move", keys=[moved], to=of["blue"])
    assert on_disk(tmp_path / "lesson") == {"blue": 7, "crimson": 5, "green": 6}
    me.change(do="remove", keys=[moved])
    assert on_disk(tmp_path / "lesson") == {"blue": 6, "crimson": 5, "green": 6}
    me.change(do="drop", id=of["green"])
    assert on_disk(tmp_path / "lesson") == {"blue": 6, "crimson": 5}
    assert me.predict(colour("blue", 60)) == ["blue"]

    for words, disk in (
        ("green removed", {"blue": 6, "crimson": 5, "green": 6}),
        ("1 photo removed", {"blue": 7, "crimson": 5, "green": 6}),
        ("1 photo moved to blue", {"blue": 6, "crimson": 6, "green": 6}),
        ("red renamed to crimson", {"blue": 6, "green": 6, "red": 6}),
    ):
        assert me.get()["undo"] == words
        me.change(do="undo")
        assert on_disk(tmp_path / "lesson") == disk
    after = me.get()
    assert after["classes"] == start["classes"]
    assert after["seen"]["confusion"] == start["seen"]["confusion"]
    for _ in range(6):
        assert me.change(do="undo").status_code == 200
    assert me.get()["classes"] == []
    assert me.change(do="undo").json()["error"] == "There is nothing to undo."


def test_photos_of_one_drop_are_undone_together(server, tmp_path: Path) -> None:
    me = Teacher(server())
    red = me.name("red")
    me.add(red, colour("red", 1), batch=5)
    for i in range(3):
        me.add(red, colour("red", 10 + 2 * i), colour("red", 11 + 2 * i), batch=6)
    assert me.get()["undo"] == "6 photos added to red"
    me.change(do="undo")
    assert me.get()["undo"] == "1 photo added to red"
    assert on_disk(tmp_path / "lesson") == {"red": 1}
    server.close()  # the journal says the same
    assert len(Teacher(server(), me.key).get()["photos"]) == 1


def test_what_is_shown_comes_from_photos_left_out(server) -> None:
    """A wrong label that the classifier was fitted to is still found, and confusion counts left-out answers."""
    me = Teacher(server())
    of = me.colours(each=8)
    (wrong,) = me.add(of["red"], colour("blue", 555))
    seen = me.get()["seen"]
    assert [one["key"] for one in seen["suspects"]] == [wrong["key"]]
    assert seen["suspects"][0]["guess"] == of["blue"]
    assert seen["confusion"][seen["classes"].index(of["red"])][seen["classes"].index(of["blue"])] == 1
    assert seen["accuracy"] == pytest.approx(24 / 25)
    me.change(do="move", keys=[wrong["key"]], to=of["blue"])
    assert me.get()["seen"]["suspects"] == []
    assert me.get()["seen"]["accuracy"] == 1.0


def test_bursts_are_left_out_together(server) -> None:
    me = Teacher(server())
    me.colours()
    alone = me.name("alone")
    me.add(alone, *(colour("red", 700 + i) for i in range(4)), burst=9)
    advice = [one["text"] for one in me.get()["advice"]]
    assert any("all its photos are from one burst" in text for text in advice), advice
    state = me.client.lessons.first.state  # type: ignore[attr-defined]
    keys = [key for key, one in state.photos.items() if one.of == alone]
    assert len(set(groups_of(state, keys))) == 4  # there is nothing else to know it by
    me.add(alone, colour("red", 800))
    state = me.client.lessons.first.state  # type: ignore[attr-defined]
    keys = [key for key, one in state.photos.items() if one.of == alone]
    assert sorted(np.unique(groups_of(state, keys), return_counts=True)[1]) == [1, 4]


def test_a_bad_file_has_its_own_error_and_nothing_is_lost(server, tmp_path: Path) -> None:
    me = Teacher(server(max_megapixels=0.01, max_request_megapixels=1, max_megabytes=1))
    red = me.name("red")
    bomb = photo(1, (200, 200))
    answers = me.add(red, colour("red", 1), b"<html>not a photo</html>", bomb, colour("red", 2), b"", colour("red", 1))
    assert [one.get("kind", "kept") for one in answers] == ["kept", "BadImage", "TooLarge", "kept", "BadImage", "kept"]
    assert answers[0]["key"] == answers[5]["key"]  # a copy counts once
    assert on_disk(tmp_path / "lesson") == {"red": 2}
    (again,) = me.add(red, colour("red", 2))
    assert again["new"] is False
    (elsewhere,) = me.add(me.name("blue"), colour("red", 2))
    assert elsewhere["error"] == "photo0.png is already in red. Move it there if it belongs here."
    too_many = me.post(f"/photos?of={red}", files=files(*(colour("red", i) for i in range(33))))
    assert too_many.status_code == 413
    assert me.post("/photos?of=77", files=files(colour("red", 5))).status_code == 422
    assert me.get()["classes"] == [{"id": 1, "name": "red", "photos": 2}, {"id": 2, "name": "blue", "photos": 0}]


@pytest.mark.parametrize("name", ["", "   ", "a/b", "..", ".hidden", "con", "x" * 61, "tab\x00", 'quo"te', "dot."])
def test_names_that_cannot_name_a_folder(server, tmp_path: Path, name: str) -> None:
    me = Teacher(server())
    answer = me.change(do="class", name=name)
    assert answer.status_code == 422
    assert "Expected a name" in answer.json()["error"]
    assert me.get()["classes"] == []
    assert not (tmp_path / "lesson" / "photos").exists()


def test_names_are_unique_and_may_be_in_any_script(server, tmp_path: Path) -> None:
    me = Teacher(server())
    first = me.name("Crème brûlée")
    me.name("寿司")
    assert me.change(do="class", name="crème BRÛLÉE").json()["error"].endswith("'Crème brûlée' already.")
    me.add(first, photo(1))
    assert on_disk(tmp_path / "lesson") == {"Crème brûlée": 1}


def test_two_people_keep_apart(server, tmp_path: Path) -> None:
    client = server()
    ann, bob = Teacher(client), Teacher(client)
    assert ann.key != bob.key
    red = ann.name("red")
    bob.add(bob.name("mine"), photo(3))
    (kept,) = ann.add(red, colour("red", 1))
    assert [one["name"] for one in ann.get()["classes"]] == ["red"]
    assert [one["name"] for one in bob.get()["classes"]] == ["mine"]
    assert on_disk(tmp_path / "lesson") == {"red": 1}
    assert on_disk(tmp_path / "lesson-2") == {"mine": 1}
    assert client.get(f"/v1/teach/photo/{kept['key']}", headers={"Lesson": ann.key}).status_code == 200
    assert client.get(f"/v1/teach/photo/{kept['key']}", headers={"Lesson": bob.key}).status_code == 422
    assert client.get("/v1/teach", headers={"Lesson": "guess"}).status_code == 400
    assert Teacher(client, bob.key).key == bob.key  # a reloaded page
    third = Teacher(client)
    assert third.key not in (ann.key, bob.key)
    server.close()
    assert not (tmp_path / "lesson-3").exists()  # nothing was taught there

    client = server()
    assert [one["name"] for one in Teacher(client, bob.key).get()["classes"]] == ["mine"]
    assert [one["name"] for one in Teacher(client).get()["classes"]] == ["red"]  # the first to come


def test_two_new_classes_at_once_are_two_classes(server, monkeypatch: pytest.MonkeyPatch) -> None:
    client = server()
    me, do, started, go = Teacher(client), Store.do, threading.Event(), threading.Event()

    def slow(store: Store, action: teach_state.Action) -> teach_state.State:
        started.set()
        assert go.wait(60)
        return do(store, action)

    monkeypatch.setattr(Store, "do", slow)
    with ThreadPoolExecutor(2) as pool:
        red = pool.submit(me.name, "red")
        assert started.wait(60)
        blue = pool.submit(me.name, "blue")
        while not client.lessons.first.lock._waiters:
            time.sleep(0.001)
        go.set()
        assert red.result() != blue.result()
    assert [one["name"] for one in me.get()["classes"]] == ["red", "blue"]


def test_a_photo_that_is_added_to_two_classes_at_once_is_in_one(server, monkeypatch: pytest.MonkeyPatch) -> None:
    me, embed, computed = Teacher(server()), Service.embed, list[int]()
    classes = [me.name("red"), me.name("blue")]

    async def together(service: Service, uploads: Any) -> Any:
        found = await embed(service, uploads)
        computed.append(1)
        while len(computed) < 2:
            await asyncio.sleep(0.001)
        return found

    monkeypatch.setattr(Service, "embed", together)
    with ThreadPoolExecutor(2) as pool:
        answers = [one for (one,) in pool.map(lambda of: me.add(of, colour("red", 1)), classes)]
    kept, refused = sorted(answers, key=lambda one: "error" in one)
    assert kept["new"] is True
    assert "photo0.png is already in" in refused["error"]
    assert len(me.get()["photos"]) == 1


def test_a_photo_is_shown_while_it_moves(server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was looked for where it had been, and the server's log had a traceback."""
    client = server()
    me, lesson = Teacher(client), client.lessons.first
    red = me.name("red")
    (kept,) = me.add(red, colour("red", 1))
    pool = client.lessons.service.pool

    def submit(who: str, size: int, work: Any) -> Any:
        lesson.store.do({"do": "class", "id": red, "name": "crimson"})
        return type(pool).submit(pool, who, size, work)

    monkeypatch.setattr(pool, "submit", submit)
    shown = client.get(f"/v1/teach/photo/{kept['key']}", headers={"Lesson": me.key})
    assert shown.status_code == 200
    assert shown.content.startswith(b"\xff\xd8")


def test_a_server_that_stops_finishes_its_fits(server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that were being chosen start a refit when they are; it was left to fail."""
    me, go, closing, finished = Teacher(server()), threading.Event(), threading.Event(), list[bool]()
    choose, close = Fitting.choose, Lesson.close

    def slow(fitting: Fitting, state: teach_state.State) -> Any:
        assert not threading.current_thread().name.startswith("vitkit-choose") or go.wait(60)
        return choose(fitting, state)

    async def closed(lesson: Lesson) -> None:
        closing.set()
        await close(lesson)
        finished.extend(task.done() for task in (lesson._choosing, lesson._refitting) if task is not None)

    monkeypatch.setattr(Fitting, "choose", slow)
    monkeypatch.setattr(Lesson, "close", closed)
    me.colours()
    assert me.get()["choosing"] is True
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(server.close)
        assert closing.wait(60)
        go.set()
        stopped.result()
    assert finished == [True, True]


def test_the_number_of_lessons_photos_and_classes_is_bounded(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teach, "LESSONS", 2)
    monkeypatch.setattr(teach_state, "PHOTOS", 3)
    monkeypatch.setattr(teach_state, "CLASSES", 2)
    client = server()
    me, _ = Teacher(client), Teacher(client)
    assert client.post("/v1/teach", json={}).status_code == 503
    red = me.name("red")
    me.name("blue")
    assert me.change(do="class", name="third").status_code == 413
    me.add(red, photo(1), photo(2))
    full = me.post(f"/photos?of={red}", files=files(photo(3), photo(4)))
    assert full.status_code == 413
    assert "at most 3 photos" in full.json()["error"]
    assert len(me.get()["photos"]) == 2


def test_loaded_again_without_computing_features(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = Teacher(server())
    of = me.colours()
    gone = me.get()["photos"][0]["key"]
    me.change(do="remove", keys=[gone])
    before = me.get()
    server.close()

    client = server()
    monkeypatch.setattr(Service, "embed", None)
    again = Teacher(client, me.key)
    after = again.get()
    assert after["classes"] == before["classes"]
    assert after["photos"] == before["photos"]
    assert after["seen"]["confusion"] == before["seen"]["confusion"]
    assert after["undo"] is None
    assert not list((tmp_path / "lesson").rglob(f"{gone}*"))  # removed for good
    monkeypatch.undo()
    assert again.add(of["red"], colour("red", 0))[0]["new"] is True  # and may come back


def test_a_folder_of_something_else_is_refused(server, tmp_path: Path) -> None:
    (tmp_path / "lesson").mkdir()
    (tmp_path / "lesson" / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(OutputError, match="holds something else"):
        server()
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    with pytest.raises(OutputError, match=r"--out must be a folder; .*photo\.jpg is a file"):
        server("photo.jpg")
    server("other")
    with pytest.raises(OutputError, match="in use by process"):
        server("other")


def test_features_of_another_model_are_refused(server, tmp_path: Path) -> None:
    Teacher(server()).name("red")
    server.close()
    other = tiny()
    other.blocks[0].norm1.weight.data += 0.1
    service = Service(other, source="other")
    with pytest.raises(UnreadableFile, match="was taught with tiny; its backbone is not that of other"):
        Lessons(service, tmp_path / "lesson", lambda folder, taught: None)
    service.close()


def test_an_exported_file_cannot_be_taught(tmp_path: Path) -> None:
    service = Service(tiny())
    service.model = object()
    with pytest.raises(InputError, match="exported file"):
        Lessons(service, tmp_path / "lesson", lambda folder, taught: None)
    service.model = tiny()
    service.close()


def test_a_full_disk_loses_nothing(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = Teacher(server())
    red = me.name("red")
    me.add(red, colour("red", 1))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        answer = me.post(f"/photos?of={red}", files=files(colour("red", 2)))
        assert answer.status_code == 422
        assert "the disk is full" in answer.json()["error"]
    assert [one["key"] for one in me.add(red, colour("red", 3))]
    assert len(me.get()["photos"]) == 2
    server.close()
    assert len(Teacher(server(), me.key).get()["photos"]) == 2


def test_a_line_that_was_cut_short_is_forgotten_and_a_damaged_one_named(server, tmp_path: Path) -> None:
    me = Teacher(server())
    me.colours(each=2)
    server.close()
    journal = tmp_path / "lesson" / ".teach" / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"do": "drop", "i')
    assert len(Teacher(server(), me.key).get()["photos"]) == 6
    server.close()
    lines = journal.read_bytes().split(b"\n")
    journal.write_bytes(b"\n".join([lines[0], b"{broken", *lines[1:]]))
    with pytest.raises(UnreadableFile, match=r"Line 2 of .* is damaged"):
        server()
    assert on_disk(tmp_path / "lesson") == {"blue": 2, "green": 2, "red": 2}


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ({0: {"format": 1}}, "first line of .* is damaged .key is missing or wrong"),
        ({0: {"backbone": None}}, "first line of .* is damaged .backbone is missing or wrong"),
        ({0: {"width": "32"}}, "first line of .* is damaged .width is missing or wrong"),
        ({0: {"generation": "../../x"}}, "first line of .* is damaged .generation"),
        ({0: b"[" * 100_000}, "first line of .* is damaged"),
        ({1: b"[" * 100_000}, "Line 2 of .* is damaged"),
        ({1: b"[1]"}, "Line 2 of .* is damaged"),
        ({2: {"file": "../../../gone.png"}}, "Line 3 of .* is damaged .*whose file is named by its key"),
        ({2: {"key": ["x"]}}, "Line 3 of .* is damaged"),
        ({2: {"row": -1}}, "Line 3 of .* is damaged .*whole numbers"),
        ({2: {"row": "0"}}, "Line 3 of .* is damaged .*whole numbers"),
        ("features", "features-1.bin, the features of this lesson's photos, is missing"),
    ],
)
def test_a_damaged_lesson_is_refused_and_its_photos_stay(server, tmp_path: Path, damage: Any, sentence: str) -> None:
    me = Teacher(server())
    me.add(me.name("red"), colour("red", 1))
    server.close()
    hidden = tmp_path / "lesson" / ".teach"
    if damage == "features":
        (hidden / "features-1.bin").unlink()
        os.mkfifo(hidden / "features-1.bin")  # which must not be waited for
    else:
        lines = (hidden / "journal.jsonl").read_bytes().split(b"\n")
        for number, change in damage.items():
            line = json.loads(lines[number])
            if isinstance(change, bytes):
                lines[number] = change
                continue
            new = change if "format" in change else (line["photos"][0] if number == 2 else line) | change
            lines[number] = json.dumps(line | {"photos": [new]} if number == 2 else new).encode()
        (hidden / "journal.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(UnreadableFile, match=sentence):
        server()
    assert on_disk(tmp_path / "lesson") == {"red": 1}


@pytest.mark.parametrize("what", ["journal.jsonl", "features-1.bin"])
def test_photos_that_a_damaged_lesson_has_forgotten_are_not_deleted(server, tmp_path: Path, what: str) -> None:
    me = Teacher(server())
    me.colours(each=2)
    server.close()
    path = tmp_path / "lesson" / ".teach" / what
    raw = path.read_bytes()
    path.write_bytes(raw[: raw.index(b"\n", len(raw) // 2) + 1] if what == "journal.jsonl" else raw[: len(raw) // 2])
    kept = Teacher(server(), me.key).get()["photos"]
    assert 0 < len(kept) < 6
    server.close()
    assert on_disk(tmp_path / "lesson") == {"blue": 2, "green": 2, "red": 2}


def test_a_journal_that_is_not_a_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / ".teach").mkdir()
    os.mkfifo(tmp_path / ".teach" / "journal.jsonl")
    with pytest.raises(UnreadableFile, match="has no lesson"):
        start_of(tmp_path)


def test_a_token_is_required_as_elsewhere(server) -> None:
    client = server(token="open-sesame")
    assert client.post("/v1/teach", json={}).status_code == 401
    assert client.post("/v1/teach", json={}, headers={"Authorization": "Bearer open-sesame"}).status_code == 200


def test_another_site_cannot_teach(server) -> None:
    client = server()
    assert client.post("/v1/teach", json={}, headers={"Origin": "http://evil.example"}).status_code == 403


def test_a_killed_server_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    vitkit.save(tiny(), tmp_path / "tiny.safetensors")

    def begin(*arguments: object) -> tuple[Any, str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "vitkit", "teach", *map(str, arguments), "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        line = next(line for line in process.stdout if "teach at" in line)
        url = line.split("teach at ")[1].split("/#teach")[0]
        wait_for(int(url.rpartition(":")[2]))
        return process, url

    def ask(url: str, path: str, key: str, **body: Any) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Lesson": key}
        request = urllib.request.Request(f"{url}/v1/teach{path}", json.dumps(body).encode(), headers)
        return dict(json.load(urllib.request.urlopen(request)))

    process, url = begin("--from", tmp_path / "tiny.safetensors", "--out", tmp_path / "lesson")
    kept: list[str] = []
    try:
        key = ask(url, "", "")["lesson"]
        of = ask(url, "/change", key, change={"do": "class", "name": "noise"})["id"]

        def upload(seed: int) -> None:
            images = [{"name": f"{seed}.png", "data": base64.b64encode(photo(seed)).decode()}]
            with_errors = ask(url, f"/photos?of={of}", key, images=images)
            kept.append(with_errors["results"][0]["key"])
            if len(kept) >= 15:  # whoever sees it first, so that the others do not finish
                os.kill(process.pid, signal.SIGKILL)

        with ThreadPoolExecutor(4) as pool:
            for one in [pool.submit(upload, seed) for seed in range(60)]:
                one.exception()
    finally:
        process.kill()
        process.communicate()
    process, url = begin(tmp_path / "lesson")
    try:
        state = ask(url, "", key)
        found = {one["key"] for one in state["photos"]}
        assert set(kept) <= found
        assert 15 <= len(kept) <= len(found) < 60
        files_there = {path.stem for path in (tmp_path / "lesson" / "photos" / "noise").iterdir()}
        assert files_there == found
    finally:
        process.terminate()
        process.communicate()
