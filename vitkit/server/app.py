"""The routes: each reads a request, asks the service, and writes an answer. FastAPI derives OpenAPI from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import vitkit
from vitkit.errors import InputError, RequestError, VitkitError
from vitkit.evaluation.predict import Guess
from vitkit.evaluation.predict import Prediction as Predicted
from vitkit.server import explaining, pages
from vitkit.server.exploring import ExplorablePage
from vitkit.server.middleware import Middleware, error_response, sentence_of
from vitkit.server.service import Service, name_of
from vitkit.server.teach import Lessons, teach_router
from vitkit.server.uploads import BODY, Upload, read_uploads

T = TypeVar("T")
R = TypeVar("R")


class Top(BaseModel):
    """One class and its probability."""

    model_config = ConfigDict(serialize_by_alias=True)
    name: str = Field(serialization_alias="class")
    index: int
    p: float
    threshold: float | None = Field(
        None, description="Probability from which a label counts as present. null if the model names one class."
    )


class Prediction(BaseModel):
    """The prediction for one image, the most likely class first."""

    name: str
    top: list[Top]
    none_of_these: bool = Field(False, description="Whether the image is far from every class.")
    distance: float | None = Field(
        None,
        description="Distance to the nearest class, as a share of what the model accepts: above 1 is none of these. "
        "null if the model accepts everything.",
    )
    labels: list[Top] | None = Field(
        None,
        description="All labels of the image, for a model that gives an image any number of labels: those that reach "
        "their thresholds, whatever `top` is. null if the model names one class.",
    )


class Failure(BaseModel):
    """Why one image of several has no result."""

    name: str
    error: str
    kind: str


class Predictions(BaseModel):
    """One result per image, in order."""

    results: list[Prediction | Failure]


class Embedding(BaseModel):
    """The features of one image: y of Eq. 4."""

    name: str
    embedding: list[float]


class Embeddings(BaseModel):
    """One result per image, in order."""

    width: int
    results: list[Embedding | Failure]


class SimilarPhoto(BaseModel):
    """A photo that is similar to the one that was sent."""

    model_config = ConfigDict(serialize_by_alias=True)
    photo: str = Field(description="Its address; add ?thumbnail=true for a small one.")
    label: str = Field(serialization_alias="class")
    similarity: float = Field(description="Cosine similarity of the features, at most 1.")


class Similar(BaseModel):
    """The most similar photos, the most similar first."""

    name: str
    similar: list[SimilarPhoto]


class SimilarPhotos(BaseModel):
    """One result per image, in order."""

    results: list[Similar | Failure]


class Explanation(BaseModel):
    """The values of an explanation; null where a head was pruned."""

    name: str
    kind: str
    grid: list[int] = Field(description="Rows and columns of patches.")
    prefix_tokens: int = Field(description="Number of tokens before the patches in every row.")
    shape: list[int]
    values: list[Any]


class Error(BaseModel):
    """Why a request failed, in one sentence."""

    error: str
    kind: str


class Health(BaseModel):
    """Whether the server is alive, or ready."""

    status: str


ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": Error, "description": words}
    for code, words in {
        400: "The request cannot be read.",
        401: "The token is missing or wrong.",
        403: "A browser sent it for a page of another site.",
        408: "The request did not arrive in time.",
        413: "The request exceeds one of the limits.",
        415: "The body is neither multipart, JSON nor an image.",
        422: "An image or a parameter does not fit the model.",
        431: "The head of the request exceeds the limits.",
        503: "The server is busy; Retry-After says when to try again.",
    }.items()
}
# Answers in the documentation.
TOP = [
    {"class": "sushi", "index": 2, "p": 0.98, "threshold": 0.41},
    {"class": "pizza", "index": 0, "p": 0.015, "threshold": 0.37},
]
BAD = {"name": "notes.txt", "error": "notes.txt: not an image in a format that vitkit reads. [...]", "kind": "BadImage"}
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "predict": [{"name": "sushi.jpg", "top": TOP, "none_of_these": False, "distance": 0.4, "labels": TOP[:1]}, BAD],
    "embed": [{"name": "sushi.jpg", "embedding": [0.12, -1.3, 0.77]}, BAD],
    "similar": [
        {"name": "sushi.jpg", "similar": [{"photo": "/v1/photos/3", "class": "sushi", "similarity": 0.83}]},
        BAD,
    ],
}


def _answers(name: str) -> dict[int | str, dict[str, Any]]:
    """The answers of a route, with an example of a good one."""
    example = {**({"width": 3} if name == "embed" else {}), "results": EXAMPLES[name]}
    good = {"description": "One result per image, in order.", "content": {"application/json": {"example": example}}}
    return {200: good, **ERRORS}


ARRAY: dict[str, Any] = {"content": {"application/json": {}, "image/png": {}, "application/x-npy": {}}}
KindName = StrEnum("KindName", {name: name for name in explaining.KINDS})  # type: ignore[misc]
PictureName = StrEnum("PictureName", {name: name for name in explaining.PICTURES})  # type: ignore[misc]
ROLLOUT = KindName("rollout")
Number = Annotated[int | None, Query(ge=-(2**31), lt=2**31)]
FromZero = Annotated[
    int | None,
    Query(ge=-(2**31), lt=2**31, description="Counted from 0, where the page counts from 1; -1 is the last."),
]


def create_app(service: Service, lessons: Lessons | None = None) -> Middleware:
    """Create the app of a service, behind its middleware: API, page, health and metrics. Any ASGI server can run it.

    Args:
        service: the model and its limits.
        lessons: what `vitkit teach` adds; None for a server that writes nothing to disk.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(service.warm)  # before the port opens, so that the first request is answered
        yield
        if lessons:
            await lessons.close()
        await asyncio.to_thread(service.close)

    name = name_of(service.source) if service.source else "a Vision Transformer"
    app = FastAPI(
        title="vitkit",
        version=vitkit.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        description=f"Predictions, features and explanations from {name}.",
    )
    _answer_errors(app, service)
    _api(app, service, teaches=lessons is not None)
    if lessons:
        app.state.lessons = lessons
        app.include_router(teach_router(lessons, ERRORS))
    _operations(app, service)
    _pages(app)
    if service.explorable is not None:
        _explore(app, service.explorable)
    return Middleware(app, service, frozenset(getattr(route, "path", "") for route in app.routes))


