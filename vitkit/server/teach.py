"""Teach: name classes, show photos, and watch a classifier learn them. Lessons, and the routes that change them.

Every browser has a lesson of its own, known by a key that nobody can guess. Features are computed once per photo by the
service's batcher; everything else is ridge regression (see teach_fit.py), and everything is on disk (teach_store.py).
"""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from vitkit.data.decode import decode, header
from vitkit.data.files import ENDINGS, FORMATS
from vitkit.data.string_table import natural
from vitkit.errors import BadImage, Busy, InputError, OutputError, RequestError, TooLarge, VitkitError
from vitkit.features.cache import backbone_hash
from vitkit.features.choice import choose
from vitkit.features.head import Head, check_attachable
from vitkit.features.online import Taught
from vitkit.server.middleware import sentence_of
from vitkit.server.service import Service
from vitkit.server.teach_advice import advise, look
from vitkit.server.teach_fit import LEAST, Answers, Fitting, Threads
from vitkit.server.teach_state import Action, Photo, State
from vitkit.server.teach_store import KEY, Store, is_lesson, key_of, start_of
from vitkit.server.uploads import BODY, Upload, read_uploads
from vitkit.types import Array

log = logging.getLogger("vitkit")
LESSONS = 32  # at once
LOCAL = ("127.0.0.1", "::1", "testclient")  # addresses of browsers on this machine
THUMBNAIL = 320  # pixels of the longer side
T = TypeVar("T")


Save = Callable[[Path, Taught], object]  # (run folder, lesson) -> writes the run


