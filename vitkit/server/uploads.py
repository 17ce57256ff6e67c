"""Read a request's images. File names are only labels, never paths; formats are read from the bytes, not from names."""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from torch import Tensor

from vitkit.data.decode import decode, header
from vitkit.data.preprocess import pixels, resized
from vitkit.errors import RequestError, TooLarge, VitkitError
from vitkit.model.config import InputSpec
from vitkit.server.settings import Settings

PIECE = 2**20  # bytes of a body that are searched at a time
COMMAS = 100  # per image in a JSON request, those in its name included
WANTED = (
    "Send images as multipart/form-data in the field `files`, as JSON "
    '{"images": [{"name": "cat.jpg", "data": "<base64>"}]}, or one image as the whole body with its own Content-Type, '
    "such as image/jpeg."
)
PIXEL = (  # the smallest PNG, for examples that work
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class WrongType(RequestError):
    """A request whose Content-Type the server does not read."""


@dataclass(frozen=True)
class Upload:
    """One uploaded image.

    Args:
        name: its name.
        raw: its bytes.
        client: the address of the client that sent it.
    """

    name: str
    raw: bytes
    client: str = ""


class JsonImage(BaseModel):
    """One image of a JSON request."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(default="image", description="Its name in the answer.")
    data: str = Field(description="The file's bytes in base64, or a data: URL.", min_length=1)


class JsonImages(BaseModel):
    """A JSON request."""

    model_config = ConfigDict(extra="forbid")
    images: list[JsonImage] = Field(min_length=1)


# The request body in OpenAPI: the three ways to send images.
BINARY = {"schema": {"type": "string", "format": "binary"}}
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["files"],
                    "properties": {
                        "files": {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}
                    },
                }
            },
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "additionalProperties": False,
                    "properties": {
                        "images": {
                            "type": "array",
                            "minItems": 1,
                            "items": {
                                "type": "object",
                                "required": ["data"],
                                "additionalProperties": False,
                                "properties": {
                                    "name": {"type": "string", "default": "image"},
                                    "data": {"type": "string", "contentEncoding": "base64", "minLength": 1},
                                },
                            },
                        }
                    },
                },
                "example": {"images": [{"name": "pixel.png", "data": PIXEL}]},
            },
            "image/jpeg": BINARY,
            "image/png": BINARY,
            "image/webp": BINARY,
        },
    }
}


def clean(name: str | None) -> str:
    """A client's file name, safe to show: no folders, no control characters, at most 100 characters."""
    last = re.split(r"[/\\]", name or "")[-1].encode("utf-8", "replace").decode("utf-8")
    return "".join(letter for letter in last if letter.isprintable())[:100].strip() or "image"


async def read_uploads(request: Request, settings: Settings) -> list[Upload]:
    """Read the images of a request.

    Args:
        request: multipart, JSON or one image; the middleware bounds its size.
        settings: the limits.

    Raises:
        RequestError: the request holds no images that can be read; the message says how to send them.
    """
    client = request.client.host if request.client else ""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        try:
            async with request.form(max_files=settings.max_files, max_fields=16) as form:
                found = [await _upload(field, part, client) for field, part in form.multi_items()]
        except HTTPException as error:
            if "Too many files" in error.detail:
                raise _too_many(settings.max_files, f"more than {settings.max_files}") from None
            raise
    elif kind == "application/json":
        found = await asyncio.to_thread(_json, await request.body(), client, settings.max_files)
    elif kind.startswith("image/") or kind == "application/octet-stream":
        found = [Upload("image", await request.body(), client)]
    elif kind:
        raise WrongType(f"Expected multipart/form-data, application/json or an image; got {clean(kind)!r}. {WANTED}")
    else:
        raise WrongType(f"Expected a Content-Type; got none. {WANTED}")
    if not found:
        raise RequestError(f"Expected at least one image; got none. {WANTED}")
    return found


async def _upload(field: str, part: UploadFile | str, client: str) -> Upload:
    if field != "files":
        raise RequestError(f"Expected the field `files`; got {clean(field)!r}. {WANTED}")
    if not isinstance(part, UploadFile):
        raise RequestError(f"Expected files in the field `files`; got text. {WANTED}")
    return Upload(clean(part.filename), await part.read(), client)


def _too_many(most: int, got: object) -> TooLarge:
    return TooLarge(f"Expected at most {most} images per request; got {got}. Send them in several requests.")


@functools.cache
def _model(max_files: int) -> TypeAdapter[JsonImages]:
    """Return the validator of a JSON request; pydantic counts the images before it looks at them."""

    class Limited(JsonImages):
        images: list[JsonImage] = Field(min_length=1, max_length=max_files)

    return TypeAdapter(Limited)


def _count(body: bytes, what: bytes) -> int:
    """Count occurrences piece by piece, so that other threads can run in between."""
    return sum(body.count(what, start, start + PIECE + len(what) - 1) for start in range(0, len(body), PIECE))


def _json(body: bytes, client: str, max_files: int) -> list[Upload]:
    # Counted before anything is parsed, which would stop all other threads for seconds. Every value after the first
    # needs a comma; base64 has none, and a name has room for many.
    if (images := _count(body, b'"data"')) > max_files or (commas := _count(body, b",")) > COMMAS * max_files:
        raise _too_many(max_files, images or commas + 1)
    try:
        asked = _model(max_files).validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "too_long":
            raise _too_many(max_files, first["ctx"]["actual_length"]) from None
        place = ".".join(str(part) for part in first["loc"])
        raise RequestError(
            f"Expected JSON with images in base64; {place or 'the body'}: {first['msg']}. {WANTED}"
        ) from None
    found = []
    for image in asked.images:
        text = image.data.partition(",")[2] if image.data.startswith("data:") else image.data
        try:
            found.append(Upload(clean(image.name), base64.b64decode(text, validate=True), client))
        except (binascii.Error, ValueError):
            raise RequestError(f"{clean(image.name)}: `data` is not valid base64. {WANTED}") from None
    return found


def measure(upload: Upload, spec: InputSpec, settings: Settings) -> int:
    """Return the number of pixels of an image, read from its header. Runs in a thread.

    Args:
        upload: the image.
        spec: what the model expects.
        settings: the limits.

    Raises:
        BadImage: it is not an image.
        TooLarge: it has more pixels than the limit.
    """
    most = settings.max_megapixels * 1e6
    width, height = header(upload.raw, upload.name).size
    if width * height > most:
        raise TooLarge(
            f"{upload.name}: {width} x {height} pixels are more than the {settings.max_megapixels:g} "
            f"megapixels that this server accepts. Send a smaller image."
        )
    wide, high = resized(width, height, spec)
    if wide * high > max(most, spec.size[0] * spec.size[1]):
        raise TooLarge(
            f"{upload.name}: {width} x {height} pixels are too long and thin for this model. Crop the image."
        )
    return width * height


def measure_all(uploads: Sequence[Upload], spec: InputSpec, settings: Settings) -> list[int | VitkitError]:
    """Return the number of pixels of each image, or why it is refused. Takes the arguments of `measure`.

    Raises:
        TooLarge: all together have more pixels than the limit.
    """
    found: list[int | VitkitError] = []
    for upload in uploads:
        try:
            found.append(measure(upload, spec, settings))
        except VitkitError as error:
            found.append(error)
    total = sum(one for one in found if isinstance(one, int))
    if total > settings.max_request_megapixels * 1e6:
        raise TooLarge(
            f"The images' {total / 1e6:.3g} megapixels in all are more than the "
            f"{settings.max_request_megapixels:g} that this server accepts per request. Send them in several requests."
        )
    return found


def to_pixels(upload: Upload, spec: InputSpec) -> Tensor:
    """Decode, resize and crop one image that `measure` has accepted: [C, H, W] uint8. Runs in a thread.

    Args:
        upload: its name and bytes.
        spec: what the model expects.

    Raises:
        BadImage: it cannot be decoded.
    """
    return pixels(decode(upload.raw, upload.name), spec, upload.name)
