"""Read a request's images. File names are only labels, never paths; formats are read from the bytes, not from names."""

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

from vitkit.data.decode import decode, header
from vitkit.data.preprocess import pixels, resized
from vitkit.errors import RequestError, TooLarge
from vitkit.model.config import InputSpec
from vitkit.server.settings import Settings

WANTED = (
    "Send images as multipart/form-data in the field `files`, or as JSON "
    '{"images": [{"name": "cat.jpg", "data": "<base64>"}]}.'
)


class WrongType(RequestError):
    """A request whose Content-Type the server does not read."""


@dataclass(frozen=True)
class Upload:
    """One uploaded image: its name and its bytes."""

    name: str
    raw: bytes


class JsonImage(BaseModel):
    """One image of a JSON request."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(default="image", description="Its name in the answer.")
    data: str = Field(description="The file's bytes in base64, or a data: URL.", min_length=1)


class JsonImages(BaseModel):
    """A JSON request."""

    model_config = ConfigDict(extra="forbid")
    images: list[JsonImage] = Field(min_length=1)


# The request body in OpenAPI: the two ways to send images.
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
    """A client's file name, safe to show: no folders, no control characters, at most 100 characters."""
    last = re.split(r"[/\\]", name or "")[-1].encode("utf-8", "replace").decode("utf-8")
    return "".join(letter for letter in last if letter.isprintable())[:100].strip() or "image"


async def read_uploads(request: Request, settings: Settings) -> list[Upload]:
    """Read the images of a request.

    Args:
        request: multipart or JSON; the middleware bounds its size.
        settings: the limits.

    Raises:
        RequestError: the request holds no images that can be read; the message says how to send them.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        async with request.form(max_files=settings.max_files + 1, max_fields=16) as form:
            found = []
            for field, part in form.multi_items():
                if field != "files":
                    raise RequestError(f"Expected the field `files`; got {clean(field)!r}. {WANTED}")
                if not isinstance(part, UploadFile):
                    raise RequestError(f"Expected files in the field `files`; got text. {WANTED}")
                found.append(Upload(clean(part.filename), await part.read()))
    elif kind == "application/json":
        found = await asyncio.to_thread(_json, await request.body())
    elif kind:
        raise WrongType(f"Expected multipart/form-data or application/json; got {clean(kind)!r}. {WANTED}")
    else:
        raise WrongType(f"Expected a Content-Type; got none. {WANTED}")
    if not found:
        raise RequestError(f"Expected at least one image; got none. {WANTED}")
    if len(found) > settings.max_files:
        raise TooLarge(
            f"Expected at most {settings.max_files} images per request; got {len(found)}. "
            f"Send them in several requests."
        )
    return found


def _json(body: bytes) -> list[Upload]:
    try:
        asked = JsonImages.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RequestError(
            f"Expected JSON with images in base64; {place or 'the body'}: {first['msg']}. {WANTED}"
        ) from None
    found = []
    for image in asked.images:
        text = image.data.partition(",")[2] if image.data.startswith("data:") else image.data
        try:
            found.append(Upload(clean(image.name), base64.b64decode(text, validate=True)))
        except (binascii.Error, ValueError):
            raise RequestError(f"{clean(image.name)}: `data` is not valid base64. {WANTED}") from None
    return found


def to_pixels(upload: Upload, spec: InputSpec, settings: Settings) -> Tensor:
    """Decode, resize and crop one image: [C, H, W] uint8. Runs in a thread.

    Args:
        upload: its name and bytes.
        spec: what the model expects.
        settings: the limits; the image's size is read from its header before it is decoded.

    Raises:
        BadImage: it is not an image, or it cannot be decoded; the same sentence as on the command line.
        TooLarge: it has more pixels than the limit.
    """
    image = header(upload.raw, upload.name)
    (width, height), most = image.size, settings.max_megapixels * 1e6
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
    return pixels(decode(upload.raw, upload.name), spec, upload.name)