class Lesson:
    """One lesson: its store, and the classifier that follows it.

    Args:
        store: the lesson on disk.
        threads: where fits run.
    """

    def __init__(self, store: Store, threads: Threads) -> None:
        self.store, self.threads = store, threads
        self.key = str(store.start["key"])
        self.fitting = Fitting(store.features)
        self.lock = asyncio.Lock()  # one change at a time
        self.revision, self.fitted = 1, 0  # of what there is to fit, and of what is fitted
        self.changes, self.saved = 0, 0 if store.saved else -1  # by the user, and at the time of the last save
        self.answers: Answers | None = None
        self.seconds: list[float] = []  # of each refit
        self._refitting: asyncio.Task[None] | None = None
        self._choosing: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        """What was taught."""
        return self.store.history.state

    async def do(self, action: Action) -> Action:
        """Take an action, and refit; it is on disk when this returns.

        Args:
            action: what to do. A class without an id is a new one.

        Returns:
            The action with the id of the class.
        """
        async with self.lock:
            if action["do"] == "class" and action["id"] is None:
                action = {**action, "id": self.store.history.new_id()}
            elif action["do"] == "class":
                self.state.name_of(action["id"])
            await self._do(action)
        return action

    async def _do(self, action: Action) -> None:
        await asyncio.to_thread(self.store.do, action)
        self.changes += 1
        self.revision += 1
        self._refit_soon()

    async def add(
        self, service: Service, uploads: Sequence[Upload], of: int, burst: int = 0, batch: int = 0
    ) -> list[dict[str, Any]]:
        """Add photos to a class; one that cannot be read has an error of its own, and the others are kept.

        Args:
            service: computes the features.
            uploads: the photos.
            of: id of the class.
            burst: number of the burst; 0 for photos on their own.
            batch: photos that are added one after the other with the same number are undone together; 0 for none.
        """
        self.state.name_of(of)
        keys = await asyncio.to_thread(lambda: [key_of(one.raw) for one in uploads])
        names = dict(zip(keys, uploads, strict=True))  # copies within a request count once
        known = {key: self.state.photos[key] for key in names if key in self.state.photos}
        new = [key for key in names if key not in known]
        features = await _embed(service, [names[key] for key in new])
        good: list[tuple[Photo, bytes]] = []
        rows: list[Array] = []
        errors: dict[str, VitkitError] = {}
        for key, found in zip(new, features, strict=True):
            if isinstance(found, VitkitError):
                errors[key] = found
            else:
                good.append(
                    (Photo(key, names[key].name, f"{key}{ending(names[key].raw)}", 0, of, burst), names[key].raw)
                )
                rows.append(found)
        async with self.lock:
            known |= {key: self.state.photos[key] for key in new if key in self.state.photos}  # added meanwhile
            kept = [i for i, (photo, _) in enumerate(good) if photo.key not in known]
            if kept:
                self.state.name_of(of)
                stored = await asyncio.to_thread(self.store.keep, [good[i] for i in kept], [rows[i] for i in kept])
                await self._do({"do": "photos", "photos": [asdict(photo) for photo in stored], "batch": batch})
            classes, photos = self.state.classes, self.state.photos
        answers: list[dict[str, Any]] = []
        for key, one in zip(keys, uploads, strict=True):
            if key in errors:
                answers.append(
                    {"name": one.name, "error": sentence_of(errors[key]), "kind": type(errors[key]).__name__}
                )
            elif key in known and known[key].of != of:
                where = classes.get(photos[key].of, "another class") if key in photos else "another class"
                words = f"{one.name} is already in {where}. Move it there if it belongs here."
                answers.append({"name": one.name, "error": words, "kind": "InputError", "key": key})
            else:
                answers.append({"name": one.name, "key": key, "new": key not in known})
        return answers

    def _refit_soon(self) -> None:
        if self._refitting is None or self._refitting.done():
            self._refitting = asyncio.create_task(self._refit())

    async def _refit(self) -> None:
        """Refit until nothing has changed; what changes meanwhile is fitted in one go."""
        while self.fitted < self.revision:
            wanted, state = self.revision, self.state
            try:
                self.answers = await self._run(self.threads.refit, partial(self.fitting.follow, state))
            except Exception:
                log.exception("the refit failed")
                self.answers, self.fitting.online = None, None
            if self.answers is not None:
                self.seconds = [*self.seconds[-999:], self.answers.seconds]
            self.fitted = wanted
            if self.fitting.is_stale(state) and (self._choosing is None or self._choosing.done()):
                self._choosing = asyncio.create_task(self._choose())

    async def _choose(self) -> None:
        """Choose the settings anew in the background, then refit with them."""
        try:
            state = self.state
            chosen = await self._run(self.threads.choose, lambda: self.fitting.choose(state))
            await self._run(self.threads.refit, lambda: self.fitting.adopt(chosen))
        except Exception:
            log.exception("choosing the settings failed")
            return
        self.revision += 1
        self._refit_soon()

    async def _run(self, pool: Any, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def current(self) -> Answers | None:
        """Return the answers for what is taught now."""
        self._refit_soon()
        while self.fitted < self.revision:
            assert self._refitting is not None
            await asyncio.shield(self._refitting)
        return self.answers

    async def show(self) -> dict[str, Any]:
        """Return everything that the page shows, as JSON values."""
        found = await self.current()
        state, counts = self.state, self.state.counts()
        seen = await asyncio.to_thread(look, state, found)
        before = self.store.history.before
        return {
            "lesson": self.key,
            "folder": str(self.store.folder),
            "classes": [{"id": of, "name": name, "photos": counts[of]} for of, name in state.classes.items()],
            "photos": [{"key": photo.key, "of": photo.of, "name": photo.name} for photo in state.photos.values()],
            "seen": seen,
            "advice": [asdict(one) for one in advise(state, seen)],
            "undo": before[-1].words if before else None,
            "saved": self.saved == self.changes,
            "choosing": self._choosing is not None and not self._choosing.done(),
        }

    async def predict(self, service: Service, uploads: Sequence[Upload]) -> list[dict[str, Any]]:
        """Return the probabilities of the classes for each image, the highest first."""
        found = await self.current()
        if found is None:
            raise InputError(f"Expected two classes with {LEAST} photos each. Add photos first.")
        names, answers = self.state.classes, list[dict[str, Any]]()
        for upload, x in zip(uploads, await service.embed(uploads), strict=True):
            if isinstance(x, VitkitError):
                answers.append({"name": upload.name, "error": sentence_of(x), "kind": type(x).__name__})
                continue
            (row,) = found.predict(x[None])
            top = [(names[found.classes[k]], k) for k in np.argsort(-row, kind="stable") if found.classes[k] in names]
            answers.append({"name": upload.name, "top": [{"class": name, "p": float(row[k])} for name, k in top]})
        return answers

    async def save(self, write: Save) -> None:
        """Choose the settings once more from all photos, and write the run."""
        async with self.lock:
            state, counts = self.state, self.state.counts()
            if few := [name for of, name in state.classes.items() if 0 < counts[of] < LEAST]:
                raise InputError(
                    f"Expected {LEAST} photos of every class; {few[0]!r} has 1. Add photos or remove the class."
                )
            if len(counts) < 2:
                raise InputError(f"Expected two classes with {LEAST} photos each. Add photos first.")
            while self._choosing is not None and not self._choosing.done():
                await asyncio.wait([self._choosing])
            start = time.perf_counter()
            chosen = await self._run(self.threads.choose, lambda: self.fitting.choose(state))
            await self._run(self.threads.refit, lambda: self.fitting.adopt(chosen))
            self.revision += 1
            found = await self.current()
            assert found is not None
            taught = self._taught(state, found, time.perf_counter() - start)
            await asyncio.to_thread(write, self.store.folder, taught)
            self.saved = self.changes

    def _taught(self, state: State, found: Answers, seconds: float) -> Taught:
        """Put classes and photos in the order in which a class folder is read."""
        names = [state.classes[of] for of in found.classes]
        order = sorted(range(len(names)), key=lambda k: natural(names[k]))
        place = np.argsort(order)
        images = [f"{names[k]}/{state.photos[key].file}" for key, k in zip(found.keys, found.y, strict=True)]
        rows = sorted(range(len(images)), key=lambda i: (place[found.y[i]], images[i]))
        return Taught(
            tuple(names[k] for k in order),
            Head(found.head.W[order], found.head.b[order]),
            tuple(images[i] for i in rows),
            place[found.y[rows]],
            found.logits[rows][:, order],
            {"l2": found.l2, "factor": found.factor},
            seconds,
        )

    async def thumbnail(self, service: Service, key: str, client: str) -> bytes:
        """Return a small JPEG of a photo, decoded in turn with what other clients ask for."""
        if key not in self.state.photos:
            raise InputError("Expected one of your photos; there is none with this key. Reload the page.")

        def make() -> bytes:
            image = decode(self.store.read(key), key)
            image.thumbnail((THUMBNAIL, THUMBNAIL))
            out = io.BytesIO()
            image.convert("RGB").save(out, "JPEG", quality=80)
            return out.getvalue()

        return await asyncio.wrap_future(service.pool.submit(client, 0, make))

    async def close(self) -> None:
        """Stop following, and release the folder; an empty lesson leaves none behind."""
        while running := [task for task in (self._choosing, self._refitting) if task is not None and not task.done()]:
            await asyncio.wait(running)  # and for the refit with what was chosen
        self.store.close()
        if not self.state.classes and not self.store.history.before and not self.store.saved:
            shutil.rmtree(self.store.hidden, ignore_errors=True)
            with suppress(OSError):  # something else may be there
                (self.store.folder / ".lock").unlink(missing_ok=True)
                self.store.folder.rmdir()


async def _embed(service: Service, uploads: list[Upload]) -> list[Array | VitkitError]:
    """Return the feature of each image, or why it has none, even if it is the only one."""
    if not uploads:
        return []
    try:
        return await service.embed(uploads)
    except (BadImage, TooLarge) as error:
        if len(uploads) > 1:
            raise
        return [error]


def ending(raw: bytes) -> str:
    """Return the file ending for an image's bytes; what its owner called it may be wrong."""
    endings = FORMATS.get(header(raw, "image").format or "", ENDINGS)
    return endings[0]


class Lessons:
    """All lessons of a server. The first browser teaches in `out`; any other gets `out-2`, `out-3`, ...

    Args:
        service: computes the features.
        out: run folder of the first lesson; if it holds a lesson, that one goes on.
        save: writes the run of a lesson.
        weights: name of the weights, for the record.

    Raises:
        InputError: the model cannot take a new head.
        OutputError: another process teaches in `out`, or it cannot be written to.
        UnreadableFile: `out` belongs to another model, or is damaged.
    """

    def __init__(self, service: Service, out: str | Path, save: Save, weights: str = "") -> None:
        service.need_model()
        choice = choose(None, service.model.config)
        check_attachable(choice)
        self.service, self.out, self.save, self.threads = service, Path(out).expanduser(), save, Threads()
        spec = {name: value for name, value in service.spec.to_dict().items() if name != "class_names"}
        self.start = {
            "weights": weights or service.source,
            "backbone": backbone_hash(service.model),
            "features": choice.name,
            "width": choice.width,
            "input_spec": spec,
        }
        self.open: dict[str, Lesson] = {}
        self.first = self._open(self.out)
        self.door = asyncio.Lock()  # one browser comes in at a time
        self.taken = False  # whether a browser has the first lesson

    def _open(self, folder: Path) -> Lesson:
        if folder.exists() and not folder.is_dir():
            raise OutputError(f"--out must be a folder; {folder} is a file. Choose another.")
        if not is_lesson(folder) and folder.exists() and any(p.name != ".lock" for p in folder.iterdir()):
            raise OutputError(
                f"--out must be a new folder, or one made by `vitkit teach`; {folder} holds something else. Choose "
                f"another."
            )
        lesson = Lesson(Store(folder, self.start | {"key": secrets.token_urlsafe(18)}), self.threads)
        self.open[lesson.key] = lesson
        return lesson

    async def enter(self, key: str, local: bool) -> Lesson:
        """Return the lesson of a browser: the one that it knows, the first one, or a new one.

        Args:
            key: what the browser was given last time; empty if it comes for the first time.
            local: whether it runs on this machine. Photos of an earlier lesson are not shown to others.

        Raises:
            Busy: there are too many lessons.
        """
        async with self.door:
            if key in self.open:
                self.taken |= key == self.first.key
                return self.open[key]
            folder = await asyncio.to_thread(self._find, key) if key else None
            if folder is None and not self.taken and (local or not self.first.state.photos):
                self.taken = True
                return self.first
            if len(self.open) >= LESSONS:
                raise Busy(f"The server is busy: {LESSONS} people are teaching, its limit. Try again later.")
            folder = folder or next(place for place in self._places() if not place.exists())
            return await asyncio.to_thread(self._open, folder)

    def _places(self) -> Iterator[Path]:
        return (self.out.with_name(f"{self.out.name}-{i}") for i in itertools.count(2))

    def _find(self, key: str) -> Path | None:
        for place in itertools.islice(self._places(), 1000):
            if not place.exists():
                return None
            if is_lesson(place) and secrets.compare_digest(str(start_of(place)["key"]).encode(), key.encode()):
                return place
        return None

    async def close(self) -> None:
        """Finish all fits, and release all folders."""
        for lesson in self.open.values():
            await lesson.close()
        self.threads.close()


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Enter(_Strict):
    """A browser comes in."""

    lesson: str = Field("", max_length=100, description="The key that it was given last time; empty for a new lesson.")


class NameClass(_Strict):
    """A new class, or a new name for one."""

    do: Literal["class"]
    id: int | None = Field(None, description="The class to rename; none for a new one.", ge=1, lt=2**31)
    name: str = Field(max_length=1000)


class DropClass(_Strict):
    """Remove a class with its photos."""

    do: Literal["drop"]
    id: int = Field(ge=1, lt=2**31)


class MovePhotos(_Strict):
    """Move photos to another class."""

    do: Literal["move"]
    keys: list[Annotated[str, Field(max_length=KEY)]] = Field(min_length=1, max_length=5_000)
    to: int = Field(ge=1, lt=2**31)


class RemovePhotos(_Strict):
    """Remove photos."""

    do: Literal["remove"]
    keys: list[Annotated[str, Field(max_length=KEY)]] = Field(min_length=1, max_length=5_000)


class Undo(_Strict):
    """Take back the last change."""

    do: Literal["undo"]


class Change(_Strict):
    """One change to a lesson."""

    change: Annotated[NameClass | DropClass | MovePhotos | RemovePhotos | Undo, Field(discriminator="do")]


def _client(request: Request) -> str:
    return request.client.host if request.client else ""


def lesson_of(
    request: Request, lesson: Annotated[str, Header(description="The lesson's key, from POST /v1/teach.")] = ""
) -> Lesson:
    """Return the lesson of a request.

    Raises:
        RequestError: it is not open.
    """
    lessons: Lessons = request.app.state.lessons
    if lesson not in lessons.open:
        raise RequestError("This lesson is not open. Enter it with POST /v1/teach, or reload the page.")
    return lessons.open[lesson]


Here = Annotated[Lesson, Depends(lesson_of)]


def teach_router(lessons: Lessons, errors: Mapping[int | str, dict[str, Any]]) -> APIRouter:
    """Return the routes of Teach.

    Args:
        lessons: the lessons.
        errors: the errors that every route may answer with, for OpenAPI.
    """
    service = lessons.service
    router = APIRouter(prefix="/v1/teach", tags=["teach"], responses=dict(errors))

    @router.post("")
    async def enter(request: Request, asked: Enter) -> dict[str, Any]:
        """Enter a lesson: the one of this key, or a new one. The answer is everything that the page shows."""
        lesson = await lessons.enter(asked.lesson, _client(request) in LOCAL)
        return await lesson.show()

    @router.get("")
    async def show(lesson: Here) -> dict[str, Any]:
        """What is taught, how well it is known, and what to photograph next."""
        return await lesson.show()

    @router.post("/change")
    async def change(lesson: Here, asked: Change) -> dict[str, Any]:
        """Name, rename or remove a class; move or remove photos; undo."""
        return {"id": (await lesson.do(asked.change.model_dump())).get("id")}

    @router.post("/photos", openapi_extra=BODY)
    async def photos(
        request: Request,
        lesson: Here,
        of: Annotated[int, Query(ge=1, lt=2**31, description="The class.")],
        burst: Annotated[int, Query(ge=0, lt=2**53, description="Photos of one burst share a number.")] = 0,
        batch: Annotated[int, Query(ge=0, lt=2**53, description="Photos that are undone together share one.")] = 0,
    ) -> dict[str, Any]:
        """Add photos to a class. Each has its own answer, in order: its key, or an error; the others are kept."""
        return {"results": await lesson.add(service, await read_uploads(request, service.settings), of, burst, batch)}

    @router.post("/predict", openapi_extra=BODY)
    async def predict(request: Request, lesson: Here) -> dict[str, Any]:
        """The classes of each image with their probabilities, as taught so far."""
        return {"results": await lesson.predict(service, await read_uploads(request, service.settings))}

    @router.get("/photo/{key}", response_class=Response, responses={200: {"content": {"image/jpeg": {}}}})
    async def photo(request: Request, lesson: Here, key: str) -> Response:
        """A small picture of a photo."""
        return Response(await lesson.thumbnail(service, key, _client(request)), media_type="image/jpeg")

    @router.post("/save")
    async def save(lesson: Here) -> dict[str, Any]:
        """Save the lesson as a run folder, which every command takes."""
        await lesson.save(lessons.save)
        return {"folder": str(lesson.store.folder)}

    return router
