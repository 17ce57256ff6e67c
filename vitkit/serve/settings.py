"""The limits of a server, and every number that its operator may turn."""

from __future__ import annotations

import os
from dataclasses import dataclass

from vitkit.errors import ConfigError
from vitkit.model import checks


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much a server takes on; refused when it cannot work.

    Args:
        max_batch: images that go through the model at once.
        max_delay: seconds that a ready image waits, at most, for others that are being decoded.
        max_queue: images accepted and not yet answered; beyond it the answer is 503 with Retry-After.
        max_requests: requests in the house at once, whatever they hold; beyond it the same 503.
        max_files: images in one request.
        max_megabytes: size of one request; all that are in the house together may hold eight times as much.
        max_megapixels: size of one image, read from its header before a pixel is decoded.
        body_seconds: time in which a request must have arrived.
        answer_seconds: time in which an accepted request is answered.
        threads: threads that decode images.
        token: what clients must send as `Authorization: Bearer TOKEN`; None lets everybody in.
        hosts: names under which the server may be called (the Host header); None for any.
        embed_in: address of a site that may show the page in a frame; None for none.
    """

    max_batch: int = 16
    max_delay: float = 0.01
    max_queue: int = 256
    max_requests: int = 128
    max_files: int = 32
    max_megabytes: float = 32.0
    max_megapixels: float = 50.0
    body_seconds: float = 30.0
    answer_seconds: float = 60.0
    threads: int = min(4, os.cpu_count() or 1)
    token: str | None = None
    hosts: tuple[str, ...] | None = None
    embed_in: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "max_requests", "max_files", "threads"):
            checks.whole(name, getattr(self, name), 1)
        checks.number("max_delay", self.max_delay, 0, 10)
        for name in ("max_megabytes", "max_megapixels", "body_seconds", "answer_seconds"):
            checks.number(name, getattr(self, name), 0, open_low=True)
        if self.max_queue < self.max_files:
            raise ConfigError(
                f"max_queue must hold one full request; got {self.max_queue} for requests of up to "
                f"{self.max_files} files. Raise max_queue or lower max_files."
            )
        if self.token is not None and (len(self.token) < 8 or not self.token.isascii() or " " in self.token):
            raise ConfigError(
                "token must have at least 8 ASCII characters and no space; make one with "
                "`python -c 'import secrets; print(secrets.token_urlsafe())'`."
            )
        if self.embed_in is not None and not self.embed_in.startswith(("https://", "http://")):
            raise ConfigError(
                f"embed_in must be a site's address such as https://huggingface.co; got {self.embed_in!r}."
            )

    @property
    def max_bytes(self) -> int:
        """Size of one request in bytes."""
        return int(self.max_megabytes * 2**20)

    @property
    def max_held_bytes(self) -> int:
        """Size of all requests that are being answered together, in bytes."""
        return 8 * self.max_bytes

    @property
    def max_pixels(self) -> int:
        """Size of one image in pixels."""
        return int(self.max_megapixels * 10**6)
