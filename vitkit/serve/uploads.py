"""A request -> named bytes -> pixels. Names are words, never paths; types are read from the bytes, never believed."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request
from torch import Tensor

from vitkit.data.decode import bad, decode, header
from vitkit.data.preprocess import pixels, resized
from vitkit.errors import RequestError, TooLarge
from vitkit.model.config import InputSpec
from vitkit.serve.settings import Settings

# What is decoded: formats whose decoders run inside this process, and that people have.
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
WANTED = (
    "Send images as multipart/form-data in the field `files`, or as JSON "
    '{"images": [{"name": "cat.jpg", "data": "<base64>"}]}.'
)


class WrongType(RequestError):
    """A body of a type that the server does not read."""


@dataclass(frozen=True)
class Upload:
    """One image as it came: what it is called, and its bytes."""

    name: str
    raw: bytes


class JsonImage(BaseModel):
    """One image of a JSON request."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(default="image", description="What to call it in the answer.")
    data: str = Field(description="The file's bytes in base64; a data: URL will do.", min_length=1)


class JsonImages(BaseModel):
    """A JSON request."""

    model_config = ConfigDict(extra="forbid")
    images: list[JsonImage] = Field(min_length=1)


# What OpenAPI says of the body: the two ways to send images.
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
                }
            },
        },
    }
}


def clean(name: str | None) -> str:
    """A client's file name as one word of a message: no folders, no control characters, not long."""
    last = re.split(r"[/\\]", name or "")[-1].encode("utf-8", "replace").decode("utf-8")
    return "".join(letter for letter in last if letter.isprintable())[:100].strip() or "image"


async def read_uploads(request: Request, settings: Settings) -> list[Upload]:
    """The images of a request.

    Args:
        request: multipart or JSON; its size is bounded already, by the middleware.
        settings: the limits.

    Raises:
        RequestError: one sentence on what was expected.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        found = await _multipart(request, settings)
    elif kind == "application/json":
        found = await asyncio.to_thread(_json, await request.body())
    else:
        raise WrongType(
            f"Expected multipart/form-data or application/json; got {clean(kind)!r}. {WANTED}"
            if kind
            else f"Expected a Content-Type; got none. {WANTED}"
        )
    if not found:
        raise RequestError(f"Expected at least one image; got none. {WANTED}")
    if len(found) > settings.max_files:
        raise TooLarge(
            f"Expected at most {settings.max_files} images in one request; got {len(found)}. "
            f"Send them in several requests."
        )
    return found


async def _multipart(request: Request, settings: Settings) -> list[Upload]:
    async with request.form(max_files=settings.max_files + 1, max_fields=16) as form:
        for field in form:
            if field != "files":
                raise RequestError(f"Expected the field `files`; got {clean(field)!r}. {WANTED}")
        parts = form.getlist("files")
        if any(not isinstance(part, UploadFile) for part in parts):
            raise RequestError(f"Expected files in the field `files`; got text. {WANTED}")
        return [Upload(clean(part.filename), await part.read()) for part in parts if isinstance(part, UploadFile)]


def _json(body: bytes) -> list[Upload]:
    try:
        asked = JsonImages.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RequestError(
            f"Expected JSON with images in base64; {place or 'the body'}: {first['msg']}. {WANTED}"
        ) from None
    return [Upload(clean(image.name), _bytes(image)) for image in asked.images]


def _bytes(image: JsonImage) -> bytes:
    text = image.data
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{clean(image.name)}: `data` is not base64. {WANTED}") from None


def to_pixels(upload: Upload, spec: InputSpec, settings: Settings) -> Tensor:
    """Decode, resize and crop one image: [C, H, W] uint8. Runs in a thread.

    Args:
        upload: its name and bytes.
        spec: what the model expects.
        settings: the limits; sizes are read from the file's header before a pixel is decoded.

    Raises:
        BadImage: no image, or one that cannot be decoded; the same sentence as on the command line.
        TooLarge: more pixels than the server decodes.
    """
    image = header(upload.raw, upload.name)
    if image.format not in FORMATS:
        raise bad(upload.name, f"{image.format} files are not read here; use one of {', '.join(FORMATS)}")
    width, height = image.size
    if width * height > settings.max_pixels:
        raise TooLarge(
            f"{upload.name}: {width} x {height} pixels are more than the {settings.max_megapixels:g} "
            f"megapixels that this server decodes. Make it smaller."
        )
    wide, high = resized(width, height, spec)
    if wide * high > max(settings.max_pixels, spec.size[0] * spec.size[1]):
        raise TooLarge(f"{upload.name}: {width} x {height} pixels are too long and thin for this model. Crop it.")
    return pixels(decode(upload.raw, upload.name), spec, upload.name)