def _answer_errors(app: FastAPI, service: Service) -> None:
    """Answer every error with one JSON object that holds one sentence and shows no internals of the server."""

    def answer(status: int, error: str, kind: str, headers: Any = None) -> JSONResponse:
        return JSONResponse({"error": error, "kind": kind}, status, headers)

    @app.exception_handler(VitkitError)
    async def known(request: Request, error: VitkitError) -> JSONResponse:
        return error_response(error, service)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        words = {
            404: "Nothing was found at this address; /docs describes the API.",
            405: "This address does not support this method; /docs describes the API.",
        }
        return answer(error.status_code, words.get(error.status_code, str(error.detail)), "RequestError", error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return answer(422, f"{first['loc'][-1]}: {first['msg']}.", "InputError")

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> JSONResponse:
        return answer(400, "The client disconnected before it had sent the whole request.", "RequestError")

    @app.exception_handler(Exception)
    async def ours(request: Request, error: Exception) -> JSONResponse:
        return answer(500, "Internal server error; see the server log.", "ServerError")


def _api(app: FastAPI, service: Service, teaches: bool) -> None:
    settings = service.settings

    async def one_upload(request: Request) -> Upload:
        uploads = await read_uploads(request, settings)
        if len(uploads) != 1:
            raise RequestError(f"Expected one image; got {len(uploads)}. Send each image in its own request.")
        return uploads[0]

    @app.post(
        "/v1/predict", response_model=Predictions, responses=_answers("predict"), openapi_extra=BODY, tags=["model"]
    )
    async def predict(request: Request, top: Annotated[int, Query(ge=1, le=10_000)] = 5) -> Predictions:
        """The most likely classes of each image, with their probabilities.

        Of several images, one that cannot be read has `error` and `kind` in place of its result.
        """
        uploads = await read_uploads(request, settings)

        limits = service.spec.thresholds

        def tops(guesses: Sequence[Guess]) -> list[Top]:
            return [
                Top(name=g.name, index=g.index, p=g.probability, threshold=limits[g.index] if limits else None)
                for g in guesses
            ]

        def result(upload: Upload, one: Predicted) -> Prediction:
            return Prediction(
                name=upload.name,
                top=tops(one.guesses),
                none_of_these=one.none_of_these,
                distance=one.distance,
                labels=None if one.labels is None else tops(one.labels),
            )

        return Predictions(results=per_image(uploads, await service.predict(uploads, top), result))

    @app.post("/v1/embed", response_model=Embeddings, responses=_answers("embed"), openapi_extra=BODY, tags=["model"])
    async def embed(request: Request) -> Embeddings:
        """The features of each image: y of Eq. 4, the class token (or the mean of the patches) after the final norm."""
        uploads = await read_uploads(request, settings)
        found = await service.embed(uploads)
        return Embeddings(
            width=service.model.config.width,
            results=per_image(uploads, found, lambda one, y: Embedding(name=one.name, embedding=y.tolist())),
        )

    @app.post(
        "/v1/similar", response_model=SimilarPhotos, responses=_answers("similar"), openapi_extra=BODY, tags=["model"]
    )
    async def similar(request: Request, count: Annotated[int, Query(ge=1, le=100)] = 6) -> SimilarPhotos:
        """The training photos that are most similar to each image, if the server may show them."""
        uploads = await read_uploads(request, settings)

        def result(upload: Upload, photos: list[tuple[int, float]]) -> Similar:
            assert service.photos is not None
            rows = [(f"/v1/photos/{i}", service.photos.label(i), round(min(v, 1.0), 4)) for i, v in photos]
            return Similar(
                name=upload.name, similar=[SimilarPhoto(photo=p, label=label, similarity=v) for p, label, v in rows]
            )

        return SimilarPhotos(results=per_image(uploads, await service.similar(uploads, count), result))

    @app.post(
        "/v1/explain",
        response_model=Explanation,
        openapi_extra=BODY,
        tags=["model"],
        responses={**ERRORS, 200: {**ARRAY, "description": "An overlay (PNG), or the values (JSON, NPY)."}},
    )
    async def explain(
        request: Request,
        kind: KindName = ROLLOUT,
        layer: FromZero = None,
        head: FromZero = None,
        query: Number = None,
        target: Number = None,
        format: Annotated[Literal["png", "json", "npy"], Query()] = "png",
    ) -> Any:
        """Where the model looks: an overlay on the image, or the values behind it."""
        upload = await one_upload(request)
        ask = explaining.Question(kind=kind.value, layer=layer, head=head, query=query, target=target)
        if format == "png":
            return Response(await service.explain(upload, partial(explaining.overlay, ask=ask)), media_type="image/png")
        values = await service.explain(upload, partial(explaining.arrays, ask=ask))
        if format == "npy":
            return Response(explaining.npy(values), media_type="application/x-npy")
        return JSONResponse(
            await asyncio.to_thread(
                lambda: {
                    "name": upload.name,
                    "kind": kind.value,
                    "grid": list(explaining.grid(service.model)),
                    "prefix_tokens": service.model.config.num_prefix_tokens,
                    "shape": list(values.shape),
                    "values": explaining.plain(values),
                }
            )
        )

    @app.post(
        "/v1/picture",
        openapi_extra=BODY,
        tags=["model"],
        response_class=Response,
        responses={**ERRORS, 200: {"content": {"image/png": {}}, "description": "A figure (PNG)."}},
    )
    async def picture(request: Request, name: PictureName, theme: Literal["light", "dark"] | None = None) -> Response:
        """One of the figures that `vitkit explain` and `vitkit figures` draw.

        With a theme it is transparent and without a title, and its text suits a light or a dark page.
        """
        upload = await one_upload(request)
        drawn = await service.explain(upload, partial(explaining.picture, name=name.value, theme=theme))
        return Response(drawn, media_type="image/png")

    @app.get(
        "/v1/photos/{number}",
        tags=["model"],
        response_class=Response,
        responses={
            200: {"content": {"image/jpeg": {}, "image/png": {}}, "description": "The photo."},
            **{code: ERRORS[code] for code in (401, 422)},
        },
    )
    async def photo(number: Annotated[int, Path(ge=0, lt=2**31)], thumbnail: bool = False) -> Response:
        """A photo that the model was made with, if the server may show them."""
        photos = service.photos
        if photos is None or number >= len(photos):
            raise InputError(f"This server has no photo with the number {number}; /v1/model lists some that it has.")
        if thumbnail:
            raw, kind = await asyncio.to_thread(photos.thumbnail, number), "image/jpeg"
        else:
            raw, kind = await asyncio.to_thread(photos.file, number)
        return Response(raw, media_type=kind, headers={"Cache-Control": "private, max-age=3600"})

    @app.get("/v1/model", tags=["model"], responses={401: ERRORS[401]})
    async def model() -> dict[str, Any]:
        """The model card: variant, classes, input, sha256 of the weights, and the limits of the server."""
        return {
            **service.card(),
            "explanations": {name: kind.words for name, kind in explaining.KINDS.items() if service.explains},
            "pictures": {
                name: {"title": plot.title, "caption": plot.caption, "needs": plot.needs}
                for name, plot in explaining.PICTURES.items()
                if service.embeds and plot.fits(service.model)
            },
            "teaches": teaches,
            "explores": service.explorable is not None,
            "samples": _samples(service),
            "similar": service.photos is not None and service.photos.searchable,
        }


def per_image(
    uploads: Sequence[Upload], found: Sequence[R | VitkitError], result: Callable[[Upload, R], T]
) -> list[T | Failure]:
    """The result of each image, or why it has none."""
    return [
        Failure(name=upload.name, error=sentence_of(one), kind=type(one).__name__)
        if isinstance(one, VitkitError)
        else result(upload, one)
        for upload, one in zip(uploads, found, strict=True)
    ]


def _samples(service: Service) -> dict[str, str]:
    """{path: description} of photos to try: those of the run, and two others that a model may not know."""
    photos = service.photos
    own = {f"/v1/photos/{i}": photos.label(i) for i in photos.samples} if photos is not None else {}
    others = {path: pages.SAMPLES[path][1] for path in pages.samples()} if not own or service.judged else {}
    return own | others


def _operations(app: FastAPI, service: Service) -> None:
    """Health checks and metrics."""

    @app.get("/healthz", response_model=Health, tags=["server"])
    async def healthz() -> Health:
        """The process is alive."""
        return Health(status="alive")

    @app.get("/readyz", response_model=Health, tags=["server"], responses={503: {"model": Health}})
    async def readyz() -> Any:
        """The model is loaded and warmed up, and the server is not stopping."""
        if service.ready and not service.stopping:
            return Health(status="ready")
        return JSONResponse({"status": "stopping" if service.stopping else "starting"}, 503, {"Retry-After": "5"})

    @app.get(
        "/metrics",
        tags=["server"],
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}, 401: ERRORS[401]},
    )
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _explore(app: FastAPI, explorable: ExplorablePage) -> None:
    """The explorable page, which runs the model in the browser."""

    async def explore(request: Request) -> Response:
        name = request.path_params.get("name") or "index.html"
        raw = explorable.file(name)
        if raw is None and name.startswith(pages.MODEL):
            made = explorable.made()
            if made is None:
                return JSONResponse(
                    {"status": f"Preparing the model: {explorable.status} …"}, 202, {"Retry-After": "1"}
                )
            raw = made.get(name)
        if raw is None:
            raise HTTPException(404)
        return Response(raw, media_type=pages.kind_of(name), headers={"Cache-Control": "no-store"})

    for path in (pages.EXPLORE, f"{pages.EXPLORE}{{name:path}}"):
        app.add_route(path, explore, methods=["GET"], include_in_schema=False)


def _pages(app: FastAPI) -> None:
    def add(path: str, read: Callable[[], bytes], kind: str, cache: str) -> None:
        async def answer(request: Request) -> Response:
            return Response(await asyncio.to_thread(read), media_type=kind, headers={"Cache-Control": cache})

        app.add_route(path, answer, methods=["GET"], include_in_schema=False)

    for path, (_, kind) in pages.PAGE.items():
        add(path, partial(pages.page, path), kind, "no-cache")
    for path, file in pages.samples().items():
        add(path, file.read_bytes, "image/jpeg", "max-age=3600")
