"""The routes: each reads a request, asks the service, and writes an answer. FastAPI derives OpenAPI from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import vitkit
from vitkit.errors import RequestError, VitkitError
from vitkit.server import explaining, pages
from vitkit.server.middleware import Middleware, error_response
from vitkit.server.service import Service
from vitkit.server.uploads import BODY, Upload, read_uploads


class Top(BaseModel):
    """One class and its probability."""

    model_config = ConfigDict(serialize_by_alias=True)
    name: str = Field(serialization_alias="class")
    index: int
    p: float


class Prediction(BaseModel):
    """The prediction for one image, the most likely class first."""

    name: str
    top: list[Top]
    none_of_these: bool = Field(False, description="Whether the image is far from every class (vitkit probe --accept).")


class Predictions(BaseModel):
    """One result per image, in order."""

    results: list[Prediction]


class Embedding(BaseModel):
    """The features of one image: y of Eq. 4."""

    name: str
    embedding: list[float]


class Embeddings(BaseModel):
    """One result per image, in order."""

    width: int
    results: list[Embedding]


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
        415: "The body is neither multipart nor JSON.",
        422: "An image or a parameter does not fit the model.",
        431: "The head of the request exceeds the limits.",
        503: "The server is busy; Retry-After says when to try again.",
    }.items()
}
ARRAY: dict[str, Any] = {"content": {"application/json": {}, "image/png": {}, "application/x-npy": {}}}
KindName = StrEnum("KindName", {name: name for name in explaining.KINDS})  # type: ignore[misc]
PictureName = StrEnum("PictureName", {name: name for name in explaining.PICTURES})  # type: ignore[misc]
ROLLOUT = KindName("rollout")
Number = Annotated[int | None, Query(ge=-(2**31), lt=2**31)]
FromZero = Annotated[
    int | None,
    Query(ge=-(2**31), lt=2**31, description="Counted from 0, where the page counts from 1; -1 is the last."),
]


def create_app(service: Service) -> Middleware:
    """Create the app of a service, behind its middleware: API, page, health and metrics. Any ASGI server can run it.

    Args:
        service: the model and its limits.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(service.warm)  # before the port opens, so that the first request is answered
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="vitkit",
        version=vitkit.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        description=f"Predictions, features and explanations from {service.source or 'a Vision Transformer'}.",
    )
    _answer_errors(app, service)
    _api(app, service)
    _operations(app, service)
    _pages(app)
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


def _api(app: FastAPI, service: Service) -> None:
    settings = service.settings

    async def one_upload(request: Request) -> Upload:
        uploads = await read_uploads(request, settings)
        if len(uploads) != 1:
            raise RequestError(f"Expected one image; got {len(uploads)}. Send each image in its own request.")
        return uploads[0]

    @app.post("/v1/predict", response_model=Predictions, responses=ERRORS, openapi_extra=BODY, tags=["model"])
    async def predict(request: Request, top: Annotated[int, Query(ge=1, le=10_000)] = 5) -> Predictions:
        """The most likely classes of each image, with their probabilities."""
        found = await service.predict(await read_uploads(request, settings), top)
        return Predictions(
            results=[
                Prediction(
                    name=one.image,
                    top=[Top(name=g.name, index=g.index, p=g.probability) for g in one.guesses],
                    none_of_these=one.none_of_these,
                )
                for one in found
            ]
        )

    @app.post("/v1/embed", response_model=Embeddings, responses=ERRORS, openapi_extra=BODY, tags=["model"])
    async def embed(request: Request) -> Embeddings:
        """The features of each image: y of Eq. 4, the class token (or the mean of the patches) after the final norm."""
        uploads = await read_uploads(request, settings)
        found = await service.embed(uploads)
        return Embeddings(
            width=service.model.config.width,
            results=[Embedding(name=one.name, embedding=y.tolist()) for one, y in zip(uploads, found)],
        )

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
    async def picture(request: Request, name: PictureName) -> Response:
        """One of the figures that `vitkit explain` and `vitkit figures` draw."""
        upload = await one_upload(request)
        return Response(
            await service.explain(upload, partial(explaining.picture, name=name.value)), media_type="image/png"
        )

    @app.get("/v1/model", tags=["model"], responses={401: ERRORS[401]})
    async def model() -> dict[str, Any]:
        """The model card: variant, classes, input, sha256 of the weights, and the limits of the server."""
        return {
            **service.card(),
            "explanations": {name: kind.words for name, kind in explaining.KINDS.items() if service.explains},
            "pictures": {
                name: plot.title
                for name, plot in explaining.PICTURES.items()
                if service.embeds and plot.fits(service.model)
            },
            "samples": {path: pages.SAMPLES[path][1] for path in pages.samples()},
        }


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


def _pages(app: FastAPI) -> None:
    def add(path: str, read: Callable[[], bytes], kind: str, cache: str) -> None:
        async def answer(request: Request) -> Response:
            return Response(await asyncio.to_thread(read), media_type=kind, headers={"Cache-Control": cache})

        app.add_route(path, answer, methods=["GET"], include_in_schema=False)

    for path, (_, kind) in pages.PAGE.items():
        add(path, partial(pages.page, path), kind, "no-cache")
    for path, file in pages.samples().items():
        add(path, file.read_bytes, "image/jpeg", "max-age=3600")
